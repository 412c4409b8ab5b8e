/*
 * threads.c - tl_pool: threads that sleep until there is work.
 *
 * A job is a function and a count. run publishes it under the lock, wakes as many threads as can be
 * of use, and takes numbers from the counter like everybody else. When the counter is used up, run
 * closes the job and waits for the threads that are inside, and only for those: a thread that the
 * system has not woken by then finds the job closed and goes back to sleep, so that a busy machine
 * does not delay a caller who needs no help any more.
 */
#include "kernels/threads.h"

#include "runtime/internal.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#ifdef __linux__
#include <sched.h>
#endif

#define SCRATCH_MIN        ((size_t)1 << 20)
#define SCRATCH_FOR_THREAD ((size_t)256 << 10)

struct tl_pool {
    uint32_t n_threads; /* the caller included */
    unsigned forks;     /* at create; another number means: not our threads */
    void *scratch;
    size_t scratch_bytes;

    pthread_mutex_t callers; /* held from enter to leave */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t work, done;
    uint64_t job;    /* the number of the latest job */
    uint32_t inside; /* threads at work on it, the caller not counted */
    int open;        /* more may come in */
    int ending;
    tl_pool_fn *fn;
    void *arg;
    size_t n;

    _Atomic size_t next;
    pthread_t threads[]; /* n_threads - 1 */
};

/* ---- fork ---------------------------------------------------------------------------------- */

static _Atomic unsigned forks;

static void count_fork(void) {
    atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
}

static void watch_forks(void) {
    (void)pthread_atfork(NULL, NULL, count_fork);
}

static int is_ours(const tl_pool *tp) {
    return tp->forks == atomic_load_explicit(&forks, memory_order_relaxed);
}

/* ---- work ---------------------------------------------------------------------------------- */

static void take_numbers(tl_pool *tp, size_t n, tl_pool_fn *fn, void *arg) {
    for (;;) {
        const size_t i = atomic_fetch_add_explicit(&tp->next, 1, memory_order_relaxed);
        if (i >= n) {
            return;
        }
        fn(arg, i);
    }
}

static void *thread_main(void *arg) {
    tl_pool *tp = arg;
    uint64_t seen = 0;
    pthread_mutex_lock(&tp->lock);
    for (;;) {
        while (!tp->ending && (!tp->open || tp->job == seen)) {
            pthread_cond_wait(&tp->work, &tp->lock);
        }
        if (tp->ending) {
            break;
        }
        seen = tp->job;
        tp->inside++;
        const size_t n = tp->n;
        tl_pool_fn *fn = tp->fn;
        void *fn_arg = tp->arg;
        pthread_mutex_unlock(&tp->lock);
        take_numbers(tp, n, fn, fn_arg);
        pthread_mutex_lock(&tp->lock);
        if (--tp->inside == 0) {
            pthread_cond_signal(&tp->done);
        }
    }
    pthread_mutex_unlock(&tp->lock);
    return NULL;
}

void tl_pool_run(tl_pool *tp, size_t n, tl_pool_fn *fn, void *arg) {
    if (n == 0) {
        return;
    }
    const size_t of_use = n - 1 < tp->n_threads - 1 ? n - 1 : tp->n_threads - 1;
    pthread_mutex_lock(&tp->lock);
    tp->job++;
    tp->fn = fn;
    tp->arg = arg;
    tp->n = n;
    tp->open = 1;
    atomic_store_explicit(&tp->next, 0, memory_order_relaxed);
    for (size_t i = 0; i < of_use; i++) {
        pthread_cond_signal(&tp->work);
    }
    pthread_mutex_unlock(&tp->lock);

    take_numbers(tp, n, fn, arg);

    pthread_mutex_lock(&tp->lock);
    tp->open = 0;
    while (tp->inside > 0) {
        pthread_cond_wait(&tp->done, &tp->lock);
    }
    pthread_mutex_unlock(&tp->lock);
}

