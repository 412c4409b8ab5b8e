/*
 * paged_attn.c - attention over a block table: what is checked, how the work is cut, and how the
 * pieces become one result. The arithmetic of a piece is in paged_attn_tile.h.
 *
 * A query's keys are cut into tiles of 256 positions, counted from position 0. A tile gives three
 * things, as if there were no other keys:
 *
 *     m       the largest score
 *     l       the sum of the weights 2^(score - m)
 *     a[D]    the sum of weight times V
 *
 * and two neighbours are joined (online softmax) by bringing them to the larger m:
 *
 *     M = max(m1, m2),  c1 = 2^(m1 - M),  c2 = 2^(m2 - M):   l = l1 c1 + l2 c2,  a = a1 c1 + a2 c2
 *
 * always from the first tile to the last: ((t0 + t1) + t2) + ... The result is a / l. Tiles are cut
 * by position alone, so a row is formed by the same operations on the same numbers whatever the
 * block size, the batch or the number of threads: threads may take tiles in any order, only the
 * joining has one.
 *
 * A set is what shares K and V: up to 64 queries of one sequence and one KV head (a decode has
 * H / Hkv of them; a prefill several rows of those), so that a tile is loaded from memory once.
 * Work for threads is whole sets; a set that is too large a part of everything is cut into its
 * tiles, whose results wait in the pool's memory for the caller, who joins them.
 */
#include "tinyllm/attention.h"

#include "kernels/paged_attn.h"
#include "kernels/threads.h"
#include "numerics/cpu.h"
#include "runtime/internal.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define TILE         ((int64_t)TL_ATTN_TILE)
#define SET_QUERIES  64       /* queries of a set */
#define SET_ROWS     16       /* positions of a set */
#define WORTH_WAKING 500000.0 /* multiplications; fewer are done before another thread is awake */
#define SHARES       8        /* of the work for each thread: no set may be more than one */

/* ---- variants ------------------------------------------------------------------------------ */

const tl_attn_variant tl_attn_variants[] = {
    {"portable", 0, tl_attn_score_portable, tl_attn_mix_portable},
#if defined(__x86_64__)
    {"avx2", TL_CPU_AVX2 | TL_CPU_FMA | TL_CPU_F16C, tl_attn_score_avx2, tl_attn_mix_avx2},
    {"avx512", TL_CPU_AVX2 | TL_CPU_FMA | TL_CPU_F16C | TL_CPU_AVX512, tl_attn_score_avx512,
     tl_attn_mix_avx512},
#endif
#if defined(__aarch64__)
    {"neon", 0, tl_attn_score_neon, tl_attn_mix_neon},
#endif
    {NULL, 0, NULL, NULL},
};

static const tl_attn_variant *select_variant(void) {
    /* Racing first calls compute and store the same pointer. */
    static _Atomic(const tl_attn_variant *) selected;
    const tl_attn_variant *v = atomic_load_explicit(&selected, memory_order_relaxed);
    if (v == NULL) {
        const unsigned have = tl_cpu_features();
        for (const tl_attn_variant *i = tl_attn_variants; i->name != NULL; i++) {
            if ((i->need & ~have) == 0) {
                v = i;
            }
        }
        atomic_store_explicit(&selected, v, memory_order_relaxed);
    }
    return v;
}

const char *tl_attn_selected(void) {
    return select_variant()->name;
}

/* ---- the problem and its sets -------------------------------------------------------------- */

typedef struct {
    const float *q;
    float *out;
    const uint16_t *k;  /* block 0, head 0 of the layer's K */
    size_t v;           /* values from a key's K to its V */
    size_t block, head; /* values from one block to the next, from one head to the next */
    int64_t block_tokens;
    const int32_t *tables;
    int64_t max_blocks;
    const int32_t *ctx_lens; /* of each sequence; NULL: ctx_len */
    int64_t ctx_len;
    int64_t B, T, H, Hkv, G, D; /* T queries a sequence; G query heads a KV head */
    float scale;                /* in log2 */
    int64_t window;             /* positions a query sees, INT64_MAX for all */
    const tl_attn_variant *variant;

    int64_t set_heads, set_rows;   /* the most a set has of either */
    int64_t head_parts, row_parts; /* sets for a KV head, and for the rows of a sequence */
    uint64_t n_sets;
} problem;

