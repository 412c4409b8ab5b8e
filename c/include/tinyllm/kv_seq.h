/*
 * tinyllm/kv_seq.h - sequences over a pool: one call for one request.
 *
 * A manager turns prompts into block tables. It keeps, for each sequence, its tokens, its blocks
 * and the chained names of its full blocks, each computed once; for each block, a proof of what was
 * computed into it; and an index from proofs to blocks, in which a new prompt finds its prefix.
 *
 *   tokens --> proofs, once --> longest prefix held + blocks for the rest       tl_kv_seq_allocate
 *          --> the caller computes K and V into the blocks
 *          --> full blocks get their name and become findable                   tl_kv_seq_commit
 *          --> next tokens, next blocks, copies of shared ones                  tl_kv_seq_append
 *          --> blocks go back, tail first                                       tl_kv_seq_free
 *
 * Verified hits. The format's block hash, FNV-1a 64, can be collided on purpose by whoever chooses
 * the prompt. It names blocks for other processes, and here it decides nothing: prefixes are found
 * by a keyed 122-bit polynomial hash over the whole prefix, with a secret of the process
 * (src/runtime/proof.h). A forged prompt misses, and when its block meets the name it forged, that
 * is counted in tl_kv_mgr_stats.collisions.
 *
 * The pool. Works on any implementation of kv_pool.h and calls nothing else. While a manager lives,
 * take blocks from its pool and import into it through the manager; references, reads, exports
 * and lookups from elsewhere are fine. If blocks are evicted behind its back it notices and forgets
 * what nobody holds, rather than trust it.
 *
 * Threads: the caller serializes all calls on a manager and its pool. Errors: as in abi.h; a failed
 * call changes nothing, the pool's LRU order included, unless it says otherwise. Memory: comes from
 * the hook; allocate, can_allocate, adopt, append and fork may allocate when a sequence is longer,
 * or more of them are alive, than ever before; nothing else does. A namespace that allocate has met
 * costs some 60 bytes for the manager's life.
 */
#ifndef TINYLLM_KV_SEQ_H
#define TINYLLM_KV_SEQ_H

#include "tinyllm/kv_pool.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tl_kv_mgr tl_kv_mgr;

/* A sequence. Never 0; never used twice by a process within 2^32 sequences, so that a freed
 * sequence, or one of another manager, is told (TL_EINVAL) and not mistaken for a live one. */
typedef uint64_t tl_kv_seq;

/* ---- the manager --------------------------------------------------------------------------- */

/* Bits of tl_kv_mgr_options.flags. */
#define TL_KV_MGR_NO_PREFIX_CACHE 1u /* no hits, no names: every block is private */
#define TL_KV_MGR_EVENTS          2u /* record what becomes findable and what stops being so */
#define TL_KV_MGR_ALL_FLAGS       3u

typedef struct {
    uint32_t flags;
    uint32_t watermark; /* blocks that allocate leaves alone, for sequences already running */
    /*
     * What kv_pool.h cannot do; each may be NULL. Ours are in kv_pool_ext.h, another pool brings
     * its own.
     *
     *   evict      tl_kv_evict. Without: tl_kv_mgr_evict is TL_EUNSUPPORTED, and blocks of before a
     *              reset keep their names, unfindable, until the pool evicts them.
     *   find       tl_kv_find. Without: who holds a name is asked with a lookup, which counts as a
     *              use of the holder, and collisions are counted as unproven.
     *   refs       tl_kv_refs. Without: adopt cannot see that the caller has no reference of its
     *              own, and an append that is refused may have given a tail that others hold its
     *              own copy.
     *   prefetch   tl_kv_prefetch. Without: a commit into a large pool waits for memory.
     *   copy       tl_kv_copy_block. Without: blocks are copied by memcpy between what
     *              tl_kv_block_ptr gives, so a pool of ids, which gives nothing, is refused.
     */
    tl_status (*evict)(tl_kv_pool *p, uint32_t id);
    int (*find)(const tl_kv_pool *p, uint64_t hash, uint32_t *id);
    uint32_t (*refs)(const tl_kv_pool *p, uint32_t id);
    void (*prefetch)(const tl_kv_pool *p, uint64_t hash, int near);
    /* tl_kv_import_private. Without: tl_kv_mgr_import_private is TL_EUNSUPPORTED. */
    tl_status (*import_private)(tl_kv_pool *p, const void *buf, size_t len, uint32_t *ids_out);
    void (*copy)(tl_kv_pool *p, uint32_t src, uint32_t dst);
} tl_kv_mgr_options;

/*
 * A manager over a pool that outlives it. opt NULL means all zero. TL_EINVAL: p or out NULL,
 * unknown flags, a watermark of n_blocks or more; TL_EUNSUPPORTED: a pool without a slab and no
 * copy; TL_ENOMEM; TL_EIO: the system gives no random bytes for the secret that hits are verified
 * with. *out is NULL on failure. O(n_blocks): 40 bytes a block.
 */
