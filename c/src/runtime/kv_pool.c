/*
 * kv_pool.c (rt.04) - the paged KV block pool, its prefix index and its wire format v1.
 *
 * The states and the slab's layout are drawn in kv_pool.h, the records in kv_pool_impl.h, the
 * envelope in formats/kv-block.md. Sections: life, references, contents, prefix index, export,
 * import. A call validates first and changes things after; once it has begun to change things it
 * cannot fail.
 */
#include "tinyllm/kv_pool_ext.h"

#include "numerics/copy_crc.h"
#include "numerics/crc32c_shift.h"
#include "runtime/internal.h"
#include "runtime/kv_pool_impl.h"
#include "runtime/kv_wire.h"
#include "tinyllm/numerics.h"

#include <inttypes.h>
#include <string.h>

/* ---- life ---------------------------------------------------------------------------------- */

/* P and one plane of it, or 0 when they overflow. A dimension of 0 makes both 0, whatever the
 * others multiply to: an envelope may announce anything. */
static int block_sizes(const tl_kv_cfg *cfg, size_t *plane, size_t *block) {
    size_t n;
    *plane = *block = 0;
    if (cfg->n_layers == 0 || cfg->n_kv_heads == 0 || cfg->block_tokens == 0 ||
        cfg->head_dim == 0) {
        return 1;
    }
    return tl_mul_size(cfg->n_kv_heads, cfg->block_tokens, &n) &&
           tl_mul_size(n, cfg->head_dim, &n) && tl_mul_size(n, 2, plane) &&
           tl_mul_size(*plane, cfg->n_layers, &n) && tl_mul_size(n, 2, block);
}

/* Why the caller's slab cannot be this pool's, or NULL. */
static const char *slab_trouble(const tl_kv_options *opt, size_t slab_bytes) {
    if (opt->slab == NULL) {
        return opt->slab_bytes != 0 ? "slab_bytes without a slab"
               : opt->copy != NULL && (opt->flags & TL_KV_TOUCH)
                   ? "TL_KV_TOUCH, but a pool of ids has no slab to touch"
                   : NULL;
    }
    return opt->copy != NULL ? "slab and copy: values are in a slab, or copied for the pool"
           : opt->slab_bytes < slab_bytes  ? "slab_bytes is less than n_blocks * P"
           : (uintptr_t)opt->slab % 2 != 0 ? "slab is not aligned to 2"
           : opt->flags & TL_KV_TOUCH      ? "TL_KV_TOUCH would overwrite the caller's slab"
                                           : NULL;
}

