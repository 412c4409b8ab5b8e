/*
 * bench_bytes.c - checksums, copies, envelopes and hashes against what the memory allows.
 *
 *   bench_bytes [--json] [--quick] [group ...]      groups: crc copy export import hash
 *
 * Every figure comes from a contest: the contestants run in turn, ROUNDS times over, so that
 * whatever else the machine does falls on all of them. A line gives the median time, what it means
 * in GB/s, and the median of the rounds' ratios to the first contestant, which is the yardstick:
 * a plain read or memcpy of the same bytes, in the same state of the caches.
 *
 *   warm    the same bytes again and again: they are in cache when they fit
 *   cold    the next bytes of a region of 512 MiB each time: they come from, or go to, memory
 *
 * Links the static library, to reach every variant of the CRC.
 */
#include "numerics/copy_crc.h"
#include "numerics/cpu.h"
#include "numerics/crc32c.h"

#include <tinyllm.h>
#include <tinyllm/kv_pool_ext.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#ifdef TL_BENCH_ISAL
#include <isa-l/crc.h>
#endif

#define MAX_ROUNDS  41u
#define MAX_ENTRIES 16u
#define REGION      ((size_t)512 << 20)

static int json, n_printed;
static unsigned rounds = 21;
static uint64_t sink; /* results end here, so that no work is optimized away */

_Noreturn static void die(const char *what) {
    fprintf(stderr, "bench_bytes: %s: %s\n", what, tl_last_error());
    exit(1);
}

/* The thread's own time: waiting for a processor that others use is not counted. */
static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *x, size_t n) {
    double sorted[MAX_ROUNDS];
    memcpy(sorted, x, n * sizeof *x);
    qsort(sorted, n, sizeof *sorted, by_value);
    return sorted[n / 2];
}

/* ---- a contest ----------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    void (*run)(const void *arg, size_t i); /* the i-th of the calls that are timed together */
    const void *arg;
} entry;

/* Times `calls` calls of each entry in turn and prints them; a call handles n_bytes bytes, or, when
 * n_bytes is 0, n_items items. */
static void contest(const char *group, const entry *entries, size_t n, size_t calls, size_t n_bytes,
                    size_t n_items) {
    static double ns[MAX_ENTRIES][MAX_ROUNDS];
    size_t at = 0; /* shared: no entry finds in cache what another has just left there */
    for (unsigned r = 0; r < rounds + 1; r++) { /* the first round warms up */
        for (size_t e = 0; e < n; e++) {
            const double t0 = now_ns();
            for (size_t i = 0; i < calls; i++) {
                entries[e].run(entries[e].arg, at++);
            }
            if (r > 0) {
                ns[e][r - 1] = (now_ns() - t0) / (double)calls;
            }
        }
    }
    for (size_t e = 0; e < n; e++) {
        double ratios[MAX_ROUNDS];
        for (unsigned r = 0; r < rounds; r++) {
            ratios[r] = ns[e][r] / ns[0][r];
        }
        const double t = median(ns[e], rounds), ratio = median(ratios, rounds);
        const double value = n_bytes > 0 ? (double)n_bytes / t : t / (double)n_items;
        const char *unit = n_bytes > 0 ? "GB/s" : "ns";
        if (json) {
            printf("%s\n  \"%s/%s\": {\"value\": %.3f, \"unit\": \"%s\", \"time_ratio\": %.4f}",
                   n_printed++ ? "," : "", group, entries[e].name, value, unit, ratio);
        } else {
            printf("%-34s %-22s %10.2f %-5s %8.3f of %s\n", group, entries[e].name, value, unit,
                   ratio, entries[0].name);
            fflush(stdout);
        }
    }
}

/* Memory like a pool's slab: huge pages where the system gives them, touched. */
static uint8_t *region(size_t n, int fill) {
    uint8_t *p = tl_alloc(n, (size_t)2 << 20);
    if (p == NULL) {
        die("memory");
    }
    (void)madvise(p, n, MADV_HUGEPAGE);
    memset(p, fill, n);
    return p;
}

/* ---- crc ----------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *p;
    size_t n, stride, span; /* call i takes n bytes at p + i * stride modulo span */
    tl_crc32c_fn *fn;
} crc_arg;

