/*
 * tl_test_kv.h - what every test of a pool needs: making one, counting its blocks, filling a block
 * with values that can be told apart and finding them again. Uses kv_pool.h only, so it works over
 * any implementation of it.
 */
#ifndef TL_TEST_KV_H
#define TL_TEST_KV_H

#include "tinyllm/kv_pool.h"
#include "tl_test.h"

#include <string.h>

/* A pool of n blocks of B positions, L layers, H heads, D values. The test ends when it fails. */
static inline tl_kv_pool *kv_new(uint32_t n, uint32_t B, uint32_t L, uint32_t H, uint32_t D) {
    const tl_kv_cfg cfg = {n, B, L, H, D, TL_F16, TL_KV_FORMAT_V1};
    tl_kv_pool *p = NULL;
    TL_OK_(tl_kv_pool_create(&cfg, &p));
    TL_CHECK(p != NULL);
    return p;
}

static inline tl_kv_cfg kv_cfg(const tl_kv_pool *p) {
    tl_kv_cfg cfg;
    tl_kv_pool_cfg(p, &cfg);
    return cfg;
}

static inline tl_kv_stats kv_stats(const tl_kv_pool *p) {
    tl_kv_stats s;
    tl_kv_stats_get(p, &s);
    return s;
}

/* The pool has these many blocks in each state, and they are all its blocks. */
#define KV_STATS(p, free_, used_, cached_)                                                         \
    do {                                                                                           \
        const tl_kv_stats kv_s = kv_stats(p);                                                      \
        if (kv_s.free != (free_) || kv_s.used != (used_) || kv_s.cached != (cached_))              \
            tl_test_fail(__FILE__, __LINE__,                                                       \
                         "free, used, cached are %u, %u, %u, but must be %u, %u, %u", kv_s.free,   \
                         kv_s.used, kv_s.cached, (unsigned)(free_), (unsigned)(used_),             \
                         (unsigned)(cached_));                                                     \
        TL_EQ(kv_s.free + kv_s.used + kv_s.cached, kv_cfg(p).n_blocks);                            \
    } while (0)

/* Nothing about the counts changed, evictions included. */
#define KV_SAME_STATS(p, before)                                                                   \
    do {                                                                                           \
        const tl_kv_stats kv_b = (before);                                                         \
        KV_STATS(p, kv_b.free, kv_b.used, kv_b.cached);                                            \
        TL_EQ(kv_stats(p).evictions, kv_b.evictions);                                              \
    } while (0)

/* The call fails with the status and says something in the error slot. */
#define KV_REFUSED(call, status)                                                                   \
    do {                                                                                           \
        tl_set_last_error(NULL);                                                                   \
        TL_STATUS(call, status);                                                                   \
        TL_CHECK(tl_last_error()[0] != 0);                                                         \
    } while (0)

static inline uint32_t kv_alloc1(tl_kv_pool *p) {
    uint32_t id = UINT32_MAX;
    TL_OK_(tl_kv_alloc(p, 1, &id));
    TL_CHECK(id < kv_cfg(p).n_blocks);
    return id;
}

/* Element i of one layer's K or V in the pattern `seed`: never 0, different for every place. */
static inline uint16_t kv_value(uint64_t seed, uint32_t layer, int is_v, size_t i) {
    uint64_t s = seed ^ ((uint64_t)layer << 40 | (uint64_t)(is_v != 0) << 32 | i);
    return (uint16_t)(tl_test_rand(&s) | 1u);
}

static inline size_t kv_slab_values(const tl_kv_pool *p) {
    const tl_kv_cfg c = kv_cfg(p);
    return (size_t)c.n_kv_heads * c.block_tokens * c.head_dim;
}

/* Writes the pattern into every position of a block; the caller may write it. */
static inline void kv_write(tl_kv_pool *p, uint32_t id, uint64_t seed) {
    for (uint32_t layer = 0; layer < kv_cfg(p).n_layers; layer++)
        for (int is_v = 0; is_v < 2; is_v++) {
            uint16_t *x = tl_kv_block_ptr(p, id, layer, is_v);
            TL_CHECK(x != NULL);
            for (size_t i = 0; i < kv_slab_values(p); i++)
                x[i] = kv_value(seed, layer, is_v, i);
        }
}

