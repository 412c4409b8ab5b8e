/*
 * tinyllm/kv_pool.h (rt.04) - the paged KV block pool, its prefix index and its wire format v1.
 *
 * A pool owns one slab of n_blocks blocks. A block holds the K and V vectors of block_tokens
 * consecutive token positions, for every layer and KV head, as float16:
 *
 *   slab    [ block 0 | block 1 | ... | block n_blocks-1 ]                       P bytes a block
 *   block   [ layer 0 K | layer 0 V | layer 1 K | ... ]
 *   one K   [n_kv_heads][block_tokens][head_dim]                                  float16
 *
 *   P = n_layers * 2 * n_kv_heads * block_tokens * head_dim * 2
 *
 * A block is in exactly one state, and free + used + cached == n_blocks after every call:
 *
 *                alloc                     unref to 0, registered
 *        free ------------> used --------------------------------> cached
 *          ^                 ^ |                                     | |
 *          |  unref to 0,    | +-------------------------------------+ |
 *          |  unregistered   +------------------ lookup hit            |
 *          +-----------------------------------------------------------+
 *                             evicted by alloc, oldest first
 *
 * Words: a block is held when its reference count is at least 1 (used); full when fill equals
 * block_tokens; registered when the prefix index maps a hash to it; a registered block is
 * immutable: set_fill refuses it, and nobody may write through its pointers.
 *
 * Threads: the caller serializes the calls on one pool. Different pools are independent.
 * Errors: every call that fails sets the error slot to a text with the function and the reason; a
 * lookup miss alone leaves it. A failed call leaves the pool as it was, LRU order included.
 * Pointers: `p` must be a live pool; passing NULL for it is TL_EINVAL (or 0, or NULL) with the slot
 * set, except where NULL is given a meaning below. Memory: only create allocates.
 */
#ifndef TINYLLM_KV_POOL_H
#define TINYLLM_KV_POOL_H

#include "tinyllm/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TL_KV_FORMAT_V1       1u
#define TL_KV_MAGIC           "TLKV"
#define TL_KV_ENVELOPE_HEADER 28u

typedef struct {
    uint32_t n_blocks, block_tokens, n_layers, n_kv_heads, head_dim; /* all at least 1 */
    int32_t dtype;                                                   /* TL_F16 */
    uint32_t format;                                                 /* TL_KV_FORMAT_V1 */
} tl_kv_cfg;

typedef struct {
    uint32_t free, used, cached; /* blocks in each state; they add up to n_blocks */
    uint32_t evictions;          /* cached blocks reclaimed since create, modulo 2^32 */
} tl_kv_stats;

typedef struct tl_kv_pool tl_kv_pool;

/* ---- life ---------------------------------------------------------------------------------- */

/*
 * A pool of n_blocks free blocks with fill 0. The slab's contents are undefined and its pages are
 * not touched; blocks are 64-byte aligned when P is a multiple of 64. *out is NULL on failure and
 * nothing is leaked.
 * TL_EINVAL: cfg or out NULL, a zero dimension (reported before format and dtype), or sizes that
 * overflow size_t. TL_EUNSUPPORTED: format other than 1, dtype other than TL_F16. TL_ENOMEM.
 * O(n_blocks), whatever the size of the slab.
 */
TL_API tl_status tl_kv_pool_create(const tl_kv_cfg *cfg, tl_kv_pool **out);

/* Frees the slab and everything else; every pointer into it dies. NULL does nothing. */
TL_API void tl_kv_pool_destroy(tl_kv_pool *p);

/* The configuration of create, byte for byte. out NULL sets the slot; p NULL also zeroes *out. */
TL_API void tl_kv_pool_cfg(const tl_kv_pool *p, tl_kv_cfg *out);

/* ---- references ---------------------------------------------------------------------------- */

/*
 * Takes n blocks, all or nothing: free ones first (last freed, first taken), then cached ones,
 * oldest first; an evicted block is unregistered and counted. Each has 1 reference and fill 0.
 * n 0 is TL_OK and ids may be NULL. TL_EFULL: free + cached < n; nothing is taken or evicted.
 * TL_EINVAL: ids NULL. ids is written only on TL_OK. O(n).
 */
