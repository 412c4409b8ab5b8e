/*
 * test_threads.c - what may happen at once: pure functions from any thread, the first call
 * included; independent pools; one pool behind a lock. Meant for ThreadSanitizer, worth running
 * without. A thread reports what went wrong as a text; checks belong to the thread of the test.
 */
#include "tinyllm/ds.h"
#include "tinyllm/kv_pool_ext.h"
#include "tinyllm/numerics.h"
#include "tl_test.h"
#include "tl_test_kv.h"
#include "tl_test_wire.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 8 };

typedef struct {
    pthread_t thread;
    uint32_t number;
    const char *problem; /* NULL: none */
    tl_kv_pool *pool;
    pthread_mutex_t *lock;
    pthread_barrier_t *start;
} worker;

static void run_workers(void *(*body)(void *), tl_kv_pool *pool) {
    worker w[THREADS];
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_barrier_t start;
    TL_EQ(pthread_barrier_init(&start, NULL, THREADS), 0);
    for (uint32_t i = 0; i < THREADS; i++) {
        w[i] = (worker){.number = i, .pool = pool, .lock = &lock, .start = &start};
        TL_EQ(pthread_create(&w[i].thread, NULL, body, &w[i]), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++)
        TL_EQ(pthread_join(w[i].thread, NULL), 0);
    TL_EQ(pthread_barrier_destroy(&start), 0);
    for (uint32_t i = 0; i < THREADS; i++)
        if (w[i].problem)
            tl_test_fail(__FILE__, __LINE__, "thread %u: %s", i, w[i].problem);
}

/* ---- first calls --------------------------------------------------------------------------- */

static void *call_everything_pure(void *arg) {
    worker *w = arg;
    uint8_t data[2000];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 7);
    const uint32_t want = wire_crc(data, sizeof data);
    float wide[64];
    uint16_t half[64];
    for (uint16_t i = 0; i < 64; i++)
        half[i] = (uint16_t)(i * 977);
    pthread_barrier_wait(w->start);
    if (tl_crc32c(data, sizeof data, 0) != want)
        w->problem = "the CRC is wrong";
    tl_f16_to_f32_n(wide, half, 64);
    for (int i = 0; i < 64; i++)
        if (tl_f32_to_f16(wide[i]) != half[i] && (half[i] & 0x7C00) != 0x7C00)
            w->problem = "a float16 is wrong";
    tl_map *m = NULL; /* draws the secret of the process */
    if (tl_map_create(10, &m) != TL_OK || tl_map_put(m, 1, 2) != TL_OK || !tl_map_get(m, 1, NULL))
        w->problem = "a map is wrong";
    tl_map_destroy(m);
    if (tl_kv_alloc(NULL, 1, NULL) != TL_EINVAL || tl_last_error()[0] == 0)
        w->problem = "the error slot is wrong";
    return NULL;
}

/* The first test of the program, so that these are first calls. */
TL_TEST(first_calls_may_come_from_many_threads) {
    run_workers(call_everything_pure, NULL);
}

/* ---- pools of their own -------------------------------------------------------------------- */

