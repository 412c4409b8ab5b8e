/*
 * crc32c_avx512.c - x86-64 with AVX-512 and VPCLMULQDQ: folding, 256 bytes a step.
 *
 * A register of 128 bits holds the polynomial A = lo x^64 + hi (lo is the lower half: the first
 * bytes of the message are the high powers). "A, then d bits" is A x^d, and modulo P that is
 *
 *     A x^d = lo (x^(d + 64) mod P) + hi (x^d mod P)
 *
 * of less than 96 bits: two carry-less multiplications move A over d bits, where it is added to the
 * 128 bits that stand there. Sixteen such registers, as four of 512 bits, move over 2,048 bits a
 * step, each in its own lane. At the end they are moved onto the last one, and the crc32
 * instruction takes those 16 bytes modulo P. A product of two reflected polynomials comes out
 * multiplied by x, so the constants are x^(d + 63) and x^(d - 1), in the upper half of their 64
 * bits.
 *
 * The copying form stores what it has loaded. It aligns the destination: a store that crosses a
 * cache line costs more than a load that does.
 */
#include "numerics/crc32c.h"

#if defined(__x86_64__)

#include "numerics/crc32c_powers.h"

#include <immintrin.h>
#include <string.h>

#define AVX512 __attribute__((target("sse4.2,pclmul,avx2,avx512f,avx512bw,avx512vl,vpclmulqdq")))
#define INLINE AVX512 static inline __attribute__((always_inline))

/* The constants of a fold: for lo, for hi. */
#define HIGH(x)      ((long long)((uint64_t)(x) << 32))
#define PAIR(lo, hi) HIGH(hi), HIGH(lo)

enum store { NO_STORE, PLAIN_STORE, STREAM_STORE };

INLINE __m512i move(__m512i a, __m512i by, __m512i onto) {
    const __m512i lo = _mm512_clmulepi64_epi128(a, by, 0x00);
    const __m512i hi = _mm512_clmulepi64_epi128(a, by, 0x11);
    return _mm512_ternarylogic_epi64(lo, hi, onto, 0x96); /* lo ^ hi ^ onto */
}

INLINE __m512i by_all(uint32_t lo, uint32_t hi) {
    return _mm512_broadcast_i32x4(_mm_set_epi64x(PAIR(lo, hi)));
}

INLINE __m512i load(const uint8_t *src, uint8_t *dst, enum store store) {
    const __m512i v = _mm512_loadu_si512(src);
    if (store == PLAIN_STORE) {
        _mm512_storeu_si512(dst, v);
    } else if (store == STREAM_STORE) {
        _mm512_stream_si512((void *)dst, v);
    }
    return v;
}

/* The remainder of the 64 bytes in z: lanes 0, 1 and 2 move onto lane 3. */
INLINE uint32_t reduce(__m512i z) {
    const __m512i by = _mm512_set_epi64(0, 0, PAIR(TL_X191, TL_X127), PAIR(TL_X319, TL_X255),
                                        PAIR(TL_X447, TL_X383));
    const __m512i moved = _mm512_xor_si512(_mm512_clmulepi64_epi128(z, by, 0x00),
                                           _mm512_clmulepi64_epi128(z, by, 0x11));
    const __m512i all = _mm512_mask_mov_epi64(moved, 0xC0, z);
    const __m256i two =
        _mm256_xor_si256(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    const __m128i one =
        _mm_xor_si128(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
    const uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(one));
    return (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(one, 1));
}

/* Fewer than 64 bytes, or what is left of more. */
INLINE uint32_t few(uint32_t raw, const uint8_t *p, size_t n) {
    uint64_t r = raw;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        r = _mm_crc32_u64(r, word);
    }
    raw = (uint32_t)r;
    if (n & 4) {
        uint32_t word;
        memcpy(&word, p, 4);
        raw = _mm_crc32_u32(raw, word);
        p += 4;
    }
    if (n & 2) {
        uint16_t word;
        memcpy(&word, p, 2);
        raw = _mm_crc32_u16(raw, word);
        p += 2;
    }
    return n & 1 ? _mm_crc32_u8(raw, *p) : raw;
}

/* The whole 64-byte pieces of n bytes, at least one; *src, *dst and *n move on. */
INLINE uint32_t fold(uint32_t raw, const uint8_t **src_at, uint8_t **dst_at, size_t *n_left,
                     enum store store) {
    const uint8_t *src = *src_at;
    uint8_t *dst = *dst_at;
    size_t n = *n_left;
    const __m512i by_512 = by_all(TL_X575, TL_X511);
    const __m512i start = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)raw));
    __m512i a = _mm512_xor_si512(load(src, dst, store), start);
    src += 64, dst += 64, n -= 64;
    if (n >= 192) {
        __m512i b = load(src, dst, store);
        __m512i c = load(src + 64, dst + 64, store);
        __m512i d = load(src + 128, dst + 128, store);
        const __m512i by_2048 = by_all(TL_X2111, TL_X2047);
        for (src += 192, dst += 192, n -= 192; n >= 256; src += 256, dst += 256, n -= 256) {
            a = move(a, by_2048, load(src, dst, store));
            b = move(b, by_2048, load(src + 64, dst + 64, store));
            c = move(c, by_2048, load(src + 128, dst + 128, store));
            d = move(d, by_2048, load(src + 192, dst + 192, store));
        }
        a = move(a, by_512, b);
        c = move(c, by_512, d);
        a = move(a, by_all(TL_X1087, TL_X1023), c);
    }
    for (; n >= 64; src += 64, dst += 64, n -= 64) {
        a = move(a, by_512, load(src, dst, store));
    }
    *src_at = src;
    *dst_at = dst;
    *n_left = n;
    return reduce(a);
}

AVX512 uint32_t tl_crc32c_avx512(uint32_t raw, const uint8_t *p, size_t n) {
    if (n >= 64) {
        uint8_t *unused = (uint8_t *)(uintptr_t)p; /* stepped along, never stored to */
        raw = fold(raw, &p, &unused, &n, NO_STORE);
    }
    return few(raw, p, n);
}

AVX512 uint32_t tl_crc32c_copy_avx512(uint32_t raw, uint8_t *dst, const uint8_t *src, size_t n,
                                      int stream) {
    if (n >= 256) {
        const size_t head = (0u - (uintptr_t)dst) & 63u;
        memcpy(dst, src, head);
        raw = few(raw, src, head);
        src += head, dst += head, n -= head;
        if (stream) {
            raw = fold(raw, &src, &dst, &n, STREAM_STORE);
            _mm_sfence(); /* streamed bytes are there for whoever sees this call return */
        } else {
            raw = fold(raw, &src, &dst, &n, PLAIN_STORE);
        }
    } else if (n >= 64) {
        raw = fold(raw, &src, &dst, &n, PLAIN_STORE);
    }
    memcpy(dst, src, n);
    return few(raw, src, n);
}

#else
typedef int tl_crc32c_avx512_is_for_x86_64; /* ISO C wants a declaration in every file */
#endif
