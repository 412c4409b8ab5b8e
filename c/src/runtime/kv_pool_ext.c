/*
 * kv_pool_ext.c - what kv_pool_ext.h adds: options, batches validated whole, the checker.
 *
 * A batch is all or nothing although an id may appear in it more than once, so "validate each, then
 * apply each" is not enough: {b, b} passes twice on one reference. Each batch therefore tries its
 * change on the reference counts alone, where it is undone without a trace, and moves blocks
 * between states only when all of it fits.
 */
#include "tinyllm/kv_pool_ext.h"

#include "runtime/internal.h"
#include "runtime/kv_pool_impl.h"

#include <inttypes.h>
#include <string.h>

/* ---- creation and state -------------------------------------------------------------------- */

tl_status tl_kv_pool_create_opt(const tl_kv_cfg *cfg, const tl_kv_options *opt, tl_kv_pool **out) {
    static const tl_kv_options none = {0};
    opt = opt == NULL ? &none : opt;
    if (opt->flags & ~TL_KV_ALL_FLAGS) {
        if (out != NULL) {
            *out = NULL;
        }
        return tl_fail(TL_EINVAL, "tl_kv_pool_create_opt: unknown flags 0x%" PRIx32,
                       opt->flags & ~TL_KV_ALL_FLAGS);
    }
    return tl_kv_pool_create_with(cfg, opt, "tl_kv_pool_create_opt", out);
}

size_t tl_kv_meta_bytes(const tl_kv_pool *p) {
    if (p == NULL) {
        tl_set_last_error("tl_kv_meta_bytes: p is NULL");
        return 0;
    }
    const size_t n = p->cfg.n_blocks;
    return sizeof *p + n * sizeof(tl_kv_block) + p->free_ids.cap * p->free_ids.elem + n / 8 + 1 +
           tl_map_bytes(p->index);
}

static const tl_kv_block *block_or_null(const tl_kv_pool *p, uint32_t id, const char *who) {
    if (p == NULL || id >= p->cfg.n_blocks) {
        tl_errorf("%s: block %" PRIu32 " is out of range, the pool has %" PRIu32, who, id,
                  p == NULL ? 0 : p->cfg.n_blocks);
        return NULL;
    }
    return &p->blocks[id];
}

void tl_kv_copy_block(tl_kv_pool *p, uint32_t src, uint32_t dst) {
    if (block_or_null(p, src, "tl_kv_copy_block") != NULL &&
        block_or_null(p, dst, "tl_kv_copy_block") != NULL && src != dst) {
        tl_kv_copy_contents(p, src, dst);
    }
}

uint32_t tl_kv_refs(const tl_kv_pool *p, uint32_t id) {
    const tl_kv_block *b = block_or_null(p, id, "tl_kv_refs");
    return b == NULL ? 0 : b->refs;
}

uint64_t tl_kv_hash(const tl_kv_pool *p, uint32_t id) {
    const tl_kv_block *b = block_or_null(p, id, "tl_kv_hash");
    return b == NULL ? 0 : b->hash;
}

int tl_kv_find(const tl_kv_pool *p, uint64_t hash, uint32_t *id) {
    uint64_t held;
    if (p == NULL || id == NULL || hash == 0 || !tl_map_get(p->index, hash, &held)) {
        return 0;
    }
    *id = (uint32_t)held;
    return 1;
}

void tl_kv_prefetch(const tl_kv_pool *p, uint64_t hash, int near) {
    if (p == NULL) {
        tl_set_last_error("tl_kv_prefetch: p is NULL");
    } else if (near) {
        tl_map_prefetch_empty(p->index, hash);
    } else {
        tl_map_prefetch_tags(p->index, hash);
    }
}

tl_status tl_kv_evict(tl_kv_pool *p, uint32_t id) {
    if (block_or_null(p, id, "tl_kv_evict") == NULL) {
        return TL_EINVAL;
    }
    tl_kv_block *b = &p->blocks[id];
    if (b->lru.next == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_evict: block %" PRIu32 " is not cached", id);
    }
    tl_lru_unlink(&p->cached, &b->lru);
    (void)tl_map_del(p->index, b->hash);
    b->hash = 0;
    ((uint32_t *)p->free_ids.data)[p->free_ids.len++] = id;
    return TL_OK;
}

