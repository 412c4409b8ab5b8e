/*
 * tinyllm/replay.h - what a stream of prompts would have hit: every pool size at once, and other
 * orders of eviction than the pool's own.
 *
 *   tl_stack         blocks by how recently they were used; the depth of a block is the size of the
 *                    smallest least-recently-used pool that would still hold it
 *
 *               newest  [ a0 a1 a2 | b0 b1 | c0 ... ]  oldest       depths 1 2 3 4 5 6 ...
 *                         one request
 *
 *   tl_policy_hits   the hits of one trace in a cache of one size under one order of eviction
 *
 * Nothing here touches a pool: these are the sums beside it. Not thread-safe: the caller serializes
 * the calls on one object. All memory comes from the hook of abi.h.
 *
 * Sources: Mattson, Gecsei, Slutz, Traiger, Evaluation techniques for storage hierarchies (IBM
 * Systems Journal, 1970); Belady, A study of replacement algorithms (IBM Systems Journal, 1966);
 * Yang et al., FIFO queues are all you need for cache eviction (SOSP 2023); Einziger, Friedman,
 * Manes, TinyLFU (ACM Transactions on Storage, 2017).
 */
#ifndef TINYLLM_REPLAY_H
#define TINYLLM_REPLAY_H

#include "tinyllm/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- tl_stack ------------------------------------------------------------------------------- */

typedef struct tl_stack tl_stack;

/*
 * An empty stack that remembers the max_keys most recently used keys at least; what lies deeper may
 * be forgotten. Memory grows with what is remembered, to about 150 bytes a key at most. TL_EINVAL:
 * out NULL, max_keys 0 or above 2^31; TL_ENOMEM. *out is NULL on failure.
 */
TL_API tl_status tl_stack_create(size_t max_keys, tl_stack **out);

/* NULL does nothing. */
TL_API void tl_stack_destroy(tl_stack *s);

/* Keys remembered now; 0 for NULL. */
TL_API size_t tl_stack_len(const tl_stack *s);

/*
 * One request: keys[i] names its block i together with everything before it. First depths[i]
 * (0 for a key that is not remembered) and stamps[i] (when it was last used; NaN for 0) are read
 * for all keys, then all are used at the time `now`, the last one first, so that keys[0] is the
 * newest: the order in which a pool's sequences give their blocks back. depths and stamps may be
 * NULL. A key that appears twice counts where it appears first.
 *
 * In a pool of N blocks that serves one request after the other, each block of it findable once it
 * was computed, keys[i] is hit exactly when 0 < depths[i] <= N, for every N that holds the longest
 * request: the pool holds the N newest keys, and a block is always newer than those behind it.
 *
 * TL_EINVAL: s NULL, or keys NULL with n > 0; TL_ENOMEM, and nothing has changed. Time: O(log n) a
 * key, and O(1) for a key that was last used together with the one before it.
 */
TL_API tl_status tl_stack_use(tl_stack *s, const uint64_t *keys, size_t n, double now,
                              uint64_t *depths, double *stamps);

/*
 * Reads the keys at the depths depth .. depth + n - 1 (1 is the newest): the key, when it was first
 * used since it is remembered, and when it was last. Each array may be NULL. Returns how many there
 * are: fewer than n at the end of the stack. O(log n + n).
 */
TL_API size_t tl_stack_read(const tl_stack *s, size_t depth, size_t n, uint64_t *keys,
                            double *firsts, double *lasts);

/* ---- tl_policy_hits ------------------------------------------------------------------------- */

/* Orders of eviction. The first is the pool's own. */
typedef int32_t tl_policy;
enum {
    TL_POLICY_LRU = 0,      /* least recently used; a prefix is newer than what follows it */
    TL_POLICY_FIFO = 1,     /* oldest computed, whatever was hit since */
    TL_POLICY_LFU = 2,      /* least often used since it is there, then least recently */
    TL_POLICY_POSITION = 3, /* deepest in its prompt (in powers of two), then least recently used */
    TL_POLICY_S3FIFO = 4,   /* S3-FIFO: a small queue, a main queue, a ghost of what just left */
    TL_POLICY_TINYLFU = 5,  /* W-TinyLFU: a window, and admission by frequency */
    TL_POLICY_OPTIMAL = 6,  /* Belady: the one whose next use is farthest; no order does better */
    TL_N_POLICIES = 7
};

/*
 * A trace: request r uses blocks[starts[r]] .. blocks[starts[r + 1] - 1], in this order. Blocks are
 * numbered from 0 to n_blocks - 1, and a number stands for a block together with everything before
 * it: parents[b] is the block before b, or UINT32_MAX where b begins a prompt.
 */
typedef struct {
    const uint32_t *blocks;
    const uint64_t *starts; /* n_requests + 1 of them, from 0 on, never falling */
    const uint32_t *parents;
    uint64_t n_requests;
    uint32_t n_blocks;
} tl_trace;

/*
 * Serves the requests one after the other from a cache of `capacity` blocks, and counts in *hits
 * the blocks that led a request and were there, over the requests from first_counted on; without
 * match_last, not the last block of a request. A request never evicts its own blocks (but under
 * FIFO); of one that is longer than the cache the beginning stays.
 *
 * TL_EINVAL: a NULL argument, an unknown policy, capacity 0, starts that fall, a block or parent
 * out of range, a block that follows another block than its parent, a request of 2^32 - 1 and
 * later; TL_ENOMEM. *hits is 0 on failure. Time O(log n) a block (FIFO, S3-FIFO: O(1)).
 */
TL_API tl_status tl_policy_hits(tl_policy policy, const tl_trace *trace, uint32_t capacity,
                                uint64_t first_counted, int match_last, uint64_t *hits);

#ifdef __cplusplus
}
#endif

#endif /* TINYLLM_REPLAY_H */
