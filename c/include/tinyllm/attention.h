/*
 * tinyllm/attention.h (L9.4) - attention that reads K and V where they lie: in the blocks of a
 * pool, through a block table, without a copy.
 *
 *     out[h] = sum over j of w_j * V[h / (H / Hkv)][j],    w = softmax(scale * q[h] . K[...][j])
 *
 * over the keys j that the query sees. A query at position p sees the keys 0..p, and with a window
 * w > 0 only those above p - w. K and V are the pool's float16; everything else is float32.
 *
 * The same bits, whatever is around. A row of the result is a function of its query, of the K and
 * V it sees and of scale: not of the other rows of the batch or of its place among them, of the
 * number of threads, of block ids, of the size of a block or of the form (the row of a prefill is
 * the row of a decode at that length). On one machine with one build: another processor may have
 * another variant, which rounds differently. docs/attention.md derives how.
 *
 * Infinite and NaN values in K, V or q give what the formula gives for them; values at positions
 * that a query does not see are never looked at.
 *
 * Threads: calls may run at once, on one pool of blocks too, while others alloc, ref and unref:
 * only the configuration and the slab are read. Blocks that are read must be held, and nobody may
 * write the positions that are read. Nothing is allocated. tp may be NULL (threads.h).
 */
#ifndef TINYLLM_ATTENTION_H
#define TINYLLM_ATTENTION_H

#include "tinyllm/kv_pool.h"
#include "tinyllm/threads.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * One query for each of B sequences, each at its last position.
 *
 *   q, out         [B][H][D]           float32; they must not overlap
 *   block_tables   [B][max_blocks]     sequence b reads the blocks block_tables[b * max_blocks + i]
 *                                      for i < ceil(ctx_lens[b] / block_tokens); the rest of a row
 *                                      is not looked at
 *   ctx_lens       [B]                 positions of the sequence, the query's own included: it
 *                                      stands at ctx_lens[b] - 1
 *   scale                              of the scores, usually 1 / sqrt(D); at most 2.3e38 in size
 *   window                             0 and below: none
 *
 * TL_EINVAL: a NULL among the pointers (but tp), B or max_blocks negative, H below 1, scale NaN or
 * too large, q and out overlap, layer out of range, a ctx_lens below 1 or of more than max_blocks
 * blocks, an id out of range. TL_ESHAPE: Hkv or D unlike the pool's, H no multiple of Hkv.
 * TL_EUNSUPPORTED: the pool has no memory of its own to read. On failure out is untouched. B 0 is
 * TL_OK, and q, block_tables, ctx_lens and out may be NULL then.
 */
TL_API tl_status tl_paged_attn_decode_f32(const float *q, const tl_kv_pool *kv, uint32_t layer,
                                          const int32_t *block_tables, int64_t max_blocks,
                                          const int32_t *ctx_lens, float *out, int64_t B, int64_t H,
                                          int64_t Hkv, int64_t D, float scale, int64_t window,
                                          tl_pool *tp);

/*
 * The last T positions of one sequence: query t stands at ctx_len - T + t and sees no key behind
 * itself. K and V of all ctx_len positions are in the blocks already.
 *
 *   q, out        [T][H][D]    float32; they must not overlap
 *   block_table   [n_blocks]   at least ceil(ctx_len / block_tokens) of them
 *
 * The statuses of decode; TL_EINVAL also for T negative or above ctx_len. T 0 is TL_OK.
 */
TL_API tl_status tl_paged_attn_prefill_f32(const float *q, const tl_kv_pool *kv, uint32_t layer,
                                           const int32_t *block_table, int64_t n_blocks,
                                           int64_t ctx_len, float *out, int64_t T, int64_t H,
                                           int64_t Hkv, int64_t D, float scale, int64_t window,
                                           tl_pool *tp);

#ifdef __cplusplus
}
#endif

#endif /* TINYLLM_ATTENTION_H */