tl_status tl_kv_import_private(tl_kv_pool *p, const void *buf, size_t len, uint32_t *ids_out) {
    const tl_status status = tl_kv_import(p, buf, len, ids_out);
    if (status != TL_OK) {
        return status;
    }
    /* The count follows from the length, which import has compared with the header. An import takes
     * no name from a holder, so without the new ones the index has what it had. */
    const size_t n = (len - TL_KV_ENVELOPE_HEADER - 4) / (12 + p->block_bytes);
    for (size_t i = 0; i < n; i++) {
        tl_kv_block *b = &p->blocks[ids_out[i]];
        if (b->hash != 0) {
            (void)tl_map_del(p->index, b->hash);
            b->hash = 0;
        }
    }
    return TL_OK;
}

/* ---- batches ------------------------------------------------------------------------------- */

static int usable(const tl_kv_pool *p, const uint32_t *ids, size_t n, const char *who) {
    if (TL_UNLIKELY(p == NULL || (ids == NULL && n > 0))) {
        tl_errorf("%s: %s is NULL", who, p == NULL ? "p" : "ids");
        return 0;
    }
    return 1;
}

static inline int is_held(const tl_kv_pool *p, uint32_t id) {
    return id < p->cfg.n_blocks && p->blocks[id].refs > 0;
}

/* The error of position i: its block is out of range or nobody holds it. */
TL_COLD static tl_status not_held(const tl_kv_pool *p, const uint32_t *ids, size_t i,
                                  const char *who) {
    if (ids[i] >= p->cfg.n_blocks) {
        return tl_fail(TL_EINVAL,
                       "%s: ids[%zu] is block %" PRIu32 ", out of range: the pool has %" PRIu32,
                       who, i, ids[i], p->cfg.n_blocks);
    }
    return tl_fail(TL_EINVAL, "%s: ids[%zu] is block %" PRIu32 ", which nobody holds", who, i,
                   ids[i]);
}

/* TL_OK when p is a pool and every id is a block somebody holds. */
static tl_status check_held(const tl_kv_pool *p, const uint32_t *ids, size_t n, const char *who) {
    if (!usable(p, ids, n, who)) {
        return TL_EINVAL;
    }
    for (size_t i = 0; i < n; i++) {
        if (TL_UNLIKELY(!is_held(p, ids[i]))) {
            return not_held(p, ids, i, who);
        }
    }
    return TL_OK;
}

tl_status tl_kv_ref_many(tl_kv_pool *p, const uint32_t *ids, size_t n) {
    const tl_status status = check_held(p, ids, n, "tl_kv_ref_many");
    if (status != TL_OK) {
        return status;
    }
    for (size_t i = 0; i < n; i++) {
        if (TL_UNLIKELY(p->blocks[ids[i]].refs == UINT32_MAX)) {
            const tl_status full = tl_fail(TL_EINVAL,
                                           "tl_kv_ref_many: ids[%zu] is block %" PRIu32
                                           ", which has as many references as fit",
                                           i, ids[i]);
            while (i-- > 0) {
                p->blocks[ids[i]].refs--;
            }
            return full;
        }
        p->blocks[ids[i]].refs++;
    }
    return TL_OK;
}

tl_status tl_kv_unref_many(tl_kv_pool *p, const uint32_t *ids, size_t n) {
    if (!usable(p, ids, n, "tl_kv_unref_many")) {
        return TL_EINVAL;
    }
    tl_kv_block *const blocks = p->blocks;
    /* Take the references on the counts alone, to see whether there are enough of them ... */
    size_t taken = 0;
    while (taken < n && is_held(p, ids[taken])) {
        blocks[ids[taken++]].refs--;
    }
    for (size_t i = 0; i < taken; i++) { /* ... and put them back either way. */
        blocks[ids[i]].refs++;
    }
    if (TL_UNLIKELY(taken < n)) {
        if (!is_held(p, ids[taken])) {
            return not_held(p, ids, taken, "tl_kv_unref_many");
        }
        return tl_fail(TL_EINVAL,
                       "tl_kv_unref_many: ids[%zu] is block %" PRIu32
                       ", which is in ids more often than it has references",
                       taken, ids[taken]);
    }
    for (size_t i = 0; i < n; i++) {
        tl_kv_drop(p, &blocks[ids[i]]);
    }
    return TL_OK;
}

