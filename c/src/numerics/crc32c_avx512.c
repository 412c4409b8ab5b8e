/* crc32c_avx512.c - x86-64 with AVX-512 and VPCLMULQDQ: folding in 512 bits. */
#include "numerics/crc32c.h"

#if defined(__x86_64__)

#include "numerics/crc32c_x86.h"

#define AVX512  __attribute__((target("sse4.2,pclmul,avx2,avx512f,avx512bw,avx512vl,vpclmulqdq")))
#define FOLD_FN AVX512 __attribute__((always_inline)) static inline

typedef __m512i vec;
#define VEC_BYTES 64u

#define BY_VEC        TL_X575, TL_X511
#define BY_2_VECS     TL_X1087, TL_X1023
#define BY_STEP       TL_X2111, TL_X2047
#define BY_GAP        TL_X5183, TL_X5119
#define STREAMS_BELOW ((size_t)1 << 20)

FOLD_FN vec load(const uint8_t *p) {
    return _mm512_loadu_si512(p);
}

FOLD_FN void store(uint8_t *p, vec v) {
    _mm512_storeu_si512(p, v);
}

FOLD_FN void stream(uint8_t *p, vec v) {
    _mm512_stream_si512((void *)p, v);
}

FOLD_FN vec add(vec v, vec w) {
    return _mm512_xor_si512(v, w);
}

FOLD_FN vec by(uint32_t lo, uint32_t hi) {
    return _mm512_broadcast_i32x4(lane_by(lo, hi));
}

FOLD_FN vec move(vec v, vec k, vec onto) {
    const vec lo = _mm512_clmulepi64_epi128(v, k, 0x00);
    const vec hi = _mm512_clmulepi64_epi128(v, k, 0x11);
    return _mm512_ternarylogic_epi64(lo, hi, onto, 0x96); /* lo ^ hi ^ onto */
}

FOLD_FN vec first(uint32_t r) {
    return _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)r));
}

FOLD_FN vec left(uint64_t r0, uint64_t r1, uint64_t r2) {
    return _mm512_zextsi128_si512(lane_left(r0, r1, r2));
}

/* Lanes 0, 1 and 2 move onto lane 3, by constants of their own. */
FOLD_FN uint32_t reduce(vec v) {
    const vec k = _mm512_set_epi32(0, 0, 0, 0, (int)TL_X127, 0, (int)TL_X191, 0, (int)TL_X255, 0,
                                   (int)TL_X319, 0, (int)TL_X383, 0, (int)TL_X447, 0);
    const vec moved =
        add(_mm512_clmulepi64_epi128(v, k, 0x00), _mm512_clmulepi64_epi128(v, k, 0x11));
    const vec all = _mm512_mask_mov_epi64(moved, 0xC0, v);
    const __m256i two =
        _mm256_xor_si256(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return lane_reduce(
        _mm_xor_si128(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1)));
}

#include "numerics/crc32c_fold.h"

AVX512 uint32_t tl_crc32c_avx512(uint32_t raw, const uint8_t *p, size_t n) {
    return fold_crc(raw, p, n);
}

AVX512 uint32_t tl_crc32c_copy_avx512(uint32_t raw, uint8_t *dst, const uint8_t *src, size_t n,
                                      int stream) {
    return fold_copy(raw, dst, src, n, stream);
}

#else
typedef int tl_crc32c_avx512_is_for_x86_64; /* ISO C wants a declaration in every file */
#endif