TL_API tl_status tl_kv_alloc(tl_kv_pool *p, uint32_t n, uint32_t *ids);

/* One more reference on a used block. For a block nobody holds, an id out of range, or a count of
 * UINT32_MAX: sets the slot and does nothing. O(1). */
TL_API void tl_kv_ref(tl_kv_pool *p, uint32_t id);

/*
 * One reference less. At 0 a registered block becomes cached (newest end of the LRU list), any
 * other becomes free. TL_EINVAL, and nothing changes: nobody holds the block, or id is out of
 * range. O(1).
 */
TL_API tl_status tl_kv_unref(tl_kv_pool *p, uint32_t id);

/*
 * Makes a block the caller may write. With 1 reference *out is id itself. Above that a new block
 * is allocated (as by tl_kv_alloc), contents and fill are copied to it, the caller's reference
 * moves from id to it, and *out is the copy, which is not registered. Looks only at the
 * references: a registered block comes back as itself at 1 reference and must not be written;
 * whoever has to change one allocates, copies and unrefs the original.
 * TL_EFULL: no block for the copy. TL_EINVAL: out NULL, nobody holds the block, id out of range.
 * *out is written only on TL_OK. O(P) when it copies, else O(1).
 */
TL_API tl_status tl_kv_cow(tl_kv_pool *p, uint32_t id, uint32_t *out);

/* ---- contents ------------------------------------------------------------------------------ */

/* How many positions of the block hold data, 0..block_tokens. TL_EINVAL, and nothing changes:
 * above that, a registered block, a block nobody holds, id out of range. O(1). */
TL_API tl_status tl_kv_set_fill(tl_kv_pool *p, uint32_t id, uint32_t n_tokens);

/* The fill; 0 with the slot set when id is out of range. O(1). */
TL_API uint32_t tl_kv_fill(const tl_kv_pool *p, uint32_t id);

/*
 * The [n_kv_heads][block_tokens][head_dim] float16 values of one layer's K (is_v 0) or V (any
 * other is_v), at slab + id * P + (layer * 2 + is_v) * n_kv_heads * block_tokens * head_dim * 2.
 * NULL with the slot set for an id or a layer out of range. Valid until destroy, and meaningful
 * while the caller holds the block. Writing is the right of a holder with the only reference to an
 * unregistered block. O(1).
 */
TL_API void *tl_kv_block_ptr(const tl_kv_pool *p, uint32_t id, uint32_t layer, int is_v);

/* P, the payload bytes of one block. */
TL_API size_t tl_kv_block_bytes(const tl_kv_pool *p);

/* The counts, in O(1). out NULL sets the slot. */
TL_API void tl_kv_stats_get(const tl_kv_pool *p, tl_kv_stats *out);

/* ---- the prefix index ---------------------------------------------------------------------- */

/*
 * The name of a full block: FNV-1a 64 over the 8 little-endian bytes of parent (the previous
 * block's hash, 0 for block 0) and 4 little-endian bytes for each of the n token ids; a result of
 * 0 becomes 1, because 0 means "no hash". Pure. toks may be NULL only when n is 0. O(n).
 */
TL_API uint64_t tl_kv_block_hash(uint64_t parent, const uint32_t *toks, uint32_t n);

/*
 * Makes a used, full block findable under hash. Again under the same hash is TL_OK.
 * TL_EINVAL: hash 0, id out of range, nobody holds it, not full, or registered under another hash
 * (checked before TL_EBUSY). TL_EBUSY: another block holds the hash; this one stays private.
 * O(1) expected; never allocates.
 */
TL_API tl_status tl_kv_register(tl_kv_pool *p, uint32_t id, uint64_t hash);

/*
 * A hit gives *id and one more reference; a cached block leaves the LRU list, is used again with
 * its contents intact, and will come back at the newest end. A miss is TL_ENOTFOUND with *id and
 * the error slot untouched: the normal answer for a new prompt. Hash 0 is a miss.
 * TL_EINVAL: id NULL, or the block is at UINT32_MAX references. O(1) expected.
 */