tl_status tl_kv_set_fill_many(tl_kv_pool *p, const uint32_t *ids, const uint32_t *fills, size_t n) {
    const tl_status status = check_held(p, ids, n, "tl_kv_set_fill_many");
    if (status != TL_OK) {
        return status;
    }
    if (fills == NULL && n > 0) {
        return tl_fail(TL_EINVAL, "tl_kv_set_fill_many: fills is NULL");
    }
    for (size_t i = 0; i < n; i++) {
        if (p->blocks[ids[i]].hash != 0) {
            return tl_fail(TL_EINVAL,
                           "tl_kv_set_fill_many: ids[%zu] is block %" PRIu32
                           ", which is registered: immutable",
                           i, ids[i]);
        }
        if (fills[i] > p->cfg.block_tokens) {
            return tl_fail(TL_EINVAL,
                           "tl_kv_set_fill_many: fills[%zu] is %" PRIu32 ", a block has %" PRIu32,
                           i, fills[i], p->cfg.block_tokens);
        }
    }
    for (size_t i = 0; i < n; i++) {
        p->blocks[ids[i]].fill = fills[i];
    }
    return TL_OK;
}

#define LOOKUP_CHUNK      32u
#define LOOKUP_NEAR_BYTES ((size_t)512 << 10)

tl_status tl_kv_register_many(tl_kv_pool *p, const uint32_t *ids, const uint64_t *hashes, size_t n,
                              uint8_t *registered) {
    tl_status status = check_held(p, ids, n, "tl_kv_register_many");
    if (status != TL_OK) {
        return status;
    }
    if (n > 0 && (hashes == NULL || registered == NULL)) {
        return tl_fail(TL_EINVAL, "tl_kv_register_many: %s is NULL",
                       hashes == NULL ? "hashes" : "registered");
    }
    for (size_t i = 0; i < n; i++) {
        if (i % LOOKUP_CHUNK ==
            0) { /* each new name misses the cache: let a chunk's misses overlap */
            for (size_t j = i; j < n && j < i + LOOKUP_CHUNK; j++) {
                tl_map_prefetch_tags(p->index, hashes[j]);
            }
        }
        tl_kv_block *b = &p->blocks[ids[i]];
        if (b->hash == 0 && b->fill == p->cfg.block_tokens && hashes[i] != 0) {
            /* That another block holds the name is an answer here, no error: no text in the slot.
             */
            uint64_t holder;
            registered[i] = 0;
            if (tl_map_insert(p->index, hashes[i], ids[i], &holder) == TL_OK) {
                b->hash = hashes[i];
                registered[i] = 2; /* made by this call */
            }
            continue;
        }
        status = tl_kv_register(p, ids[i], hashes[i]); /* under this name already, or refused */
        if (TL_UNLIKELY(status != TL_OK)) {
            /* Every registration made here is younger than the call, and all blocks are used, so
             * taking it back restores the index and touches no order. */
            for (size_t j = i; j-- > 0;) {
                if (registered[j] == 2) {
                    (void)tl_map_del(p->index, hashes[j]);
                    p->blocks[ids[j]].hash = 0;
                }
            }
            return status;
        }
        registered[i] = 1;
    }
    for (size_t i = 0; i < n; i++) {
        registered[i] = registered[i] != 0;
    }
    return TL_OK;
}

tl_status tl_kv_lookup_many(tl_kv_pool *p, const uint64_t *hashes, size_t n, int64_t *ids_out) {
    if (p == NULL || (n > 0 && (hashes == NULL || ids_out == NULL))) {
        return tl_fail(TL_EINVAL, "tl_kv_lookup_many: %s is NULL",
                       p == NULL        ? "p"
                       : hashes == NULL ? "hashes"
                                        : "ids_out");
    }
    /* Three cache misses wait in a row for each hash (tags, slot, record). Going through a chunk
     * once for each of them lets the misses of a chunk overlap. An index that fits the cache has
     * no misses to overlap. */
    const int far = tl_map_bytes(p->index) > LOOKUP_NEAR_BYTES;
    for (size_t start = 0; start < n; start += LOOKUP_CHUNK) {
        const size_t end = n - start < LOOKUP_CHUNK ? n : start + LOOKUP_CHUNK;
        for (size_t i = start; far && i < end; i++) {
            tl_map_prefetch_tags(p->index, hashes[i]);
        }
        for (size_t i = start; far && i < end; i++) {
            tl_map_prefetch_slot(p->index, hashes[i]);
        }
        for (size_t i = start; i < end; i++) {
            uint64_t held;
            ids_out[i] = -1;
            if (hashes[i] != 0 && tl_map_get(p->index, hashes[i], &held)) {
                ids_out[i] = (int64_t)held;
                TL_PREFETCH(&p->blocks[held]);
            }
        }
        for (size_t i = start; i < end; i++) {
            if (ids_out[i] < 0) {
                continue;
            }
            if (TL_UNLIKELY(p->blocks[ids_out[i]].refs == UINT32_MAX)) {
                const tl_status full = tl_fail(TL_EINVAL,
                                               "tl_kv_lookup_many: hashes[%zu]: block %" PRId64
                                               " has as many references as fit",
                                               i, ids_out[i]);
                while (i-- > 0) {
                    if (ids_out[i] >= 0) {
                        p->blocks[ids_out[i]].refs--;
                    }
                }
                return full;
            }
            p->blocks[ids_out[i]].refs++;
        }
    }
    for (size_t i = 0; i < n; i++) {
        if (ids_out[i] >= 0) { /* a node in no list is left alone */
            tl_lru_remove(&p->cached, &p->blocks[ids_out[i]].lru);
        }
    }
    return TL_OK;
}

