/*
 * tinyllm/threads.h - a pool of threads for the kernels of attention.h.
 *
 * A kernel cuts its work into pieces that do not depend on the number of threads and hands them
 * out one by one; the caller works too. Results therefore never depend on the pool, and NULL
 * instead of one means: the caller alone.
 *
 * Threads: one pool may be used from many threads; their calls follow one another. Between calls
 * the pool's threads sleep. They run nothing but kernels and block all signals.
 * fork: the pool's threads exist in the process that made it. In a child the caller does all the
 * work itself, with the same results, and destroy gives back what it can.
 */
#ifndef TINYLLM_THREADS_H
#define TINYLLM_THREADS_H

#include "tinyllm/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TL_POOL_MAX_THREADS 1024u

typedef struct tl_pool tl_pool;

/*
 * A pool in which n_threads work, the caller among them: n_threads - 1 are started. 0 means one
 * for each processor that the process may use. *out is NULL on failure and nothing is leaked.
 * TL_EINVAL: out NULL, more than TL_POOL_MAX_THREADS. TL_ENOMEM: no memory, or the system refused
 * to start a thread.
 */
TL_API tl_status tl_pool_create(uint32_t n_threads, tl_pool **out);

/* Ends the threads and frees the pool. Nobody may be using it. NULL does nothing. */
TL_API void tl_pool_destroy(tl_pool *tp);

/* How many threads work, the caller included; 1 for NULL. */
TL_API uint32_t tl_pool_threads(const tl_pool *tp);

#ifdef __cplusplus
}
#endif

#endif /* TINYLLM_THREADS_H */