TL_API tl_status tl_kv_mgr_create(tl_kv_pool *p, const tl_kv_mgr_options *opt, tl_kv_mgr **out);

/* Frees every sequence, then the manager. The pool stays. NULL does nothing. */
TL_API void tl_kv_mgr_destroy(tl_kv_mgr *m);

typedef struct {
    uint64_t prompt_tokens; /* of all allocated prompts, resumed ones excepted */
    uint64_t hit_tokens;    /* of those, tokens that came from the prefix index */
    uint64_t hit_blocks;    /* the same in blocks */
    uint64_t stored;        /* blocks that became findable */
    uint64_t removed;       /* findable blocks that stopped being so */
    uint64_t duplicates;    /* full blocks that stayed private: an equal one was findable */
    uint64_t collisions;    /* the same, because different content held the name: a forgery */
    uint64_t unproven;      /* the same, because the holder has no proof: see adopt and reset */
    uint64_t copies;        /* blocks copied because they were shared or immutable */
    uint64_t refused;       /* allocates and appends answered TL_EFULL */
    uint64_t events_lost;   /* events dropped because nobody drained them */
    uint32_t n_seqs;        /* alive now */
    uint32_t n_findable;    /* blocks in the index now */
    uint32_t peak_seqs;     /* high-water marks since create */
    uint32_t peak_used;     /* used blocks of the pool, as the manager saw them */
} tl_kv_mgr_stats;

TL_API tl_status tl_kv_mgr_stats_get(const tl_kv_mgr *m, tl_kv_mgr_stats *out);

/* Bytes allocated for blocks (a fixed number each) and for sequences (as many as there were). */
TL_API size_t tl_kv_mgr_bytes(const tl_kv_mgr *m);

/* ---- one request --------------------------------------------------------------------------- */

typedef struct {
    uint64_t root;     /* the parent of block 0: 0, or a namespace's root hash */
    size_t max_cached; /* take at most so many tokens from the index; SIZE_MAX: all there are */
    uint32_t resumed;  /* not 0: a preempted request comes back; prompt and hits are not counted */
    uint32_t match_last; /* not 0: a prompt that ends with a block may hit it too (see allocate) */
} tl_kv_request;

/*
 * A sequence for n tokens: the longest findable prefix of full blocks, then new blocks for the
 * rest, all or nothing. The last token is always left to compute, so at most floor((n - 1) / B)
 * blocks are taken from the index; with match_last, floor(n / B). req NULL means root 0, all hits,
 * a new request. Hits are taken before anything is evicted, and those that are cached count as
 * blocks this request takes from the free + cached ones.
 * TL_EFULL: hits that are cached + new blocks + the watermark exceed free + cached. TL_EINVAL: m,
 * out, or toks (with n > 0) NULL, or more blocks than 2^32. TL_ENOMEM. n 0 is a sequence without
 * blocks. *out is written only on TL_OK. O(n).
 */
TL_API tl_status tl_kv_seq_allocate(tl_kv_mgr *m, const uint32_t *toks, size_t n,
                                    const tl_kv_request *req, tl_kv_seq *out);

/*
 * What allocate would do now, changing nothing: TL_OK or TL_EFULL. *n_cached and *n_new (each may
 * be NULL) are the tokens it would take from the index and the blocks it would allocate, in both
 * cases. A prompt of more blocks than the pool has is refused unread: 0, and all its blocks.
 * TL_EINVAL, TL_ENOMEM as above. O(n).
 */
TL_API tl_status tl_kv_seq_can_allocate(tl_kv_mgr *m, const uint32_t *toks, size_t n,
                                        const tl_kv_request *req, size_t *n_cached, size_t *n_new);

typedef struct {
    size_t n_tokens;   /* its length */
    size_t n_cached;   /* tokens that were found, not computed: by allocate, or tl_kv_seq_found */
    size_t n_computed; /* tokens whose K and V are written, as committed */
    size_t n_blocks;   /* ceil(n_tokens / B) */
} tl_kv_seq_info;

/* TL_EINVAL: not a live sequence of this manager. The same holds for every function below. */
TL_API tl_status tl_kv_seq_info_get(const tl_kv_mgr *m, tl_kv_seq s, tl_kv_seq_info *out);

/* The block ids (n_blocks of them) and the tokens (n_tokens), owned by the manager and valid until
 * the next call that changes the sequence. NULL with the slot set when s is not alive, and NULL for
 * an empty sequence. */
TL_API const uint32_t *tl_kv_seq_blocks(const tl_kv_mgr *m, tl_kv_seq s);
TL_API const uint32_t *tl_kv_seq_tokens(const tl_kv_mgr *m, tl_kv_seq s);

