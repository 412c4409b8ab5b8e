/*
 * paged_attn_tile.h - the arithmetic of one tile, written once over the vectors of a variant.
 *
 * The naive loop, for one query:
 *
 *     for j: s[j] = scale * sum over d of q[d] * K[j][d]
 *     m = max of s;  w[j] = 2^(s[j] - m);  l = sum of w
 *     for d: a[d] = sum over j of w[j] * V[j][d]
 *
 * Both loops are products with a matrix in float16 that is read once, so what counts is how much
 * is done with a value once it is loaded and converted. A group has n queries; `dots` holds
 * keys x queries sums in registers and `mix` chunks x queries, so that a converted vector serves
 * all queries and a query's vector (or weight) all keys (or chunks).
 *
 * In which order a sum is formed is fixed, whatever the group:
 *
 *     a score     lane i adds the d with d mod LANES == i, upwards; then sum4's tree over the lanes
 *     l           lane i adds the j with j mod LANES == i, upwards; then the same tree
 *     a[d]        upwards in j
 *
 * all with one rounding for a product and its addition (fma), and j counted from the tile's
 * beginning. Keys that a query does not see have no part in it: their weight is set to 0 before l
 * is formed (adding 0 changes nothing), and mix leaves them out.
 *
 * Before this file is included, a variant defines
 *
 *     FN                                      the attributes of a function
 *     vec, LANES                              a vector of float32 and how many: 4, 8 or 16
 *     zero() set1(x) load32(p) store(p, v)    on unaligned memory
 *     load32_part(p, n)  load16_part(p, n)    the first n, zeros behind; nothing else is read
 *     load16(p)                               LANES float16 made float32
 *     add max (a, b)   fma_(a, b, c)          a * b + c
 *     round_(x)   pow2(n)                     nearest integer; 2^n for integers -126..0
 *     below(x, limit, v)                      v, but 0 in the lanes where x < limit
 *     quad sum4(a, b, c, d)                   the sums of four vectors
 *     quad_scale(q, x)  store4(p, q)          float32; store2(p, r, q): q's halves to p and r
 *     KEYS_1 .. KEYS_4                        keys at a time for a group of n: 2, 4 or 8
 *     CHUNKS_1 .. CHUNKS_4                    vectors of V at a time
 */
#include "kernels/paged_attn.h"

#include <math.h>

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define MAX_SUMS    16
#define LINE_VALUES (TL_ATTN_LINE / 2u) /* float16 */

/* 2^x for x in [-infinity, 0]: x = n + r with r in [-1/2, 1/2]; 2^r by a polynomial (least relative
 * error with 2^0 = 1 exactly: 2e-9, so that rounding decides), 2^n into the exponent. Below -126 it
 * is 0: no subnormal numbers. NaN stays NaN. */
FN vec exp2_(vec x) {
    const vec n = round_(x);
    const vec r = fma_(n, set1(-1.0f), x);
    vec p = set1(0x1.41fbbcp-13f);
    p = fma_(p, r, set1(0x1.5f3e54p-10f));
    p = fma_(p, r, set1(0x1.3b2d4cp-7f));
    p = fma_(p, r, set1(0x1.c6aee8p-5f));
    p = fma_(p, r, set1(0x1.ebfbdcp-3f));
    p = fma_(p, r, set1(0x1.62e430p-1f));
    p = fma_(p, r, set1(1.0f));
    return below(x, -126.0f, mul(p, pow2(n)));
}

/* Asks for the next lines of what comes next, into the second-level cache: the first has room for
 * too few requests at a time to keep the memory busy. */
FN void ask(tl_attn_ahead *a, uint32_t lines) {
    while (lines-- > 0) {
        if (a->now.at >= a->now.end) {
            if (a->next == a->n) {
                return;
            }
            a->now = a->regions[a->next++];
        }
        __builtin_prefetch(a->now.at, 0, 2);
        a->now.at += TL_ATTN_LINE;
    }
}

/* The scores of all keys from g->first rounded down to g->end rounded up, keys x queries at a time.
 * Those nobody sees are overwritten afterwards. */
