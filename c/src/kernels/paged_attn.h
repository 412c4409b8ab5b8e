/*
 * paged_attn.h - what paged_attn.c and its variants share.
 *
 * Positions are taken in tiles of TL_ATTN_TILE, counted from position 0 of the sequence. A variant
 * does the arithmetic of one tile for up to TL_ATTN_GROUP queries that read the same KV head: the
 * scores and their softmax (score), then the weighted sum of V (mix). Nothing of a query's results
 * may depend on the others in its group.
 */
#ifndef TL_KERNELS_PAGED_ATTN_H
#define TL_KERNELS_PAGED_ATTN_H

#include "tinyllm/threads.h"

#include <stddef.h>
#include <stdint.h>

#define TL_ATTN_TILE  256u
#define TL_ATTN_GROUP 4u
#define TL_ATTN_SLICE ((size_t)256) /* of head_dim: mix does this much at a time at most */
#define TL_ATTN_ALIGN 8u /* score takes keys by this many: the rows around are readable */

/* Memory that will be needed next: asked for while something else is computed, a line at a time. */
typedef struct {
    const char *at, *end;
} tl_attn_region;

#define TL_ATTN_LINE    64u
#define TL_ATTN_REGIONS 640u

typedef struct {
    tl_attn_region now;
    uint32_t next, n; /* of the regions */
    uint32_t rate;    /* lines for each key of score, and each of mix */
    tl_attn_region regions[TL_ATTN_REGIONS];
} tl_attn_ahead;

typedef struct {
    const float *q[TL_ATTN_GROUP]; /* head_dim values each */
    uint32_t n;                    /* queries, 1..TL_ATTN_GROUP */
    uint32_t lo[TL_ATTN_GROUP];    /* query i sees the keys lo[i] .. hi[i] - 1 of the tile: none */
    uint32_t hi[TL_ATTN_GROUP];    /*   when they are equal */
    uint32_t first, end;           /* the smallest lo and the largest hi of those that see some */
    const uint16_t *const *rows;   /* key j's row of head 0; valid for all j from first rounded down
                                      to end rounded up to TL_ATTN_ALIGN */
    size_t k, v;                   /* its K and V of the group's head are this many values behind */
    size_t head_dim;
    float scale;          /* the caller's times log2(e): weights are powers of two */
    tl_attn_ahead *ahead; /* NULL: nothing to ask for */
} tl_attn_group;

/* One tile's scores, then weights, of a group. */
typedef struct {
    _Alignas(64) float s[TL_ATTN_GROUP][TL_ATTN_TILE];
    float max[TL_ATTN_GROUP]; /* of the scores, in log2 */
    float sum[TL_ATTN_GROUP]; /* of the weights 2^(score - max); 0 when max is -infinity */
} tl_attn_weights;

/* Fills w, for the queries that see a key. */
typedef void tl_attn_score_fn(const tl_attn_group *g, tl_attn_weights *w);

/* a[i * TL_ATTN_SLICE + d] = the sum over query i's keys of its weights times V[d0 + d], d < n. */
typedef void tl_attn_mix_fn(const tl_attn_group *g, const tl_attn_weights *w, size_t d0, size_t n,
                            float *a);

typedef struct {
    const char *name; /* NULL ends the table */
    unsigned need;    /* TL_CPU_ bits */
    tl_attn_score_fn *score;
    tl_attn_mix_fn *mix;
} tl_attn_variant;

/* Slowest first; the last whose needs the processor meets is taken, once. */
extern const tl_attn_variant tl_attn_variants[];
const char *tl_attn_selected(void);

tl_attn_score_fn tl_attn_score_portable;
tl_attn_mix_fn tl_attn_mix_portable;
#if defined(__x86_64__)
tl_attn_score_fn tl_attn_score_avx2, tl_attn_score_avx512;
tl_attn_mix_fn tl_attn_mix_avx2, tl_attn_mix_avx512;
#endif
#if defined(__aarch64__)
tl_attn_score_fn tl_attn_score_neon;
tl_attn_mix_fn tl_attn_mix_neon;
#endif

/* ---- the problem --------------------------------------------------------------------------- */

/* What a call asks for, checked. */
typedef struct {
    const float *q;
    float *out;
    const uint16_t *k;  /* block 0, head 0 of the layer's K */
    size_t v;           /* values from a key's K to its V */
    size_t block, head; /* values from one block to the next, from one head to the next */
    int64_t block_tokens;
    const int32_t *tables; /* [B][max_blocks] */
    int64_t max_blocks;
    const int32_t *ctx_lens; /* of each sequence; NULL: ctx_len */
    int64_t ctx_len;
    int64_t B, T, H, Hkv, G, D; /* T queries a sequence; G query heads a KV head; B, T above 0 */
    float scale;                /* in log2 */
    int64_t window;             /* positions a query sees, INT64_MAX for all */
    const tl_attn_variant *variant;
} tl_attn_problem;

/* paged_attn_sets.c */
void tl_attn_run(const tl_attn_problem *pr, tl_pool *tp);

/* 2^x for x in [-infinity, 0], portable's; for what is done once a tile. */
float tl_attn_exp2(float x);

#endif /* TL_KERNELS_PAGED_ATTN_H */