typedef struct {
    int64_t b, kv_head;
    int64_t first_head; /* of the H */
    int64_t n_heads;
    int64_t first_row; /* of the T */
    int64_t first_pos, last_pos;
    uint32_t n; /* queries: rows x n_heads; query i is head i % n_heads of row i / n_heads */
} set;

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static set set_at(const problem *pr, uint64_t index) {
    int64_t i = (int64_t)index;
    const int64_t part = i % pr->head_parts;
    i /= pr->head_parts;
    set s;
    s.kv_head = i % pr->Hkv;
    i /= pr->Hkv;
    s.first_row = i % pr->row_parts * pr->set_rows;
    s.b = i / pr->row_parts;
    s.first_head = s.kv_head * pr->G + part * pr->set_heads;
    s.n_heads = least(pr->set_heads, pr->G - part * pr->set_heads);
    const int64_t rows = least(pr->set_rows, pr->T - s.first_row);
    const int64_t ctx_len = pr->ctx_lens != NULL ? pr->ctx_lens[s.b] : pr->ctx_len;
    s.first_pos = ctx_len - pr->T + s.first_row;
    s.last_pos = s.first_pos + rows - 1;
    s.n = (uint32_t)(rows * s.n_heads);
    return s;
}

/* The first position that a query at `pos` sees. */
static int64_t sees_from(const problem *pr, int64_t pos) {
    return pos < pr->window ? 0 : pos - pr->window + 1;
}

static int64_t first_tile(const problem *pr, const set *s) {
    return sees_from(pr, s->first_pos) / TILE;
}

static int64_t end_tile(const set *s) {
    return s->last_pos / TILE + 1;
}

static size_t row_of(const problem *pr, const set *s, uint32_t i) {
    const int64_t row = s->b * pr->T + s->first_row + i / s->n_heads;
    return (size_t)((row * pr->H + s->first_head + i % s->n_heads) * pr->D);
}

/* ---- joining tiles ------------------------------------------------------------------------- */

typedef struct {
    float m, l; /* l below 0: nothing yet */
} sum;

/* Takes in a tile's m and l; *c1 and *c2 are what the two a have to be multiplied by. 1 when there
 * was nothing before, so that the tile's a is taken as it is. */
static int join(sum *s, float m, float l, float *c1, float *c2) {
    if (s->l < 0) {
        s->m = m;
        s->l = l;
        return 1;
    }
    const float top = m > s->m ? m : s->m;
    const float from = top == -INFINITY ? 0 : top; /* both are -infinity: both weigh 0 */
    *c1 = tl_attn_exp2(s->m - from);
    *c2 = tl_attn_exp2(m - from);
    s->m = top;
    s->l = s->l * *c1 + l * *c2;
    return 0;
}

static void join_values(float *out, const float *a, size_t n, int is_first, float c1, float c2) {
    if (is_first) {
        memcpy(out, a, n * sizeof *out);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        out[i] = out[i] * c1 + a[i] * c2;
    }
}

static void finish(const problem *pr, const set *s, const sum *sums) {
    for (uint32_t i = 0; i < s->n; i++) {
        float *out = pr->out + row_of(pr, s, i);
        for (int64_t d = 0; d < pr->D; d++) {
            out[d] /= sums[i].l;
        }
    }
}

/* ---- one tile of one set ------------------------------------------------------------------- */

/* K rows of the positions from base + first to `end`, by their place in the tile; what is around is
 * filled up with the nearest, so that it can be read. */
