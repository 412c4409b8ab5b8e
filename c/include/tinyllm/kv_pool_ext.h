/*
 * tinyllm/kv_pool_ext.h - what this implementation of kv_pool.h offers beyond it: creation
 * options, batches that are validated whole, envelopes in parts and in pieces, their validation
 * without a pool, read access to a block's state, and a checker.
 *
 * kv_pool.h is the interface that any implementation has; this header needs ours (it is compiled
 * from src/runtime/kv_pool_ext.c, which knows the pool's records). The same rules hold: the caller
 * serializes the calls on one pool, a failed call sets the error slot and changes nothing.
 */
#ifndef TINYLLM_KV_POOL_EXT_H
#define TINYLLM_KV_POOL_EXT_H

#include "tinyllm/kv_pool.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- creation ------------------------------------------------------------------------------ */

/* Bits of tl_kv_options.flags. */
#define TL_KV_TOUCH     1u /* touch every page of the slab in create: slow start, no faults later */
#define TL_KV_NO_HUGE   2u /* do not advise the system to back the slab with huge pages */
#define TL_KV_ALL_FLAGS 3u

/*
 * Whose memory the values are in:
 *
 *   slab NULL, copy NULL   the pool's: it allocates n_blocks * P bytes and frees them
 *   slab                   the caller's: slab_bytes of it, at least n_blocks * P, aligned to 2 (to
 *                          64 where kernels want that), alive and in place until destroy, which
 *                          leaves it alone. Everything else is as with a slab of the pool's own
 *   copy                   nobody's: a pool of ids. The values are on a device, or laid out in
 *                          another way; the pool keeps references, fills and names, and has no
 * bytes to give: tl_kv_block_ptr is NULL with the slot set, export in all its forms and import are
 * TL_EUNSUPPORTED. cfg.dtype stays TL_F16
 *
 * copy(user, src, dst) is called where a pool with a slab copies block src to block dst: inside
 * tl_kv_cow, and inside the appends of a manager over it (tl_kv_copy in its options). It must be
 * there, so that no copy can be forgotten. When it is called both blocks are held and dst is nobody
 * else's; when it returns, the copy must be done or ordered before everything that the caller does
 * next with the two (a stream does that). It cannot fail, and of the pool's functions it may call
 * tl_kv_ref alone, on src and dst, for a copy that is made later.
 */
typedef struct {
    uint32_t flags;
    void *slab;
    size_t slab_bytes;
    void (*copy)(void *user, uint32_t src, uint32_t dst);
    void *user;
} tl_kv_options;

/*
 * tl_kv_pool_create with options; opt NULL means all zero. TL_EINVAL as well: unknown flags, slab
 * and copy both given, a slab that is too small or not aligned, slab_bytes without a slab, or
 * TL_KV_TOUCH where the pool has no slab of its own.
 */
TL_API tl_status tl_kv_pool_create_opt(const tl_kv_cfg *cfg, const tl_kv_options *opt,
                                       tl_kv_pool **out);

/*
 * Copies the contents of block src to block dst, both held, as tl_kv_cow does it: in the slab, or
 * by the copy of the options. For tl_kv_mgr_options.copy. An id out of range: the slot, and nothing
 * is done. O(P).
 */
TL_API void tl_kv_copy_block(tl_kv_pool *p, uint32_t src, uint32_t dst);

/* Bytes the pool has allocated besides the slab: records, free list, index. */
TL_API size_t tl_kv_meta_bytes(const tl_kv_pool *p);

/* ---- one block's state --------------------------------------------------------------------- */

/* References of a block (0: free or cached), and the hash it is registered under (0: none).
 * 0 with the slot set when id is out of range. O(1). */
TL_API uint32_t tl_kv_refs(const tl_kv_pool *p, uint32_t id);
TL_API uint64_t tl_kv_hash(const tl_kv_pool *p, uint32_t id);

/* tl_kv_lookup without taking a reference or touching the LRU order: 1 and *id when a block is
 * registered under hash, else 0 with *id and the error slot untouched. O(1) expected. */
TL_API int tl_kv_find(const tl_kv_pool *p, uint64_t hash, uint32_t *id);

/* A hint that hash is going to be registered: asks for the memory that this reads and writes. near
 * 0 some blocks ahead of it, and 1 when about half of that time has passed: what is asked for then
 * is known from the memory asked for before. Changes nothing. O(1). */
TL_API void tl_kv_prefetch(const tl_kv_pool *p, uint64_t hash, int near);

/*
 * Frees one cached block now, whatever its place in the LRU order: it is unregistered and goes to
 * the free list. Not counted as an eviction: nobody needed the room. TL_EINVAL, and nothing
 * changes: the block is not cached, or id is out of range. O(1) expected.
 */
TL_API tl_status tl_kv_evict(tl_kv_pool *p, uint32_t id);

