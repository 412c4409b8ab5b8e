/*
 * tinyllm.h - everything libtinyllm offers, in one include.
 *
 *   abi.h          status codes, dtypes, the error slot, the allocator hook
 *   ds.h           tl_vec, tl_map (Swiss table), tl_lru
 *   numerics.h     FNV-1a 64, float16 <-> float32
 *   kv_pool.h      the paged KV block pool: exactly the interface of format v1
 *   kv_seq.h       sequences over a pool: prompts in, block tables out, verified prefix hits
 *   threads.h      a pool of threads for the kernels
 *   attention.h    attention over the blocks of a pool, decode and prefill
 *   kv_pool_ext.h  what this implementation offers beyond it: options, batches, checks
 *   replay.h       what a stream of prompts would have hit, in pools of any size and order
 */
#ifndef TINYLLM_H
#define TINYLLM_H

#include "tinyllm/abi.h"
#include "tinyllm/attention.h"
#include "tinyllm/ds.h"
#include "tinyllm/kv_pool.h"
#include "tinyllm/kv_pool_ext.h"
#include "tinyllm/kv_seq.h"
#include "tinyllm/numerics.h"
#include "tinyllm/replay.h"
#include "tinyllm/threads.h"

#endif /* TINYLLM_H */