TL_API tl_status tl_kv_lookup(tl_kv_pool *p, uint64_t hash, uint32_t *id);

/* ---- the wire ------------------------------------------------------------------------------ */

/* Bytes of an envelope of n blocks: 28 + n * (12 + P) + 4. SIZE_MAX when that overflows. */
TL_API size_t tl_kv_export_bytes(const tl_kv_pool *p, uint32_t n);

/*
 * Writes the envelope (formats/kv-block.md) of n used blocks, in the order given; an id may appear
 * more than once. Positions at and past a block's fill are written as zeros, so that the bytes are
 * a function of the data alone. n 0 is a valid envelope of 32 bytes (ids may be NULL).
 * TL_OK: *written is the size, and nothing after it is touched. TL_EFULL: cap is too small;
 * *written is the size needed and buf untouched; buf NULL with cap 0 asks for it. TL_EINVAL, with
 * *written 0 and buf untouched: ids NULL, buf NULL with cap not 0, an id out of range, a block
 * nobody holds or with fill 0; also written NULL. O(n * P), each byte read once.
 */
TL_API tl_status tl_kv_export(const tl_kv_pool *p, const uint32_t *ids, uint32_t n, void *buf,
                              size_t cap, size_t *written);

/*
 * Takes blocks for an envelope, copies them in and registers the full ones that carry a hash, in
 * envelope order; a hash that is held already leaves that block a private copy. ids_out has room
 * for the header's n_blocks and is written only on TL_OK; the caller owns one reference on each.
 * Validation is complete before anything is taken: a refused import changes nothing at all.
 * TL_EFORMAT: a length that is too short or does not match the header, bad magic, CRC mismatch,
 * another version or dtype, n_tokens outside 1..block_tokens, a hashed block that is partial.
 * TL_ESHAPE: block_tokens, n_layers, n_kv_heads or head_dim unlike the pool's. TL_EFULL: not
 * enough blocks. TL_EINVAL: buf NULL, or ids_out NULL with blocks to return. O(len).
 */
TL_API tl_status tl_kv_import(tl_kv_pool *p, const void *buf, size_t len, uint32_t *ids_out);

/*
 * CRC-32C (Castagnoli; reflected polynomial 0x82F63B78, initial value and final XOR 0xFFFFFFFF).
 * crc 0 starts; an earlier result continues, so crc(a then b) is tl_crc32c(b, nb, tl_crc32c(a, na,
 * 0)). tl_crc32c("123456789", 9, 0) is 0xE3069283. data may be NULL when n is 0. Pure; safe from
 * any thread, the first call included. O(n).
 */
TL_API uint32_t tl_crc32c(const void *data, size_t n, uint32_t crc);

#ifdef __cplusplus
}
#endif

#if UINTPTR_MAX == 0xFFFFFFFFFFFFFFFFu
TL_STATIC_ASSERT(sizeof(tl_kv_cfg) == 28, "tl_kv_cfg is 28 bytes in this ABI");
TL_STATIC_ASSERT(offsetof(tl_kv_cfg, block_tokens) == 4, "block_tokens is at 4");
TL_STATIC_ASSERT(offsetof(tl_kv_cfg, n_layers) == 8, "n_layers is at 8");
TL_STATIC_ASSERT(offsetof(tl_kv_cfg, n_kv_heads) == 12, "n_kv_heads is at 12");
TL_STATIC_ASSERT(offsetof(tl_kv_cfg, head_dim) == 16, "head_dim is at 16");
TL_STATIC_ASSERT(offsetof(tl_kv_cfg, dtype) == 20, "dtype is at 20");
TL_STATIC_ASSERT(offsetof(tl_kv_cfg, format) == 24, "format is at 24");
TL_STATIC_ASSERT(sizeof(tl_kv_stats) == 16, "tl_kv_stats is 16 bytes in this ABI");
#endif

#endif /* TINYLLM_KV_POOL_H */