tl_status tl_kv_pool_create_with(const tl_kv_cfg *cfg, const tl_kv_options *opt, const char *who,
                                 tl_kv_pool **out) {
    if (out == NULL) {
        return tl_fail(TL_EINVAL, "%s: out is NULL", who);
    }
    *out = NULL;
    if (cfg == NULL) {
        return tl_fail(TL_EINVAL, "%s: cfg is NULL", who);
    }
    const char *zero = cfg->n_blocks == 0       ? "n_blocks"
                       : cfg->block_tokens == 0 ? "block_tokens"
                       : cfg->n_layers == 0     ? "n_layers"
                       : cfg->n_kv_heads == 0   ? "n_kv_heads"
                       : cfg->head_dim == 0     ? "head_dim"
                                                : NULL;
    if (zero != NULL) {
        return tl_fail(TL_EINVAL, "%s: %s is 0, expected at least 1", who, zero);
    }
    if (cfg->format != TL_KV_FORMAT_V1) {
        return tl_fail(TL_EUNSUPPORTED, "%s: format %" PRIu32 ", this version has format 1", who,
                       cfg->format);
    }
    if (cfg->dtype != TL_F16) {
        return tl_fail(TL_EUNSUPPORTED, "%s: dtype %" PRId32 ", format 1 stores TL_F16 (1)", who,
                       cfg->dtype);
    }
    const size_t n = cfg->n_blocks;
    size_t plane_bytes, block_bytes, slab_bytes, record_bytes;
    if (!block_sizes(cfg, &plane_bytes, &block_bytes) ||
        !tl_mul_size(n, block_bytes, &slab_bytes) ||
        !tl_mul_size(n, sizeof(tl_kv_block), &record_bytes)) {
        return tl_fail(TL_EINVAL, "%s: the slab's size overflows", who);
    }
    const char *trouble = slab_trouble(opt, slab_bytes);
    if (trouble != NULL) {
        return tl_fail(TL_EINVAL, "%s: %s (%zu bytes, found %zu)", who, trouble, slab_bytes,
                       opt->slab_bytes);
    }

    tl_kv_pool *p = tl_alloc(sizeof *p, _Alignof(tl_kv_pool));
    if (p == NULL) {
        return tl_fail(TL_ENOMEM, "%s: no memory for the pool", who);
    }
    *p = (tl_kv_pool){.cfg = *cfg,
                      .block_bytes = block_bytes,
                      .plane_bytes = plane_bytes,
                      .slab = opt->slab,
                      .copy = opt->copy,
                      .copy_user = opt->user};
    tl_lru_init(&p->cached);
    tl_status status = tl_vec_init(&p->free_ids, sizeof(uint32_t));
    const char *what = "the free list";
    if (status == TL_OK) {
        status = tl_vec_reserve(&p->free_ids, n);
    }
    if (status != TL_OK) {
        goto fail;
    }
    what = "the records";
    status = TL_ENOMEM;
    p->blocks = tl_alloc_array(record_bytes, 1);
    p->marks = p->blocks == NULL ? NULL : tl_alloc_array(n / 8 + 1, 0);
    if (p->marks == NULL) {
        goto fail;
    }
    what = "the prefix index";
    status = tl_map_create(n, &p->index);
    if (status != TL_OK) {
        goto fail;
    }
    what = "the slab";
    status = TL_ENOMEM;
    if (opt->slab == NULL && opt->copy == NULL) {
        p->slab = p->own_slab = tl_alloc_array(slab_bytes, !(opt->flags & TL_KV_NO_HUGE));
        if (p->slab == NULL) {
            goto fail;
        }
    }
    if (opt->flags & TL_KV_TOUCH) {
        memset(p->slab, 0, slab_bytes);
    }
    memset(p->blocks, 0, record_bytes);
    uint32_t *ids = p->free_ids.data;
    for (size_t i = 0; i < n; i++) { /* block 0 on top: a fresh pool hands out 0, 1, 2, ... */
        ids[i] = (uint32_t)(n - 1 - i);
    }
    p->free_ids.len = n;
    *out = p;
    return TL_OK;

fail:
    tl_kv_pool_destroy(p);
    return tl_fail(status, "%s: no memory for %s (%zu blocks of %zu bytes)", who, what, n,
                   block_bytes);
}

tl_status tl_kv_pool_create(const tl_kv_cfg *cfg, tl_kv_pool **out) {
    static const tl_kv_options none = {0};
    return tl_kv_pool_create_with(cfg, &none, "tl_kv_pool_create", out);
}

void tl_kv_pool_destroy(tl_kv_pool *p) {
    if (p == NULL) {
        return;
    }
    tl_free(p->own_slab);
    tl_map_destroy(p->index);
    tl_free(p->marks);
    tl_free(p->blocks);
    tl_vec_free(&p->free_ids);
    tl_free(p);
}

void tl_kv_pool_cfg(const tl_kv_pool *p, tl_kv_cfg *out) {
    if (out == NULL || p == NULL) {
        tl_errorf("tl_kv_pool_cfg: %s is NULL", out == NULL ? "out" : "p");
        if (out != NULL) {
            memset(out, 0, sizeof *out);
        }
        return;
    }
    *out = p->cfg;
}

void tl_kv_stats_get(const tl_kv_pool *p, tl_kv_stats *out) {
    if (out == NULL || p == NULL) {
        tl_errorf("tl_kv_stats_get: %s is NULL", out == NULL ? "out" : "p");
        if (out != NULL) {
            memset(out, 0, sizeof *out);
        }
        return;
    }
    out->free = (uint32_t)p->free_ids.len;
    out->cached = (uint32_t)p->cached.len;
    out->used = p->cfg.n_blocks - out->free - out->cached;
    out->evictions = p->evictions;
}

/* ---- references ---------------------------------------------------------------------------- */

/* Why block_at or held_block_at has no record to give; always NULL. */
TL_COLD static tl_kv_block *no_block(const tl_kv_pool *p, uint32_t id, const char *who) {
    if (p == NULL) {
        tl_errorf("%s: p is NULL", who);
    } else if (id >= p->cfg.n_blocks) {
        tl_errorf("%s: block %" PRIu32 " is out of range, the pool has %" PRIu32, who, id,
                  p->cfg.n_blocks);
    } else {
        tl_errorf("%s: nobody holds block %" PRIu32, who, id);
    }
    return NULL;
}

/* The record of block id; NULL, with the slot set, when `who` was given one that is out of range.
 */