static const uint8_t *crc_input(const crc_arg *a, size_t i) {
    return a->p + i * a->stride % a->span;
}

/* Reads every byte and does as little as possible with it. */
static void run_read(const void *arg, size_t i) {
    const crc_arg *a = arg;
    const uint8_t *p = crc_input(a, i);
    size_t at = 0;
    uint64_t x = 0;
#ifdef __GNUC__
    typedef uint64_t vec __attribute__((vector_size(16), aligned(1), may_alias));
    vec x0 = {0}, x1 = {0}, x2 = {0}, x3 = {0};
    for (; at + 64 <= a->n; at += 64) {
        const vec *v = (const vec *)(const void *)(p + at);
        x0 ^= v[0], x1 ^= v[1], x2 ^= v[2], x3 ^= v[3];
    }
    x0 ^= x1 ^ x2 ^ x3;
    x = x0[0] ^ x0[1];
#endif
    for (; at + 8 <= a->n; at += 8) {
        uint64_t w;
        memcpy(&w, p + at, 8);
        x ^= w;
    }
    sink ^= x;
}

static void run_variant(const void *arg, size_t i) {
    const crc_arg *a = arg;
    sink ^= a->fn((uint32_t)i, crc_input(a, i), a->n);
}

static void run_crc32c(const void *arg, size_t i) {
    const crc_arg *a = arg;
    sink ^= tl_crc32c(crc_input(a, i), a->n, (uint32_t)i);
}

#ifdef TL_BENCH_ISAL
static void run_isal(const void *arg, size_t i) {
    const crc_arg *a = arg;
    uint8_t *p = (uint8_t *)(uintptr_t)crc_input(a, i); /* it only reads */
    sink ^= crc32_iscsi(p, (int)a->n, (unsigned)i);
}
#endif

static void bench_crc(const uint8_t *mem) {
    static const struct {
        const char *name;
        size_t n;
        int cold;
    } sizes[] = {{"crc/16", 16, 0},
                 {"crc/64", 64, 0},
                 {"crc/256", 256, 0},
                 {"crc/4KiB", 4096, 0},
                 {"crc/64KiB", 65536, 0},
                 {"crc/1MiB", (size_t)1 << 20, 0},
                 {"crc/64MiB", (size_t)64 << 20, 0},
                 {"crc/64KiB-cold", 65536, 1},
                 {"crc/1MiB-cold", (size_t)1 << 20, 1}};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t n = sizes[s].n;
        const size_t calls = n > (size_t)4 << 20 ? 1 : ((size_t)4 << 20) / (n + 256);
        const size_t stride = sizes[s].cold ? n + 4096 : 0;
        crc_arg args[MAX_ENTRIES];
        entry entries[MAX_ENTRIES];
        size_t k = 0;
        args[k] = (crc_arg){mem, n, stride, REGION - n, NULL};
        entries[k] = (entry){"read", run_read, &args[k]};
        k++;
        args[k] = args[0];
        entries[k] = (entry){"tl_crc32c", run_crc32c, &args[k]};
        k++;
        for (const tl_crc32c_variant *v = tl_crc32c_variants + 1; v->name != NULL; v++) {
            if ((v->need & ~tl_cpu_features()) == 0) {
                args[k] = args[0];
                args[k].fn = v->fn;
                entries[k] = (entry){v->name, run_variant, &args[k]};
                k++;
            }
        }
#ifdef TL_BENCH_ISAL
        args[k] = args[0];
        entries[k] = (entry){"isa-l", run_isal, &args[k]};
        k++;
#endif
        contest(sizes[s].name, entries, k, calls, n, 1);
    }
}