/* ---- batches ------------------------------------------------------------------------------- */

/*
 * tl_kv_ref and tl_kv_unref for n ids in order, all or nothing. An id that appears k times counts
 * k times, so unref of {b, b} on a block with one reference is TL_EINVAL and changes nothing.
 * TL_EINVAL: as for one id (for ref: a block nobody holds, or a count that would pass UINT32_MAX);
 * the slot names the position in ids. ids may be NULL when n is 0. O(n).
 */
TL_API tl_status tl_kv_ref_many(tl_kv_pool *p, const uint32_t *ids, size_t n);
TL_API tl_status tl_kv_unref_many(tl_kv_pool *p, const uint32_t *ids, size_t n);

/* tl_kv_set_fill for n ids, all or nothing; fills[i] goes to ids[i], the last of equal ids wins. */
TL_API tl_status tl_kv_set_fill_many(tl_kv_pool *p, const uint32_t *ids, const uint32_t *fills,
                                     size_t n);

/*
 * tl_kv_register for n pairs in order, all or nothing. registered[i] is 1 when ids[i] carries
 * hashes[i] afterwards, 0 when another block holds that hash (TL_EBUSY for one block: the normal
 * answer when equal blocks were computed twice). TL_EINVAL: as for one pair; then nothing is
 * registered and registered is undefined. O(n) expected.
 */
TL_API tl_status tl_kv_register_many(tl_kv_pool *p, const uint32_t *ids, const uint64_t *hashes,
                                     size_t n, uint8_t *registered);

/*
 * tl_kv_lookup for n hashes in order: ids_out[i] is the block, with one more reference for each
 * hit, or -1 for a miss. The index and the records are prefetched ahead, so a large pool costs
 * little more than a small one. TL_EINVAL: hashes or ids_out NULL with n not 0, or a block at
 * UINT32_MAX references; then no reference is taken. O(n) expected.
 */
TL_API tl_status tl_kv_lookup_many(tl_kv_pool *p, const uint64_t *hashes, size_t n,
                                   int64_t *ids_out);

/*
 * The chained hashes of the floor(n / block_tokens) full blocks of n token ids, from the root
 * `parent` (0 by default): out[i] = tl_kv_block_hash(out[i - 1], toks + i * block_tokens,
 * block_tokens). TL_EINVAL: block_tokens 0, or toks or out NULL with a full block to hash. O(n).
 */
TL_API tl_status tl_kv_block_hashes(uint64_t parent, const uint32_t *toks, size_t n,
                                    uint32_t block_tokens, uint64_t *out);

/* A prompt of tl_kv_block_hashes_batch: n token ids, the root parent hash (0 by default), and room
 * for the floor(n / block_tokens) hashes. */
typedef struct {
    const uint32_t *toks;
    size_t n;
    uint64_t parent;
    uint64_t *out;
} tl_kv_prompt;

/*
 * tl_kv_block_hashes for n prompts. The blocks of one prompt are one chain, each waiting for the
 * one before; several chains run side by side, so that a block takes a third of the time it takes
 * alone. Prompts of similar length gain most, and the order does not matter. The outs must not
 * overlap. TL_EINVAL: block_tokens 0, prompts NULL with n not 0, or toks or out NULL with a full
 * block to hash; then nothing is written. O(tokens).
 */
TL_API tl_status tl_kv_block_hashes_batch(const tl_kv_prompt *prompts, size_t n,
                                          uint32_t block_tokens);

/*
 * tl_kv_import that registers nothing: every block arrives private, whatever names the envelope
 * gives. For bytes from a sender whose word is not proof: a block under a name can be taken by
 * others, and keeps it when it is let go. Statuses and effects otherwise as tl_kv_import.
 */
TL_API tl_status tl_kv_import_private(tl_kv_pool *p, const void *buf, size_t len,
                                      uint32_t *ids_out);

/* ---- the wire without one large buffer ----------------------------------------------------- */

/*
 * The part of tl_kv_export's envelope of ids[0 .. n) that blocks first .. first + count - 1 make,
 * with the header when first is 0 and the CRC at the end when first + count is n: parts that follow
 * one another are the envelope. *crc carries the checksum from part to part; it is ignored with
 * first 0, and updated only on TL_OK.
 * Statuses, *written and what is touched: as for tl_kv_export, for the blocks of this part alone;
 * also TL_EINVAL: crc NULL, or a part that reaches past n. Between parts the blocks must stay held
 * and unwritten. O(count * P).
 *
 * Parts can also be made side by side, each with *crc 0 before it: tl_crc32c_combine then gives
 * the CRC of the whole, to be put, as 4 little-endian bytes, over the one the last part wrote.
 */
TL_API tl_status tl_kv_export_part(const tl_kv_pool *p, const uint32_t *ids, uint32_t n,
                                   uint32_t first, uint32_t count, void *buf, size_t cap,
                                   size_t *written, uint32_t *crc);

