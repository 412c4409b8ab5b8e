/*
 * fuzz_import.c - tl_kv_import under libFuzzer. The input is an envelope, just as it comes from a
 * wire; the corpus is a folder of envelopes.
 *
 * Each input meets a pool that has lived: blocks shared, private, partial, cached and free. The
 * verdict must be that of a second reader (wire_judge in tl_test_wire.h).
 *
 * The validator without a pool says the same, whole and in the steps of a stream.
 *
 *   refused    the whole pool is as it was: counts, references, fills, hashes, every byte of the
 *              slab, and the order in which blocks would be taken
 *   accepted   exporting the blocks again gives the input back, but for what the format says is not
 *              kept: values past a fill become zeros, a hash that is held already becomes 0
 *
 * A plain mutation breaks the CRC and ends at the third rule. The mutator here therefore repairs:
 * mostly the CRC, sometimes the block count, sometimes the shape.
 */
#include "tinyllm/kv_pool_ext.h"
#include "tl_count_alloc.h"
#include "tl_test_kv.h"
#include "tl_test_state.h"
#include "tl_test_wire.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct {
    uint32_t B, L, H, D;
} shape;

static const shape shapes[] = {{2, 1, 1, 2}, {1, 1, 1, 1}, {4, 2, 2, 3}, {3, 1, 2, 5}};
enum { N_SHAPES = 4 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

#define MUST(cond, what)                                                                           \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, what);                              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static size_t payload_of(shape s) {
    return (size_t)s.L * 2 * s.H * s.B * s.D * 2;
}

/* The shape whose pool the input meets: its own if there is one like it. */
static shape shape_for(const uint8_t *data, size_t size) {
    for (int i = 0; size >= WIRE_HEADER && i < N_SHAPES; i++)
        if (wire_get(data + WIRE_BLOCK_TOKENS, 4) == shapes[i].B &&
            wire_get(data + WIRE_HEAD_DIM, 4) == shapes[i].D)
            return shapes[i];
    return shapes[0];
}

/* After a refusal: the same orders as in a pool that nothing was imported into. */
static void order_is_untouched(tl_kv_pool *p, shape s) {
    uint32_t order[KV_LIVED_IN_BLOCKS], twin_order[KV_LIVED_IN_BLOCKS];
    tl_kv_pool *twin = kv_lived_in(s.B, s.L, s.H, s.D);
    const uint32_t n = kv_drain(p, order);
    MUST(kv_drain(twin, twin_order) == n, "another number of blocks can be taken");
    MUST(memcmp(order, twin_order, n * sizeof order[0]) == 0, "the order of blocks changed");
    tl_kv_pool_destroy(twin);
}

/* After an import of n blocks: they are what the envelope says, and come out as they went in. */
static void came_in_whole(tl_kv_pool *p, shape s, const uint8_t *data, size_t size,
                          const uint32_t *ids, uint32_t n, const kv_state *before) {
    const size_t P = payload_of(s);
    uint8_t *want = malloc(size), *got = malloc(size);
    size_t written = 0;
    memcpy(want, data, size);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *r = wire_record(want, i, P);
        const uint64_t hash = wire_get(r, 8), kept = tl_kv_hash(p, ids[i]);
        const uint32_t fill = (uint32_t)wire_get(r + WIRE_N_TOKENS, 4);
        MUST(tl_kv_refs(p, ids[i]) == 1, "an imported block has not one reference");
        MUST(tl_kv_fill(p, ids[i]) == fill, "an imported block has another fill");
        MUST(before->refs[ids[i]] == 0, "an imported block was somebody's");
        if (kept != hash) {
            uint32_t holder;
            MUST(kept == 0, "an imported block has another hash");
            MUST(tl_kv_lookup(p, hash, &holder) == TL_OK, "nobody holds a hash that was refused");
            MUST(holder != ids[i] && tl_kv_hash(p, holder) == hash, "the index misleads");
            MUST(tl_kv_unref(p, holder) == TL_OK, "a hit cannot be given back");
            wire_put(r, 0, 8);
        }
        wire_zero_past(r + WIRE_RECORD, fill, s.B, s.L, s.H, s.D);
    }
    wire_seal(want, size);
    MUST(tl_kv_export(p, ids, n, got, size, &written) == TL_OK, "the blocks cannot be exported");
    MUST(written == size && memcmp(got, want, size) == 0, "other bytes came out than went in");
    MUST(tl_kv_check(p) == TL_OK, tl_last_error());
    for (uint32_t i = 0; i < before->n_blocks; i++)
        if (before->refs[i] > 0)
            MUST(tl_kv_refs(p, i) == before->refs[i], "a block of somebody else changed");
    MUST(tl_kv_unref_many(p, ids, n) == TL_OK, "the blocks cannot be given back");
    MUST(kv_stats(p).used == before->stats.used, "more blocks are in use than before");
    MUST(tl_kv_check(p) == TL_OK, tl_last_error());
    free(want);
    free(got);
}

