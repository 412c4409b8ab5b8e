/*
 * kv_hash.c - the block hashes of many sequences at once.
 *
 * One chain is a step for each byte, h = (h ^ byte) * prime, and each step waits for the one
 * before: 1 cycle for the XOR and 3 for the multiplication, although a multiplication could start
 * in every cycle. A block names its whole prefix, so the blocks of one prompt are a single chain
 * and nothing in it can run early. Different prompts are different chains: four of them side by
 * side fill the multiplier, and a block costs its number of multiplications instead of four times
 * that.
 *
 * The number: 8 for the parent and 3 for each token below 2^24, whose upper zero byte only
 * multiplies and is taken together with the byte before it (as in tl_kv_block_hash).
 */
#include "runtime/internal.h"
#include "tinyllm/kv_pool_ext.h"
#include "tinyllm/numerics.h"

#include <inttypes.h>

tl_status tl_kv_block_hashes(uint64_t parent, const uint32_t *toks, size_t n, uint32_t block_tokens,
                             uint64_t *out) {
    if (block_tokens == 0) {
        return tl_fail(TL_EINVAL, "tl_kv_block_hashes: block_tokens is 0");
    }
    const size_t n_full = n / block_tokens;
    if (n_full > 0 && (toks == NULL || out == NULL)) {
        return tl_fail(TL_EINVAL, "tl_kv_block_hashes: %s is NULL", toks == NULL ? "toks" : "out");
    }
    for (size_t i = 0; i < n_full; i++) {
        parent = tl_kv_block_hash(parent, toks + i * block_tokens, block_tokens);
        out[i] = parent;
    }
    return TL_OK;
}

/* A sequence on its way: h is the hash of the block before toks. */
typedef struct {
    const uint32_t *toks;
    uint64_t *out;
    uint64_t h;
    size_t n_blocks; /* to go */
} lane;

#define LANES        4u
#define EACH_LANE(X) X(0) X(1) X(2) X(3)

/* n_blocks blocks of each lane. */
static void run_lanes(lane *lanes, size_t n_blocks, uint32_t block_tokens) {
    const uint64_t p1 = TL_FNV1A64_PRIME, p2 = p1 * p1;
#define BEGIN(k)                                                                                   \
    const uint32_t *t##k = lanes[k].toks;                                                          \
    uint64_t *out##k = lanes[k].out;                                                               \
    uint64_t h##k = lanes[k].h;
    EACH_LANE(BEGIN)
    for (size_t b = 0; b < n_blocks; b++) {
#define START(k)                                                                                   \
    uint64_t parent##k = h##k;                                                                     \
    h##k = TL_FNV1A64_BASIS;
        EACH_LANE(START)
        for (int i = 0; i < 8; i++) {
#define PARENT(k)                                                                                  \
    h##k = (h##k ^ (parent##k & 255u)) * p1;                                                       \
    parent##k >>= 8;
            EACH_LANE(PARENT)
        }
        for (uint32_t i = 0; i < block_tokens; i++) {
#define LOW(k)                                                                                     \
    const uint32_t x##k = t##k[i];                                                                 \
    h##k = (h##k ^ (x##k & 255u)) * p1;
            EACH_LANE(LOW)
#define MIDDLE(k) h##k = (h##k ^ ((x##k >> 8) & 255u)) * p1;
            EACH_LANE(MIDDLE)
            if (TL_LIKELY((x0 | x1 | x2 | x3) < 1u << 24)) {
#define HIGH(k) h##k = (h##k ^ (x##k >> 16)) * p2;
                EACH_LANE(HIGH)
            } else {
#define HIGHEST(k)                                                                                 \
    h##k = (h##k ^ ((x##k >> 16) & 255u)) * p1;                                                    \
    h##k = (h##k ^ (x##k >> 24)) * p1;
                EACH_LANE(HIGHEST)
            }
        }
#define END(k)                                                                                     \
    h##k = h##k == 0 ? 1 : h##k;                                                                   \
    *out##k++ = h##k;                                                                              \
    t##k += block_tokens;
        EACH_LANE(END)
    }
#define STORE(k) lanes[k] = (lane){t##k, out##k, h##k, lanes[k].n_blocks - n_blocks};
    EACH_LANE(STORE)
}

tl_status tl_kv_block_hashes_batch(const tl_kv_prompt *prompts, size_t n, uint32_t block_tokens) {
    static const char who[] = "tl_kv_block_hashes_batch";
    if (block_tokens == 0) {
        return tl_fail(TL_EINVAL, "%s: block_tokens is 0", who);
    }
    if (prompts == NULL && n > 0) {
        return tl_fail(TL_EINVAL, "%s: prompts is NULL", who);
    }
    for (size_t i = 0; i < n; i++) {
        if (prompts[i].n >= block_tokens && (prompts[i].toks == NULL || prompts[i].out == NULL)) {
            return tl_fail(TL_EINVAL, "%s: %s of prompts[%zu] is NULL", who,
                           prompts[i].toks == NULL ? "toks" : "out", i);
        }
    }
    lane lanes[LANES];
    size_t n_lanes = 0, next = 0;
    for (;;) {
        for (; n_lanes < LANES && next < n; next++) {
            const tl_kv_prompt *q = &prompts[next];
            if (q->n >= block_tokens) {
                lanes[n_lanes++] = (lane){q->toks, q->out, q->parent, q->n / block_tokens};
            }
        }
        if (n_lanes < 2) {
            break;
        }
        size_t least = lanes[0].n_blocks;
        for (size_t k = 1; k < LANES; k++) {
            if (k >= n_lanes) { /* an idle lane does again what lane 0 does, for nothing */
                lanes[k] = lanes[0];
            }
            least = lanes[k].n_blocks < least ? lanes[k].n_blocks : least;
        }
        run_lanes(lanes, least, block_tokens);
        for (size_t k = n_lanes; k-- > 0;) {
            if (lanes[k].n_blocks == 0) {
                lanes[k] = lanes[--n_lanes];
            }
        }
    }
    return n_lanes == 0
               ? TL_OK
               : tl_kv_block_hashes(lanes[0].h, lanes[0].toks, lanes[0].n_blocks * block_tokens,
                                    block_tokens, lanes[0].out);
}
