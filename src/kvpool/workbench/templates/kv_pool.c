/*
 * kv_pool.c (rt.04) - the paged KV block pool, its prefix index and its wire format v1.
 *
 * A stub: every function says that it is not written yet. Your work starts here. The contract is
 * tinyllm/kv_pool.h, where every status and every rule is; README.md has the order of the work.
 *
 * What you stand on: tl_alloc and tl_free (abi.h), tl_vec, tl_map and tl_lru (ds.h), tl_fnv1a64
 * (numerics.h).
 */
#include "tinyllm/kv_pool.h"

#include "tinyllm/ds.h"
#include "tinyllm/numerics.h"

struct tl_kv_pool {
    tl_kv_cfg cfg;
    /* Yours: the slab, the free list, a record for each block, the cached blocks, the index. */
};

/* ---- first pass: blocks and references ----------------------------------------------------- */

tl_status tl_kv_pool_create(const tl_kv_cfg *cfg, tl_kv_pool **out) {
    (void)cfg;
    if (out != NULL) {
        *out = NULL;
    }
    tl_set_last_error("tl_kv_pool_create: not written yet");
    return TL_EUNSUPPORTED;
}

void tl_kv_pool_destroy(tl_kv_pool *p) {
    (void)p;
    tl_set_last_error("tl_kv_pool_destroy: not written yet");
}

void tl_kv_pool_cfg(const tl_kv_pool *p, tl_kv_cfg *out) {
    (void)p;
    if (out != NULL) {
        *out = (tl_kv_cfg){0};
    }
    tl_set_last_error("tl_kv_pool_cfg: not written yet");
}

tl_status tl_kv_alloc(tl_kv_pool *p, uint32_t n, uint32_t *ids) {
    (void)p, (void)n, (void)ids;
    tl_set_last_error("tl_kv_alloc: not written yet");
    return TL_EUNSUPPORTED;
}

void tl_kv_ref(tl_kv_pool *p, uint32_t id) {
    (void)p, (void)id;
    tl_set_last_error("tl_kv_ref: not written yet");
}

tl_status tl_kv_unref(tl_kv_pool *p, uint32_t id) {
    (void)p, (void)id;
    tl_set_last_error("tl_kv_unref: not written yet");
    return TL_EUNSUPPORTED;
}

tl_status tl_kv_cow(tl_kv_pool *p, uint32_t id, uint32_t *out) {
    (void)p, (void)id, (void)out;
    tl_set_last_error("tl_kv_cow: not written yet");
    return TL_EUNSUPPORTED;
}

tl_status tl_kv_set_fill(tl_kv_pool *p, uint32_t id, uint32_t n_tokens) {
    (void)p, (void)id, (void)n_tokens;
    tl_set_last_error("tl_kv_set_fill: not written yet");
    return TL_EUNSUPPORTED;
}

uint32_t tl_kv_fill(const tl_kv_pool *p, uint32_t id) {
    (void)p, (void)id;
    tl_set_last_error("tl_kv_fill: not written yet");
    return 0;
}

void *tl_kv_block_ptr(const tl_kv_pool *p, uint32_t id, uint32_t layer, int is_v) {
    (void)p, (void)id, (void)layer, (void)is_v;
    tl_set_last_error("tl_kv_block_ptr: not written yet");
    return NULL;
}

size_t tl_kv_block_bytes(const tl_kv_pool *p) {
    (void)p;
    tl_set_last_error("tl_kv_block_bytes: not written yet");
    return 0;
}

void tl_kv_stats_get(const tl_kv_pool *p, tl_kv_stats *out) {
    (void)p;
    if (out != NULL) {
        *out = (tl_kv_stats){0};
    }
    tl_set_last_error("tl_kv_stats_get: not written yet");
}

/* ---- second pass: names, the prefix index, the cache --------------------------------------- */

uint32_t tl_crc32c(const void *data, size_t n, uint32_t crc) {
    (void)data, (void)n, (void)crc;
    tl_set_last_error("tl_crc32c: not written yet");
    return 0;
}

uint64_t tl_kv_block_hash(uint64_t parent, const uint32_t *toks, uint32_t n) {
    (void)parent, (void)toks, (void)n;
    tl_set_last_error("tl_kv_block_hash: not written yet");
    return 0;
}

tl_status tl_kv_register(tl_kv_pool *p, uint32_t id, uint64_t hash) {
    (void)p, (void)id, (void)hash;
    tl_set_last_error("tl_kv_register: not written yet");
    return TL_EUNSUPPORTED;
}

tl_status tl_kv_lookup(tl_kv_pool *p, uint64_t hash, uint32_t *id) {
    (void)p, (void)hash, (void)id;
    tl_set_last_error("tl_kv_lookup: not written yet");
    return TL_EUNSUPPORTED;
}

/* ---- third pass: the wire format ----------------------------------------------------------- */

size_t tl_kv_export_bytes(const tl_kv_pool *p, uint32_t n) {
    (void)p, (void)n;
    tl_set_last_error("tl_kv_export_bytes: not written yet");
    return 0;
}

tl_status tl_kv_export(const tl_kv_pool *p, const uint32_t *ids, uint32_t n, void *buf, size_t cap,
                       size_t *written) {
    (void)p, (void)ids, (void)n, (void)buf, (void)cap;
    if (written != NULL) {
        *written = 0;
    }
    tl_set_last_error("tl_kv_export: not written yet");
    return TL_EUNSUPPORTED;
}

tl_status tl_kv_import(tl_kv_pool *p, const void *buf, size_t len, uint32_t *ids_out) {
    (void)p, (void)buf, (void)len, (void)ids_out;
    tl_set_last_error("tl_kv_import: not written yet");
    return TL_EUNSUPPORTED;
}
