/* crc32c_vpclmul.c - x86-64 with AVX2 and VPCLMULQDQ: folding in 256 bits. */
#include "numerics/crc32c.h"

#if defined(__x86_64__)

#include "numerics/crc32c_x86.h"

#define VPCLMUL __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq")))
#define FOLD_FN VPCLMUL __attribute__((always_inline)) static inline

typedef __m256i vec;
#define VEC_BYTES 32u

#define BY_VEC        TL_X319, TL_X255
#define BY_2_VECS     TL_X575, TL_X511
#define BY_STEP       TL_X1087, TL_X1023
#define BY_GAP        TL_X4159, TL_X4095
#define STREAMS_BELOW SIZE_MAX

FOLD_FN vec load(const uint8_t *p) {
    return _mm256_loadu_si256((const void *)p);
}

FOLD_FN void store(uint8_t *p, vec v) {
    _mm256_storeu_si256((void *)p, v);
}

FOLD_FN void stream(uint8_t *p, vec v) {
    _mm256_stream_si256((void *)p, v);
}

FOLD_FN vec add(vec v, vec w) {
    return _mm256_xor_si256(v, w);
}

FOLD_FN vec by(uint32_t lo, uint32_t hi) {
    return _mm256_broadcastsi128_si256(lane_by(lo, hi));
}

FOLD_FN vec move(vec v, vec k, vec onto) {
    const vec lo = _mm256_clmulepi64_epi128(v, k, 0x00);
    const vec hi = _mm256_clmulepi64_epi128(v, k, 0x11);
    return add(add(lo, hi), onto);
}

FOLD_FN vec first(uint32_t r) {
    return _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)r));
}

FOLD_FN vec left(uint64_t r0, uint64_t r1, uint64_t r2) {
    return _mm256_zextsi128_si256(lane_left(r0, r1, r2));
}

/* Lane 0 moves onto lane 1. */
FOLD_FN uint32_t reduce(vec v) {
    const __m128i k = lane_by(TL_X191, TL_X127), l0 = _mm256_castsi256_si128(v);
    const __m128i lo = _mm_clmulepi64_si128(l0, k, 0x00), hi = _mm_clmulepi64_si128(l0, k, 0x11);
    return lane_reduce(_mm_xor_si128(_mm_xor_si128(lo, hi), _mm256_extracti128_si256(v, 1)));
}

#include "numerics/crc32c_fold.h"

VPCLMUL uint32_t tl_crc32c_vpclmul(uint32_t raw, const uint8_t *p, size_t n) {
    return fold_crc(raw, p, n);
}

VPCLMUL uint32_t tl_crc32c_copy_vpclmul(uint32_t raw, uint8_t *dst, const uint8_t *src, size_t n,
                                        int stream) {
    return fold_copy(raw, dst, src, n, stream);
}

#else
typedef int tl_crc32c_vpclmul_is_for_x86_64; /* ISO C wants a declaration in every file */
#endif
