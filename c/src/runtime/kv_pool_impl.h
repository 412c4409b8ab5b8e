/*
 * kv_pool_impl.h - the pool's records, shared by kv_pool.c (format v1's interface) and
 * kv_pool_ext.c (batches, options, the checker). Nobody else sees them.
 *
 *   a block's state        refs   hash   its lru node      its id
 *     free                   0      0    unlinked          on the free list
 *     used                  >= 1   any   unlinked          only with its holders
 *     cached                 0     != 0  linked            only in the LRU list
 *
 *   index[hash] == id  <=>  blocks[id].hash == hash
 */
#ifndef TL_RUNTIME_KV_POOL_IMPL_H
#define TL_RUNTIME_KV_POOL_IMPL_H

#include "ds/list.h"
#include "ds/swiss.h"
#include "tinyllm/kv_pool_ext.h"

#include <string.h>

typedef struct {
    tl_list_node lru;
    uint64_t hash;
    uint32_t refs;
    uint32_t fill;
} tl_kv_block;

TL_STATIC_ASSERT(sizeof(void *) != 8 || sizeof(tl_kv_block) == 32, "two records a cache line");

struct tl_kv_pool {
    tl_kv_cfg cfg;
    uint32_t evictions;
    size_t block_bytes; /* P */
    size_t plane_bytes; /* one layer's K or V of one block: P / (2 * n_layers) */
    uint8_t *slab;      /* NULL: a pool of ids, and copy is there */
    void *own_slab;     /* what destroy frees of it: the slab, or NULL when it is the caller's */
    void (*copy)(void *user, uint32_t src, uint32_t dst);
    void *copy_user;
    tl_kv_block *blocks;
    tl_vec free_ids; /* uint32_t, a stack, with room for n_blocks */
    tl_lru cached;
    tl_map *index;
    uint8_t *marks; /* one bit a block, scratch of tl_kv_check */
};

/* tl_kv_pool_create with options, whose flags are known ones; `who` is the function named in
 * errors. */
tl_status tl_kv_pool_create_with(const tl_kv_cfg *cfg, const tl_kv_options *opt, const char *who,
                                 tl_kv_pool **out);

/* The contents of block src, in block dst as well. */
static inline void tl_kv_copy_contents(tl_kv_pool *p, uint32_t src, uint32_t dst) {
    if (p->slab != NULL) {
        memcpy(p->slab + dst * p->block_bytes, p->slab + src * p->block_bytes, p->block_bytes);
    } else {
        p->copy(p->copy_user, src, dst);
    }
}

static inline tl_kv_block *tl_kv_block_of(tl_list_node *n) {
    return TL_CONTAINER_OF(n, tl_kv_block, lru);
}

/* Drops one of the references of a block that has some. */
static inline void tl_kv_drop(tl_kv_pool *p, tl_kv_block *b) {
    if (--b->refs > 0) {
        return;
    }
    if (b->hash != 0) {
        tl_lru_push_newest(&p->cached, &b->lru);
    } else { /* room for every id was reserved at create: this never reallocates */
        ((uint32_t *)p->free_ids.data)[p->free_ids.len++] = (uint32_t)(b - p->blocks);
    }
}

#endif /* TL_RUNTIME_KV_POOL_IMPL_H */