static void find_rows(const problem *pr, const set *s, int64_t base, uint32_t first, int64_t end,
                      const uint16_t **rows) {
    const int32_t *table = pr->tables + s->b * pr->max_blocks;
    int64_t block = (base + first) / pr->block_tokens;
    int64_t place = (base + first) % pr->block_tokens;
    uint32_t j = first;
    const uint32_t until = (uint32_t)least(end - base, TILE + TL_ATTN_AHEAD);
    while (j < until) {
        const uint16_t *row = pr->k + (size_t)table[block] * pr->block +
                              (size_t)s->kv_head * pr->head + (size_t)(place * pr->D);
        const uint32_t stop = (uint32_t)least(until, j + (pr->block_tokens - place));
        for (; j < stop; j++) {
            rows[j] = row;
            row += pr->D;
        }
        block++;
        place = 0;
    }
    for (uint32_t i = first & ~(TL_ATTN_ALIGN - 1); i < first; i++) {
        rows[i] = rows[first];
    }
    for (; j < TILE + TL_ATTN_AHEAD; j++) {
        rows[j] = rows[until - 1];
    }
}

/* A tile's results for a set: into pr->out and `sums` by joining them with what is there, or, when
 * `slot` is not NULL, for each query m, l (below 0: it sees none of the tile) and a[D] there. */
static void do_tile(const problem *pr, const set *s, int64_t tile, sum *sums, float *slot) {
    const int64_t base = tile * TILE;
    const uint16_t *rows[TL_ATTN_TILE + TL_ATTN_AHEAD];
    find_rows(pr, s, base, (uint32_t)most(sees_from(pr, s->first_pos) - base, 0), s->last_pos + 1,
              rows);
    const size_t D = (size_t)pr->D;
    tl_attn_group g = {.rows = rows, .v = pr->v, .head_dim = D, .scale = pr->scale, .prefetch = 1};
    for (uint32_t at = 0; at < s->n; at += TL_ATTN_GROUP) {
        g.n = s->n - at < TL_ATTN_GROUP ? s->n - at : TL_ATTN_GROUP;
        g.first = TL_ATTN_TILE;
        g.end = 0;
        for (uint32_t i = 0; i < g.n; i++) {
            const int64_t pos = s->first_pos + (at + i) / s->n_heads;
            g.q[i] = pr->q + row_of(pr, s, at + i);
            g.lo[i] = (uint32_t)most(sees_from(pr, pos) - base, 0);
            g.hi[i] = (uint32_t)most(least(pos + 1 - base, TILE), 0);
            if (g.lo[i] >= g.hi[i]) {
                g.lo[i] = g.hi[i] = 0;
                continue;
            }
            g.first = g.lo[i] < g.first ? g.lo[i] : g.first;
            g.end = g.hi[i] > g.end ? g.hi[i] : g.end;
        }
        tl_attn_weights w;
        float c1[TL_ATTN_GROUP] = {0}, c2[TL_ATTN_GROUP] = {0};
        int is_first[TL_ATTN_GROUP] = {0};
        if (g.end > 0) {
            pr->variant->score(&g, &w);
            g.prefetch = 0; /* the other groups find the tile in the cache */
        }
        for (uint32_t i = 0; i < g.n; i++) {
            const int sees_some = g.lo[i] < g.hi[i];
            if (slot != NULL) {
                float *to = slot + (at + i) * (D + 2);
                to[0] = sees_some ? w.max[i] : 0;
                to[1] = sees_some ? w.sum[i] : -1;
            } else if (sees_some) {
                is_first[i] = join(&sums[at + i], w.max[i], w.sum[i], &c1[i], &c2[i]);
            }
        }
        for (size_t d = 0; g.end > 0 && d < D; d += TL_ATTN_SLICE) {
            const size_t n = D - d < TL_ATTN_SLICE ? D - d : TL_ATTN_SLICE;
            _Alignas(64) float a[TL_ATTN_GROUP * TL_ATTN_SLICE];
            pr->variant->mix(&g, &w, d, n, a);
            for (uint32_t i = 0; i < g.n; i++) {
                const float *from = a + i * TL_ATTN_SLICE;
                if (g.lo[i] >= g.hi[i]) {
                    continue;
                }
                if (slot != NULL) {
                    memcpy(slot + (at + i) * (D + 2) + 2 + d, from, n * sizeof *from);
                } else {
                    join_values(pr->out + row_of(pr, s, at + i) + d, from, n, is_first[i], c1[i],
                                c2[i]);
                }
            }
        }
    }
}