static inline tl_kv_block *block_at(const tl_kv_pool *p, uint32_t id, const char *who) {
    return TL_LIKELY(p != NULL && id < p->cfg.n_blocks) ? &p->blocks[id] : no_block(p, id, who);
}

/* The same for a block that somebody must hold. */
static inline tl_kv_block *held_block_at(const tl_kv_pool *p, uint32_t id, const char *who) {
    const int held = p != NULL && id < p->cfg.n_blocks && p->blocks[id].refs > 0;
    return TL_LIKELY(held) ? &p->blocks[id] : no_block(p, id, who);
}

/* Unregisters the oldest cached block and returns its id; there is one. */
static uint32_t evict_oldest(tl_kv_pool *p) {
    tl_kv_block *b = tl_kv_block_of(p->cached.head.next);
    tl_lru_unlink(&p->cached, &b->lru);
    /* In a large pool each victim's record, and the tags and the slot of its name in the index, are
     * far away. Three victims are on their way while this one is handled, each a step further. */
    if (p->cached.len > 2) {
        const tl_list_node *next = p->cached.head.next; /* the list is a ring: there is no NULL */
        const tl_list_node *then = next->next;
        tl_map_prefetch_slot(p->index, TL_CONTAINER_OF(next, const tl_kv_block, lru)->hash);
        /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
        tl_map_prefetch_tags(p->index, TL_CONTAINER_OF(then, const tl_kv_block, lru)->hash);
        TL_PREFETCH(then->next);
    }
    (void)tl_map_del(p->index, b->hash);
    b->hash = 0;
    p->evictions++;
    return (uint32_t)(b - p->blocks);
}

/* Takes n blocks that are there: free + cached >= n. */
static void take_blocks(tl_kv_pool *p, uint32_t n, uint32_t *ids) {
    tl_kv_block *const blocks = p->blocks;
    const uint32_t *stack = p->free_ids.data;
    size_t top = p->free_ids.len;
    uint32_t i = 0;
    for (; i < n && top > 0; i++) {
        const uint32_t id = stack[--top];
        blocks[id].refs = 1;
        blocks[id].fill = 0;
        ids[i] = id;
    }
    p->free_ids.len = top;
    for (; i < n; i++) {
        const uint32_t id = evict_oldest(p);
        blocks[id].refs = 1;
        blocks[id].fill = 0;
        ids[i] = id;
    }
}

/* TL_OK when n blocks can be taken. */
static tl_status room_for(const tl_kv_pool *p, uint32_t n, const char *who) {
    if (TL_UNLIKELY(n > p->free_ids.len + p->cached.len)) {
        return tl_fail(TL_EFULL, "%s: %" PRIu32 " blocks needed, %zu are free and %zu cached", who,
                       n, p->free_ids.len, p->cached.len);
    }
    return TL_OK;
}

tl_status tl_kv_alloc(tl_kv_pool *p, uint32_t n, uint32_t *ids) {
    if (TL_UNLIKELY(p == NULL || (ids == NULL && n > 0))) {
        return tl_fail(TL_EINVAL, "tl_kv_alloc: %s is NULL", p == NULL ? "p" : "ids");
    }
    const tl_status status = room_for(p, n, "tl_kv_alloc");
    if (status == TL_OK) {
        take_blocks(p, n, ids);
    }
    return status;
}

void tl_kv_ref(tl_kv_pool *p, uint32_t id) {
    tl_kv_block *b = held_block_at(p, id, "tl_kv_ref");
    if (b == NULL) {
        return;
    }
    if (TL_UNLIKELY(b->refs == UINT32_MAX)) {
        tl_errorf("tl_kv_ref: block %" PRIu32 " has as many references as fit", id);
        return;
    }
    b->refs++;
}

tl_status tl_kv_unref(tl_kv_pool *p, uint32_t id) {
    tl_kv_block *b = held_block_at(p, id, "tl_kv_unref");
    if (b == NULL) {
        return TL_EINVAL;
    }
    tl_kv_drop(p, b);
    return TL_OK;
}

tl_status tl_kv_cow(tl_kv_pool *p, uint32_t id, uint32_t *out) {
    if (out == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_cow: out is NULL");
    }
    tl_kv_block *b = held_block_at(p, id, "tl_kv_cow");
    if (b == NULL) {
        return TL_EINVAL;
    }
    if (b->refs == 1) {
        *out = id;
        return TL_OK;
    }
    const tl_status status = room_for(p, 1, "tl_kv_cow");
    if (status != TL_OK) {
        return status;
    }
    uint32_t copy;
    take_blocks(p, 1, &copy);
    tl_kv_copy_contents(p, id, copy);
    p->blocks[copy].fill = b->fill;
    b->refs--;
    *out = copy;
    return TL_OK;
}