FN void dots(const tl_attn_group *g, float (*s)[TL_ATTN_TILE], const uint32_t keys,
             const uint32_t queries) {
    const size_t D = g->head_dim, whole = D - D % LANES;
    /* A line is asked for whenever one is read, or as many as one step reads. */
    const uint32_t every = keys * LANES >= LINE_VALUES ? LANES : LINE_VALUES / keys;
    for (uint32_t j = g->first & ~(TL_ATTN_ALIGN - 1); j < g->end; j += keys) {
        const uint16_t *rows[8];
        UNROLL for (uint32_t i = 0; i < keys; i++) {
            rows[i] = g->rows[j + i] + g->k;
        }
        vec sums[MAX_SUMS];
        UNROLL for (uint32_t i = 0; i < keys * queries; i++) {
            sums[i] = zero();
        }
        for (size_t d = 0; d < whole; d += LANES) {
            if (g->ahead != NULL && d % every == 0) {
                ask(g->ahead, keys * every / LINE_VALUES * g->ahead->rate);
            }
            vec k[8];
            UNROLL for (uint32_t i = 0; i < keys; i++) {
                k[i] = load16(rows[i] + d);
            }
            UNROLL for (uint32_t h = 0; h < queries; h++) {
                const vec q = load32(g->q[h] + d);
                UNROLL for (uint32_t i = 0; i < keys; i++) {
                    sums[h * keys + i] = fma_(q, k[i], sums[h * keys + i]);
                }
            }
        }
        if (whole < D) {
            UNROLL for (uint32_t h = 0; h < queries; h++) {
                const vec q = load32_part(g->q[h] + whole, D - whole);
                UNROLL for (uint32_t i = 0; i < keys; i++) {
                    const vec k = load16_part(rows[i] + whole, D - whole);
                    sums[h * keys + i] = fma_(q, k, sums[h * keys + i]);
                }
            }
        }
        UNROLL for (uint32_t i = 0; i < keys * queries; i += 4) {
            const quad four =
                quad_scale(sum4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]), g->scale);
            if (keys == 2) {
                store2(&s[i / 2][j], &s[i / 2 + 1][j], four);
            } else {
                store4(&s[i / keys][j + i % keys], four);
            }
        }
    }
}

/* Query i's scores become weights. */
FN void soften(const tl_attn_group *g, tl_attn_weights *w, uint32_t i) {
    float *s = w->s[i];
    const uint32_t lo = g->lo[i], hi = g->hi[i];
    const uint32_t from = lo & ~15u, to = (hi + 15u) & ~15u;
    for (uint32_t j = from; j < lo; j++) {
        s[j] = -INFINITY;
    }
    for (uint32_t j = hi; j < to; j++) {
        s[j] = -INFINITY;
    }
    vec m = set1(-INFINITY);
    for (uint32_t j = from; j < to; j += LANES) {
        m = max(m, load32(s + j));
    }
    float lanes[LANES];
    store(lanes, m);
    float top = lanes[0];
    for (uint32_t k = 1; k < LANES; k++) {
        top = lanes[k] > top ? lanes[k] : top;
    }
    /* Scores that are all -infinity weigh 0, not NaN. */
    const vec minus = set1(top == -INFINITY ? 0.0f : -top);
    vec sum = zero();
    for (uint32_t j = from; j < to; j += LANES) {
        const vec x = exp2_(add(load32(s + j), minus));
        store(s + j, x);
        sum = add(sum, x);
    }
    float four[4];
    store4(four, sum4(sum, sum, sum, sum));
    w->max[i] = top;
    w->sum[i] = four[0];
}

FN void score(const tl_attn_group *g, tl_attn_weights *w) {
    switch (g->n) {
    case 1:
        dots(g, w->s, KEYS_1, 1);
        break;
    case 2:
        dots(g, w->s, KEYS_2, 2);
        break;
    case 3:
        dots(g, w->s, KEYS_3, 3);
        break;
    default:
        dots(g, w->s, KEYS_4, 4);
    }
    for (uint32_t i = 0; i < g->n; i++) {
        if (g->lo[i] < g->hi[i]) {
            soften(g, w, i);
        }
    }
}