static void nothing_yet(sum *sums) {
    for (int i = 0; i < SET_QUERIES; i++) {
        sums[i] = (sum){0, -1};
    }
}

static void do_set(void *arg, size_t index) {
    const problem *pr = arg;
    const set s = set_at(pr, index);
    sum sums[SET_QUERIES];
    nothing_yet(sums);
    for (int64_t tile = first_tile(pr, &s); tile < end_tile(&s); tile++) {
        do_tile(pr, &s, tile, sums, NULL);
    }
    finish(pr, &s, sums);
}

/* ---- on threads ---------------------------------------------------------------------------- */

typedef struct {
    uint64_t set;
    int64_t tile; /* below 0: all of the set */
} unit;

typedef struct {
    problem *pr;
    const unit *units;
    float *slots;
    size_t slot_floats;
} wave;

static void do_unit(void *arg, size_t i) {
    const wave *w = arg;
    const unit u = w->units[i];
    if (u.tile < 0) {
        do_set(w->pr, u.set);
    } else {
        const set s = set_at(w->pr, u.set);
        do_tile(w->pr, &s, u.tile, NULL, w->slots + i * w->slot_floats);
    }
}

/* Joins the tiles of a wave, in order. `sums` is of the set that the wave before ended in. */
static void join_wave(const wave *w, size_t n, sum *sums) {
    const problem *pr = w->pr;
    const size_t D = (size_t)pr->D;
    for (size_t u = 0; u < n; u++) {
        if (w->units[u].tile < 0) {
            continue;
        }
        const set s = set_at(pr, w->units[u].set);
        if (w->units[u].tile == first_tile(pr, &s)) {
            nothing_yet(sums);
        }
        for (uint32_t i = 0; i < s.n; i++) {
            const float *from = w->slots + u * w->slot_floats + i * (D + 2);
            if (from[1] < 0) {
                continue;
            }
            float c1 = 0, c2 = 0;
            const int is_first = join(&sums[i], from[0], from[1], &c1, &c2);
            join_values(pr->out + row_of(pr, &s, i), from + 2, D, is_first, c1, c2);
        }
        if (w->units[u].tile + 1 == end_tile(&s)) {
            finish(pr, &s, sums);
        }
    }
}

static void do_waves(problem *pr, tl_pool *tp, double share, void *scratch, size_t n_fit,
                     size_t slot_floats) {
    unit *units = scratch;
    const size_t unit_bytes = (n_fit * sizeof(unit) + 63) & ~(size_t)63;
    wave w = {pr, units, (float *)(void *)((char *)scratch + unit_bytes), slot_floats};
    sum sums[SET_QUERIES];
    nothing_yet(sums);
    size_t n = 0;
    for (uint64_t index = 0; index < pr->n_sets; index++) {
        const set s = set_at(pr, index);
        const int64_t end = end_tile(&s);
        int64_t tile = first_tile(pr, &s);
        const int whole = (double)(end - tile) <= share;
        while (tile < end) {
            units[n++] = (unit){index, whole ? -1 : tile};
            tile = whole ? end : tile + 1;
            if (n == n_fit || (index + 1 == pr->n_sets && tile == end)) {
                tl_pool_run(tp, n, do_unit, &w);
                join_wave(&w, n, sums);
                n = 0;
            }
        }
    }
}