/* ---- contents ------------------------------------------------------------------------------ */

tl_status tl_kv_set_fill(tl_kv_pool *p, uint32_t id, uint32_t n_tokens) {
    tl_kv_block *b = held_block_at(p, id, "tl_kv_set_fill");
    if (b == NULL) {
        return TL_EINVAL;
    }
    if (b->hash != 0) {
        return tl_fail(TL_EINVAL, "tl_kv_set_fill: block %" PRIu32 " is registered: immutable", id);
    }
    if (n_tokens > p->cfg.block_tokens) {
        return tl_fail(TL_EINVAL, "tl_kv_set_fill: n_tokens %" PRIu32 ", a block has %" PRIu32,
                       n_tokens, p->cfg.block_tokens);
    }
    b->fill = n_tokens;
    return TL_OK;
}

uint32_t tl_kv_fill(const tl_kv_pool *p, uint32_t id) {
    const tl_kv_block *b = block_at(p, id, "tl_kv_fill");
    return b == NULL ? 0 : b->fill;
}

void *tl_kv_block_ptr(const tl_kv_pool *p, uint32_t id, uint32_t layer, int is_v) {
    if (block_at(p, id, "tl_kv_block_ptr") == NULL) {
        return NULL;
    }
    if (layer >= p->cfg.n_layers) {
        tl_errorf("tl_kv_block_ptr: layer %" PRIu32 " is out of range, the pool has %" PRIu32,
                  layer, p->cfg.n_layers);
        return NULL;
    }
    if (TL_UNLIKELY(p->slab == NULL)) {
        tl_set_last_error("tl_kv_block_ptr: a pool of ids has no slab");
        return NULL;
    }
    const size_t plane = (size_t)layer * 2 + (is_v != 0);
    return p->slab + id * p->block_bytes + plane * p->plane_bytes;
}

size_t tl_kv_block_bytes(const tl_kv_pool *p) {
    if (p == NULL) {
        tl_set_last_error("tl_kv_block_bytes: p is NULL");
        return 0;
    }
    return p->block_bytes;
}

/* ---- the prefix index ---------------------------------------------------------------------- */

/*
 * FNV-1a over the little-endian bytes of parent and tokens, byte by byte: h = (h ^ b) * prime. A
 * zero byte only multiplies, so a run of zero bytes is one multiplication by a power of the prime.
 * Token ids are small: most have two zero bytes on top, and the chain is two steps shorter.
 */
uint64_t tl_kv_block_hash(uint64_t parent, const uint32_t *toks, uint32_t n) {
    if (toks == NULL && n > 0) {
        tl_set_last_error("tl_kv_block_hash: toks is NULL");
        return 0;
    }
    const uint64_t p1 = TL_FNV1A64_PRIME, p2 = p1 * p1, p3 = p2 * p1;
    uint64_t h = TL_FNV1A64_BASIS;
    for (int i = 0; i < 8; i++, parent >>= 8) {
        h = (h ^ (parent & 255u)) * p1;
    }
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t t = toks[i];
        h = (h ^ (t & 255u)) * p1;
        if (TL_LIKELY(t < 1u << 16)) {
            h = (h ^ (t >> 8)) * p3;
        } else if (t < 1u << 24) {
            h = (h ^ ((t >> 8) & 255u)) * p1;
            h = (h ^ (t >> 16)) * p2;
        } else {
            h = (h ^ ((t >> 8) & 255u)) * p1;
            h = (h ^ ((t >> 16) & 255u)) * p1;
            h = (h ^ (t >> 24)) * p1;
        }
    }
    return h == 0 ? 1 : h;
}

tl_status tl_kv_register(tl_kv_pool *p, uint32_t id, uint64_t hash) {
    tl_kv_block *b = held_block_at(p, id, "tl_kv_register");
    if (b == NULL) {
        return TL_EINVAL;
    }
    if (hash == 0) {
        return tl_fail(TL_EINVAL, "tl_kv_register: hash 0 means \"no hash\"");
    }
    if (b->fill != p->cfg.block_tokens) {
        return tl_fail(TL_EINVAL,
                       "tl_kv_register: block %" PRIu32 " holds %" PRIu32 " of %" PRIu32
                       " tokens, only full blocks are registered",
                       id, b->fill, p->cfg.block_tokens);
    }
    if (b->hash != 0) {
        return b->hash == hash
                   ? TL_OK
                   : tl_fail(TL_EINVAL,
                             "tl_kv_register: block %" PRIu32 " is registered under %016" PRIx64,
                             id, b->hash);
    }
    uint64_t holder;
    const tl_status status = tl_map_insert(p->index, hash, id, &holder);
    if (status == TL_EBUSY) {
        return tl_fail(TL_EBUSY, "tl_kv_register: block %" PRIu64 " holds %016" PRIx64 " already",
                       holder, hash);
    }
    if (status == TL_OK) {
        b->hash = hash;
    }
    return status;
}