/* The first `fill` positions of the block hold the pattern. */
static inline void kv_expect(const tl_kv_pool *p, uint32_t id, uint64_t seed, uint32_t fill) {
    const tl_kv_cfg c = kv_cfg(p);
    for (uint32_t layer = 0; layer < c.n_layers; layer++)
        for (int is_v = 0; is_v < 2; is_v++) {
            const uint16_t *x = tl_kv_block_ptr(p, id, layer, is_v);
            TL_CHECK(x != NULL);
            for (size_t i = 0; i < kv_slab_values(p); i++) {
                const size_t position = i / c.head_dim % c.block_tokens;
                const uint16_t want = kv_value(seed, layer, is_v, i);
                if (position < fill && x[i] != want)
                    tl_test_fail(__FILE__, __LINE__,
                                 "block %u layer %u %s value %zu is 0x%04x, but must be 0x%04x", id,
                                 layer, is_v ? "V" : "K", i, x[i], want);
            }
        }
}

/* A used block with `fill` positions of the pattern `seed`. */
static inline uint32_t kv_filled(tl_kv_pool *p, uint64_t seed, uint32_t fill) {
    const uint32_t id = kv_alloc1(p);
    kv_write(p, id, seed);
    TL_OK_(tl_kv_set_fill(p, id, fill));
    return id;
}

/* A used, full block registered under hash, with the pattern of its hash. */
static inline uint32_t kv_registered(tl_kv_pool *p, uint64_t hash) {
    const uint32_t id = kv_filled(p, hash, kv_cfg(p).block_tokens);
    TL_OK_(tl_kv_register(p, id, hash));
    return id;
}

/* The same, given back: cached. */
static inline uint32_t kv_cached(tl_kv_pool *p, uint64_t hash) {
    const uint32_t id = kv_registered(p, hash);
    TL_OK_(tl_kv_unref(p, id));
    return id;
}

/* A hit on this block; the reference is the caller's. */
static inline void kv_expect_hit(tl_kv_pool *p, uint64_t hash, uint32_t id) {
    uint32_t got = UINT32_MAX;
    TL_STATUS(tl_kv_lookup(p, hash, &got), TL_OK);
    TL_EQ(got, id);
}

/* A miss, with the id and the error slot as they were. */
static inline void kv_expect_miss(tl_kv_pool *p, uint64_t hash) {
    uint32_t got = 0xABCDEF01u;
    tl_set_last_error("an earlier error");
    TL_STATUS(tl_kv_lookup(p, hash, &got), TL_ENOTFOUND);
    TL_EQ(got, 0xABCDEF01u);
    TL_STR_EQ(tl_last_error(), "an earlier error");
    tl_set_last_error(NULL);
}

/* Takes every block that can be had, one by one, and returns how many. order[i] is the i-th block
 * taken: free ones, then cached ones, oldest first. No block comes twice. */
static inline uint32_t kv_drain(tl_kv_pool *p, uint32_t *order) {
    const uint32_t n = kv_stats(p).free + kv_stats(p).cached;
    for (uint32_t i = 0; i < n; i++) {
        order[i] = kv_alloc1(p);
        for (uint32_t j = 0; j < i; j++)
            TL_CHECK(order[j] != order[i]);
    }
    uint32_t one_more = 0;
    TL_STATUS(tl_kv_alloc(p, 1, &one_more), TL_EFULL);
    return n;
}

/* A pool of 9 blocks in the middle of its life: shared (3 references), private, partial and
 * registered blocks in use, three cached ones whose order is not that of their ids, two free ones
 * in the order they came back. Registered are 0x100 .. 0x104. */
enum { KV_LIVED_IN_BLOCKS = 9 };
static inline tl_kv_pool *kv_lived_in(uint32_t B, uint32_t L, uint32_t H, uint32_t D) {
    tl_kv_pool *p = kv_new(KV_LIVED_IN_BLOCKS, B, L, H, D);
    uint32_t id[KV_LIVED_IN_BLOCKS];
    for (uint32_t i = 0; i < KV_LIVED_IN_BLOCKS; i++)
        id[i] = i < 5 ? kv_registered(p, 0x100 + i) : kv_filled(p, i, i == 5 ? 1 : B);
    tl_kv_ref(p, id[0]);
    tl_kv_ref(p, id[0]);
    static const uint32_t back[] = {3, 1, 4, 8, 6};
    for (int i = 0; i < 5; i++)
        TL_OK_(tl_kv_unref(p, id[back[i]]));
    KV_STATS(p, 2, 4, 3);
    return p;
}

#endif /* TL_TEST_KV_H */
