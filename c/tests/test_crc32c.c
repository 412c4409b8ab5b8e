/*
 * test_crc32c.c - every variant this processor can run against the bytewise loop, written here a
 * second time. ctest runs this program again with features switched off (TL_CPU_DISABLE), so that
 * the dispatch reaches each variant as well.
 */
#include "numerics/cpu.h"
#include "numerics/crc32c.h"
#include "numerics/crc32c_powers.h"
#include "numerics/crc32c_shift.h"
#include "tinyllm/kv_pool.h"
#include "tl_test.h"

#include <stdlib.h>
#include <string.h>

static uint32_t plain(uint32_t raw, const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        raw ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            raw = raw >> 1 ^ (0x82F63B78u & (0u - (raw & 1u)));
    }
    return raw;
}

enum { LONG = 40000 };

/* Random bytes, 64-byte aligned, with room to start anywhere in a line. */
static uint8_t *random_bytes(uint64_t seed) {
    uint8_t *p = tl_alloc(LONG + 64, 64);
    TL_CHECK(p != NULL);
    for (size_t i = 0; i < LONG + 64; i++)
        p[i] = (uint8_t)tl_test_rand(&seed);
    return p;
}

static int can_run(const tl_crc32c_variant *v) {
    return (v->need & ~tl_cpu_features()) == 0;
}

TL_TEST(every_length_and_alignment_agrees_with_the_bytewise_loop) {
    uint8_t *data = random_bytes(1);
    int ran = 0;
    for (const tl_crc32c_variant *v = tl_crc32c_variants; v->name; v++) {
        if (!can_run(v))
            continue;
        ran++;
        /* Every length at a few alignments, every alignment at a few lengths. */
        for (size_t shift = 0; shift < 64; shift++) {
            tl_test_context("%s at alignment %zu", v->name, shift);
            uint32_t want = ~(uint32_t)shift;
            const uint32_t start = want;
            const size_t step = shift % 16 == 0 || shift == 1 || shift == 63 ? 1 : 61;
            const size_t max = strcmp(v->name, "bytewise") == 0 && shift ? 256 : 4096;
            for (size_t n = 0; n <= max; n++) {
                if (n > 0)
                    want = plain(want, data + shift + n - 1, 1);
                if (n % step == 0 || n < 130)
                    TL_EQ(v->fn(start, data + shift, n), want);
            }
        }
    }
    tl_test_context("%s", "");
    TL_CHECK(ran >= 2); /* the plain ones run everywhere */
    tl_free(data);
}

TL_TEST(long_inputs_and_random_splits_agree) {
    uint8_t *data = random_bytes(2);
    uint64_t rng = 3;
    for (int round = 0; round < 60; round++) {
        const size_t n = LONG - tl_test_below(&rng, round % 2 ? 64 : LONG);
        const size_t shift = tl_test_below(&rng, 64);
        const uint32_t start = (uint32_t)tl_test_rand(&rng);
        const uint32_t want = plain(start, data + shift, n);
        for (const tl_crc32c_variant *v = tl_crc32c_variants; v->name; v++) {
            if (!can_run(v))
                continue;
            tl_test_context("%s, %zu bytes at %zu", v->name, n, shift);
            TL_EQ(v->fn(start, data + shift, n), want);
            uint32_t raw = start;
            for (size_t at = 0; at < n;) {
                size_t piece = tl_test_below(&rng, tl_test_below(&rng, 4) ? 100 : 20000);
                piece = piece > n - at ? n - at : piece;
                raw = v->fn(raw, data + shift + at, piece);
                at += piece;
            }
            TL_EQ(raw, want);
        }
        TL_EQ(tl_crc32c(data + shift, n, ~start), ~want);
    }
    tl_test_context("%s", "");
    tl_free(data);
}

TL_TEST(known_values) {
    TL_EQ(tl_crc32c("123456789", 9, 0), 0xE3069283u);
    /* The iSCSI values: 32 bytes of zeros, of ones, counting up, counting down. */
    uint8_t b[32];
    memset(b, 0, 32);
    TL_EQ(tl_crc32c(b, 32, 0), 0x8A9136AAu);
    memset(b, 0xFF, 32);
    TL_EQ(tl_crc32c(b, 32, 0), 0x62A8AB43u);
    for (uint8_t i = 0; i < 32; i++)
        b[i] = i;
    TL_EQ(tl_crc32c(b, 32, 0), 0x46DD794Eu);
    for (uint8_t i = 0; i < 32; i++)
        b[i] = (uint8_t)(31 - i);
    TL_EQ(tl_crc32c(b, 32, 0), 0x113FDB5Cu);
    TL_EQ(tl_crc32c(NULL, 0, 0), 0);
    TL_EQ(tl_crc32c(NULL, 0, 77), 77);
}

TL_TEST(the_last_variant_that_can_run_is_selected) {
    const char *want = NULL;
    for (const tl_crc32c_variant *v = tl_crc32c_variants; v->name; v++)
        if (can_run(v))
            want = v->name;
    TL_STR_EQ(tl_crc32c_selected(), want);
    /* What the environment switched off is off. */
    static const struct {
        const char *name;
        unsigned bit;
    } features[] = {{"sse42", TL_CPU_SSE42},     {"pclmul", TL_CPU_PCLMUL}, {"avx2", TL_CPU_AVX2},
                    {"vpclmul", TL_CPU_VPCLMUL}, {"avx512", TL_CPU_AVX512}, {"f16c", TL_CPU_F16C},
                    {"armcrc", TL_CPU_ARMCRC},   {"pmull", TL_CPU_PMULL}};
    const char *off = getenv("TL_CPU_DISABLE");
    for (; off && *off; off += strcspn(off, ","), off += *off == ',')
        for (size_t i = 0; i < sizeof features / sizeof features[0]; i++)
            if (strcspn(off, ",") == strlen(features[i].name) &&
                strncmp(off, features[i].name, strlen(features[i].name)) == 0)
                TL_EQ(tl_cpu_features() & features[i].bit, 0);
}

TL_TEST(the_folding_constants_are_the_powers_of_x_they_are_called_after) {
    /* x^e mod P is what e shifts make of 1: bit i stands for x^(31 - i). */
#define IS_POWER(e, value)                                                                         \
    do {                                                                                           \
        uint32_t x = 0x80000000u;                                                                  \
        for (int i = 0; i < (e); i++)                                                              \
            x = x >> 1 ^ (0x82F63B78u & (0u - (x & 1u)));                                          \
        TL_EQ(value, x);                                                                           \
        TL_EQ(tl_crc32c_xpow(e), x);                                                               \
    } while (0);
    TL_CRC32C_POWERS(IS_POWER)
#undef IS_POWER
}