/* ---- copy ---------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *dst;
    const uint8_t *src;
    size_t n, dst_stride, src_stride, span;
    int stream;
} copy_arg;

static void run_memcpy(const void *arg, size_t i) {
    const copy_arg *a = arg;
    memcpy(a->dst + i * a->dst_stride % a->span, a->src + i * a->src_stride % a->span, a->n);
}

static void run_copy(const void *arg, size_t i) {
    const copy_arg *a = arg;
    tl_copy(a->dst + i * a->dst_stride % a->span, a->src + i * a->src_stride % a->span, a->n,
            a->stream);
}

static void run_copy_crc(const void *arg, size_t i) {
    const copy_arg *a = arg;
    sink ^= tl_copy_crc32c(a->dst + i * a->dst_stride % a->span,
                           a->src + i * a->src_stride % a->span, a->n, (uint32_t)i, a->stream);
}

static void run_copy_then_crc(const void *arg, size_t i) {
    const copy_arg *a = arg;
    run_memcpy(arg, i);
    sink ^= tl_crc32c(a->dst + i * a->dst_stride % a->span, a->n, (uint32_t)i);
}

static void bench_copy(uint8_t *slab, uint8_t *wire) {
    static const struct {
        const char *name;
        size_t n;
        int cold_src, cold_dst;
    } cases[] = {{"copy/64KiB", 65536, 0, 0},
                 {"copy/1MiB", (size_t)1 << 20, 0, 0},
                 {"copy/64MiB", (size_t)64 << 20, 0, 0},
                 {"copy/1MiB-from-cold", (size_t)1 << 20, 1, 0},
                 {"copy/1MiB-to-cold", (size_t)1 << 20, 0, 1}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        const size_t n = cases[c].n, step = n + 4096;
        const size_t calls = n > (size_t)4 << 20 ? 1 : ((size_t)8 << 20) / n;
        /* a payload in an envelope starts at 40, a slab's at a cache line */
        const copy_arg plain = {.dst = cases[c].cold_dst ? slab : wire + 40,
                                .src = cases[c].cold_dst ? wire + 40 : slab,
                                .n = n,
                                .dst_stride = cases[c].cold_dst ? step : 0,
                                .src_stride = cases[c].cold_src ? step : 0,
                                .span = REGION - n};
        copy_arg streamed = plain;
        streamed.stream = 1;
        const entry entries[] = {{"memcpy", run_memcpy, &plain},
                                 {"memcpy, then crc", run_copy_then_crc, &plain},
                                 {"copy+crc", run_copy_crc, &plain},
                                 {"copy+crc, streamed", run_copy_crc, &streamed},
                                 {"copy, streamed", run_copy, &streamed}};
        contest(cases[c].name, entries, sizeof entries / sizeof entries[0], calls, n, 1);
    }
}

/* ---- export and import --------------------------------------------------------------------- */

/* Blocks of 1 MiB: 32 layers, 8 heads, 16 tokens, 64 dimensions. */
static const tl_kv_cfg shape = {512, 16, 32, 8, 64, TL_F16, TL_KV_FORMAT_V1};
#define BLOCK_BYTES ((size_t)1 << 20)

typedef struct {
    tl_kv_pool *pool;
    const uint32_t *ids; /* of all blocks */
    uint32_t n, cold;    /* n blocks a call; cold: other ones each time */
    uint8_t *wire;
    size_t size;
} wire_arg;

static const uint32_t *wire_ids(const wire_arg *a, size_t i) {
    return a->cold ? a->ids + i * a->n % (shape.n_blocks - a->n) : a->ids;
}

static void run_export(const void *arg, size_t i) {
    const wire_arg *a = arg;
    size_t written;
    if (tl_kv_export(a->pool, wire_ids(a, i), a->n, a->wire, a->size, &written) != TL_OK) {
        die("export");
    }
}

static void run_export_memcpy(const void *arg, size_t i) {
    const wire_arg *a = arg;
    const uint32_t *ids = wire_ids(a, i);
    for (uint32_t k = 0; k < a->n; k++) {
        memcpy(a->wire + 40 + k * (BLOCK_BYTES + 12), tl_kv_block_ptr(a->pool, ids[k], 0, 0),
               BLOCK_BYTES);
    }
}