tl_status tl_kv_lookup(tl_kv_pool *p, uint64_t hash, uint32_t *id) {
    if (p == NULL || id == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_lookup: %s is NULL", p == NULL ? "p" : "id");
    }
    uint64_t held;
    if (hash == 0 || !tl_map_get(p->index, hash, &held)) {
        return TL_ENOTFOUND;
    }
    tl_kv_block *b = &p->blocks[held];
    if (TL_UNLIKELY(b->refs == UINT32_MAX)) {
        return tl_fail(TL_EINVAL, "tl_kv_lookup: block %" PRIu64 " has as many references as fit",
                       held);
    }
    if (b->refs++ == 0) {
        tl_lru_unlink(&p->cached, &b->lru);
    }
    *id = (uint32_t)held;
    return TL_OK;
}

/* ---- the wire: bytes ----------------------------------------------------------------------- */

/*
 * Moves float16 values between the slab (the host's byte order) and the wire (little-endian). The
 * way out returns the CRC continued over the wire's bytes: on a little-endian host, one pass over
 * them. `stream` is copy_crc.h's.
 */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
static void f16_from_wire(uint8_t *slab, const uint8_t *wire, size_t n_bytes, int stream) {
    (void)stream;
    for (size_t i = 0; i + 2 <= n_bytes; i += 2) {
        slab[i] = wire[i + 1];
        slab[i + 1] = wire[i];
    }
}

static uint32_t f16_to_wire(uint8_t *wire, const uint8_t *slab, size_t n_bytes, uint32_t crc,
                            int stream) {
    f16_from_wire(wire, slab, n_bytes, stream); /* a swap is its own inverse */
    return tl_crc32c(wire, n_bytes, crc);
}
#else
#define f16_from_wire tl_copy
#define f16_to_wire   tl_copy_crc32c
#endif

size_t tl_kv_envelope_bytes(uint64_t n, size_t block_bytes) {
    const size_t fixed = TL_KV_ENVELOPE_HEADER + TL_KV_TRAILER;
    size_t body;
    if (block_bytes > SIZE_MAX - TL_KV_RECORD || n > SIZE_MAX ||
        !tl_mul_size((size_t)n, TL_KV_RECORD + block_bytes, &body) || body > SIZE_MAX - fixed) {
        return SIZE_MAX;
    }
    return fixed + body;
}

size_t tl_kv_export_bytes(const tl_kv_pool *p, uint32_t n) {
    if (p == NULL) {
        tl_set_last_error("tl_kv_export_bytes: p is NULL");
        return 0;
    }
    return tl_kv_envelope_bytes(n, p->block_bytes);
}

/* ---- export -------------------------------------------------------------------------------- */

/* A run of `n_bytes` zeros, as what it does to a CRC; kept from block to block: fills repeat. */
typedef struct {
    size_t n_bytes;
    tl_crc32c_shift shift;
} zero_run;

/*
 * A block's payload: each [block_tokens][head_dim] row set keeps its first `fill` rows, the rest is
 * zeros. The stale bytes are not read, the zeros are not read back.
 */
static uint32_t put_payload(const tl_kv_pool *p, uint32_t id, uint8_t *out, zero_run *zeros,
                            uint32_t crc, int stream) {
    const uint8_t *src = p->slab + id * p->block_bytes;
    const uint32_t fill = p->blocks[id].fill;
    if (fill == p->cfg.block_tokens) {
        return f16_to_wire(out, src, p->block_bytes, crc, stream);
    }
    const size_t row_bytes = (size_t)p->cfg.head_dim * 2;
    const size_t head_bytes = row_bytes * p->cfg.block_tokens;
    const size_t kept = row_bytes * fill, rest = head_bytes - kept;
    if (zeros->n_bytes != rest) {
        zeros->n_bytes = rest;
        tl_crc32c_shift_init(&zeros->shift, rest);
    }
    for (size_t at = 0; at < p->block_bytes; at += head_bytes) {
        crc = f16_to_wire(out + at, src + at, kept, crc, 0);
        memset(out + at + kept, 0, rest);
        crc = tl_crc32c_shift_crc(&zeros->shift, crc);
    }
    return crc;
}