static const char *live_a_little(tl_kv_pool *p, uint64_t seed) {
    enum { N = 16, B = 2 };
    uint32_t ids[4], got;
    uint64_t rng = seed;
    uint8_t env[28 + 4 * (12 + 16) + 4];
    size_t written;
    for (int round = 0; round < 2000; round++) {
        const uint32_t n = 1 + tl_test_below(&rng, 4);
        if (tl_kv_alloc(p, n, ids) != TL_OK)
            return "alloc failed";
        for (uint32_t i = 0; i < n; i++) {
            memset(tl_kv_block_ptr(p, ids[i], 0, 0), (int)ids[i], tl_kv_block_bytes(p));
            if (tl_kv_set_fill(p, ids[i], B) != TL_OK)
                return "set_fill failed";
            (void)tl_kv_register(p, ids[i], 1 + tl_test_below(&rng, 40)); /* or TL_EBUSY */
        }
        if (tl_kv_export(p, ids, n, env, sizeof env, &written) != TL_OK)
            return "export failed";
        for (uint32_t i = 0; i < n; i++) {
            const uint8_t *x = tl_kv_block_ptr(p, ids[i], 0, 1);
            if (*x != (uint8_t)ids[i] || tl_kv_unref(p, ids[i]) != TL_OK)
                return "a held block was changed or lost";
        }
        if (tl_kv_import(p, env, written, ids) != TL_OK || tl_kv_unref_many(p, ids, n) != TL_OK)
            return "import failed";
        if (tl_kv_lookup(p, 1 + tl_test_below(&rng, 40), &got) == TL_OK &&
            tl_kv_unref(p, got) != TL_OK)
            return "a hit could not be given back";
    }
    if (tl_kv_check(p) != TL_OK)
        return "the pool is inconsistent";
    return kv_stats(p).used == 0 ? NULL : "blocks are still in use";
}

static void *own_pool(void *arg) {
    worker *w = arg;
    const tl_kv_cfg cfg = {16, 2, 1, 1, 2, TL_F16, 1};
    pthread_barrier_wait(w->start);
    for (int i = 0; i < 3 && !w->problem; i++) {
        tl_kv_pool *p;
        if (tl_kv_pool_create(&cfg, &p) != TL_OK) {
            w->problem = "create failed";
            return NULL;
        }
        w->problem = live_a_little(p, w->number * 10 + (uint64_t)i);
        tl_kv_pool_destroy(p);
    }
    return NULL;
}

TL_TEST(independent_pools_live_in_threads_of_their_own) {
    run_workers(own_pool, NULL);
}

/* ---- one pool, one lock -------------------------------------------------------------------- */

#define LOCKED(call) (pthread_mutex_lock(w->lock), r = (call), pthread_mutex_unlock(w->lock), r)

/* Bookkeeping under the lock; the blocks a thread holds are its own, and written without it. */
static void *shared_pool(void *arg) {
    worker *w = arg;
    tl_status r;
    uint64_t rng = w->number;
    pthread_barrier_wait(w->start);
    for (int round = 0; round < 3000; round++) {
        uint32_t id, hit;
        const uint64_t hash = 1 + tl_test_below(&rng, 60);
        if (LOCKED(tl_kv_lookup(w->pool, hash, &hit)) == TL_OK) {
            const uint64_t *x = tl_kv_block_ptr(w->pool, hit, 0, 0);
            if (x[0] != hash || x[1] != hash)
                w->problem = "a hit does not hold what its hash says";
            if (LOCKED(tl_kv_unref(w->pool, hit)) != TL_OK)
                w->problem = "a hit could not be given back";
            continue;
        }
        if (LOCKED(tl_kv_alloc(w->pool, 1, &id)) != TL_OK)
            continue; /* the others hold everything right now */
        uint64_t *x = tl_kv_block_ptr(w->pool, id, 0, 0);
        x[0] = x[1] = hash;
        if (LOCKED(tl_kv_set_fill(w->pool, id, 2)) != TL_OK)
            w->problem = "set_fill failed";
        r = LOCKED(tl_kv_register(w->pool, id, hash));
        if (r != TL_OK && r != TL_EBUSY)
            w->problem = "register failed";
        if (x[0] != hash || x[1] != hash)
            w->problem = "a held block was changed";
        if (LOCKED(tl_kv_unref(w->pool, id)) != TL_OK)
            w->problem = "a block could not be given back";
    }
    return NULL;
}

TL_TEST(one_pool_behind_a_lock_serves_many_threads) {
    tl_kv_pool *p = kv_new(24, 2, 1, 1, 2); /* 16 bytes a block */
    run_workers(shared_pool, p);
    TL_OK_(tl_kv_check(p));
    TL_EQ(kv_stats(p).used, 0);
    TL_CHECK(kv_stats(p).cached > 0);
    TL_CHECK(kv_stats(p).evictions > 0);
    tl_kv_pool_destroy(p);
}