typedef struct {
    uint32_t src, dst;
} tl_kv_copy;

/*
 * Appends n tokens and makes their slots writable: new blocks where the last is full, and a copy of
 * the last one where it is partial and shared, or full, registered and cut (truncate). The copy of
 * the contents is done (for a pool of ids: by its copy); copies[0] tells it (copies may be NULL),
 * *n_copies is 0 or 1. TL_EFULL: not enough blocks. TL_EINVAL: toks NULL with n > 0. TL_ENOMEM.
 * O(n).
 */
TL_API tl_status tl_kv_seq_append(tl_kv_mgr *m, tl_kv_seq s, const uint32_t *toks, size_t n,
                                  tl_kv_copy *copies, size_t *n_copies);

/*
 * The same for a decode step: toks[i] goes to seqs[i], for all n_seqs or for none. copies, if not
 * NULL, has room for n_seqs. A sequence must not appear twice (TL_EINVAL).
 */
TL_API tl_status tl_kv_seq_append_batch(tl_kv_mgr *m, const tl_kv_seq *seqs, size_t n_seqs,
                                        const uint32_t *toks, tl_kv_copy *copies, size_t *n_copies);

/*
 * The K and V of the first n_computed tokens are written. Full blocks among them get their names
 * and become findable; the fill of the last block follows. A block whose content is findable
 * already stays private (duplicates), and so does one whose name is held by other content
 * (collisions). Fewer than before is no error and changes nothing. TL_EINVAL: more than the
 * sequence has. O(new full blocks).
 */
TL_API tl_status tl_kv_seq_commit(tl_kv_mgr *m, tl_kv_seq s, size_t n_computed);

/* The same for a batch; n_computed[i] for seqs[i], or all tokens of each when n_computed is NULL.
 * Validated whole first. */
TL_API tl_status tl_kv_seq_commit_batch(tl_kv_mgr *m, const tl_kv_seq *seqs, size_t n_seqs,
                                        const size_t *n_computed);

/*
 * Commit for K and V that were not computed here: what allocate did not find was found elsewhere,
 * in a lower tier say, and the caller has put it, verified, into the sequence's own blocks. The
 * first n_found tokens are committed and count as cached: in n_cached, and with `counted` not 0 in
 * hit_tokens and hit_blocks (not for a resumed request, whose prompt was not counted either).
 * TL_EINVAL: n_found is not whole blocks, above the length or below n_cached; or something was
 * computed since allocate. O(new full blocks).
 */
TL_API tl_status tl_kv_seq_found(tl_kv_mgr *m, tl_kv_seq s, size_t n_found, int counted);

/* A second sequence with the same tokens over the same blocks, each with one more reference.
 * TL_ENOMEM. *out is written only on TL_OK. O(n_tokens). */
TL_API tl_status tl_kv_seq_fork(tl_kv_mgr *m, tl_kv_seq s, tl_kv_seq *out);

/* Cuts the sequence to its first n tokens: blocks behind the cut go back (tail first), their names
 * are forgotten by the sequence. TL_EINVAL: n above its length. Never TL_EFULL. O(what is cut). */
TL_API tl_status tl_kv_seq_truncate(tl_kv_mgr *m, tl_kv_seq s, size_t n);

/* Gives the blocks back, tail first, so that a cached chain loses its end before its beginning; the
 * handle is dead afterwards. What was never committed leaves nothing findable. O(n_blocks). */
TL_API tl_status tl_kv_seq_free(tl_kv_mgr *m, tl_kv_seq s);

/* ---- for kernels --------------------------------------------------------------------------- */

/*
 * out[i * stride + k] is block k of seqs[i] times `scale`, and -1 behind its last block, for k in
 * 0..stride-1. scale 1 gives block ids; where a kernel sees the slab as pages of one layer's K or
 * V, 2 * n_layers gives the page of layer 0's K. TL_EINVAL: a sequence has more than `stride`
 * blocks, a product exceeds INT32_MAX, scale 0, out NULL; then out is undefined. O(n_seqs *
 * stride).
 */
TL_API tl_status tl_kv_seq_block_tables(const tl_kv_mgr *m, const tl_kv_seq *seqs, size_t n_seqs,
                                        uint32_t scale, int32_t *out, size_t stride);

/*
 * out[i] = block * B + offset of position first + i, for n positions; positions at and past the
 * length give `pad`. 64-bit, since slots of a large pool exceed 2^32.
 */
TL_API tl_status tl_kv_seq_slot_mapping(const tl_kv_mgr *m, tl_kv_seq s, size_t first, size_t n,
                                        int64_t pad, int64_t *out);

/* ---- the index ----------------------------------------------------------------------------- */

/*
 * After a change of weights: nothing computed before can be hit again. Running sequences go on;
 * their later commits do not become findable. root NULL: everything, else one namespace.
 * O(n_blocks).
 */
