/*
 * paged_attn.c - the public functions of attention.h: what is checked before anything is read, and
 * which variant does the arithmetic.
 */
#include "tinyllm/attention.h"

#include "kernels/paged_attn.h"
#include "numerics/cpu.h"
#include "runtime/internal.h"

#include <math.h>
#include <stdatomic.h>

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

/* ---- what is checked ----------------------------------------------------------------------- */

#define SCALE_MAX 2.3e38f /* times log2(e) it is finite still */

/* The pool and the dimensions; fills what follows from them. `who` is the function named. */
static tl_status open_problem(const char *who, const tl_kv_pool *kv, uint32_t layer, float scale,
                              int64_t window, tl_attn_problem *pr) {
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
    if (!(fabsf(scale) <= SCALE_MAX)) { /* nor NaN */
        return tl_fail(TL_EINVAL,
                       "%s: scale: expected a finite number, at most %g in size, found %g", who,
                       (double)SCALE_MAX, (double)scale);
    }
    pr->variant = select_variant();
    pr->G = pr->H / pr->Hkv;
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

static tl_status check_table(const char *who, const tl_kv_pool *kv, const tl_attn_problem *pr,
                             int64_t b, int64_t ctx_len) {
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
    tl_attn_problem pr = {.q = q,
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
        tl_attn_run(&pr, tp);
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
    tl_attn_problem pr = {.q = q,
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
        tl_attn_run(&pr, tp);
    }
    return st;
}
