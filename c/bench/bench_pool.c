/*
 * bench_pool.c - what the pool's operations cost, at 1,000 to 10 million blocks.
 *
 *   bench_pool [--json]      one line a measurement, or one JSON object
 *
 * Links the shared library, as a user does. Each figure is the median of ROUNDS rounds, in
 * nanoseconds a block. The machine is shared and noisy: compare figures of one run.
 */
#include <tinyllm.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUNDS     9u
#define OPS        (1u << 20) /* blocks handled in a round */
#define BATCH      16u
#define LOOK_BATCH 256u

static int json;
static int n_printed;

static void die(const char *what) {
    fprintf(stderr, "bench_pool: %s: %s\n", what, tl_last_error());
    exit(1);
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, size_t n) {
    qsort(x, n, sizeof *x, by_value);
    return x[n / 2];
}

static void report(const char *name, uint32_t n_blocks, double value, const char *unit) {
    if (json) {
        printf("%s\n  \"%s/%u\": {\"value\": %.3f, \"unit\": \"%s\"}", n_printed ? "," : "", name,
               n_blocks, value, unit);
    } else {
        printf("%-28s %10u blocks %10.2f %s\n", name, n_blocks, value, unit);
        fflush(stdout);
    }
    n_printed++;
}

static uint64_t rng_state = 88172645463325252u;
static uint64_t rng(void) { /* xorshift64: fast, and the same in every run */
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    return rng_state ^= rng_state << 17;
}

static tl_kv_pool *make(uint32_t n_blocks) {
    /* tiny payloads: the records and the index are what is measured */
    const tl_kv_cfg cfg = {n_blocks, 1, 1, 1, 1, TL_F16, TL_KV_FORMAT_V1};
    tl_kv_pool *p;
    if (tl_kv_pool_create(&cfg, &p) != TL_OK) {
        die("create");
    }
    return p;
}

static void bench_alloc(uint32_t n_blocks, int batched) {
    tl_kv_pool *p = make(n_blocks);
    double ns[ROUNDS];
    for (uint32_t r = 0; r < ROUNDS; r++) {
        const double t0 = now_ns();
        for (uint32_t i = 0; i < OPS; i += BATCH) {
            uint32_t ids[BATCH];
            if (tl_kv_alloc(p, BATCH, ids) != TL_OK) {
                die("alloc");
            }
            if (batched) {
                (void)tl_kv_unref_many(p, ids, BATCH);
            } else {
                for (uint32_t k = BATCH; k-- > 0;) {
                    (void)tl_kv_unref(p, ids[k]);
                }
            }
        }
        ns[r] = (now_ns() - t0) / OPS;
    }
    report(batched ? "alloc16_unref_many" : "alloc16_unref", n_blocks, median(ns, ROUNDS), "ns");
    tl_kv_pool_destroy(p);
}

/* Fills the pool: every block registered under hashes[i] and cached. */
static uint64_t *fill(tl_kv_pool *p, uint32_t n_blocks) {
    uint64_t *hashes = malloc((size_t)n_blocks * sizeof *hashes);
    if (hashes == NULL) {
        die("malloc");
    }
    for (uint32_t i = 0; i < n_blocks; i++) {
        uint32_t id;
        hashes[i] = rng() | 1u;
        if (tl_kv_alloc(p, 1, &id) != TL_OK || tl_kv_set_fill(p, id, 1) != TL_OK ||
            tl_kv_register(p, id, hashes[i]) != TL_OK || tl_kv_unref(p, id) != TL_OK) {
            die("fill");
        }
    }
    return hashes;
}

static void bench_lookup(uint32_t n_blocks) {
    tl_kv_pool *p = make(n_blocks);
    uint64_t *hashes = fill(p, n_blocks);
    double single[ROUNDS], batch[ROUNDS], miss[ROUNDS];
    uint64_t *want = malloc(OPS * sizeof *want);
    int64_t *got = malloc(LOOK_BATCH * sizeof *got);
    uint32_t *ids = malloc(LOOK_BATCH * sizeof *ids);
    if (want == NULL || got == NULL || ids == NULL) {
        die("malloc");
    }
    for (uint32_t r = 0; r < ROUNDS; r++) {
        for (uint32_t i = 0; i < OPS; i++) {
            want[i] = hashes[rng() % n_blocks];
        }
        double t0 = now_ns();
        for (uint32_t i = 0; i < OPS; i++) {
            uint32_t id;
            if (tl_kv_lookup(p, want[i], &id) != TL_OK || tl_kv_unref(p, id) != TL_OK) {
                die("lookup");
            }
        }
        single[r] = (now_ns() - t0) / OPS;
        t0 = now_ns();
        for (uint32_t i = 0; i < OPS; i += LOOK_BATCH) {
            if (tl_kv_lookup_many(p, want + i, LOOK_BATCH, got) != TL_OK) {
                die("lookup_many");
            }
            for (uint32_t k = 0; k < LOOK_BATCH; k++) {
                ids[k] = (uint32_t)got[k];
            }
            if (tl_kv_unref_many(p, ids, LOOK_BATCH) != TL_OK) {
                die("unref_many");
            }
        }
        batch[r] = (now_ns() - t0) / OPS;
        for (uint32_t i = 0; i < OPS; i++) {
            want[i] = rng() & ~(uint64_t)1; /* registered hashes are odd */
        }
        t0 = now_ns();
        for (uint32_t i = 0; i < OPS; i += LOOK_BATCH) {
            if (tl_kv_lookup_many(p, want + i, LOOK_BATCH, got) != TL_OK) {
                die("lookup_many");
            }
        }
        miss[r] = (now_ns() - t0) / OPS;
    }
    report("lookup_unref_one_by_one", n_blocks, median(single, ROUNDS), "ns");
    report("lookup_unref_batch256", n_blocks, median(batch, ROUNDS), "ns");
    report("lookup_miss_batch256", n_blocks, median(miss, ROUNDS), "ns");
    free(want);
    free(got);
    free(ids);
    free(hashes);
    tl_kv_pool_destroy(p);
}

