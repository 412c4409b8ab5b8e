/*
 * crc32c.c - CRC-32C: the definition, a portable fast form, and the dispatch.
 *
 * The message is a polynomial over GF(2); the raw remainder r is what is left of it modulo P.
 * Taking in one byte b, lowest bit first:
 *
 *     r ^= b;  eight times:  r = r & 1 ? (r >> 1) ^ P : r >> 1
 *
 * tl_crc32c_bytewise is that loop, and every other variant is tested against it.
 *
 * Slicing by eight. The eight steps are linear in r, so they are a table, T0[r & 255] ^ (r >> 8).
 * A byte with k more bytes behind it contributes T_k[b] = T0 applied k more times, and because all
 * of it is linear, the contributions of eight bytes are looked up independently and XORed: one step
 * for eight bytes, with no chain of eight dependent loads. The tables are written out at compile
 * time from their values at the powers of two (linear.h).
 */
#include "numerics/crc32c.h"

#include "numerics/copy_crc.h"
#include "numerics/cpu.h"
#include "numerics/linear.h"
#include "tinyllm/kv_pool.h"

#include <stdatomic.h>
#include <string.h>

static uint32_t tl_crc32c_bytewise(uint32_t raw, const uint8_t *p, size_t n) {
    while (n-- > 0) {
        raw ^= *p++;
        for (int bit = 0; bit < 8; bit++) {
            raw = (raw & 1u) ? (raw >> 1) ^ TL_CRC32C_POLY : raw >> 1;
        }
    }
    return raw;
}

/* clang-format off */
static const uint32_t T[8][256] = {
    {TL_LINEAR_256(0xF26B8303u, 0xE13B70F7u, 0xC79A971Fu, 0x8AD958CFu, 0x105EC76Fu, 0x20BD8EDEu, 0x417B1DBCu, 0x82F63B78u)},
    {TL_LINEAR_256(0x13A29877u, 0x274530EEu, 0x4E8A61DCu, 0x9D14C3B8u, 0x3FC5F181u, 0x7F8BE302u, 0xFF17C604u, 0xFBC3FAF9u)},
    {TL_LINEAR_256(0xA541927Eu, 0x4F6F520Du, 0x9EDEA41Au, 0x38513EC5u, 0x70A27D8Au, 0xE144FB14u, 0xC76580D9u, 0x8B277743u)},
    {TL_LINEAR_256(0xDD45AAB8u, 0xBF672381u, 0x7B2231F3u, 0xF64463E6u, 0xE964B13Du, 0xD725148Bu, 0xABA65FE7u, 0x52A0C93Fu)},
    {TL_LINEAR_256(0x38116FACu, 0x7022DF58u, 0xE045BEB0u, 0xC5670B91u, 0x8F2261D3u, 0x1BA8B557u, 0x37516AAEu, 0x6EA2D55Cu)},
    {TL_LINEAR_256(0xEF306B19u, 0xDB8CA0C3u, 0xB2F53777u, 0x6006181Fu, 0xC00C303Eu, 0x85F4168Du, 0x0E045BEBu, 0x1C08B7D6u)},
    {TL_LINEAR_256(0x68032CC8u, 0xD0065990u, 0xA5E0C5D1u, 0x4E2DFD53u, 0x9C5BFAA6u, 0x3D5B83BDu, 0x7AB7077Au, 0xF56E0EF4u)},
    {TL_LINEAR_256(0x493C7D27u, 0x9278FA4Eu, 0x211D826Du, 0x423B04DAu, 0x847609B4u, 0x0D006599u, 0x1A00CB32u, 0x34019664u)},
};
/* clang-format on */

static uint32_t tl_crc32c_slicing8(uint32_t raw, const uint8_t *p, size_t n) {
    for (; n >= 8; n -= 8, p += 8) {
        raw ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        raw = T[7][raw & 255] ^ T[6][(raw >> 8) & 255] ^ T[5][(raw >> 16) & 255] ^ T[4][raw >> 24] ^
              T[3][p[4]] ^ T[2][p[5]] ^ T[1][p[6]] ^ T[0][p[7]];
    }
    for (; n > 0; n--, p++) {
        raw = T[0][(raw ^ *p) & 255] ^ (raw >> 8);
    }
    return raw;
}

