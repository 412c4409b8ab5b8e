/*
 * half.c - float32 <-> float16 (IEEE 754 binary16), round to nearest even.
 *
 *   float32   s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm    bias 127
 *   float16   s eeeee mmmmmmmmmm                    bias 15
 *
 * The scalar forms are the definition; the F16C form gives the same bits, eight at a time, and the
 * tests compare the two over all patterns.
 */
#include "tinyllm/numerics.h"

#include "numerics/cpu.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define TL_HAVE_F16C 1
#endif

uint16_t tl_f32_to_f16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t mag = bits & 0x7FFFFFFFu;
    if (mag > 0x7F800000u) { /* NaN: the upper payload bits, made quiet */
        return (uint16_t)(sign | 0x7E00u | ((mag >> 13) & 0x03FFu));
    }
    if (mag >= 0x47800000u) { /* 65536 and above, infinity too */
        return (uint16_t)(sign | 0x7C00u);
    }
    if (mag >= 0x38800000u) { /* 2^-14 and above: a normal float16, unless rounding carries over */
        /* Rebias the exponent by 127 - 15, then round the 13 bits that go: add half, less one
         * unless the bit that stays is odd. 65520 and above carries into infinity, as it should. */
        const uint32_t h = mag - 0x38000000u;
        return (uint16_t)(sign | ((h + 0x0FFFu + ((h >> 13) & 1u)) >> 13));
    }
    if (mag < 0x33000000u) { /* below 2^-25, half of the smallest subnormal */
        return (uint16_t)sign;
    }
    /* A subnormal: the mantissa with its hidden bit, shifted to units of 2^-24 and rounded. */
    const uint32_t shift = 126u - (mag >> 23); /* 14..24 */
    const uint32_t m = (mag & 0x007FFFFFu) | 0x00800000u;
    const uint32_t kept = m >> shift, lost = m & ((1u << shift) - 1u), half = 1u << (shift - 1u);
    return (uint16_t)(sign | (kept + (lost > half || (lost == half && (kept & 1u)))));
}

float tl_f16_to_f32(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16;
    const uint32_t exponent = (x >> 10) & 0x1Fu;
    uint32_t m = x & 0x03FFu;
    uint32_t bits;
    if (exponent == 0x1Fu) { /* infinity, or NaN made quiet */
        bits = sign | 0x7F800000u | (m << 13) | (m != 0 ? 0x00400000u : 0u);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112u) << 23) | (m << 13);
    } else if (m == 0) {
        bits = sign;
    } else { /* subnormal: normalize */
        uint32_t e = 113u;
        while ((m & 0x0400u) == 0) {
            m <<= 1;
            e--;
        }
        bits = sign | (e << 23) | ((m & 0x03FFu) << 13);
    }
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

#ifdef TL_HAVE_F16C

/* Each returns how many elements it did; the caller does the rest. */
__attribute__((target("avx,f16c"))) static size_t to_f16_f16c(uint16_t *dst, const float *src,
                                                              size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(void *)(dst + i), h);
    }
    return i;
}

__attribute__((target("avx,f16c"))) static size_t to_f32_f16c(float *dst, const uint16_t *src,
                                                              size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i h = _mm_loadu_si128((const __m128i *)(const void *)(src + i));
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(h));
    }
    return i;
}

#endif

void tl_f32_to_f16_n(uint16_t *dst, const float *src, size_t n) {
    size_t i = 0;
#ifdef TL_HAVE_F16C
    if (tl_cpu_features() & TL_CPU_F16C) {
        i = to_f16_f16c(dst, src, n);
    }
#endif
    for (; i < n; i++) {
        dst[i] = tl_f32_to_f16(src[i]);
    }
}

void tl_f16_to_f32_n(float *dst, const uint16_t *src, size_t n) {
    size_t i = 0;
#ifdef TL_HAVE_F16C
    if (tl_cpu_features() & TL_CPU_F16C) {
        i = to_f32_f16c(dst, src, n);
    }
#endif
    for (; i < n; i++) {
        dst[i] = tl_f16_to_f32(src[i]);
    }
}
