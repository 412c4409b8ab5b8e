/*
 * tl_test_state.h - everything about a pool that can be seen, to be compared before and after a
 * call that must change nothing: the counts, each block's references, fill and hash, every byte of
 * the slab. The order of the free list and of the cache shows only when blocks are taken; kv_drain
 * (tl_test_kv.h) reads it at the end.
 */
#ifndef TL_TEST_STATE_H
#define TL_TEST_STATE_H

#include "tinyllm/kv_pool_ext.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    tl_kv_stats stats;
    uint32_t n_blocks;
    size_t slab_bytes;
    uint32_t *refs, *fills;
    uint64_t *hashes;
    uint8_t *slab;
} kv_state;

static inline kv_state kv_state_of(const tl_kv_pool *p) {
    tl_kv_cfg cfg;
    kv_state s;
    tl_kv_pool_cfg(p, &cfg);
    tl_kv_stats_get(p, &s.stats);
    s.n_blocks = cfg.n_blocks;
    s.slab_bytes = cfg.n_blocks * tl_kv_block_bytes(p);
    s.refs = malloc(cfg.n_blocks * sizeof *s.refs);
    s.fills = malloc(cfg.n_blocks * sizeof *s.fills);
    s.hashes = malloc(cfg.n_blocks * sizeof *s.hashes);
    s.slab = malloc(s.slab_bytes);
    if (!s.refs || !s.fills || !s.hashes || !s.slab)
        abort();
    for (uint32_t i = 0; i < cfg.n_blocks; i++) {
        s.refs[i] = tl_kv_refs(p, i);
        s.fills[i] = tl_kv_fill(p, i);
        s.hashes[i] = tl_kv_hash(p, i);
    }
    memcpy(s.slab, tl_kv_block_ptr(p, 0, 0, 0), s.slab_bytes);
    return s;
}

static inline void kv_state_free(kv_state *s) {
    free(s->refs);
    free(s->fills);
    free(s->hashes);
    free(s->slab);
}

/* NULL when the pool is exactly as it was; otherwise what is not. Allocates nothing. */
static inline const char *kv_state_changed(const kv_state *s, const tl_kv_pool *p) {
    tl_kv_stats now;
    tl_kv_stats_get(p, &now);
    if (memcmp(&now, &s->stats, sizeof now) != 0)
        return "the counts changed";
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        if (tl_kv_refs(p, i) != s->refs[i])
            return "a block's references changed";
        if (tl_kv_fill(p, i) != s->fills[i])
            return "a block's fill changed";
        if (tl_kv_hash(p, i) != s->hashes[i])
            return "a block's hash changed";
    }
    if (memcmp(tl_kv_block_ptr(p, 0, 0, 0), s->slab, s->slab_bytes) != 0)
        return "bytes of the slab changed";
    if (tl_kv_check(p) != TL_OK)
        return tl_last_error();
    return NULL;
}

#endif /* TL_TEST_STATE_H */