/* tl_kv_envelope_check gives the verdict of import, but for room; and so does a stream, which finds
 * out in another order. */
static void judged_alike(const uint8_t *data, size_t size, shape s, tl_status verdict) {
    const tl_kv_cfg cfg = {
        .block_tokens = s.B, .n_layers = s.L, .n_kv_heads = s.H, .head_dim = s.D};
    tl_kv_envelope e, step;
    MUST(tl_kv_envelope_check(data, size, &cfg, &e) == verdict, tl_last_error());
    tl_status st = size < WIRE_HEADER ? TL_EFORMAT : tl_kv_envelope_open(data, size, &step);
    if (st == TL_OK)
        st = tl_kv_envelope_accept(&step, &cfg);
    for (uint32_t i = 0; st == TL_OK && i < step.n_blocks; i++)
        st = tl_kv_envelope_records(&step, i, 1, wire_record((uint8_t *)data, i, step.block_bytes),
                                    WIRE_RECORD);
    if (st == TL_OK)
        st = tl_kv_envelope_crc(&step, (uint32_t)wire_get(data + size - WIRE_TRAILER, 4),
                                tl_crc32c(data, size - WIRE_TRAILER, 0));
    MUST((st == TL_OK) == (verdict == TL_OK), "a stream is judged otherwise");
    if (verdict == TL_OK)
        MUST(e.n_blocks == step.n_blocks && e.block_bytes == step.block_bytes &&
                 e.size_bytes == size && e.crc == wire_get(data + size - WIRE_TRAILER, 4),
             "a header read otherwise");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const shape s = shape_for(data, size);
    tl_count_install();
    tl_kv_pool *p = kv_lived_in(s.B, s.L, s.H, s.D);
    kv_state before = kv_state_of(p);
    const uint32_t room = before.stats.free + before.stats.cached;

    uint32_t ids[KV_LIVED_IN_BLOCKS];
    memset(ids, 0xEE, sizeof ids);
    tl_status want = wire_judge(data, size, s.B, s.L, s.H, s.D);
    judged_alike(data, size, s, want);
    const uint32_t n = want == TL_OK ? (uint32_t)wire_get(data + WIRE_N_BLOCKS, 4) : 0;
    if (want == TL_OK && n > room)
        want = TL_EFULL;
    const uint64_t allocs = tl_count_allocs();
    tl_set_last_error(NULL);
    const tl_status got = tl_kv_import(p, data, size, ids);
    MUST(got == want, tl_status_str(got));
    MUST(tl_count_allocs() == allocs, "an import allocated");
    if (got == TL_OK) {
        came_in_whole(p, s, data, size, ids, n, &before);
    } else {
        MUST(tl_last_error()[0] != 0, "a refusal without a text");
        MUST(ids[0] == 0xEEEEEEEEu, "a refused import wrote ids");
        const char *changed = kv_state_changed(&before, p);
        MUST(!changed, changed);
        order_is_untouched(p, s);
    }
    kv_state_free(&before);
    tl_kv_pool_destroy(p);
    MUST(tl_count_live() == 0, "memory is left");
    tl_count_uninstall();
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    uint64_t rng = seed;
    if (tl_test_below(&rng, 4) || size < WIRE_HEADER + WIRE_TRAILER)
        size = LLVMFuzzerMutate(data, size, max_size);
    if (size < WIRE_HEADER + WIRE_TRAILER)
        return size;
    const shape s = shapes[tl_test_below(&rng, N_SHAPES)];
    if (tl_test_below(&rng, 4) == 0) { /* a header that fits one of the pools */
        const uint32_t n = tl_test_below(&rng, KV_LIVED_IN_BLOCKS + 2);
        wire_header(data, n, s.B, s.L, s.H, s.D);
    }
    if (tl_test_below(&rng, 2) == 0) { /* as long as the header says */
        const size_t claimed = wire_claimed_bytes(data);
        if (claimed <= max_size) {
            if (claimed > size)
                memset(data + size, (int)tl_test_below(&rng, 256), claimed - size);
            size = claimed;
        }
    }
    if (tl_test_below(&rng, 2) == 0 && memcmp(data, "TLKV", 4) == 0 &&
        size == wire_claimed_bytes(data)) { /* records that may be legal */
        const shape own = shape_for(data, size);
        const size_t own_P = payload_of(own);
        for (size_t i = 0; wire_bytes(i + 1, own_P) <= size; i++) {
            uint8_t *r = wire_record(data, i, own_P);
            const uint32_t fill = tl_test_below(&rng, 8) ? own.B : tl_test_below(&rng, own.B + 2);
            wire_put(r + WIRE_N_TOKENS, fill, 4);
            wire_put(r, tl_test_below(&rng, 2) ? 0x100 + tl_test_below(&rng, 8) : 0, 8);
        }
    }
    if (tl_test_below(&rng, 8))
        wire_seal(data, size);
    return size;
}
