/* paged_attn_avx2.c - x86-64 with AVX2, FMA and F16C: eight at a time. */
#include "kernels/paged_attn.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define FN   AVX2 __attribute__((always_inline)) static inline

typedef __m256 vec;
typedef __m128 quad;
#define LANES 8u

/* 16 registers: the sums, the keys (or chunks), and one more. */
#define KEYS_1   8u
#define KEYS_2   4u
#define KEYS_3   4u
#define KEYS_4   2u
#define CHUNKS_1 8u
#define CHUNKS_2 4u
#define CHUNKS_3 4u
#define CHUNKS_4 2u

FN vec zero(void) {
    return _mm256_setzero_ps();
}

FN vec set1(float x) {
    return _mm256_set1_ps(x);
}

FN vec load32(const float *p) {
    return _mm256_loadu_ps(p);
}

FN vec load32_part(const float *p, size_t n) {
    float x[8] = {0};
    memcpy(x, p, n * sizeof x[0]);
    return load32(x);
}

FN void store(float *p, vec v) {
    _mm256_storeu_ps(p, v);
}

FN vec load16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

FN vec load16_part(const uint16_t *p, size_t n) {
    uint16_t x[8] = {0};
    memcpy(x, p, n * sizeof x[0]);
    return load16(x);
}

FN vec add(vec a, vec b) {
    return _mm256_add_ps(a, b);
}

FN vec mul(vec a, vec b) {
    return _mm256_mul_ps(a, b);
}

FN vec max(vec a, vec b) {
    return _mm256_max_ps(a, b);
}

FN vec fma_(vec a, vec b, vec c) {
    return _mm256_fmadd_ps(a, b, c);
}

FN vec round_(vec x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

FN vec pow2(vec n) {
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}

FN vec below(vec x, float limit, vec v) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, set1(limit), _CMP_LT_OQ), v);
}

/* Pairs of lanes, then of pairs, then of halves: ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)). */
FN quad sum4(vec a, vec b, vec c, vec d) {
    const vec ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const vec cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const vec abcd = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
    return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

FN quad quad_scale(quad q, float x) {
    return _mm_mul_ps(q, _mm_set1_ps(x));
}

FN void store4(float *p, quad q) {
    _mm_storeu_ps(p, q);
}

FN void store2(float *p, float *r, quad q) {
    _mm_storel_pi((__m64 *)(void *)p, q);
    _mm_storeh_pi((__m64 *)(void *)r, q);
}

#include "kernels/paged_attn_tile.h"

AVX2 void tl_attn_score_avx2(const tl_attn_group *g, tl_attn_weights *w) {
    score(g, w);
}

AVX2 void tl_attn_mix_avx2(const tl_attn_group *g, const tl_attn_weights *w, size_t d0, size_t n,
                           float *a) {
    mix(g, w, d0, n, a);
}

#else
typedef int tl_paged_attn_avx2_is_for_x86_64; /* ISO C wants a declaration in every file */
#endif