static void do_all(problem *pr, tl_pool *tp) {
    pr->G = pr->H / pr->Hkv;
    pr->set_heads = least(pr->G, SET_QUERIES);
    pr->set_rows = least(most(SET_QUERIES / pr->set_heads, 1), SET_ROWS);
    pr->head_parts = (pr->G + pr->set_heads - 1) / pr->set_heads;
    pr->row_parts = (pr->T + pr->set_rows - 1) / pr->set_rows;
    pr->n_sets = (uint64_t)(pr->B * pr->row_parts * pr->Hkv * pr->head_parts);
    pr->variant = select_variant();

    /* How much there is to do, and the most tiles of a set; the sets of one row part are alike. */
    double tiles = 0, most_tiles = 0;
    const uint64_t alike = (uint64_t)(pr->Hkv * pr->head_parts);
    if (tp != NULL) {
        for (uint64_t i = 0; i < pr->n_sets; i += alike) {
            const set s = set_at(pr, i);
            const double n = (double)(end_tile(&s) - first_tile(pr, &s));
            tiles += n;
            most_tiles = n > most_tiles ? n : most_tiles;
        }
    }
    tiles *= (double)alike;
    const double queries = (double)least(pr->set_rows, pr->T) * (double)pr->set_heads;
    const double work = tiles * (double)(TILE * 2) * queries * (double)pr->D;
    if (work < WORTH_WAKING || !tl_pool_enter(tp)) {
        for (uint64_t i = 0; i < pr->n_sets; i++) {
            do_set(pr, i);
        }
        return;
    }
    size_t scratch_bytes;
    void *scratch = tl_pool_scratch(tp, &scratch_bytes);
    const uint32_t n_threads = tl_pool_threads(tp);
    double share = tiles / (double)(n_threads * SHARES);
    share = share < 1 ? 1 : share;
    const size_t slot_floats = ((size_t)queries * ((size_t)pr->D + 2) + 15) & ~(size_t)15;
    const size_t n_fit = (scratch_bytes - 64) / (slot_floats * sizeof(float) + sizeof(unit));
    if (most_tiles > share && n_fit >= n_threads) {
        do_waves(pr, tp, share, scratch, n_fit, slot_floats);
    } else {
        tl_pool_run(tp, pr->n_sets, do_set, pr);
    }
    tl_pool_leave(tp);
}

/* ---- what is checked ----------------------------------------------------------------------- */

/* The pool and the dimensions; fills what follows from them. `who` is the function named. */
static tl_status open_problem(const char *who, const tl_kv_pool *kv, uint32_t layer, float scale,
                              int64_t window, problem *pr) {
    tl_kv_cfg cfg;
    tl_kv_pool_cfg(kv, &cfg);
    if (pr->B < 0 || pr->T < 0 || pr->max_blocks < 0 || pr->H < 1) {
        return tl_fail(TL_EINVAL, "%s: a dimension is negative, or H is 0", who);
    }
    if (pr->Hkv != cfg.n_kv_heads) {
        return tl_fail(TL_ESHAPE, "%s: Hkv: expected the pool's %u, found %lld", who,
                       cfg.n_kv_heads, (long long)pr->Hkv);
    }
    if (pr->D != cfg.head_dim) {
        return tl_fail(TL_ESHAPE, "%s: D: expected the pool's %u, found %lld", who, cfg.head_dim,
                       (long long)pr->D);
    }
    if (pr->H % pr->Hkv != 0) {
        return tl_fail(TL_ESHAPE, "%s: H: expected a multiple of Hkv = %lld, found %lld", who,
                       (long long)pr->Hkv, (long long)pr->H);
    }
    if (layer >= cfg.n_layers) {
        return tl_fail(TL_EINVAL, "%s: layer %u is out of range: the pool has %u", who, layer,
                       cfg.n_layers);
    }
    if (!isfinite(scale)) {
        return tl_fail(TL_EINVAL, "%s: scale: expected a finite number, found %g", who,
                       (double)scale);
    }
    pr->scale = (float)((double)scale * 1.4426950408889634); /* log2(e) */
    pr->window = window <= 0 ? INT64_MAX : window;
    pr->block_tokens = cfg.block_tokens;
    pr->head = (size_t)cfg.block_tokens * cfg.head_dim;
    pr->v = pr->head * cfg.n_kv_heads;
    pr->block = tl_kv_block_bytes(kv) / sizeof(uint16_t);
    pr->k = tl_kv_block_ptr(kv, 0, layer, 0);
    if (pr->k == NULL) {
        return tl_fail(TL_EUNSUPPORTED, "%s: the pool has no memory of its own to read", who);
    }
    size_t row, n = 0;
    if (!tl_mul_size((size_t)pr->H, (size_t)pr->D * sizeof(float), &row) ||
        !tl_mul_size((size_t)(pr->B * pr->T), row, &n)) {
        return tl_fail(TL_EINVAL, "%s: q is larger than memory", who);
    }
    const uintptr_t q = (uintptr_t)pr->q, out = (uintptr_t)pr->out;
    if (n > 0 && q < out + n && out < q + n) {
        return tl_fail(TL_EINVAL, "%s: q and out overlap", who);
    }
    return TL_OK;
}