/* ---- the checker --------------------------------------------------------------------------- */

static tl_status disagree(const char *what, uint64_t id) {
    return tl_fail(TL_EINVAL, "tl_kv_check: block %" PRIu64 ": %s", id, what);
}

/* Marks block id as seen; 0 when it was seen before. */
static int mark(const tl_kv_pool *p, size_t id) {
    const uint8_t bit = (uint8_t)(1u << (id % 8));
    const int fresh = (p->marks[id / 8] & bit) == 0;
    p->marks[id / 8] |= bit;
    return fresh;
}

tl_status tl_kv_check(const tl_kv_pool *p) {
    if (p == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_check: p is NULL");
    }
    const size_t n = p->cfg.n_blocks;
    memset(p->marks, 0, n / 8 + 1);

    if (p->free_ids.len > n || p->free_ids.cap < n) {
        return tl_fail(TL_EINVAL, "tl_kv_check: the free list has %zu of %zu ids", p->free_ids.len,
                       n);
    }
    const uint32_t *free_ids = p->free_ids.data;
    for (size_t i = 0; i < p->free_ids.len; i++) {
        const uint32_t id = free_ids[i];
        if (id >= n || !mark(p, id)) {
            return disagree(id >= n ? "on the free list, out of range" : "on the free list twice",
                            id);
        }
        const tl_kv_block *b = &p->blocks[id];
        if (b->refs != 0 || b->hash != 0 || b->lru.next != NULL) {
            return disagree("on the free list, but held, registered or in the LRU list", id);
        }
    }

    size_t n_cached = 0;
    const tl_list_node *sentinel = &p->cached.head;
    if (sentinel->next == NULL || sentinel->next->prev != sentinel) {
        return tl_fail(TL_EINVAL, "tl_kv_check: the LRU list's links are broken");
    }
    for (const tl_list_node *node = sentinel->next; node != sentinel; node = node->next) {
        if (node == NULL || node->next == NULL || node->next->prev != node || n_cached == n) {
            return tl_fail(TL_EINVAL, "tl_kv_check: the LRU list's links are broken");
        }
        const tl_kv_block *b = (const tl_kv_block *)(const void *)node; /* lru is its first field */
        if ((size_t)(b - p->blocks) >= n) {
            return tl_fail(TL_EINVAL, "tl_kv_check: a node of the LRU list is no block");
        }
        const size_t id = (size_t)(b - p->blocks);
        if (!mark(p, id)) {
            return disagree("in the LRU list, and free or there twice", id);
        }
        if (b->refs != 0 || b->hash == 0) {
            return disagree("in the LRU list, but held or not registered", id);
        }
        n_cached++;
    }
    if (n_cached != p->cached.len) {
        return tl_fail(TL_EINVAL, "tl_kv_check: the LRU list has %zu nodes, its len says %zu",
                       n_cached, p->cached.len);
    }

    size_t n_registered = 0;
    for (size_t id = 0; id < n; id++) {
        const tl_kv_block *b = &p->blocks[id];
        if (mark(p, id) && (b->refs == 0 || b->lru.next != NULL)) {
            return disagree("neither free nor cached, but nobody holds it", id);
        }
        if (b->fill > p->cfg.block_tokens) {
            return disagree("its fill is above block_tokens", id);
        }
        if (b->hash != 0) {
            uint64_t held;
            if (b->fill != p->cfg.block_tokens) {
                return disagree("registered but not full", id);
            }
            if (!tl_map_get(p->index, b->hash, &held) || held != id) {
                return disagree("registered, but the index does not lead to it", id);
            }
            n_registered++;
        }
    }
    if (tl_map_len(p->index) != n_registered) {
        return tl_fail(TL_EINVAL, "tl_kv_check: %zu hashes in the index, %zu registered blocks",
                       tl_map_len(p->index), n_registered);
    }
    return tl_map_check(p->index);
}
