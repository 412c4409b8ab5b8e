/*
 * count.c - one operation, again and again, for gate.cmake to count its instructions under
 * callgrind:
 *
 *     count CASE N        runs the case N times; N = 0 does everything but that
 *
 * The instructions of N runs less those of none, divided by N, are the operation's own: exact, and
 * the same on a busy machine, which nanoseconds are not.
 */
#include "numerics/copy_crc.h"
#include "numerics/cpu.h"
#include "numerics/crc32c.h"
#include "tinyllm/kv_pool_ext.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 65536, TOKENS = 16 };

static uint8_t src[BYTES], dst[BYTES + 4096];
static uint32_t toks[4][TOKENS];
static uint64_t hashes[4];
static uint32_t sink;
static tl_kv_pool *pool; /* 2 blocks of 64 KiB: 4 layers, 4 heads, 16 tokens, 64 dimensions */
static uint32_t ids[2];  /* a full one and one with 1 token */
static size_t written;
static tl_crc32c_fn *variant;

static void crc(void) {
    sink ^= variant(sink, src, BYTES);
}

static void crc_16_bytes(void) {
    sink ^= tl_crc32c(src, 16, sink);
}

static void copy_crc(void) {
    sink ^= tl_copy_crc32c(dst + 40, src, BYTES, sink, 0);
}

static void hash_one(void) {
    hashes[0] = tl_kv_block_hash(hashes[0], toks[0], TOKENS);
}

static void hash_four(void) {
    tl_kv_prompt prompts[4];
    for (int i = 0; i < 4; i++) {
        prompts[i] = (tl_kv_prompt){toks[i], TOKENS, hashes[i], &hashes[i]};
    }
    (void)tl_kv_block_hashes_batch(prompts, 4, TOKENS);
}

static void export_full(void) {
    (void)tl_kv_export(pool, &ids[0], 1, dst, sizeof dst, &written);
}

static void export_one_token(void) {
    (void)tl_kv_export(pool, &ids[1], 1, dst, sizeof dst, &written);
}

static const struct {
    const char *name, *variant;
    void (*run)(void);
} cases[] = {
    {"crc-slicing8", "slicing8", crc},
    {"crc-sse42", "sse42", crc},
    {"crc-pclmul", "pclmul", crc},
    {"crc-16-bytes", NULL, crc_16_bytes},
    {"copy-crc", NULL, copy_crc},
    {"hash-one", NULL, hash_one},
    {"hash-four", NULL, hash_four},
    {"export-full", NULL, export_full},
    {"export-one-token", NULL, export_one_token},
};

int main(int argc, char **argv) {
    for (size_t c = 0; argc == 3 && c < sizeof cases / sizeof cases[0]; c++) {
        if (strcmp(cases[c].name, argv[1]) != 0) {
            continue;
        }
        for (const tl_crc32c_variant *v = tl_crc32c_variants; v->name != NULL; v++) {
            if (cases[c].variant != NULL && strcmp(v->name, cases[c].variant) == 0 &&
                (v->need & ~tl_cpu_features()) == 0) {
                variant = v->fn;
            }
        }
        if (cases[c].variant != NULL && variant == NULL) {
            puts("SKIP: this processor, or valgrind's idea of it, cannot run the variant");
            return 0;
        }
        const tl_kv_cfg cfg = {2, TOKENS, 4, 4, 64, TL_F16, TL_KV_FORMAT_V1};
        if (tl_kv_pool_create(&cfg, &pool) != TL_OK || tl_kv_alloc(pool, 2, ids) != TL_OK ||
            tl_kv_set_fill(pool, ids[0], TOKENS) != TL_OK ||
            tl_kv_set_fill(pool, ids[1], 1) != TL_OK) {
            return 1;
        }
        memset(tl_kv_block_ptr(pool, 0, 0, 0), 0x3C, 2 * tl_kv_block_bytes(pool));
        for (uint32_t i = 0; i < 4 * TOKENS; i++) {
            toks[i / TOKENS][i % TOKENS] = i * 40503u % 262144u; /* below 2^18 */
        }
        for (long n = strtol(argv[2], NULL, 10); n > 0; n--) {
            cases[c].run();
        }
        tl_kv_pool_destroy(pool);
        printf("%s with %s: %08x %016llx %zu\n", argv[1], tl_crc32c_selected(), sink,
               (unsigned long long)hashes[0], written);
        return 0;
    }
    fprintf(stderr, "usage: count CASE N\n");
    return 2;
}
