/*
 * paged_attn_portable.c - any processor: vectors of four as gcc and clang know them, which become
 * whatever there is. A product is rounded before it is added unless the target has an fma.
 */
#include "kernels/paged_attn.h"

#include <string.h>

#define FN __attribute__((always_inline)) static inline

typedef float vec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));
typedef vec quad;
#define LANES 4u

#define KEYS_1   8u
#define KEYS_2   4u
#define KEYS_3   4u
#define KEYS_4   2u
#define CHUNKS_1 8u
#define CHUNKS_2 4u
#define CHUNKS_3 4u
#define CHUNKS_4 2u

FN vec set1(float x) {
    return (vec){x, x, x, x};
}

FN vec zero(void) {
    return set1(0);
}

FN vec load32(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

FN vec load32_part(const float *p, size_t n) {
    float x[4] = {0};
    memcpy(x, p, n * sizeof x[0]);
    return load32(x);
}

FN void store(float *p, vec v) {
    memcpy(p, &v, sizeof v);
}

FN ivec pick(ivec mask, ivec a, ivec b) {
    return (mask & a) | (~mask & b);
}

/*
 * float16 to float32 without a branch: exponent and fraction move to their places (<< 13) and the
 * exponent is rebiased by 112. Infinity and NaN need 112 more. A subnormal number has exponent 0
 * and no hidden bit: counted as if it had one, it is too large by 2^-14, which is subtracted.
 */
FN vec widen(ivec h) {
    const ivec em = (h & 0x7FFF) << 13, exponent = em & 0x0F800000;
    const ivec normal = em + (112 << 23);
    const ivec special = em + (224 << 23);
    const ivec with_one = em + (113 << 23);
    const vec small = (vec)with_one - set1(0x1p-14f);
    ivec x = pick(exponent == 0x0F800000, special, normal);
    x = pick(exponent == 0, (ivec)small, x);
    return (vec)(x | (h & 0x8000) << 16);
}

FN vec load16(const uint16_t *p) {
    return widen((ivec){p[0], p[1], p[2], p[3]});
}

FN vec load16_part(const uint16_t *p, size_t n) {
    uint16_t x[4] = {0};
    memcpy(x, p, n * sizeof x[0]);
    return load16(x);
}

FN vec add(vec a, vec b) {
    return a + b;
}

FN vec mul(vec a, vec b) {
    return a * b;
}

FN vec max(vec a, vec b) {
    return (vec)pick(a > b, (ivec)a, (ivec)b);
}

FN vec fma_(vec a, vec b, vec c) {
    return a * b + c;
}

/* |x| below 2^22; anything else is cut off by `below` or stays NaN. */
FN vec round_(vec x) {
    const vec magic = set1(0x1.8p23f);
    const vec y = (vec)pick(x > set1(-0x1p22f), (ivec)x, (ivec)set1(-0x1p22f)); /* no infinity */
    return (y + magic) - magic;
}

FN vec pow2(vec n) {
    ivec e;
    for (int i = 0; i < 4; i++) {
        e[i] = (int32_t)(n[i] > -127.0f ? n[i] : -127.0f); /* NaN too */
    }
    return (vec)((e + 127) << 23);
}

FN vec below(vec x, float limit, vec v) {
    return (vec)(~(x < set1(limit)) & (ivec)v);
}

/* (0 + 1) + (2 + 3) */
FN quad sum4(vec a, vec b, vec c, vec d) {
    return ((vec){a[0], b[0], c[0], d[0]} + (vec){a[1], b[1], c[1], d[1]}) +
           ((vec){a[2], b[2], c[2], d[2]} + (vec){a[3], b[3], c[3], d[3]});
}

FN quad quad_scale(quad q, float x) {
    return q * set1(x);
}

FN void store4(float *p, quad q) {
    store(p, q);
}

FN void store2(float *p, float *r, quad q) {
    p[0] = q[0];
    p[1] = q[1];
    r[0] = q[2];
    r[1] = q[3];
}

#include "kernels/paged_attn_tile.h"

void tl_attn_score_portable(const tl_attn_group *g, tl_attn_weights *w) {
    score(g, w);
}

void tl_attn_mix_portable(const tl_attn_group *g, const tl_attn_weights *w, size_t d0, size_t n,
                          float *a) {
    mix(g, w, d0, n, a);
}

float tl_attn_exp2(float x) {
    return exp2_(set1(x))[0];
}