TL_COLD static tl_status no_slab(const char *who) {
    return tl_fail(TL_EUNSUPPORTED, "%s: a pool of ids has no values, whoever has them moves them",
                   who);
}

tl_status tl_kv_export_check(const tl_kv_pool *p, const uint32_t *ids, uint32_t n, const char *who,
                             size_t *size) {
    if (p == NULL || (ids == NULL && n > 0)) {
        return tl_fail(TL_EINVAL, "%s: %s is NULL", who, p == NULL ? "p" : "ids");
    }
    if (p->slab == NULL) {
        return no_slab(who);
    }
    for (uint32_t i = 0; i < n; i++) {
        const tl_kv_block *b = held_block_at(p, ids[i], who);
        if (b == NULL) {
            return TL_EINVAL;
        }
        if (b->fill == 0) {
            return tl_fail(TL_EINVAL,
                           "%s: block %" PRIu32 " (position %" PRIu32
                           ") has fill 0, a reader would refuse it",
                           who, ids[i], i);
        }
    }
    *size = tl_kv_envelope_bytes(n, p->block_bytes);
    if (*size == SIZE_MAX) {
        return tl_fail(TL_EINVAL, "%s: an envelope of %" PRIu32 " blocks overflows", who, n);
    }
    return TL_OK;
}

uint32_t tl_kv_put_header(const tl_kv_pool *p, uint32_t n, uint8_t *out) {
    memcpy(out, TL_KV_MAGIC, 4);
    put_u16(out + 4, TL_KV_FORMAT_V1);
    put_u16(out + 6, TL_F16);
    put_u32(out + 8, n);
    put_u32(out + 12, p->cfg.block_tokens);
    put_u32(out + 16, p->cfg.n_layers);
    put_u32(out + 20, p->cfg.n_kv_heads);
    put_u32(out + 24, p->cfg.head_dim);
    return tl_crc32c(out, TL_KV_ENVELOPE_HEADER, 0);
}

uint32_t tl_kv_put_record(const tl_kv_pool *p, uint32_t id, uint8_t *out, uint32_t crc) {
    put_u64(out, p->blocks[id].hash);
    put_u32(out + 8, p->blocks[id].fill);
    return tl_crc32c(out, TL_KV_RECORD, crc);
}

uint32_t tl_kv_put_blocks(const tl_kv_pool *p, const uint32_t *ids, uint32_t n, uint8_t *out,
                          uint32_t crc, int stream) {
    zero_run zeros = {.n_bytes = 0};
    for (uint32_t i = 0; i < n; i++) {
        crc = tl_kv_put_record(p, ids[i], out, crc);
        out += TL_KV_RECORD;
        crc = put_payload(p, ids[i], out, &zeros, crc, stream);
        out += p->block_bytes;
    }
    return crc;
}

tl_status tl_kv_export(const tl_kv_pool *p, const uint32_t *ids, uint32_t n, void *buf, size_t cap,
                       size_t *written) {
    if (written == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_export: written is NULL");
    }
    *written = 0;
    if (buf == NULL && cap > 0) {
        return tl_fail(TL_EINVAL, "tl_kv_export: buf is NULL");
    }
    size_t size = 0;
    const tl_status status = tl_kv_export_check(p, ids, n, "tl_kv_export", &size);
    if (status != TL_OK) {
        return status;
    }
    if (buf == NULL || cap < size) {
        *written = size;
        return tl_fail(TL_EFULL, "tl_kv_export: %zu bytes needed, the buffer has %zu", size, cap);
    }
    uint8_t *out = buf;
    uint32_t crc = tl_kv_put_header(p, n, out);
    crc = tl_kv_put_blocks(p, ids, n, out + TL_KV_ENVELOPE_HEADER, crc, tl_copy_streams(size));
    put_u32(out + size - TL_KV_TRAILER, crc);
    *written = size;
    return TL_OK;
}

/* ---- import -------------------------------------------------------------------------------- */

/*
 * The reader rules of formats/kv-block.md on untrusted bytes, in four steps, so that a stream,
 * whose CRC comes last, is held to the very same ones (kv_wire.c). `who` is the function named in
 * errors.
 */