/* A full pool of cached blocks under churn: take one (evicting), register it, give it back. */
static void bench_evict(uint32_t n_blocks) {
    tl_kv_pool *p = make(n_blocks);
    free(fill(p, n_blocks));
    /* Shuffle the LRU order, so that neighbours in it are not neighbours in memory. */
    double ns[ROUNDS], batch[ROUNDS];
    for (uint32_t i = 0; i < 2 * n_blocks && i < 4 * OPS; i++) {
        uint32_t ids[8];
        const uint32_t k = 1 + (uint32_t)(rng() % 8);
        if (k > n_blocks || tl_kv_alloc(p, k, ids) != TL_OK) {
            die("alloc");
        }
        for (uint32_t j = 0; j < k; j++) {
            if (tl_kv_set_fill(p, ids[j], 1) != TL_OK ||
                tl_kv_register(p, ids[j], rng() | 1u) != TL_OK) {
                die("register");
            }
        }
        for (uint32_t j = k; j-- > 0;) {
            (void)tl_kv_unref(p, ids[j]);
        }
    }
    for (uint32_t r = 0; r < ROUNDS; r++) {
        const double t0 = now_ns();
        for (uint32_t i = 0; i < OPS; i++) {
            uint32_t id;
            if (tl_kv_alloc(p, 1, &id) != TL_OK || tl_kv_set_fill(p, id, 1) != TL_OK ||
                tl_kv_register(p, id, rng() | 1u) != TL_OK || tl_kv_unref(p, id) != TL_OK) {
                die("evict cycle");
            }
        }
        ns[r] = (now_ns() - t0) / OPS;
        const double t1 = now_ns();
        for (uint32_t i = 0; i < OPS; i += BATCH) {
            uint32_t ids[BATCH], fills[BATCH];
            uint64_t hashes[BATCH];
            uint8_t registered[BATCH];
            for (uint32_t k = 0; k < BATCH; k++) {
                fills[k] = 1;
                hashes[k] = rng() | 1u;
            }
            if (tl_kv_alloc(p, BATCH, ids) != TL_OK ||
                tl_kv_set_fill_many(p, ids, fills, BATCH) != TL_OK ||
                tl_kv_register_many(p, ids, hashes, BATCH, registered) != TL_OK ||
                tl_kv_unref_many(p, ids, BATCH) != TL_OK) {
                die("evict cycle in batches");
            }
        }
        batch[r] = (now_ns() - t1) / OPS;
    }
    report("evict_register_unref", n_blocks, median(ns, ROUNDS), "ns");
    report("evict16_register_unref", n_blocks, median(batch, ROUNDS), "ns");
    tl_kv_pool_destroy(p);
}

static void bench_create(void) {
    double ms[3];
    size_t meta = 0;
    for (int r = 0; r < 3; r++) {
        const double t0 = now_ns();
        tl_kv_pool *p = make(10000000);
        ms[r] = (now_ns() - t0) / 1e6;
        meta = tl_kv_meta_bytes(p);
        tl_kv_pool_destroy(p);
    }
    report("create", 10000000, median(ms, 3), "ms");
    report("meta_bytes_per_block", 10000000, (double)meta / 1e7, "bytes");

    /* 20 GiB of SmolLM2-135M blocks: the slab's pages are not touched. */
    const tl_kv_cfg big = {58254, 16, 30, 3, 64, TL_F16, TL_KV_FORMAT_V1};
    for (int r = 0; r < 3; r++) {
        tl_kv_pool *p;
        const double t0 = now_ns();
        if (tl_kv_pool_create(&big, &p) != TL_OK) {
            die("create of 20 GiB");
        }
        ms[r] = (now_ns() - t0) / 1e6;
        tl_kv_pool_destroy(p);
    }
    report("create_20GiB", big.n_blocks, median(ms, 3), "ms");
}

int main(int argc, char **argv) {
    json = argc > 1 && strcmp(argv[1], "--json") == 0;
    if (json) {
        printf("{");
    }
    const uint32_t sizes[] = {1000, 100000, 1000000, 10000000};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        bench_alloc(sizes[i], 0);
        bench_alloc(sizes[i], 1);
    }
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        bench_lookup(sizes[i]);
    }
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        bench_evict(sizes[i]);
    }
    bench_create();
    if (json) {
        printf("\n}\n");
    }
    return 0;
}
