/*
 * paged_attn_sets.c - how attention over block tables is cut into pieces, and how the pieces become
 * one result. The arithmetic of a piece is in paged_attn_tile.h.
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
 * A set is what one thread takes through a tile: up to 64 queries, which are the rows of a prefill
 * or the one of a decode, times the query heads of one or several neighbouring KV heads. The
 * queries of a KV head share a tile from the cache; the heads of a tile share the run of memory in
 * which a block holds them, which is asked for a tile ahead: K and V of one head in one block are 2
 * to 4 KiB, too short a run for the memory to be fast. Work for threads is runs of (set, tile). A
 * set that is too large a part of everything is cut into its tiles, whose results wait in the
 * pool's memory for the caller, who joins them.
 */
#include "kernels/paged_attn.h"
#include "kernels/threads.h"

#include <math.h>
#include <string.h>

#define TILE         ((int64_t)TL_ATTN_TILE)
#define SET_QUERIES  64                   /* queries of a set at most */
#define SET_ROWS     16                   /* positions of a set at most */
#define SET_BYTES    ((int64_t)512 << 10) /* of K and V of a tile: half of a second-level cache */
#define WORTH_WAKING 500000.0 /* multiplications; fewer are done before another thread is awake */
#define SHARES       8        /* tasks for each thread */

typedef tl_attn_problem problem;

/* ---- sets ---------------------------------------------------------------------------------- */

/* How a problem is cut into sets. */
typedef struct {
    int64_t rows, heads, kv_heads;           /* the most that a set has of each */
    int64_t row_parts, head_parts, kv_parts; /* sets for a sequence, a KV head, and all of them */
    uint64_t n_sets;
} cutting;

typedef struct {
    int64_t b;
    int64_t kv_head, n_kv;       /* n_kv > 1 only with all G heads of each */
    int64_t first_head, n_heads; /* of the G of a KV head */
    int64_t first_row, n_rows;   /* of the T */
    int64_t first_pos, last_pos;
    uint32_t n; /* queries: by KV head, row, head */
} set;

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t parts(int64_t n, int64_t size) {
    return (n + size - 1) / size;
}

static void cut_heads(const problem *pr, cutting *c, int64_t kv_heads) {
    c->kv_heads = kv_heads;
    c->kv_parts = parts(pr->Hkv, kv_heads);
    c->n_sets = (uint64_t)(pr->B * c->row_parts * c->kv_parts * c->head_parts);
}

static cutting cut(const problem *pr) {
    cutting c;
    c.heads = least(pr->G, SET_QUERIES);
    c.rows = least(pr->T, least(most(SET_QUERIES / c.heads, 1), SET_ROWS));
    c.head_parts = parts(pr->G, c.heads);
    c.row_parts = parts(pr->T, c.rows);
    const int64_t fit = least(SET_QUERIES / (c.heads * c.rows), SET_BYTES / (TILE * pr->D * 4));
    cut_heads(pr, &c, c.head_parts > 1 ? 1 : most(least(pr->Hkv, fit), 1));
    return c;
}

static set set_at(const problem *pr, const cutting *c, uint64_t index) {
    int64_t i = (int64_t)index;
    set s;
    s.first_head = i % c->head_parts * c->heads;
    s.n_heads = least(c->heads, pr->G - s.first_head);
    i /= c->head_parts;
    s.kv_head = i % c->kv_parts * c->kv_heads;
    s.n_kv = least(c->kv_heads, pr->Hkv - s.kv_head);
    i /= c->kv_parts;
    s.first_row = i % c->row_parts * c->rows;
    s.n_rows = least(c->rows, pr->T - s.first_row);
    s.b = i / c->row_parts;
    const int64_t ctx_len = pr->ctx_lens != NULL ? pr->ctx_lens[s.b] : pr->ctx_len;
    s.first_pos = ctx_len - pr->T + s.first_row;
    s.last_pos = s.first_pos + s.n_rows - 1;
    s.n = (uint32_t)(s.n_kv * s.n_rows * s.n_heads);
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

/* Where query i of the set stands in q and out. */
static size_t place_of(const problem *pr, const set *s, uint32_t i) {
    const int64_t head = i % s->n_heads, row = i / s->n_heads % s->n_rows;
    const int64_t kv = s->kv_head + i / (s->n_heads * s->n_rows);
    return (
        size_t)(((s->b * pr->T + s->first_row + row) * pr->H + kv * pr->G + s->first_head + head) *
                pr->D);
}

/* ---- joining tiles ------------------------------------------------------------------------- */

typedef struct {
    float m, l; /* l below 0: nothing yet */
} sum;

static void nothing_yet(sum *sums) {
    for (int i = 0; i < SET_QUERIES; i++) {
        sums[i] = (sum){0, -1};
    }
}

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
        float *out = pr->out + place_of(pr, s, i);
        for (int64_t d = 0; d < pr->D; d++) {
            out[d] /= sums[i].l;
        }
    }
}