/* The CRC-32C of a then b from those of a and of b, which has n_bytes_b bytes. About 100 ns,
 * whatever the length. Pure. */
TL_API uint32_t tl_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_bytes_b);

/* Laid out like struct iovec, so that an array of them is one of those. */
typedef struct {
    const void *ptr;
    size_t len;
} tl_kv_piece;

/*
 * tl_kv_export's envelope as a list of pieces, for writev and its like: full blocks are sent from
 * where they lie in the slab, the rest (header, records, partial blocks, CRC) is written to
 * scratch. Each payload byte is read once, for the CRC, and not copied.
 * TL_OK: *n_pieces pieces, at most 2 n + 1, which are valid while scratch is and while the blocks
 * are held and unwritten. TL_EFULL: *scratch_bytes and *n_pieces are what is needed, and nothing
 * is written; with both capacities 0 it asks for that. TL_EINVAL, with both 0: as for
 * tl_kv_export, scratch or pieces NULL with a capacity, scratch_bytes or n_pieces NULL. O(n * P).
 */
TL_API tl_status tl_kv_export_pieces(const tl_kv_pool *p, const uint32_t *ids, uint32_t n,
                                     void *scratch, size_t scratch_cap, tl_kv_piece *pieces,
                                     size_t pieces_cap, size_t *scratch_bytes, size_t *n_pieces);

/* ---- an envelope without a pool ------------------------------------------------------------ */

/* What an envelope's header says, and what follows from it. */
typedef struct {
    uint32_t version, dtype, n_blocks, block_tokens, n_layers, n_kv_heads, head_dim;
    uint32_t crc;       /* the trailer's; 0 until it is known */
    size_t block_bytes; /* P; 0 for an envelope without blocks whose P overflows */
    size_t size_bytes;  /* of the whole */
} tl_kv_envelope;

/*
 * All reader rules of formats/kv-block.md in their order, on untrusted bytes, as tl_kv_import holds
 * to them: what it accepts, this accepts, and the other way round, but for room in a pool. Of shape
 * the four dimensions are read; with NULL they may be any but 0, which no pool has. Record i is
 * then at offset 28 + i * (12 + block_bytes): a hash of 8 bytes, n_tokens of 4, the payload.
 * TL_EFORMAT, TL_ESHAPE; the slot says which rule, field and offset, what was found and what
 * expected. TL_EINVAL: buf or out NULL. *out is undefined on failure. Allocates nothing. O(len).
 */
TL_API tl_status tl_kv_envelope_check(const void *buf, size_t len, const tl_kv_cfg *shape,
                                      tl_kv_envelope *out);

/*
 * The same rules in steps, for bytes that come one after another or that do not fit in memory. A
 * stream is valid when every step is TL_OK; which step complains first is then up to the order of
 * the bytes, and only the last one, the CRC, says that the others saw what was sent.
 *
 *   open     rules 1 and 2, from the first 28 bytes (TL_KV_ENVELOPE_HEADER) and the length of the
 *            whole, SIZE_MAX when it is not known. TL_EINVAL: header or out NULL. *out is undefined
 *            on failure; with a length below 32 the header is not read.
 *   accept   rules 4 and 5; with shape NULL the dimensions may be any but 0.
 *   records  rule 6 for blocks first .. first + count - 1: 12 bytes for each at records, records +
 *            stride, ... TL_EINVAL: records NULL with count > 0, or blocks past e->n_blocks.
 *   crc      rule 3: the trailer's value and that of the bytes before it.
 *
 * TL_EINVAL: e NULL. Pure; they read what they are given and nothing else.
 */
TL_API tl_status tl_kv_envelope_open(const void *header, size_t len, tl_kv_envelope *out);
TL_API tl_status tl_kv_envelope_accept(const tl_kv_envelope *e, const tl_kv_cfg *shape);
TL_API tl_status tl_kv_envelope_records(const tl_kv_envelope *e, uint32_t first, uint32_t count,
                                        const void *records, size_t stride);
TL_API tl_status tl_kv_envelope_crc(const tl_kv_envelope *e, uint32_t stored, uint32_t crc);

/* ---- the checker --------------------------------------------------------------------------- */

/*
 * Walks the whole pool and compares what is stored twice: every block in exactly one state, the
 * free list without duplicates, the LRU list's links and length, the index against the records in
 * both directions, fills and registrations legal, the counts. TL_OK, or TL_EINVAL with the first
 * disagreement in the slot. Allocates nothing. For tests and debugging: a
 * disagreement is a bug in the library or a stray write, never a caller's wrong argument.
 * O(n_blocks).
 */
TL_API tl_status tl_kv_check(const tl_kv_pool *p);

#ifdef __cplusplus
}
#endif

#endif /* TINYLLM_KV_POOL_EXT_H */