/* The part of `mix` that a query has to itself: keys that not all of the group see. */
FN void mix_alone(const tl_attn_group *g, const float *s, size_t d, const uint32_t chunks,
                  size_t part, uint32_t from, uint32_t to, vec *a) {
    for (uint32_t j = from; j < to; j++) {
        const uint16_t *v = g->rows[j] + g->v + d;
        const vec w = set1(s[j]);
        UNROLL for (uint32_t c = 0; c < chunks; c++) {
            const vec x = part ? load16_part(v, part) : load16(v + c * LANES);
            a[c] = fma_(w, x, a[c]);
        }
    }
}

/* `chunks` vectors of the sum from place d of the head on; `part`: one vector that has but these.
 */
FN void mix_chunks(const tl_attn_group *g, const tl_attn_weights *w, size_t d, float *a,
                   const uint32_t chunks, const uint32_t queries, size_t part) {
    const uint32_t step = chunks * LANES;
    vec sums[MAX_SUMS];
    UNROLL for (uint32_t i = 0; i < chunks * queries; i++) {
        sums[i] = zero();
    }
    uint32_t from = 0, to = TL_ATTN_TILE; /* the keys that all see */
    UNROLL for (uint32_t i = 0; i < queries; i++) {
        from = g->lo[i] > from ? g->lo[i] : from;
        to = g->hi[i] < to ? g->hi[i] : to;
    }
    to = to < from ? from : to;
    UNROLL for (uint32_t i = 0; i < queries; i++) {
        const uint32_t until = g->hi[i] < from ? g->hi[i] : from;
        mix_alone(g, w->s[i], d, chunks, part, g->lo[i], until, sums + i * chunks);
    }
    for (uint32_t j = from; j < to; j++) {
        const uint16_t *v = g->rows[j] + g->v + d;
        if (g->ahead != NULL && d % LINE_VALUES == 0) {
            ask(g->ahead, (step > LINE_VALUES ? step / LINE_VALUES : 1) * g->ahead->rate);
        }
        vec x[MAX_SUMS];
        UNROLL for (uint32_t c = 0; c < chunks; c++) {
            x[c] = part ? load16_part(v, part) : load16(v + c * LANES);
        }
        UNROLL for (uint32_t i = 0; i < queries; i++) {
            const vec weight = set1(w->s[i][j]);
            UNROLL for (uint32_t c = 0; c < chunks; c++) {
                sums[i * chunks + c] = fma_(weight, x[c], sums[i * chunks + c]);
            }
        }
    }
    UNROLL for (uint32_t i = 0; i < queries; i++) {
        mix_alone(g, w->s[i], d, chunks, part, to, g->hi[i], sums + i * chunks);
        UNROLL for (uint32_t c = 0; c < chunks; c++) {
            store(a + i * TL_ATTN_SLICE + c * LANES, sums[i * chunks + c]);
        }
    }
}

FN void mix_all(const tl_attn_group *g, const tl_attn_weights *w, size_t d0, size_t n, float *a,
                const uint32_t chunks, const uint32_t queries) {
    size_t d = 0;
    for (; d + chunks * LANES <= n; d += chunks * LANES) {
        mix_chunks(g, w, d0 + d, a + d, chunks, queries, 0);
    }
    if (d + chunks / 2 * LANES <= n && chunks > 2) { /* one sum alone would wait for itself */
        mix_chunks(g, w, d0 + d, a + d, chunks / 2, queries, 0);
        d += chunks / 2 * LANES;
    }
    for (; d + LANES <= n; d += LANES) {
        mix_chunks(g, w, d0 + d, a + d, 1, queries, 0);
    }
    if (d < n) {
        mix_chunks(g, w, d0 + d, a + d, 1, queries, n - d);
    }
}

FN void mix(const tl_attn_group *g, const tl_attn_weights *w, size_t d0, size_t n, float *a) {
    switch (g->n) {
    case 1:
        mix_all(g, w, d0, n, a, CHUNKS_1, 1);
        break;
    case 2:
        mix_all(g, w, d0, n, a, CHUNKS_2, 2);
        break;
    case 3:
        mix_all(g, w, d0, n, a, CHUNKS_3, 3);
        break;
    default:
        mix_all(g, w, d0, n, a, CHUNKS_4, 4);
    }
}