static tl_status check_table(const char *who, const tl_kv_pool *kv, const problem *pr, int64_t b,
                             int64_t ctx_len) {
    if (ctx_len < 1) {
        return tl_fail(TL_EINVAL, "%s: sequence %lld: ctx_len: expected at least 1, found %lld",
                       who, (long long)b, (long long)ctx_len);
    }
    const int64_t n = (ctx_len - 1) / pr->block_tokens + 1;
    if (n > pr->max_blocks) {
        return tl_fail(TL_EINVAL,
                       "%s: sequence %lld: %lld positions are %lld blocks, its table has %lld", who,
                       (long long)b, (long long)ctx_len, (long long)n, (long long)pr->max_blocks);
    }
    tl_kv_cfg cfg;
    tl_kv_pool_cfg(kv, &cfg);
    const int32_t *table = pr->tables + b * pr->max_blocks;
    for (int64_t i = 0; i < n; i++) {
        if (table[i] < 0 || (uint32_t)table[i] >= cfg.n_blocks) {
            return tl_fail(TL_EINVAL,
                           "%s: sequence %lld: block %lld of its table is %d, the pool has %u", who,
                           (long long)b, (long long)i, table[i], cfg.n_blocks);
        }
    }
    return TL_OK;
}

tl_status tl_paged_attn_decode_f32(const float *q, const tl_kv_pool *kv, uint32_t layer,
                                   const int32_t *block_tables, int64_t max_blocks,
                                   const int32_t *ctx_lens, float *out, int64_t B, int64_t H,
                                   int64_t Hkv, int64_t D, float scale, int64_t window,
                                   tl_pool *tp) {
    static const char who[] = "tl_paged_attn_decode_f32";
    if (kv == NULL ||
        (B != 0 && (q == NULL || out == NULL || block_tables == NULL || ctx_lens == NULL))) {
        return tl_fail(TL_EINVAL, "%s: a pointer is NULL", who);
    }
    problem pr = {.q = q,
                  .out = out,
                  .tables = block_tables,
                  .max_blocks = max_blocks,
                  .ctx_lens = ctx_lens,
                  .B = B,
                  .T = 1,
                  .H = H,
                  .Hkv = Hkv,
                  .D = D};
    tl_status st = open_problem(who, kv, layer, scale, window, &pr);
    for (int64_t b = 0; st == TL_OK && b < B; b++) {
        st = check_table(who, kv, &pr, b, ctx_lens[b]);
    }
    if (st == TL_OK && B > 0) {
        do_all(&pr, tp);
    }
    return st;
}

tl_status tl_paged_attn_prefill_f32(const float *q, const tl_kv_pool *kv, uint32_t layer,
                                    const int32_t *block_table, int64_t n_blocks, int64_t ctx_len,
                                    float *out, int64_t T, int64_t H, int64_t Hkv, int64_t D,
                                    float scale, int64_t window, tl_pool *tp) {
    static const char who[] = "tl_paged_attn_prefill_f32";
    if (kv == NULL || (T != 0 && (q == NULL || out == NULL || block_table == NULL))) {
        return tl_fail(TL_EINVAL, "%s: a pointer is NULL", who);
    }
    problem pr = {.q = q,
                  .out = out,
                  .tables = block_table,
                  .max_blocks = n_blocks,
                  .ctx_len = ctx_len,
                  .B = 1,
                  .T = T,
                  .H = H,
                  .Hkv = Hkv,
                  .D = D};
    tl_status st = open_problem(who, kv, layer, scale, window, &pr);
    if (st != TL_OK || T == 0) {
        return st;
    }
    if (T > ctx_len) {
        return tl_fail(TL_EINVAL, "%s: T: expected at most ctx_len = %lld, found %lld", who,
                       (long long)ctx_len, (long long)T);
    }
    st = check_table(who, kv, &pr, 0, ctx_len);
    if (st == TL_OK) {
        do_all(&pr, tp);
    }
    return st;
}