/* Rules 1 and 2, from the header's 28 bytes and the length of the whole, SIZE_MAX while that is not
 * known. */
tl_status tl_kv_rules_header(const uint8_t *in, size_t len, const char *who, tl_kv_envelope *e) {
    /* 1. the length is the one its own header announces */
    if (len < TL_KV_ENVELOPE_HEADER + TL_KV_TRAILER) {
        return tl_fail(TL_EFORMAT, "%s: length %zu, an envelope has at least 32 bytes (rule 1)",
                       who, len);
    }
    const tl_kv_cfg shape = {.n_blocks = get_u32(in + 8),
                             .block_tokens = get_u32(in + 12),
                             .n_layers = get_u32(in + 16),
                             .n_kv_heads = get_u32(in + 20),
                             .head_dim = get_u32(in + 24)};
    size_t plane, block = 0; /* of no blocks the size does not count, even one that overflows */
    const int fits = block_sizes(&shape, &plane, &block);
    const size_t expected = shape.n_blocks == 0 || fits
                                ? tl_kv_envelope_bytes(shape.n_blocks, fits ? block : 0)
                                : SIZE_MAX;
    if (expected == SIZE_MAX || (len != expected && len != SIZE_MAX)) {
        return tl_fail(TL_EFORMAT, "%s: length %zu, the header announces %zu (rule 1)", who, len,
                       expected);
    }
    /* 2. magic */
    if (memcmp(in, TL_KV_MAGIC, 4) != 0) {
        return tl_fail(TL_EFORMAT,
                       "%s: magic %02x %02x %02x %02x at offset 0, expected \"TLKV\" (rule 2)", who,
                       in[0], in[1], in[2], in[3]);
    }
    *e = (tl_kv_envelope){.version = get_u16(in + 4),
                          .dtype = get_u16(in + 6),
                          .n_blocks = shape.n_blocks,
                          .block_tokens = shape.block_tokens,
                          .n_layers = shape.n_layers,
                          .n_kv_heads = shape.n_kv_heads,
                          .head_dim = shape.head_dim,
                          .block_bytes = fits ? block : 0,
                          .size_bytes = expected};
    return TL_OK;
}

/* Rule 3: the CRC of everything before it. */
tl_status tl_kv_rule_crc(const tl_kv_envelope *e, uint32_t stored, uint32_t crc, const char *who) {
    if (crc != stored) {
        return tl_fail(TL_EFORMAT,
                       "%s: CRC-32C %08" PRIx32 " at offset %zu, the bytes have %08" PRIx32
                       " (rule 3)",
                       who, stored, e->size_bytes - TL_KV_TRAILER, crc);
    }
    return TL_OK;
}

/* Rules 4 and 5; without a shape, rule 5 for a pool of any: none has a dimension of 0. */
tl_status tl_kv_rules_kind(const tl_kv_envelope *e, const tl_kv_cfg *cfg, const char *who) {
    /* 4. version and dtype */
    if (e->version != TL_KV_FORMAT_V1) {
        return tl_fail(TL_EFORMAT, "%s: version %" PRIu32 " at offset 4, expected 1 (rule 4)", who,
                       e->version);
    }
    if (e->dtype != TL_F16) {
        return tl_fail(TL_EFORMAT, "%s: dtype %" PRIu32 " at offset 6, expected 1 (f16) (rule 4)",
                       who, e->dtype);
    }
    /* 5. the pool's shape */
    static const tl_kv_cfg none = {0};
    const tl_kv_cfg *const own = cfg == NULL ? &none : cfg;
    const struct {
        const char *name;
        uint32_t found, expected;
    } dims[] = {{"block_tokens", e->block_tokens, own->block_tokens},
                {"n_layers", e->n_layers, own->n_layers},
                {"n_kv_heads", e->n_kv_heads, own->n_kv_heads},
                {"head_dim", e->head_dim, own->head_dim}};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        if (cfg == NULL && dims[i].found != 0) {
            continue;
        }
        if (cfg == NULL) {
            return tl_fail(TL_ESHAPE, "%s: %s 0 at offset %zu, expected at least 1 (rule 5)", who,
                           dims[i].name, 12 + 4 * i);
        }
        if (dims[i].found != dims[i].expected) {
            return tl_fail(TL_ESHAPE,
                           "%s: %s %" PRIu32 " at offset %zu, the pool has %" PRIu32 " (rule 5)",
                           who, dims[i].name, dims[i].found, 12 + 4 * i, dims[i].expected);
        }
    }
    return TL_OK;
}

