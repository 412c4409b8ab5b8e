/*
 * bench_seq.c - what a request costs the block manager: a 12,000-token prompt of blocks of 16,
 * nothing cached and all cached, and a decode step of 256 sequences; in a small and in a huge pool.
 *
 *   bench_seq [--json]
 *
 * Nanoseconds a block (prompt) or a step (decode), medians of ROUNDS.
 */
#include <tinyllm.h>
#include <tinyllm/kv_seq.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUNDS   101u
#define N_TOKENS 12000u
#define B        16u
#define N_SEQS   256u

static int json, n_printed;

static void die(const char *what) {
    fprintf(stderr, "bench_seq: %s: %s\n", what, tl_last_error());
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

static void report(const char *name, uint32_t n_blocks, double *x, const char *unit) {
    qsort(x, ROUNDS, sizeof *x, by_value);
    const double median = x[ROUNDS / 2];
    if (json) {
        printf("%s\n  \"%s/%u\": {\"value\": %.3f, \"unit\": \"%s\"}", n_printed++ ? "," : "", name,
               n_blocks, median, unit);
    } else {
        printf("%-28s %10u blocks %10.2f %s\n", name, n_blocks, median, unit);
    }
}

static void bench(uint32_t n_blocks, uint32_t n_background) {
    const tl_kv_cfg cfg = {n_blocks, B, 1, 1, 1, TL_F16, TL_KV_FORMAT_V1};
    const tl_kv_mgr_options opt = {
        .evict = tl_kv_evict, .find = tl_kv_find, .refs = tl_kv_refs, .prefetch = tl_kv_prefetch};
    tl_kv_pool *p;
    tl_kv_mgr *m;
    if (tl_kv_pool_create(&cfg, &p) != TL_OK || tl_kv_mgr_create(p, &opt, &m) != TL_OK) {
        die("create");
    }
    static uint32_t toks[N_TOKENS];
    uint32_t next = 1;
    tl_kv_seq s;
    for (uint32_t i = 0; i < n_background; i++) { /* live sequences that fill the pool */
        for (uint32_t k = 0; k < 1000; k++) {
            toks[k] = next++ % 50000;
        }
        toks[0] = i;
        if (tl_kv_seq_allocate(m, toks, 1000, NULL, &s) != TL_OK ||
            tl_kv_seq_commit(m, s, 1000) != TL_OK) {
            die("background");
        }
    }
    const double n = N_TOKENS / B;
    double cold[ROUNDS], warm[ROUNDS], step[ROUNDS];
    for (uint32_t r = 0; r < ROUNDS; r++) {
        for (uint32_t k = 0; k < N_TOKENS; k++) {
            toks[k] = (next++ * 2654435761u) % 50000;
        }
        double t0 = now_ns();
        if (tl_kv_seq_allocate(m, toks, N_TOKENS, NULL, &s) != TL_OK ||
            tl_kv_seq_commit(m, s, N_TOKENS) != TL_OK || tl_kv_seq_free(m, s) != TL_OK) {
            die("cold");
        }
        double t1 = now_ns();
        cold[r] = (t1 - t0) / n;
        if (tl_kv_seq_allocate(m, toks, N_TOKENS, NULL, &s) != TL_OK ||
            tl_kv_seq_commit(m, s, N_TOKENS) != TL_OK || tl_kv_seq_free(m, s) != TL_OK) {
            die("warm");
        }
        warm[r] = (now_ns() - t1) / n;
    }
    report("prompt_nothing_cached", n_blocks, cold, "ns/block");
    report("prompt_all_cached", n_blocks, warm, "ns/block");

    static tl_kv_seq seqs[N_SEQS];
    static uint32_t tokens[N_SEQS];
    static int32_t table[N_SEQS * 128];
    for (uint32_t i = 0; i < N_SEQS; i++) {
        for (uint32_t k = 0; k < 1000; k++) {
            toks[k] = (next++ * 2654435761u) % 50000;
        }
        if (tl_kv_seq_allocate(m, toks, 900 + i % 200, NULL, &seqs[i]) != TL_OK) {
            die("decode");
        }
    }
    for (uint32_t r = 0; r < ROUNDS; r++) {
        const double t0 = now_ns();
        if (tl_kv_seq_append_batch(m, seqs, N_SEQS, tokens, NULL, NULL) != TL_OK ||
            tl_kv_seq_commit_batch(m, seqs, N_SEQS, NULL) != TL_OK ||
            tl_kv_seq_block_tables(m, seqs, N_SEQS, 1, table, 128) != TL_OK) {
            die("step");
        }
        step[r] = (now_ns() - t0) / 1000.0;
    }
    report("decode_step_256", n_blocks, step, "us");
    tl_kv_mgr_destroy(m);
    tl_kv_pool_destroy(p);
}

int main(int argc, char **argv) {
    json = argc > 1 && strcmp(argv[1], "--json") == 0;
    if (json) {
        printf("{");
    }
    bench(50000, 0);
    bench(10000000, 10000);
    if (json) {
        printf("\n}\n");
    }
    return 0;
}
