/* paged_attn_neon.c - aarch64: four at a time, with the 32 registers that every such processor
 * has. */
#include "kernels/paged_attn.h"

#if defined(__aarch64__)

#include <arm_neon.h>
#include <string.h>

#define FN __attribute__((always_inline)) static inline

typedef float32x4_t vec;
typedef float32x4_t quad;
#define LANES 4u

#define KEYS_1   8u
#define KEYS_2   8u
#define KEYS_3   4u
#define KEYS_4   4u
#define CHUNKS_1 16u
#define CHUNKS_2 8u
#define CHUNKS_3 4u
#define CHUNKS_4 4u

FN vec zero(void) {
    return vdupq_n_f32(0);
}

FN vec set1(float x) {
    return vdupq_n_f32(x);
}

FN vec load32(const float *p) {
    return vld1q_f32(p);
}

FN vec load32_part(const float *p, size_t n) {
    float x[4] = {0};
    memcpy(x, p, n * sizeof x[0]);
    return load32(x);
}

FN void store(float *p, vec v) {
    vst1q_f32(p, v);
}

FN vec load16(const uint16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

FN vec load16_part(const uint16_t *p, size_t n) {
    uint16_t x[4] = {0};
    memcpy(x, p, n * sizeof x[0]);
    return load16(x);
}

FN vec add(vec a, vec b) {
    return vaddq_f32(a, b);
}

FN vec mul(vec a, vec b) {
    return vmulq_f32(a, b);
}

FN vec max(vec a, vec b) {
    return vmaxq_f32(a, b);
}

FN vec fma_(vec a, vec b, vec c) {
    return vfmaq_f32(c, a, b);
}

FN vec round_(vec x) {
    return vrndnq_f32(x);
}

FN vec pow2(vec n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}

FN vec below(vec x, float limit, vec v) {
    const uint32x4_t is_below = vcltq_f32(x, set1(limit));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), is_below));
}

/* (0 + 1) + (2 + 3) */
FN quad sum4(vec a, vec b, vec c, vec d) {
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}

FN quad quad_scale(quad q, float x) {
    return vmulq_n_f32(q, x);
}

FN void store4(float *p, quad q) {
    vst1q_f32(p, q);
}

FN void store2(float *p, float *r, quad q) {
    vst1_f32(p, vget_low_f32(q));
    vst1_f32(r, vget_high_f32(q));
}

#include "kernels/paged_attn_tile.h"

void tl_attn_score_neon(const tl_attn_group *g, tl_attn_weights *w) {
    score(g, w);
}

void tl_attn_mix_neon(const tl_attn_group *g, const tl_attn_weights *w, size_t d0, size_t n,
                      float *a) {
    mix(g, w, d0, n, a);
}

#else
typedef int tl_paged_attn_neon_is_for_aarch64; /* ISO C wants a declaration in every file */
#endif
