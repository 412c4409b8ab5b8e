/*
 * threads.h - what the kernels ask of a tl_pool: to run a function for the numbers 0..n-1 on all of
 * its threads, and some memory to put pieces of a result in.
 *
 *     tl_pool_enter(tp);                   one caller at a time; the memory is its own until leave
 *     tl_pool_run(tp, n, fn, arg);         any number of times
 *     tl_pool_leave(tp);
 */
#ifndef TL_KERNELS_THREADS_H
#define TL_KERNELS_THREADS_H

#include "tinyllm/threads.h"

typedef void tl_pool_fn(void *arg, size_t i);

/* 0, and nothing to leave, when nobody but the caller would work: no pool, one thread, or a child
 * of fork. */
int tl_pool_enter(tl_pool *tp);
void tl_pool_leave(tl_pool *tp);

/* fn(arg, i) for each i below n, once each, in any order; returns when all are done. */
void tl_pool_run(tl_pool *tp, size_t n, tl_pool_fn *fn, void *arg);

/* 64-byte aligned; *n_bytes of it. */
void *tl_pool_scratch(tl_pool *tp, size_t *n_bytes);

#endif /* TL_KERNELS_THREADS_H */