/* ---- where a tile lies --------------------------------------------------------------------- */

/* A run of positions in one block. */
typedef struct {
    const uint16_t *k; /* of the set's first KV head */
    int64_t n;
} run;

static run run_at(const problem *pr, const set *s, int64_t pos, int64_t end) {
    const int64_t block = pos / pr->block_tokens, place = pos % pr->block_tokens;
    const int32_t id = pr->tables[s->b * pr->max_blocks + block];
    return (run){pr->k + (size_t)id * pr->block + (size_t)s->kv_head * pr->head +
                     (size_t)(place * pr->D),
                 least(end - pos, pr->block_tokens - place)};
}

/* The keys of a tile that a set's queries see, all together: places first .. end - 1. */
static uint32_t first_key(const problem *pr, const set *s, int64_t tile) {
    return (uint32_t)most(sees_from(pr, s->first_pos) - tile * TILE, 0);
}

static uint32_t end_key(const set *s, int64_t tile) {
    return (uint32_t)least(s->last_pos + 1 - tile * TILE, TILE);
}

/* The keys' rows by their place in the tile; the places around them, up to a multiple of
 * TL_ATTN_ALIGN, get their neighbour's, so that they can be read. */
static void find_rows(const problem *pr, const set *s, int64_t tile, const uint16_t **rows) {
    const uint32_t first = first_key(pr, s, tile), end = end_key(s, tile);
    uint32_t j = first;
    while (j < end) {
        run r = run_at(pr, s, tile * TILE + j, tile * TILE + end);
        for (const uint32_t stop = j + (uint32_t)r.n; j < stop; j++) {
            rows[j] = r.k;
            r.k += pr->D;
        }
    }
    for (uint32_t i = first & ~(TL_ATTN_ALIGN - 1); i < first; i++) {
        rows[i] = rows[first];
    }
    for (; j % TL_ATTN_ALIGN != 0; j++) {
        rows[j] = rows[end - 1];
    }
}

static void add_region(tl_attn_ahead *a, const uint16_t *from, size_t n) {
    if (a->n > 0 && a->regions[a->n - 1].end == (const char *)from) {
        a->regions[a->n - 1].end += n * sizeof *from;
    } else if (a->n < TL_ATTN_REGIONS) { /* else it is not asked for, and comes when it is read */
        a->regions[a->n++] = (tl_attn_region){(const char *)from, (const char *)(from + n)};
    }
}

/* Sets `a` to the memory of a tile, in the order in which it lies in each block. */
static void look_ahead(const problem *pr, const set *s, int64_t tile, tl_attn_ahead *a) {
    a->n = a->next = 0;
    a->now = (tl_attn_region){NULL, NULL};
    const int64_t end = tile * TILE + end_key(s, tile);
    for (int64_t pos = tile * TILE + first_key(pr, s, tile); pos < end;) {
        const run r = run_at(pr, s, pos, end);
        const size_t D = (size_t)pr->D, n = (size_t)r.n * D;
        for (int is_v = 0; is_v < 2; is_v++) {
            const uint16_t *from = r.k + (is_v ? pr->v : 0);
            if (r.n == pr->block_tokens) {
                add_region(a, from, (size_t)s->n_kv * pr->head);
                continue;
            }
            for (int64_t kv = 0; kv < s->n_kv; kv++) {
                add_region(a, from + (size_t)kv * pr->head, n);
            }
        }
        pos += r.n;
    }
}

/* Asks for what `a` has left. */
static void ask_for_rest(tl_attn_ahead *a) {
    for (;; a->now = a->regions[a->next++]) {
        for (; a->now.at < a->now.end; a->now.at += TL_ATTN_LINE) {
            __builtin_prefetch(a->now.at, 0, 2);
        }
        if (a->next == a->n) {
            return;
        }
    }
}

/* ---- one tile of one set ------------------------------------------------------------------- */

/* A tile's results for a set: into pr->out and `sums` by joining them with what is there, or, when
 * `slot` is not NULL, for each query m, l (below 0: it sees none of the tile) and a[D] there.
 * `ahead` is asked for meanwhile. */