/* Rule 6 for `count` records from block `first` on, the first at `in`, each `stride` bytes after
 * the one before. */
tl_status tl_kv_rule_records(const tl_kv_envelope *e, uint32_t first, uint32_t count,
                             const uint8_t *in, size_t stride, const char *who) {
    const size_t start = TL_KV_ENVELOPE_HEADER + first * (TL_KV_RECORD + e->block_bytes);
    for (uint32_t i = 0; i < count; i++, in += stride) {
        const size_t at = start + i * (TL_KV_RECORD + e->block_bytes);
        const uint32_t n_tokens = get_u32(in + 8);
        if (n_tokens == 0 || n_tokens > e->block_tokens) {
            return tl_fail(TL_EFORMAT,
                           "%s: n_tokens %" PRIu32 " of block %" PRIu32
                           " at offset %zu, expected 1 to %" PRIu32 " (rule 6)",
                           who, n_tokens, first + i, at + 8, e->block_tokens);
        }
        if (get_u64(in) != 0 && n_tokens != e->block_tokens) {
            return tl_fail(TL_EFORMAT,
                           "%s: block %" PRIu32 " at offset %zu has a hash but only %" PRIu32
                           " of %" PRIu32 " tokens (rule 6)",
                           who, first + i, at, n_tokens, e->block_tokens);
        }
    }
    return TL_OK;
}

/* All of them in their order, first things first: nothing of the pool is looked at before rule 5,
 * and nothing is changed at all. cfg NULL leaves rule 5 out. */
tl_status tl_kv_validate(const tl_kv_cfg *cfg, const uint8_t *in, size_t len, const char *who,
                         tl_kv_envelope *e) {
    tl_status status = tl_kv_rules_header(in, len, who, e);
    if (status == TL_OK) {
        const size_t body = len - TL_KV_TRAILER;
        e->crc = get_u32(in + body);
        status = tl_kv_rule_crc(e, e->crc, tl_crc32c(in, body, 0), who);
    }
    if (status == TL_OK) {
        status = tl_kv_rules_kind(e, cfg, who);
    }
    if (status == TL_OK) {
        status = tl_kv_rule_records(e, 0, e->n_blocks, in + TL_KV_ENVELOPE_HEADER,
                                    TL_KV_RECORD + e->block_bytes, who);
    }
    return status;
}

tl_status tl_kv_import(tl_kv_pool *p, const void *buf, size_t len, uint32_t *ids_out) {
    if (p == NULL || buf == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_import: %s is NULL", p == NULL ? "p" : "buf");
    }
    if (p->slab == NULL) {
        return no_slab("tl_kv_import");
    }
    tl_kv_envelope envelope;
    tl_status status = tl_kv_validate(&p->cfg, buf, len, "tl_kv_import", &envelope);
    if (status != TL_OK) {
        return status;
    }
    const uint32_t n = envelope.n_blocks;
    if (ids_out == NULL && n > 0) {
        return tl_fail(TL_EINVAL, "tl_kv_import: ids_out is NULL");
    }
    status = room_for(p, n, "tl_kv_import");
    if (status != TL_OK) {
        return status;
    }
    take_blocks(p, n, ids_out);
    /* A block taken from a large slab is long out of the caches, and who needs it first reads it
     * much later: do not read its lines only to overwrite them. */
    const int stream = tl_copy_streams(p->cfg.n_blocks * p->block_bytes);
    const uint8_t *in = (const uint8_t *)buf + TL_KV_ENVELOPE_HEADER;
    for (uint32_t i = 0; i < n; i++, in += TL_KV_RECORD + p->block_bytes) {
        tl_kv_block *b = &p->blocks[ids_out[i]];
        f16_from_wire(p->slab + ids_out[i] * p->block_bytes, in + TL_KV_RECORD, p->block_bytes,
                      stream);
        /* Validated above; held to again because the caller's buffer may be memory that somebody
         * else writes: the fill bounds accesses to the slab, and only full blocks have names. */
        const uint32_t n_tokens = get_u32(in + 8);
        b->fill = n_tokens < p->cfg.block_tokens ? n_tokens : p->cfg.block_tokens;
        const uint64_t hash = b->fill == p->cfg.block_tokens ? get_u64(in) : 0;
        uint64_t holder;
        /* Of equal hashes the first holder keeps the name; this block then stays private. The
         * index has room for every block, so nothing else can go wrong. */
        if (hash != 0 && tl_map_insert(p->index, hash, ids_out[i], &holder) == TL_OK) {
            b->hash = hash;
        }
    }
    return TL_OK;
}
