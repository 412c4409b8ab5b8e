/* paged_attn_avx512.c - x86-64 with AVX-512: sixteen at a time. */
#include "kernels/paged_attn.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")))
#define FN     AVX512 __attribute__((always_inline)) static inline

typedef __m512 vec;
typedef __m128 quad;
#define LANES 16u

/* 32 registers. */
#define KEYS_1   8u
#define KEYS_2   4u
#define KEYS_3   4u
#define KEYS_4   4u
#define CHUNKS_1 8u
#define CHUNKS_2 4u
#define CHUNKS_3 4u
#define CHUNKS_4 4u

FN vec zero(void) {
    return _mm512_setzero_ps();
}

FN vec set1(float x) {
    return _mm512_set1_ps(x);
}

FN vec load32(const float *p) {
    return _mm512_loadu_ps(p);
}

FN __mmask16 first(size_t n) {
    return (__mmask16)((1u << n) - 1u);
}

FN vec load32_part(const float *p, size_t n) {
    return _mm512_maskz_loadu_ps(first(n), p);
}

FN void store(float *p, vec v) {
    _mm512_storeu_ps(p, v);
}

FN vec load16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

FN vec load16_part(const uint16_t *p, size_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}

FN vec add(vec a, vec b) {
    return _mm512_add_ps(a, b);
}

FN vec mul(vec a, vec b) {
    return _mm512_mul_ps(a, b);
}

FN vec max(vec a, vec b) {
    return _mm512_max_ps(a, b);
}

FN vec fma_(vec a, vec b, vec c) {
    return _mm512_fmadd_ps(a, b, c);
}

FN vec round_(vec x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

FN vec pow2(vec n) {
    const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}

FN vec below(vec x, float limit, vec v) {
    const __mmask16 not_below = _mm512_cmp_ps_mask(x, set1(limit), _CMP_NLT_UQ);
    return _mm512_maskz_mov_ps(not_below, v);
}

/* Within each quarter pairs of lanes, then pairs of those; then quarters 0 + 2 and 1 + 3; then the
 * two. */
FN quad sum4(vec a, vec b, vec c, vec d) {
    const vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const vec abcd = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    const __m512d wide = _mm512_castps_pd(abcd);
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd),
                                      _mm256_castpd_ps(_mm512_extractf64x4_pd(wide, 1)));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
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

AVX512 void tl_attn_score_avx512(const tl_attn_group *g, tl_attn_weights *w) {
    score(g, w);
}

AVX512 void tl_attn_mix_avx512(const tl_attn_group *g, const tl_attn_weights *w, size_t d0,
                               size_t n, float *a) {
    mix(g, w, d0, n, a);
}

#else
typedef int tl_paged_attn_avx512_is_for_x86_64; /* ISO C wants a declaration in every file */
#endif
