/*
 * crc32c_x86.h - what the three x86-64 widths of crc32c_fold.h have in common: the CRC instruction,
 * and everything that happens in a single lane.
 */
#ifndef TL_NUMERICS_CRC32C_X86_H
#define TL_NUMERICS_CRC32C_X86_H

#include "numerics/crc32c_powers.h"

#include <immintrin.h>
#include <stdint.h>

#define X86_FN __attribute__((target("sse4.2,pclmul"), always_inline, unused)) static inline

X86_FN uint64_t crc8(uint64_t r, uint64_t word) {
    return _mm_crc32_u64(r, word);
}

X86_FN uint32_t crc4(uint32_t r, uint32_t word) {
    return _mm_crc32_u32(r, word);
}

X86_FN uint32_t crc2(uint32_t r, uint16_t word) {
    return _mm_crc32_u16(r, word);
}

X86_FN uint32_t crc1(uint32_t r, uint8_t byte) {
    return _mm_crc32_u8(r, byte);
}

X86_FN void stream_end(void) {
    _mm_sfence(); /* what was streamed is there for whoever sees the call return */
}

/* The two constants of a move: remainders, in the upper halves of 64 bits. */
X86_FN __m128i lane_by(uint32_t lo, uint32_t hi) {
    return _mm_set_epi32((int)hi, 0, (int)lo, 0);
}

/* Of 16 bytes. */
X86_FN uint32_t lane_reduce(__m128i lane) {
    const uint64_t r = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(lane));
    return (uint32_t)_mm_crc32_u64(r, (uint64_t)_mm_extract_epi64(lane, 1));
}

/* r0, 256 bytes back, and r1, 128 bytes back, times x^(8 * 256 + 31) and x^(8 * 128 + 31): 31 and
 * not 32 because a reflected product comes out multiplied by x. */
X86_FN __m128i lane_left(uint64_t r0, uint64_t r1, uint64_t r2) {
    const __m128i k = _mm_set_epi64x(TL_X1055, TL_X2079);
    const __m128i p0 = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)r0), k, 0x00);
    const __m128i p1 = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)r1), k, 0x10);
    return _mm_xor_si128(_mm_xor_si128(p0, p1), _mm_cvtsi64_si128((long long)r2));
}

#endif /* TL_NUMERICS_CRC32C_X86_H */