static void bench_export(void) {
    tl_kv_pool *pool;
    uint32_t *ids = malloc(shape.n_blocks * sizeof *ids);
    if (ids == NULL || tl_kv_pool_create(&shape, &pool) != TL_OK ||
        tl_kv_alloc(pool, shape.n_blocks, ids) != TL_OK) {
        die("a pool of 512 MiB");
    }
    memset(tl_kv_block_ptr(pool, 0, 0, 0), 0x3C, shape.n_blocks * BLOCK_BYTES);
    static const struct {
        const char *full, *partial;
        uint32_t n, cold;
    } cases[] = {{"export/1x1MiB", "export/1x1MiB-fill-1", 1, 0},
                 {"export/1x1MiB-cold-slab", "export/1x1MiB-fill-1-cold-slab", 1, 1},
                 {"export/8x1MiB", "export/8x1MiB-fill-1", 8, 0},
                 {"export/64x1MiB", "export/64x1MiB-fill-1", 64, 0}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        wire_arg a = {.pool = pool, .ids = ids, .n = cases[c].n, .cold = cases[c].cold};
        a.size = tl_kv_export_bytes(pool, a.n);
        a.wire = region(a.size, 1);
        const entry entries[] = {{"memcpy", run_export_memcpy, &a}, {"export", run_export, &a}};
        const size_t calls = a.n >= 64 ? 1 : 16 / a.n;
        for (int partial = 0; partial < 2; partial++) {
            const uint32_t fill = partial ? 1 : shape.block_tokens;
            for (uint32_t i = 0; i < shape.n_blocks; i++) {
                (void)tl_kv_set_fill(pool, ids[i], fill);
            }
            contest(partial ? cases[c].partial : cases[c].full, entries, 2, calls,
                    a.n * BLOCK_BYTES, 1);
        }
        tl_free(a.wire);
    }
    tl_kv_pool_destroy(pool);
    free(ids);
}

/* Imports, and gives the blocks back. `cold` takes a pool's blocks in turn: they were registered,
 * and the oldest are evicted; otherwise the block last freed is free, and warm. */
static void run_import(const void *arg, size_t i) {
    const wire_arg *a = arg;
    uint32_t ids[64];
    if (tl_kv_import(a->pool, a->wire, a->size, ids) != TL_OK) {
        die("import");
    }
    for (uint32_t k = 0; k < a->n; k++) {
        if (a->cold && tl_kv_register(a->pool, ids[k], ((uint64_t)1 << 40) + 64 * i + k) != TL_OK) {
            die("register");
        }
        (void)tl_kv_unref(a->pool, ids[k]);
    }
}

static void run_import_memcpy(const void *arg, size_t i) {
    const wire_arg *a = arg;
    const uint32_t *ids = wire_ids(a, i);
    for (uint32_t k = 0; k < a->n; k++) {
        memcpy(tl_kv_block_ptr(a->pool, ids[k], 0, 0), a->wire + 40 + k * (BLOCK_BYTES + 12),
               BLOCK_BYTES);
    }
}

static void bench_import(void) {
    static const struct {
        const char *name;
        uint32_t n, n_blocks, cold;
    } cases[] = {{"import/1x1MiB-small-pool", 1, 2, 0},
                 {"import/1x1MiB", 1, 512, 1},
                 {"import/8x1MiB", 8, 512, 1},
                 {"import/64x1MiB", 64, 512, 1}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        tl_kv_cfg cfg = shape;
        cfg.n_blocks = cases[c].n_blocks;
        tl_kv_pool *pool;
        uint32_t *ids = malloc(cfg.n_blocks * sizeof *ids);
        wire_arg a = {.ids = ids, .n = cases[c].n, .cold = cases[c].cold};
        if (ids == NULL || tl_kv_pool_create(&cfg, &pool) != TL_OK ||
            tl_kv_alloc(pool, cfg.n_blocks, ids) != TL_OK) {
            die("a pool");
        }
        a.pool = pool;
        memset(tl_kv_block_ptr(pool, 0, 0, 0), 0x3C, cfg.n_blocks * BLOCK_BYTES);
        a.size = tl_kv_export_bytes(pool, a.n);
        a.wire = region(a.size, 1);
        for (uint32_t i = 0; i < cfg.n_blocks; i++) {
            (void)tl_kv_set_fill(pool, ids[i], cfg.block_tokens);
        }
        run_export(&a, 0);
        for (uint32_t i = 0; i < cfg.n_blocks; i++) {
            if (a.cold) { /* every later import evicts, in the order of the slab */
                (void)tl_kv_register(pool, ids[i], (uint64_t)i + 1);
            }
            (void)tl_kv_unref(pool, ids[i]);
        }
        const entry entries[] = {{"memcpy", run_import_memcpy, &a}, {"import", run_import, &a}};
        contest(cases[c].name, entries, 2, a.n >= 64 ? 1 : 16 / a.n, a.n * BLOCK_BYTES, 1);
        tl_free(a.wire);
        tl_kv_pool_destroy(pool);
        free(ids);
    }
}

