/*
 * soak_map.c - the prefix index under the churn of a pool that is always full: every step evicts,
 * registers, hits or misses. A table that collects tombstones gets slower and slower here and in
 * the end loops for ever; this program must end, and shows its slowest single operation.
 *
 *     soak_map [OPERATIONS]      default 100,000,000, split over the pool sizes
 *
 * Every operation is timed. On a machine that runs other things, the slowest one is whichever was
 * interrupted; so the same operations run twice, and "slowest twice" is the largest of the smaller
 * times of each operation: interruptions do not hit the same operation again, an algorithm does.
 */
#include "tinyllm/kv_pool_ext.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SLOW_NS = 4000, MAX_SLOW = 1 << 20, BUCKETS = 40 };

typedef struct {
    uint64_t op;
    uint32_t ns;
} slow_op;

typedef struct {
    uint64_t histogram[BUCKETS]; /* by the logarithm of the nanoseconds */
    uint64_t slowest, sum;
    slow_op *slow;
    size_t n_slow;
} timing;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t next_random(uint64_t *s) {
    uint64_t z = (*s += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void die(const char *what) {
    fprintf(stderr, "soak_map: %s: %s\n", what, tl_last_error());
    exit(1);
}

/* The hash of the i-th block ever registered. */
static uint64_t name_of(uint64_t i) {
    uint64_t s = i;
    const uint64_t h = next_random(&s);
    return h ? h : 1;
}

static void record(timing *t, uint64_t op, uint64_t ns) {
    unsigned bucket = 0;
    while (bucket + 1 < BUCKETS && ns >> bucket > 1)
        bucket++;
    t->histogram[bucket]++;
    t->sum += ns;
    if (ns > t->slowest)
        t->slowest = ns;
    if (ns > SLOW_NS && t->n_slow < MAX_SLOW)
        t->slow[t->n_slow++] = (slow_op){op, ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns};
}

/* One pass of n operations over a full pool. Deterministic, so the second pass is the first. */
static void pass(uint32_t n_blocks, uint64_t n_ops, timing *t) {
    const tl_kv_cfg cfg = {n_blocks, 1, 1, 1, 1, TL_F16, TL_KV_FORMAT_V1};
    tl_kv_pool *p;
    if (tl_kv_pool_create(&cfg, &p) != TL_OK)
        die("create");
    uint64_t rng = n_blocks, registered = 0;
    for (uint64_t op = 0; op < n_ops; op++) {
        const uint64_t r = next_random(&rng);
        uint32_t id = 0;
        tl_status status;
        const uint64_t start = now_ns();
        uint64_t end;
        switch (r & 3) {
        default: /* a new block: evicts the oldest once the pool is full */
            status = tl_kv_alloc(p, 1, &id);
            if (status == TL_OK)
                status = tl_kv_set_fill(p, id, 1);
            if (status == TL_OK)
                status = tl_kv_register(p, id, name_of(registered));
            if (status == TL_OK)
                status = tl_kv_unref(p, id);
            end = now_ns();
            registered++;
            if (status != TL_OK)
                die("evict and register");
            break;
        case 2: /* a name that is probably there: it becomes the newest */
            if (registered == 0)
                continue;
            status =
                tl_kv_lookup(p, name_of(registered - 1 - (r >> 32) % n_blocks % registered), &id);
            if (status == TL_OK)
                status = tl_kv_unref(p, id);
            end = now_ns();
            if (status != TL_OK && status != TL_ENOTFOUND)
                die("hit");
            break;
        case 3: /* a name that never was */
            status = tl_kv_lookup(p, ~r | 1, &id);
            end = now_ns();
            if (status == TL_OK)
                tl_kv_unref(p, id);
        }
        record(t, op, end - start);
    }
    if (tl_kv_check(p) != TL_OK)
        die("check");
    tl_kv_pool_destroy(p);
}

/* The time below which a share of the operations lies: the upper end of its bucket. */
static uint64_t quantile(const timing *t, uint64_t n, double share) {
    uint64_t seen = 0;
    for (unsigned i = 0; i < BUCKETS; i++) {
        seen += t->histogram[i];
        if ((double)seen >= share * (double)n)
            return (uint64_t)2 << i;
    }
    return UINT64_MAX;
}

int main(int argc, char **argv) {
    static const uint32_t sizes[] = {15, 1000, 100000, 1000000};
    enum { N = sizeof sizes / sizeof sizes[0] };
    const uint64_t n_ops = (argc > 1 ? strtoull(argv[1], NULL, 0) : 100000000u) / N;
    printf("%" PRIu64 " operations a pool size, each timed, two passes\n", n_ops);
    printf("%10s %9s %9s %9s %9s %12s %14s\n", "blocks", "mean ns", "p50 <", "p99 <", "p99.99 <",
           "slowest us", "slowest twice");
    for (int i = 0; i < N; i++) {
        timing t[2];
        for (int k = 0; k < 2; k++) {
            memset(&t[k], 0, sizeof t[k]);
            t[k].slow = malloc(MAX_SLOW * sizeof(slow_op));
            if (!t[k].slow)
                die("out of memory");
            pass(sizes[i], n_ops, &t[k]);
        }
        uint32_t twice = 0;
        for (size_t a = 0, b = 0; a < t[0].n_slow && b < t[1].n_slow;) {
            if (t[0].slow[a].op == t[1].slow[b].op) {
                const uint32_t less =
                    t[0].slow[a].ns < t[1].slow[b].ns ? t[0].slow[a].ns : t[1].slow[b].ns;
                twice = less > twice ? less : twice;
                a++;
                b++;
            } else if (t[0].slow[a].op < t[1].slow[b].op) {
                a++;
            } else {
                b++;
            }
        }
        printf("%10" PRIu32 " %9.0f %9" PRIu64 " %9" PRIu64 " %9" PRIu64 " %12.1f ", sizes[i],
               (double)t[0].sum / (double)(n_ops ? n_ops : 1), quantile(&t[0], n_ops, 0.5),
               quantile(&t[0], n_ops, 0.99), quantile(&t[0], n_ops, 0.9999),
               (double)(t[0].slowest > t[1].slowest ? t[0].slowest : t[1].slowest) / 1e3);
        if (twice == 0)
            printf("%14s\n", "under 4 us");
        else
            printf("%11.1f us\n", twice / 1e3);
        fflush(stdout);
        free(t[0].slow);
        free(t[1].slow);
    }
    return 0;
}