static void do_tile(const problem *pr, const set *s, int64_t tile, sum *sums, float *slot,
                    tl_attn_ahead *ahead) {
    const uint16_t *rows[TL_ATTN_TILE];
    find_rows(pr, s, tile, rows);
    const size_t D = (size_t)pr->D;
    const uint32_t per_kv = s->n / (uint32_t)s->n_kv;
    tl_attn_group g = {.rows = rows, .head_dim = D, .scale = pr->scale};
    for (uint32_t at = 0; at < s->n; at += g.n) {
        const uint32_t kv = at / per_kv, left = (kv + 1) * per_kv - at;
        g.k = kv * pr->head;
        g.v = g.k + pr->v;
        g.ahead = at % per_kv == 0 ? ahead : NULL;
        g.n = left < TL_ATTN_GROUP ? left : TL_ATTN_GROUP;
        g.first = TL_ATTN_TILE;
        g.end = 0;
        for (uint32_t i = 0; i < g.n; i++) {
            const int64_t row = (at + i) / s->n_heads % s->n_rows, pos = s->first_pos + row;
            g.q[i] = pr->q + place_of(pr, s, at + i);
            g.lo[i] = (uint32_t)most(sees_from(pr, pos) - tile * TILE, 0);
            g.hi[i] = (uint32_t)most(least(pos + 1 - tile * TILE, TILE), 0);
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
                    join_values(pr->out + place_of(pr, s, at + i) + d, from, n, is_first[i], c1[i],
                                c2[i]);
                }
            }
        }
    }
}

/* ---- runs of tiles ------------------------------------------------------------------------- */

/* All of a set, or one tile of it whose results go to a slot. */
typedef struct {
    uint64_t set;
    int64_t tile; /* below 0: all */
    size_t slot;
} unit;

typedef struct {
    const problem *pr;
    const cutting *c;
    const unit *units;
    const uint32_t *tasks; /* task i is the units tasks[i] .. tasks[i + 1] - 1 */
    float *slots;
    size_t slot_floats;
} wave;

/* Units from..to - 1, each tile asked for while the one before is computed. units NULL: unit i is
 * all of set i. */
static void do_units(const wave *w, uint64_t from, uint64_t to) {
    const problem *pr = w->pr;
    tl_attn_ahead ahead;
    sum sums[SET_QUERIES];
    set s, next;
    for (uint64_t i = from; i < to; i++) {
        const unit u = w->units != NULL ? w->units[i] : (unit){i, -1, 0};
        const int whole = u.tile < 0;
        s = i == from ? set_at(pr, w->c, u.set) : next;
        int64_t tile = whole ? first_tile(pr, &s) : u.tile;
        const int64_t end = whole ? end_tile(&s) : tile + 1;
        if (i == from) { /* nobody has asked for it yet */
            look_ahead(pr, &s, tile, &ahead);
            ask_for_rest(&ahead);
        }
        nothing_yet(sums);
        for (; tile < end; tile++) {
            const set *after = &s;
            int64_t tile_after = tile + 1;
            if (tile_after == end) {
                after = NULL;
                if (i + 1 < to) {
                    const unit v = w->units != NULL ? w->units[i + 1] : (unit){i + 1, -1, 0};
                    next = set_at(pr, w->c, v.set);
                    tile_after = v.tile < 0 ? first_tile(pr, &next) : v.tile;
                    after = &next;
                }
            }
            if (after != NULL) {
                look_ahead(pr, after, tile_after, &ahead);
                const int64_t bytes =
                    after->n_kv * (end_key(after, tile_after) - first_key(pr, after, tile_after));
                const int64_t steps = 2 * s.n_kv * (end_key(&s, tile) - first_key(pr, &s, tile));
                ahead.rate = (uint32_t)parts(2 * bytes, steps);
            }
            do_tile(pr, &s, tile, sums, whole ? NULL : w->slots + u.slot * w->slot_floats,
                    after != NULL ? &ahead : NULL);
            if (after != NULL) {
                ask_for_rest(&ahead);
            }
        }
        if (whole) {
            finish(pr, &s, sums);
        }
    }
}

static void do_task(void *arg, size_t i) {
    const wave *w = arg;
    do_units(w, w->tasks[i], w->tasks[i + 1]);
}

/* ---- on threads ---------------------------------------------------------------------------- */

