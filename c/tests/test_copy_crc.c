/*
 * test_copy_crc.c - copying with and without a CRC, past the caches and through them, and what a
 * run of zeros does to a CRC: against memcpy and the bitwise checksum. ctest runs this program
 * again with processor features switched off.
 */
#include "numerics/copy_crc.h"
#include "numerics/cpu.h"
#include "numerics/crc32c.h"
#include "numerics/crc32c_shift.h"
#include "tinyllm/kv_pool.h"
#include "tl_test.h"
#include "tl_test_wire.h"

#include <stdlib.h>

enum { MAX = 20000, SLACK = 192 };

/* tl_crc32c bit by bit, continued. */
static uint32_t plain_crc(const uint8_t *p, size_t n, uint32_t crc) {
    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

typedef struct {
    uint8_t *src, *dst;
} buffers;

static buffers make_buffers(uint64_t seed) {
    buffers b = {tl_alloc(MAX + SLACK, 64), tl_alloc(MAX + SLACK, 64)};
    TL_CHECK(b.src && b.dst);
    for (size_t i = 0; i < MAX + SLACK; i++)
        b.src[i] = (uint8_t)tl_test_rand(&seed);
    return b;
}

static void free_buffers(buffers b) {
    tl_free(b.src);
    tl_free(b.dst);
}

/* n bytes from src + s to dst + d, with and without streaming; nothing around them. Plainly, with
 * the CRC, and by every variant this processor can run. */
static void copy_every_way(buffers b, size_t s, size_t d, size_t n, uint32_t crc, uint32_t want) {
    enum { PLAIN, WITH_CRC, VARIANTS };
    for (int stream = 0; stream < 2; stream++)
        for (int way = 0; way < VARIANTS || tl_crc32c_variants[way - VARIANTS].name; way++) {
            const tl_crc32c_variant *v =
                way < VARIANTS ? NULL : &tl_crc32c_variants[way - VARIANTS];
            if (v && ((v->need & ~tl_cpu_features()) != 0 || n == 0))
                continue;
            tl_test_context("%zu bytes from %zu to %zu, stream %d, %s", n, s, d, stream,
                            v                 ? v->name
                            : way == WITH_CRC ? "tl_copy_crc32c"
                                              : "tl_copy");
            const size_t before = d < 64 ? d : 64;
            memset(b.dst + d - before, 0xEE, before + n + 64);
            if (v)
                TL_EQ(~v->copy(~crc, b.dst + d, b.src + s, n, stream) & 0xFFFFFFFFu, want);
            else if (way == WITH_CRC)
                TL_EQ(tl_copy_crc32c(b.dst + d, b.src + s, n, crc, stream), want);
            else
                tl_copy(b.dst + d, b.src + s, n, stream);
            TL_CHECK(memcmp(b.dst + d, b.src + s, n) == 0);
            for (size_t i = 1; i <= before; i++)
                TL_EQ(b.dst[d - i], 0xEE);
            for (size_t i = 0; i < 64; i++)
                TL_EQ(b.dst[d + n + i], 0xEE);
        }
    tl_test_context("%s", "");
}

TL_TEST(every_length_is_copied_and_checksummed) {
    buffers b = make_buffers(1);
    uint32_t want = 0;
    for (size_t n = 0; n <= 2600; n++) {
        if (n > 0)
            want = plain_crc(b.src + 3 + n - 1, 1, want);
        copy_every_way(b, 3, 16, n, 0, want);
    }
    free_buffers(b);
}

TL_TEST(every_pair_of_alignments_is_copied_and_checksummed) {
    buffers b = make_buffers(2);
    uint64_t rng = 3;
    for (size_t s = 0; s < 64; s++)
        for (size_t d = 0; d < 64; d++) {
            const size_t n = 700 + tl_test_below(&rng, 700);
            const uint32_t crc = (uint32_t)tl_test_rand(&rng);
            copy_every_way(b, s, d, n, crc, plain_crc(b.src + s, n, crc));
        }
    free_buffers(b);
}

TL_TEST(long_copies_continue_a_crc) {
    buffers b = make_buffers(4);
    uint64_t rng = 5;
    for (int round = 0; round < 60; round++) {
        const size_t n = tl_test_below(&rng, MAX + 1), s = tl_test_below(&rng, 64);
        const size_t d = tl_test_below(&rng, 64), cut = n ? tl_test_below(&rng, (uint32_t)n) : 0;
        const uint32_t want = plain_crc(b.src + s, n, 0);
        copy_every_way(b, s, d, n, 0, want);
        const uint32_t half = tl_copy_crc32c(b.dst + d, b.src + s, cut, 0, round & 1);
        TL_EQ(tl_copy_crc32c(b.dst + d + cut, b.src + s + cut, n - cut, half, round & 1), want);
        TL_CHECK(memcmp(b.dst + d, b.src + s, n) == 0);
    }
    tl_copy(NULL, NULL, 0, 0);
    TL_EQ(tl_copy_crc32c(NULL, NULL, 0, 77, 1), 77);
    free_buffers(b);
}

TL_TEST(a_run_of_zeros_is_a_multiplication) {
    static uint8_t zeros[70000];
    static const uint64_t runs[] = {0,  1,  2,   3,   7,   8,    15,   16,
                                    63, 64, 100, 255, 256, 4095, 4096, 70000};
    uint64_t rng = 6;
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        tl_crc32c_shift shift;
        tl_crc32c_shift_init(&shift, runs[i]);
        for (int round = 0; round < 20; round++) {
            const uint32_t crc = round ? (uint32_t)tl_test_rand(&rng) : 0;
            TL_EQ(tl_crc32c_shift_crc(&shift, crc), plain_crc(zeros, (size_t)runs[i], crc));
        }
    }
}

/* Runs that no buffer holds: zeros after zeros are as many zeros together. */
TL_TEST(shifts_by_huge_runs_compose) {
    uint64_t rng = 7;
    for (int round = 0; round < 200; round++) {
        const uint64_t a = tl_test_rand(&rng) >> (3 + round % 60);
        const uint64_t b = tl_test_rand(&rng) >> (4 + round % 50);
        tl_crc32c_shift sa, sb, sab;
        tl_crc32c_shift_init(&sa, a);
        tl_crc32c_shift_init(&sb, b);
        const uint32_t r = (uint32_t)tl_test_rand(&rng);
        const uint32_t twice = tl_crc32c_shift_raw(&sb, tl_crc32c_shift_raw(&sa, r));
        if (a <= UINT64_MAX / 8 - b) {
            tl_crc32c_shift_init(&sab, a + b);
            TL_EQ(tl_crc32c_shift_raw(&sab, r), twice);
        }
        TL_EQ(tl_crc32c_mul(tl_crc32c_xpow(a), tl_crc32c_xpow(b % 1000)),
              tl_crc32c_xpow(a + b % 1000));
    }
    TL_EQ(tl_crc32c_xpow(0), 0x80000000u);
    TL_EQ(tl_crc32c_xpow(31), 1);
    TL_EQ(tl_crc32c_xpow(32), 0x82F63B78u);
}
