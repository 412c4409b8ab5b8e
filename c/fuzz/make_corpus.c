/*
 * make_corpus.c - writes the seeds in corpus/import: good envelopes for each pool of fuzz_import.c,
 * and one for each reason to refuse.      make_corpus FOLDER
 */
#include "tl_test_wire.h"

#include <stdio.h>
#include <stdlib.h>

static const char *g_folder;

static void write_seed(const char *name, const uint8_t *env, size_t len) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", g_folder, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(env, 1, len, f) != len || fclose(f) != 0) {
        perror(path);
        exit(1);
    }
}

typedef struct {
    uint32_t n, B, L, H, D;
} dims;

static size_t build(uint8_t *env, dims d, const uint64_t *hashes, const uint32_t *fills) {
    const size_t P = (size_t)d.L * 2 * d.H * d.B * d.D * 2, len = wire_bytes(d.n, P);
    for (size_t i = 0; i < len; i++)
        env[i] = (uint8_t)(i * 37 + 11);
    wire_header(env, d.n, d.B, d.L, d.H, d.D);
    for (uint32_t i = 0; i < d.n; i++) {
        uint8_t *r = wire_record(env, i, P);
        wire_put(r, hashes[i], 8);
        wire_put(r + WIRE_N_TOKENS, fills[i] < d.B ? fills[i] : d.B, 4);
        wire_zero_past(r + WIRE_RECORD, fills[i] < d.B ? fills[i] : d.B, d.B, d.L, d.H, d.D);
    }
    wire_seal(env, len);
    return len;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    g_folder = argv[1];
    static const dims shapes[] = {
        {0, 2, 1, 1, 2}, {0, 1, 1, 1, 1}, {0, 4, 2, 2, 3}, {0, 3, 1, 2, 5}};
    static const uint64_t fresh[] = {0x777, 0, 0x778, 0x779, 0x77A, 0x77B};
    static const uint64_t held[] = {0x100, 0x101, 0x103, 0x104, 0x101, 0x102};
    static const uint64_t equal[] = {0x777, 0x777, 0, 0x777, 0x778, 0x778};
    static const uint64_t none[6] = {0};
    static const uint32_t full[] = {9, 9, 9, 9, 9, 9}, tails[] = {1, 2, 3, 1, 2, 3};
    uint8_t env[8192];
    char name[64];
    for (unsigned i = 0; i < 4; i++) {
        dims d = shapes[i];
        for (d.n = 0; d.n <= 3; d.n++) {
            snprintf(name, sizeof name, "shape%u-%u-new", i, d.n);
            write_seed(name, env, build(env, d, fresh, full));
        }
        d.n = 6;
        snprintf(name, sizeof name, "shape%u-too-many", i);
        write_seed(name, env, build(env, d, fresh, full));
        d.n = 5;
        snprintf(name, sizeof name, "shape%u-held", i);
        write_seed(name, env, build(env, d, held, full));
        snprintf(name, sizeof name, "shape%u-equal", i);
        write_seed(name, env, build(env, d, equal, full));
        if (d.B > 1) {
            snprintf(name, sizeof name, "shape%u-tails", i);
            write_seed(name, env, build(env, d, none, tails));
            snprintf(name, sizeof name, "shape%u-hashed-tail", i);
            write_seed(name, env, build(env, d, fresh, tails));
        }
    }

    write_seed("worked-example", wire_example, sizeof wire_example);
    static const struct {
        const char *name;
        size_t at, n_bytes;
        uint64_t value;
    } wrong[] = {{"version-2", WIRE_VERSION, 2, 2},
                 {"dtype-0", WIRE_DTYPE, 2, 0},
                 {"magic", WIRE_MAGIC, 4, 0x564B4C55},
                 {"n-tokens-0", WIRE_HEADER + WIRE_N_TOKENS, 4, 0},
                 {"n-tokens-3", WIRE_HEADER + WIRE_N_TOKENS, 4, 3},
                 {"n-tokens-1-hashed", WIRE_HEADER + WIRE_N_TOKENS, 4, 1},
                 {"n-blocks-2", WIRE_N_BLOCKS, 4, 2},
                 {"n-blocks-max", WIRE_N_BLOCKS, 4, UINT32_MAX}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        memcpy(env, wire_example, 60);
        wire_put(env + wrong[i].at, wrong[i].value, wrong[i].n_bytes);
        wire_seal(env, 60);
        write_seed(wrong[i].name, env, 60);
    }
    memcpy(env, wire_example, 60);
    env[45] ^= 0x10;
    write_seed("crc", env, 60);
    write_seed("short", env, 31);
    static const dims other = {1, 2, 1, 2, 1}, product_wraps = {0, 0x80000000u, 2, 0x80000000u, 2};
    write_seed("other-shape", env, build(env, other, fresh, full));
    memset(env, 0, 32);
    wire_header(env, 0, product_wraps.B, product_wraps.L, product_wraps.H, product_wraps.D);
    wire_seal(env, 32);
    write_seed("sizes-that-overflow", env, 32);
    wire_put(env + WIRE_N_BLOCKS, 1, 4);
    wire_seal(env, 32);
    write_seed("sizes-that-overflow-1", env, 32);
    return 0;
}