/* Joins the tiles of a wave, in order. `sums` is of the set that the wave before ended in. */
static void join_wave(const wave *w, size_t n, sum *sums) {
    const problem *pr = w->pr;
    const size_t D = (size_t)pr->D;
    for (size_t u = 0; u < n; u++) {
        const unit *at = &w->units[u];
        if (at->tile < 0) {
            continue;
        }
        const set s = set_at(pr, w->c, at->set);
        if (at->tile == first_tile(pr, &s)) {
            nothing_yet(sums);
        }
        for (uint32_t i = 0; i < s.n; i++) {
            const float *from = w->slots + at->slot * w->slot_floats + i * (D + 2);
            if (from[1] < 0) {
                continue;
            }
            float c1 = 0, c2 = 0;
            const int is_first = join(&sums[i], from[0], from[1], &c1, &c2);
            join_values(pr->out + place_of(pr, &s, i), from + 2, D, is_first, c1, c2);
        }
        if (at->tile + 1 == end_tile(&s)) {
            finish(pr, &s, sums);
        }
    }
}

#define WAVE_UNITS 4096u

/* Waves of units, as many as the pool's memory holds; tasks of about `share` tiles. */
static void do_waves(const problem *pr, const cutting *c, tl_pool *tp, double share) {
    size_t n_bytes;
    char *scratch = tl_pool_scratch(tp, &n_bytes);
    unit *units = (unit *)(void *)scratch;
    uint32_t *tasks = (uint32_t *)(void *)(units + WAVE_UNITS);
    const size_t used = WAVE_UNITS * (sizeof(unit) + 2 * sizeof *tasks);
    wave w = {.pr = pr, .c = c, .units = units, .tasks = tasks};
    w.slots = (float *)(void *)(scratch + used);
    w.slot_floats = (size_t)(c->kv_heads * c->rows * c->heads) * ((size_t)pr->D + 2);
    const size_t n_slots = (n_bytes - used) / (w.slot_floats * sizeof(float));
    if (n_slots < (size_t)2 * tl_pool_threads(tp)) {
        share = INFINITY; /* too little: nothing is cut */
    }
    sum sums[SET_QUERIES];
    nothing_yet(sums);
    size_t n = 0, n_tasks = 0, slots = 0;
    double tiles = 0; /* of the task that is being filled */
    for (uint64_t index = 0; index < c->n_sets; index++) {
        const set s = set_at(pr, c, index);
        const int64_t end = end_tile(&s);
        int64_t tile = first_tile(pr, &s);
        const int whole = (double)(end - tile) <= share;
        while (tile < end) {
            if (n == 0 || tiles >= share) {
                tasks[n_tasks++] = (uint32_t)n;
                tiles = 0;
            }
            units[n++] = (unit){index, whole ? -1 : tile, slots};
            slots += whole ? 0 : 1;
            tiles += whole ? (double)(end - tile) : 1;
            tile = whole ? end : tile + 1;
            if (n == WAVE_UNITS || slots == n_slots || (index + 1 == c->n_sets && tile == end)) {
                tasks[n_tasks] = (uint32_t)n;
                tl_pool_run(tp, n_tasks, do_task, &w);
                join_wave(&w, n, sums);
                n = n_tasks = slots = 0;
            }
        }
    }
}

void tl_attn_run(const tl_attn_problem *pr, tl_pool *tp) {
    cutting c = cut(pr);
    if (tp != NULL) {
        double tiles = 0; /* of one KV head; its sets of one row part are alike */
        const uint64_t alike = (uint64_t)(c.kv_parts * c.head_parts);
        for (uint64_t i = 0; i < c.n_sets; i += alike) {
            const set s = set_at(pr, &c, i);
            tiles += (double)(end_tile(&s) - first_tile(pr, &s));
        }
        const double work = tiles * (double)(TILE * 2 * c.rows * pr->H) * (double)pr->D;
        if (work >= WORTH_WAKING && tl_pool_enter(tp)) {
            const double wanted = (double)tl_pool_threads(tp) * SHARES;
            while (c.kv_heads > 1 && tiles * (double)(c.kv_parts * c.head_parts) < wanted) {
                cut_heads(pr, &c, parts(c.kv_heads, 2));
            }
            tiles *= (double)(c.kv_parts * c.head_parts);
            do_waves(pr, &c, tp, tiles > wanted ? tiles / wanted : 1);
            tl_pool_leave(tp);
            return;
        }
    }
    const wave w = {.pr = pr, .c = &c};
    do_units(&w, 0, c.n_sets);
}