/*
 * Copy and checksum for a variant that does one thing at a time: a piece small enough to stay in
 * the first-level cache is checksummed, then copied from there. Memory is read once.
 */
#define COPY_PIECE ((size_t)8 << 10)

static inline uint32_t copy_by_pieces(tl_crc32c_fn *fn, uint32_t raw, uint8_t *dst,
                                      const uint8_t *src, size_t n) {
    while (n > COPY_PIECE) {
        raw = fn(raw, src, COPY_PIECE);
        memcpy(dst, src, COPY_PIECE);
        dst += COPY_PIECE;
        src += COPY_PIECE;
        n -= COPY_PIECE;
    }
    raw = fn(raw, src, n);
    memcpy(dst, src, n);
    return raw;
}

#define BY_PIECES(fn)                                                                              \
    static uint32_t fn##_copy(uint32_t raw, uint8_t *dst, const uint8_t *src, size_t n,            \
                              int stream) {                                                        \
        (void)stream;                                                                              \
        return copy_by_pieces(fn, raw, dst, src, n);                                               \
    }
BY_PIECES(tl_crc32c_bytewise)
BY_PIECES(tl_crc32c_slicing8)
#if defined(__x86_64__)
BY_PIECES(tl_crc32c_sse42)
#endif
#if defined(__aarch64__)
BY_PIECES(tl_crc32c_arm)
#endif

#define VARIANT(name, need, fn) {name, need, fn, fn##_copy}

const tl_crc32c_variant tl_crc32c_variants[] = {
    VARIANT("bytewise", 0, tl_crc32c_bytewise),
    VARIANT("slicing8", 0, tl_crc32c_slicing8),
#if defined(__x86_64__)
    VARIANT("sse42", TL_CPU_SSE42, tl_crc32c_sse42),
    {"pclmul", TL_CPU_SSE42 | TL_CPU_PCLMUL, tl_crc32c_pclmul, tl_crc32c_copy_pclmul},
    {"vpclmul", TL_CPU_SSE42 | TL_CPU_PCLMUL | TL_CPU_AVX2 | TL_CPU_VPCLMUL, tl_crc32c_vpclmul,
     tl_crc32c_copy_vpclmul},
    {"avx512", TL_CPU_SSE42 | TL_CPU_PCLMUL | TL_CPU_AVX2 | TL_CPU_VPCLMUL | TL_CPU_AVX512,
     tl_crc32c_avx512, tl_crc32c_copy_avx512},
#endif
#if defined(__aarch64__)
    VARIANT("arm", TL_CPU_ARMCRC, tl_crc32c_arm),
    {"pmull", TL_CPU_ARMCRC | TL_CPU_PMULL, tl_crc32c_pmull, tl_crc32c_copy_pmull},
#endif
    {NULL, 0, NULL, NULL},
};

static const tl_crc32c_variant *select_variant(void) {
    /* Racing first calls compute and store the same pointer. */
    static _Atomic(const tl_crc32c_variant *) selected;
    const tl_crc32c_variant *v = atomic_load_explicit(&selected, memory_order_relaxed);
    if (v == NULL) {
        const unsigned have = tl_cpu_features();
        for (const tl_crc32c_variant *i = tl_crc32c_variants; i->name != NULL; i++) {
            if ((i->need & ~have) == 0) {
                v = i;
            }
        }
        atomic_store_explicit(&selected, v, memory_order_relaxed);
    }
    return v;
}

const char *tl_crc32c_selected(void) {
    return select_variant()->name;
}

uint32_t tl_crc32c(const void *data, size_t n, uint32_t crc) {
    if (n == 0) {
        return crc;
    }
    return ~select_variant()->fn(~crc, data, n);
}

uint32_t tl_copy_crc32c(void *dst, const void *src, size_t n, uint32_t crc, int stream) {
    if (n == 0) {
        return crc;
    }
    return ~select_variant()->copy(~crc, dst, src, n, stream);
}