TL_API tl_status tl_kv_mgr_reset(tl_kv_mgr *m, const uint64_t *root);

/*
 * Makes n blocks unfindable now. Blocks somebody holds stay with their holders and are freed, not
 * cached, when the last one lets go. A block that is not findable is left alone. TL_EINVAL: an id
 * out of range; TL_EUNSUPPORTED: the manager was given no evict. Nothing changes on failure.
 */
TL_API tl_status tl_kv_mgr_evict(tl_kv_mgr *m, const uint32_t *ids, size_t n);

/*
 * tl_kv_import for a managed pool. The blocks arrive with names but without proof: nothing is
 * findable until tl_kv_mgr_adopt has seen the tokens.
 */
TL_API tl_status tl_kv_mgr_import(tl_kv_mgr *m, const void *buf, size_t len, uint32_t *ids_out);

/* The same, and the blocks have no names either: nobody else can take one before it is adopted, and
 * a block that is let go is free and not cached. TL_EUNSUPPORTED: the manager was given no
 * import_private. */
TL_API tl_status tl_kv_mgr_import_private(tl_kv_mgr *m, const void *buf, size_t len,
                                          uint32_t *ids_out);

/*
 * The findable blocks of these names: ids_out[i] is the block, or -1. A block that only has the
 * name, with no proof behind it, is none. take not 0: with a reference on each, as lookup gives it.
 * Otherwise nothing changes; without the manager's `find` the LRU order does, as by a use.
 * A name can be forged: what is taken by name has to be proven by adopt_proven before it is used.
 * TL_EINVAL: m, hashes or ids_out NULL (with n > 0). O(n).
 */
TL_API tl_status tl_kv_mgr_find(tl_kv_mgr *m, const uint64_t *hashes, size_t n, int take,
                                int64_t *ids_out);

/*
 * Makes a sequence of blocks that the caller holds and whose K and V are computed: n tokens over
 * ids[0 .. ceil(n / B) - 1] (from import, or taken by hash). The caller's references become the
 * sequence's. Each full block must be registered under the name that the tokens give it, or be
 * registered under no name, must not be findable as another prefix, and must hold as many positions
 * as its tokens: TL_EFORMAT otherwise, and the references stay with the caller. Full blocks become
 * findable, as by commit. TL_EINVAL, TL_ENOMEM as allocate; TL_EINVAL too for a block that the
 * caller does not hold, or that appears twice. O(n).
 */
TL_API tl_status tl_kv_mgr_adopt(tl_kv_mgr *m, const uint32_t *toks, size_t n, uint64_t root,
                                 const uint32_t *ids, tl_kv_seq *out);

/*
 * adopt, where proven[i] not 0 says that block i was not brought by the caller but taken by its
 * name: it must be findable as exactly this prefix, now, TL_EFORMAT otherwise. So a forged name
 * does not pass, nor a block that was reset or that nobody has proven. proven NULL: none.
 */
TL_API tl_status tl_kv_mgr_adopt_proven(tl_kv_mgr *m, const uint32_t *toks, size_t n, uint64_t root,
                                        const uint32_t *ids, const uint8_t *proven, tl_kv_seq *out);

/* ---- events -------------------------------------------------------------------------------- */

enum { TL_KV_STORED = 1, TL_KV_REMOVED = 2, TL_KV_CLEARED = 3 };

/*
 * STORED: `hash` became findable behind `parent` (its root for block 0); the block's B tokens are
 * in `tokens`. REMOVED: the findable block of that hash is gone. CLEARED: a reset of everything.
 * Numbers grow by 1 from 0; a gap means events were lost.
 */
typedef struct {
    uint64_t number;
    uint64_t hash, parent;
    uint32_t type;
    uint32_t block;
} tl_kv_event;

/*
 * Moves up to cap events out of the queue, oldest first; *n is how many. tokens, if not NULL, has
 * room for cap * B ids: B for each event, zeros unless it is STORED. The queue holds 65,536; past
 * that the newest are dropped and counted (events_lost). TL_EUNSUPPORTED without TL_KV_MGR_EVENTS.
 */
TL_API tl_status tl_kv_mgr_events(tl_kv_mgr *m, tl_kv_event *out, size_t cap, uint32_t *tokens,
                                  size_t *n);

/* ---- the checker --------------------------------------------------------------------------- */

/*
 * Walks sequences, blocks and index and compares them with each other and with the pool: holders
 * counted, lengths and tables agreeing, every index entry where its proof leads, fills. TL_OK, or
 * TL_EINVAL with the first disagreement in the slot. O(n_blocks + all tokens).
 */
TL_API tl_status tl_kv_mgr_check(const tl_kv_mgr *m);

#ifdef __cplusplus
}
#endif

#endif /* TINYLLM_KV_SEQ_H */
