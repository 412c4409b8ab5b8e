/* crc32c_pclmul.c - x86-64 with SSE4.2 and PCLMULQDQ: folding in 128 bits. */
#include "numerics/crc32c.h"

#if defined(__x86_64__)

#include "numerics/crc32c_x86.h"

#define PCLMUL  __attribute__((target("sse4.2,pclmul")))
#define FOLD_FN PCLMUL __attribute__((always_inline)) static inline

typedef __m128i vec;
#define VEC_BYTES 16u

#define BY_VEC        TL_X191, TL_X127
#define BY_2_VECS     TL_X319, TL_X255
#define BY_STEP       TL_X575, TL_X511
#define BY_GAP        TL_X3647, TL_X3583
#define STREAMS_BELOW SIZE_MAX

FOLD_FN vec load(const uint8_t *p) {
    return _mm_loadu_si128((const void *)p);
}

FOLD_FN void store(uint8_t *p, vec v) {
    _mm_storeu_si128((void *)p, v);
}

FOLD_FN void stream(uint8_t *p, vec v) {
    _mm_stream_si128((void *)p, v);
}

FOLD_FN vec add(vec v, vec w) {
    return _mm_xor_si128(v, w);
}

FOLD_FN vec by(uint32_t lo, uint32_t hi) {
    return lane_by(lo, hi);
}

FOLD_FN vec move(vec v, vec k, vec onto) {
    const vec lo = _mm_clmulepi64_si128(v, k, 0x00);
    const vec hi = _mm_clmulepi64_si128(v, k, 0x11);
    return add(add(lo, hi), onto);
}

FOLD_FN vec first(uint32_t r) {
    return _mm_cvtsi32_si128((int)r);
}

FOLD_FN vec left(uint64_t r0, uint64_t r1, uint64_t r2) {
    return lane_left(r0, r1, r2);
}

FOLD_FN uint32_t reduce(vec v) {
    return lane_reduce(v);
}

#include "numerics/crc32c_fold.h"

PCLMUL uint32_t tl_crc32c_pclmul(uint32_t raw, const uint8_t *p, size_t n) {
    return fold_crc(raw, p, n);
}

PCLMUL uint32_t tl_crc32c_copy_pclmul(uint32_t raw, uint8_t *dst, const uint8_t *src, size_t n,
                                      int stream) {
    return fold_copy(raw, dst, src, n, stream);
}

#else
typedef int tl_crc32c_pclmul_is_for_x86_64; /* ISO C wants a declaration in every file */
#endif