/* ---- hash ---------------------------------------------------------------------------------- */

#define TOKENS 12000u
#define SEQS   64u

static uint32_t prompts[SEQS][TOKENS];
static uint64_t hashes[SEQS][TOKENS / 16];

static void run_fnv(const void *arg, size_t i) {
    (void)arg;
    uint64_t h = 0;
    for (uint32_t b = 0; b < TOKENS / 16; b++) {
        h = tl_fnv1a64(&h, 8, TL_FNV1A64_BASIS);
        h = tl_fnv1a64(prompts[i % SEQS] + (size_t)16 * b, 64, h);
    }
    sink ^= h;
}

static void run_hashes(const void *arg, size_t i) {
    (void)arg;
    (void)tl_kv_block_hashes(0, prompts[i % SEQS], TOKENS, 16, hashes[0]);
    sink ^= hashes[0][TOKENS / 16 - 1];
}

/* Every n-th call hashes n prompts at once, the others do nothing: a call is a prompt on average.
 */
static void run_batch(const void *arg, size_t i) {
    const size_t n = *(const size_t *)arg;
    if (i % n == 0) {
        tl_kv_prompt batch[SEQS];
        for (size_t k = 0; k < n; k++) {
            batch[k] = (tl_kv_prompt){prompts[(i + k) % SEQS], TOKENS, 0, hashes[k]};
        }
        (void)tl_kv_block_hashes_batch(batch, n, 16);
        sink ^= hashes[n - 1][TOKENS / 16 - 1];
    }
}

static void bench_hash(void) {
    static const struct {
        const char *name;
        uint32_t below;
    } cases[] = {
        {"hash/ids-below-50000", 50000}, {"hash/ids-below-2^18", 1u << 18}, {"hash/any-ids", 0}};
    uint64_t rng = 88172645463325252u;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        for (uint32_t s = 0; s < SEQS; s++) {
            for (uint32_t t = 0; t < TOKENS; t++) {
                rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
                prompts[s][t] = cases[c].below == 0
                                    ? (uint32_t)rng
                                    : (uint32_t)((rng >> 32) * cases[c].below >> 32);
            }
        }
        static const size_t eight = 8, all = SEQS;
        const entry entries[] = {{"byte by byte", run_fnv, NULL},
                                 {"one sequence", run_hashes, NULL},
                                 {"8 sequences", run_batch, &eight},
                                 {"64 sequences", run_batch, &all}};
        contest(cases[c].name, entries, sizeof entries / sizeof entries[0], SEQS, 0, TOKENS / 16);
    }
}

/* -------------------------------------------------------------------------------------------- */

int main(int argc, char **argv) {
    int all = 1, crc = 0, copy = 0, export = 0, import = 0, hash = 0;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (strcmp(a, "--json") == 0) {
            json = 1;
        } else if (strcmp(a, "--quick") == 0) {
            rounds = 5;
        } else {
            all = 0;
            crc |= strcmp(a, "crc") == 0;
            copy |= strcmp(a, "copy") == 0;
            export |= strcmp(a, "export") == 0;
            import |= strcmp(a, "import") == 0;
            hash |= strcmp(a, "hash") == 0;
        }
    }
    if (json) {
        printf("{\n  \"variant\": \"%s\"", tl_crc32c_selected());
        n_printed++;
    } else {
        printf("tl_crc32c uses %s\n", tl_crc32c_selected());
    }
    if (all || crc || copy) {
        uint8_t *slab = region(REGION, 3), *wire = region((size_t)65 << 20, 1);
        if (all || crc) {
            bench_crc(slab);
        }
        if (all || copy) {
            bench_copy(slab, wire);
        }
        tl_free(slab);
        tl_free(wire);
    }
    if (all || export) {
        bench_export();
    }
    if (all || import) {
        bench_import();
    }
    if (all || hash) {
        bench_hash();
    }
    if (json) {
        printf("\n}\n");
    }
    return sink == 1; /* it is not, but who knows */
}