int tl_pool_enter(tl_pool *tp) {
    if (tp == NULL || tp->n_threads == 1 || !is_ours(tp)) {
        return 0;
    }
    pthread_mutex_lock(&tp->callers);
    return 1;
}

void tl_pool_leave(tl_pool *tp) {
    pthread_mutex_unlock(&tp->callers);
}

void *tl_pool_scratch(tl_pool *tp, size_t *n_bytes) {
    *n_bytes = tp->scratch_bytes;
    return tp->scratch;
}

/* ---- life ---------------------------------------------------------------------------------- */

static uint32_t processors(void) {
    long n;
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        n = CPU_COUNT(&set);
    } else
#endif
    {
        n = sysconf(_SC_NPROCESSORS_ONLN);
    }
    return n < 1 ? 1 : n > (long)TL_POOL_MAX_THREADS ? TL_POOL_MAX_THREADS : (uint32_t)n;
}

static void end_threads(tl_pool *tp, uint32_t n) {
    pthread_mutex_lock(&tp->lock);
    tp->ending = 1;
    pthread_cond_broadcast(&tp->work);
    pthread_mutex_unlock(&tp->lock);
    for (uint32_t i = 0; i < n; i++) {
        pthread_join(tp->threads[i], NULL);
    }
}

static void free_memory(tl_pool *tp) {
    tl_free(tp->scratch);
    tl_free(tp);
}

tl_status tl_pool_create(uint32_t n_threads, tl_pool **out) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (out == NULL) {
        return tl_fail(TL_EINVAL, "tl_pool_create: out is NULL");
    }
    *out = NULL;
    if (n_threads > TL_POOL_MAX_THREADS) {
        return tl_fail(TL_EINVAL, "tl_pool_create: n_threads: expected at most %u, found %u",
                       TL_POOL_MAX_THREADS, n_threads);
    }
    (void)pthread_once(&once, watch_forks);
    const uint32_t n = n_threads == 0 ? processors() : n_threads;
    tl_pool *tp = tl_alloc(sizeof *tp + (n - 1) * sizeof(pthread_t), 64);
    if (tp == NULL) {
        return TL_ENOMEM; /* tl_alloc has said so */
    }
    memset(tp, 0, sizeof *tp);
    tp->n_threads = n;
    tp->forks = atomic_load_explicit(&forks, memory_order_relaxed);
    if (n > 1) {
        tp->scratch_bytes = n * SCRATCH_FOR_THREAD;
        if (tp->scratch_bytes < SCRATCH_MIN) {
            tp->scratch_bytes = SCRATCH_MIN;
        }
        tp->scratch = tl_alloc(tp->scratch_bytes, 64);
        if (tp->scratch == NULL) {
            tl_free(tp);
            return TL_ENOMEM;
        }
    }
    pthread_mutex_init(&tp->callers, NULL);
    pthread_mutex_init(&tp->lock, NULL);
    pthread_cond_init(&tp->work, NULL);
    pthread_cond_init(&tp->done, NULL);

    sigset_t all, before; /* a signal is for the program's own threads to handle */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    uint32_t started = 0;
    while (started < n - 1 && pthread_create(&tp->threads[started], NULL, thread_main, tp) == 0) {
        started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started < n - 1) {
        end_threads(tp, started);
        free_memory(tp);
        return tl_fail(TL_ENOMEM, "tl_pool_create: the system started %u threads of %u", started,
                       n - 1);
    }
    *out = tp;
    return TL_OK;
}

void tl_pool_destroy(tl_pool *tp) {
    if (tp == NULL) {
        return;
    }
    if (is_ours(tp)) { /* else there are no threads to end, and a lock may be held for ever */
        end_threads(tp, tp->n_threads - 1);
        pthread_cond_destroy(&tp->work);
        pthread_cond_destroy(&tp->done);
        pthread_mutex_destroy(&tp->lock);
        pthread_mutex_destroy(&tp->callers);
    }
    free_memory(tp);
}

uint32_t tl_pool_threads(const tl_pool *tp) {
    return tp == NULL ? 1 : tp->n_threads;
}
