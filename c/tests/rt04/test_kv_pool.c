/*
 * rt04/test_kv_pool.c - the 20 tests of the pool, each with its record: kind, what it checks, why
 * that matters downstream, and the planted bugs it must catch (`--catalog` prints them).
 *
 * They use kv_pool.h, abi.h, ds.h and numerics.h only, so that any implementation of the pool can
 * be put under them. Built with -DTL_TEST_CHECK they also call tl_kv_check (kv_pool_ext.h) after
 * every operation of the random test.
 */
#include "tinyllm/kv_pool.h"
#include "tinyllm/numerics.h"
#include "tl_count_alloc.h"
#include "tl_test.h"
#include "tl_test_kv.h"
#include "tl_test_wire.h"

#include <stdio.h>
#include <stdlib.h>

#ifdef TL_TEST_CHECK
#include "tinyllm/kv_pool_ext.h"
#define POOL_CHECK(p) TL_OK_(tl_kv_check(p))
#else
#define POOL_CHECK(p) ((void)(p))
#endif

/* The worked example of the chapter: tokens 1 2 3 4 5, two tokens a block. */
#define H0 0xA91AB0C1027B9366u
#define H1 0x03DF829571605C60u

/* The block of the example: K = [[1, 2], [3, 4]], V = [[0.5, -1], [0, 0.25]], registered. */
static uint32_t example_block(tl_kv_pool *p) {
    static const uint16_t k[4] = {0x3C00, 0x4000, 0x4200, 0x4400};
    static const uint16_t v[4] = {0x3800, 0xBC00, 0x0000, 0x3400};
    const uint32_t id = kv_alloc1(p);
    memcpy(tl_kv_block_ptr(p, id, 0, 0), k, sizeof k);
    memcpy(tl_kv_block_ptr(p, id, 0, 1), v, sizeof v);
    TL_OK_(tl_kv_set_fill(p, id, 2));
    TL_OK_(tl_kv_register(p, id, H0));
    return id;
}

/* ---- hashes, checksum ---------------------------------------------------------------------- */

/* The definition of the block hash, a byte at a time. */
static uint64_t plain_block_hash(uint64_t parent, const uint32_t *toks, uint32_t n) {
    uint64_t h = 0xCBF29CE484222325u;
    for (uint32_t i = 0; i < 8; i++)
        h = (h ^ (parent >> (8 * i) & 0xFF)) * 0x100000001B3u;
    for (uint32_t i = 0; i < 4 * n; i++)
        h = (h ^ (toks[i / 4] >> (8 * (i % 4)) & 0xFF)) * 0x100000001B3u;
    return h ? h : 1;
}

TL_TEST_DOC(
    hand_example_block_hash_chain, "unit, golden",
    "h0 and h1 of the worked example; the same tokens under another parent hash differently",
    "engines find each other's blocks only through these values", "s01 s02 m01") {
    static const uint32_t toks[4] = {1, 2, 3, 4};
    TL_EQ(tl_kv_block_hash(0, toks, 2), H0);
    TL_EQ(tl_kv_block_hash(H0, toks + 2, 2), H1);
    TL_CHECK(tl_kv_block_hash(0, toks + 2, 2) != H1);
    TL_CHECK(tl_kv_block_hash(H1, toks, 2) != H0);

    /* Four ids made so that FNV-1a comes out as 0, which would mean "no hash". */
    static const uint32_t zero[4] = {0x370251BA, 0x06022D0F, 0x0A173A14, 0x25250A10};
    TL_EQ(tl_kv_block_hash(0, zero, 4), 1);

    /* Ids that need all four bytes, parents that need all eight. */
    uint64_t rng = 1;
    for (int i = 0; i < 200; i++) {
        uint32_t t[17];
        const uint32_t n = tl_test_below(&rng, 18);
        for (uint32_t j = 0; j < n; j++)
            t[j] = (uint32_t)(tl_test_rand(&rng) >> (i % 33));
        const uint64_t parent = tl_test_rand(&rng) >> (i % 65 == 64 ? 0 : i % 65);
        TL_EQ(tl_kv_block_hash(parent, t, n), plain_block_hash(parent, t, n));
    }
}

TL_TEST_DOC(crc32c_check_value_and_continuation, "unit",
            "crc32c of \"123456789\" is 0xE3069283; an earlier result is continued",
            "the envelope's trailer and every chunked transfer stand on it", "s06") {
    static const char digits[] = "123456789";
    TL_EQ(tl_crc32c(digits, 9, 0), 0xE3069283u);
    TL_EQ(tl_crc32c(NULL, 0, 0), 0);
    TL_EQ(tl_crc32c(NULL, 0, 0xE3069283u), 0xE3069283u);
    for (size_t cut = 0; cut <= 9; cut++)
        TL_EQ(tl_crc32c(digits + cut, 9 - cut, tl_crc32c(digits, cut, 0)), 0xE3069283u);
    uint8_t data[300];
    uint64_t rng = 2;
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)tl_test_rand(&rng);
    for (size_t n = 0; n <= sizeof data; n++)
        TL_EQ(tl_crc32c(data, n, 0), wire_crc(data, n));
}

/* ---- the envelope of the worked example ---------------------------------------------------- */

TL_TEST_DOC(hand_example_export_envelope, "unit, golden",
            "the 60-byte envelope of the worked example, byte for byte, nothing written past it; "
            "every header field of another shape in its place",
            "what one engine sends is what every other engine reads", "s03 s04 s05 m02") {
    tl_kv_pool *p = kv_new(3, 2, 1, 1, 2);
    const uint32_t id = example_block(p);
    TL_EQ(tl_kv_block_bytes(p), 16);
    TL_EQ(tl_kv_export_bytes(p, 1), 60);
    uint8_t buf[64];
    memset(buf, 0xEE, sizeof buf);
    size_t written = 0;
    TL_OK_(tl_kv_export(p, &id, 1, buf, sizeof buf, &written));
    TL_EQ(written, 60);
    TL_MEM_EQ(buf, wire_example, 60);
    TL_MEM_EQ(buf + 60, "\xEE\xEE\xEE\xEE", 4);
    tl_kv_pool_destroy(p);

    /* All of n_blocks, block_tokens, n_layers, n_kv_heads, head_dim different: no two fields can
     * trade places unseen. */
    p = kv_new(8, 3, 4, 5, 7);
    uint32_t ids[2] = {kv_filled(p, 11, 3), kv_filled(p, 12, 1)};
    const size_t size = tl_kv_export_bytes(p, 2), P = tl_kv_block_bytes(p);
    TL_EQ(P, 4 * 2 * 5 * 3 * 7 * 2);
    TL_EQ(size, wire_bytes(2, P));
    uint8_t *env = malloc(size), *payload = malloc(P), want[WIRE_HEADER];
    TL_OK_(tl_kv_export(p, ids, 2, env, size, &written));
    wire_header(want, 2, 3, 4, 5, 7);
    TL_MEM_EQ(env, want, WIRE_HEADER);
    TL_EQ(wire_get(wire_record(env, 0, P), 8), 0);
    TL_EQ(wire_get(wire_record(env, 0, P) + WIRE_N_TOKENS, 4), 3);
    TL_EQ(wire_get(wire_record(env, 1, P) + WIRE_N_TOKENS, 4), 1);
    wire_f16(payload, tl_kv_block_ptr(p, ids[0], 0, 0), P);
    TL_MEM_EQ(wire_record(env, 0, P) + WIRE_RECORD, payload, P);
    TL_EQ(wire_get(env + size - WIRE_TRAILER, 4), wire_crc(env, size - WIRE_TRAILER));
    free(payload);
    free(env);
    tl_kv_pool_destroy(p);
}

/* ---- references ---------------------------------------------------------------------------- */

TL_TEST_DOC(alloc_is_all_or_nothing, "unit, boundary",
            "asking for more than free + cached takes nothing and evicts nothing",
            "a request is admitted by free blocks: all of its blocks or none", "s07") {
    tl_kv_pool *p = kv_new(6, 2, 1, 1, 2);
    uint32_t ids[8];
    TL_OK_(tl_kv_alloc(p, 0, NULL));
    KV_STATS(p, 6, 0, 0);
    for (int i = 0; i < 8; i++)
        ids[i] = 0x77777777u;
    KV_REFUSED(tl_kv_alloc(p, 7, ids), TL_EFULL);
    KV_STATS(p, 6, 0, 0);
    for (int i = 0; i < 8; i++)
        TL_EQ(ids[i], 0x77777777u);

    /* Two used, two cached, two free. */
    const uint32_t a = kv_cached(p, 0xA), b = kv_cached(p, 0xB);
    uint32_t held[2];
    TL_OK_(tl_kv_alloc(p, 2, held));
    KV_STATS(p, 2, 2, 2);
    KV_REFUSED(tl_kv_alloc(p, 5, ids), TL_EFULL);
    KV_REFUSED(tl_kv_alloc(p, UINT32_MAX, ids), TL_EFULL);
    KV_STATS(p, 2, 2, 2);
    TL_EQ(kv_stats(p).evictions, 0);

    /* Exactly all is not too many. Each block once, none of them held by somebody else. */
    TL_OK_(tl_kv_alloc(p, 4, ids));
    KV_STATS(p, 0, 6, 0);
    TL_EQ(kv_stats(p).evictions, 2);
    uint32_t seen = 1u << held[0] | 1u << held[1];
    for (int i = 0; i < 4; i++) {
        TL_CHECK(ids[i] < 6 && !(seen >> ids[i] & 1u));
        seen |= 1u << ids[i];
        TL_EQ(tl_kv_fill(p, ids[i]), 0);
    }
    TL_CHECK(seen >> a & seen >> b & 1u);
    kv_expect_miss(p, 0xA);
    kv_expect_miss(p, 0xB);
    KV_REFUSED(tl_kv_alloc(p, 1, ids), TL_EFULL);
    tl_kv_pool_destroy(p);
}

TL_TEST_DOC(unref_frees_or_caches, "unit",
            "at 0 references a registered block is cached and any other freed; the counts add up",
            "prefixes are reused and no memory leaks", "s08") {
    tl_kv_pool *p = kv_new(3, 2, 1, 1, 2);
    const uint32_t plain = kv_filled(p, 1, 2), named = kv_registered(p, H0);
    KV_STATS(p, 1, 2, 0);
    tl_kv_ref(p, plain);
    tl_kv_ref(p, named);
    TL_OK_(tl_kv_unref(p, plain));
    TL_OK_(tl_kv_unref(p, named));
    KV_STATS(p, 1, 2, 0);
    TL_OK_(tl_kv_unref(p, plain));
    KV_STATS(p, 2, 1, 0);
    TL_OK_(tl_kv_unref(p, named));
    KV_STATS(p, 2, 0, 1);
    TL_EQ(tl_kv_fill(p, named), 2);
    kv_expect_hit(p, H0, named);
    KV_STATS(p, 2, 1, 0);
    TL_OK_(tl_kv_unref(p, named));
    KV_STATS(p, 2, 0, 1);
    tl_kv_pool_destroy(p);
}

TL_TEST_DOC(double_unref_is_einval_and_changes_nothing, "fault",
            "a second unref and a bad id are TL_EINVAL; ref on a block nobody holds only sets the "
            "error slot",
            "one block on the free list twice is shared memory that nobody knows about",
            "s09 s10") {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    const uint32_t freed = kv_alloc1(p);
    const uint32_t cached = kv_cached(p, H0);
    TL_OK_(tl_kv_unref(p, freed));
    KV_STATS(p, 3, 0, 1);
    static const uint32_t far_away[] = {4, 5, 0x7FFFFFFF, UINT32_MAX};
    for (int round = 0; round < 2; round++) {
        KV_REFUSED(tl_kv_unref(p, freed), TL_EINVAL);
        KV_STATS(p, 3, 0, 1);
        KV_REFUSED(tl_kv_unref(p, cached), TL_EINVAL);
        KV_STATS(p, 3, 0, 1);
        for (size_t i = 0; i < sizeof far_away / sizeof far_away[0]; i++) {
            KV_REFUSED(tl_kv_unref(p, far_away[i]), TL_EINVAL);
            tl_set_last_error(NULL);
            tl_kv_ref(p, far_away[i]);
            TL_CHECK(tl_last_error()[0] != 0);
        }
        tl_set_last_error(NULL);
        tl_kv_ref(p, freed);
        TL_CHECK(tl_last_error()[0] != 0);
        tl_set_last_error(NULL);
        tl_kv_ref(p, cached);
        TL_CHECK(tl_last_error()[0] != 0);
        KV_STATS(p, 3, 0, 1);
    }
    /* Nobody came to hold them: there is nothing to give back, and every block can be had, once. */
    KV_REFUSED(tl_kv_unref(p, freed), TL_EINVAL);
    KV_REFUSED(tl_kv_unref(p, cached), TL_EINVAL);
    uint32_t order[4];
    TL_EQ(kv_drain(p, order), 4);
    TL_EQ(order[3], cached);
    for (int i = 0; i < 4; i++) {
        TL_OK_(tl_kv_unref(p, order[i]));
        KV_REFUSED(tl_kv_unref(p, order[i]), TL_EINVAL);
    }
    KV_STATS(p, 4, 0, 0);
    tl_kv_pool_destroy(p);
}

TL_TEST_DOC(lookup_revives_a_cached_block_and_misses_quietly, "unit",
            "a hit returns the block, used again, contents intact; a miss is TL_ENOTFOUND with the "
            "error slot unchanged",
            "every new prompt starts with lookups that hit or miss", "s12") {
    tl_kv_pool *p = kv_new(3, 2, 2, 1, 4);
    const uint32_t id = kv_registered(p, H0);
    kv_expect_miss(p, H1);
    kv_expect_miss(p, 0);
    /* A hit on a used block is one more reference. */
    kv_expect_hit(p, H0, id);
    KV_STATS(p, 2, 1, 0);
    TL_OK_(tl_kv_unref(p, id));
    KV_STATS(p, 2, 1, 0);
    TL_OK_(tl_kv_unref(p, id));
    KV_STATS(p, 2, 0, 1);
    kv_expect_miss(p, H1);
    kv_expect_hit(p, H0, id);
    KV_STATS(p, 2, 1, 0);
    kv_expect(p, id, H0, 2);
    TL_EQ(tl_kv_fill(p, id), 2);
    TL_OK_(tl_kv_unref(p, id));
    KV_STATS(p, 2, 0, 1);
    KV_REFUSED(tl_kv_lookup(p, H0, NULL), TL_EINVAL);
    KV_STATS(p, 2, 0, 1);
    tl_kv_pool_destroy(p);
}

TL_TEST_DOC(eviction_takes_the_least_recently_used, "unit",
            "a hit moves a cached block to the newest end; two allocations evict the two oldest; "
            "evictions counts them",
            "the prefixes in use stay cached, and metrics show the pressure", "s13 s14") {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    uint32_t id[4];
    for (uint32_t i = 0; i < 4; i++)
        id[i] = kv_registered(p, 0x100 + i);
    /* The order of giving back decides, not the order of taking. */
    static const uint32_t order[4] = {2, 0, 3, 1};
    for (uint32_t i = 0; i < 4; i++)
        TL_OK_(tl_kv_unref(p, id[order[i]]));
    KV_STATS(p, 0, 0, 4);
    kv_expect_hit(p, 0x102, id[2]); /* the oldest becomes the newest */
    TL_OK_(tl_kv_unref(p, id[2]));
    TL_EQ(kv_stats(p).evictions, 0);
    TL_EQ(kv_alloc1(p), id[0]);
    KV_STATS(p, 0, 1, 3);
    TL_EQ(kv_stats(p).evictions, 1);
    kv_expect_miss(p, 0x100);
    TL_EQ(kv_alloc1(p), id[3]);
    KV_STATS(p, 0, 2, 2);
    TL_EQ(kv_stats(p).evictions, 2);
    kv_expect_miss(p, 0x103);
    /* The two that stayed can still be found. */
    kv_expect_hit(p, 0x101, id[1]);
    kv_expect_hit(p, 0x102, id[2]);
    kv_expect(p, id[1], 0x101, 2);
    kv_expect(p, id[2], 0x102, 2);
    KV_STATS(p, 0, 4, 0);
    /* A free block is taken before any cached one. */
    TL_OK_(tl_kv_unref(p, id[0]));
    TL_OK_(tl_kv_unref(p, id[1]));
    KV_STATS(p, 1, 2, 1);
    TL_EQ(kv_alloc1(p), id[0]);
    TL_EQ(kv_stats(p).evictions, 2);
    tl_kv_pool_destroy(p);
}

TL_TEST_DOC(a_revived_block_is_never_evicted, "unit",
            "after a lookup hit the next allocation reclaims another cached block",
            "a running request's prefix stays put", "s11") {
    for (uint32_t revived = 0; revived < 3; revived++) {
        tl_kv_pool *p = kv_new(3, 2, 1, 1, 2);
        uint32_t id[3], got = 0;
        for (uint32_t i = 0; i < 3; i++)
            id[i] = kv_registered(p, 0x200 + i);
        for (uint32_t i = 0; i < 3; i++)
            TL_OK_(tl_kv_unref(p, id[i]));
        kv_expect_hit(p, 0x200 + revived, id[revived]);
        KV_STATS(p, 0, 1, 2);
        for (int i = 0; i < 2; i++)
            TL_CHECK(kv_alloc1(p) != id[revived]);
        KV_STATS(p, 0, 3, 0);
        TL_EQ(kv_stats(p).evictions, 2);
        KV_REFUSED(tl_kv_alloc(p, 1, &got), TL_EFULL);
        kv_expect(p, id[revived], 0x200 + revived, 2);
        kv_expect_hit(p, 0x200 + revived, id[revived]);
        TL_OK_(tl_kv_unref(p, id[revived]));
        TL_OK_(tl_kv_unref(p, id[revived]));
        KV_STATS(p, 0, 2, 1);
        tl_kv_pool_destroy(p);
    }
}

/* ---- copy on write ------------------------------------------------------------------------- */

TL_TEST_DOC(cow_copies_only_when_shared, "unit",
            "1 reference writes in place; 2 copy contents and fill; the original is unchanged",
            "forks for beam search and parallel sampling", "s15 s16") {
    tl_kv_pool *p = kv_new(4, 4, 2, 2, 3);
    const uint32_t id = kv_filled(p, 21, 3);
    uint32_t out = UINT32_MAX;
    TL_OK_(tl_kv_cow(p, id, &out));
    TL_EQ(out, id);
    KV_STATS(p, 3, 1, 0);

    tl_kv_ref(p, id);
    TL_OK_(tl_kv_cow(p, id, &out));
    TL_CHECK(out != id && out < 4);
    KV_STATS(p, 2, 2, 0);
    TL_EQ(tl_kv_fill(p, out), 3);
    kv_expect(p, out, 21, 3);
    /* The writer's changes stay the writer's. */
    kv_write(p, out, 22);
    TL_OK_(tl_kv_set_fill(p, out, 4));
    kv_expect(p, id, 21, 3);
    TL_EQ(tl_kv_fill(p, id), 3);
    /* One reference left on each: the writer's went with the copy. */
    uint32_t again = UINT32_MAX;
    TL_OK_(tl_kv_cow(p, id, &again));
    TL_EQ(again, id);
    TL_OK_(tl_kv_unref(p, id));
    KV_STATS(p, 3, 1, 0);
    TL_OK_(tl_kv_unref(p, out));
    KV_STATS(p, 4, 0, 0);

    /* A copy of a registered block is private; the original stays findable. */
    const uint32_t named = kv_registered(p, H0);
    tl_kv_ref(p, named);
    tl_kv_ref(p, named);
    TL_OK_(tl_kv_cow(p, named, &out));
    TL_CHECK(out != named);
    kv_expect(p, out, H0, 4);
    TL_OK_(tl_kv_set_fill(p, out, 1));
    TL_OK_(tl_kv_unref(p, out));
    KV_STATS(p, 3, 1, 0);
    kv_expect_hit(p, H0, named);
    for (int i = 0; i < 3; i++)
        TL_OK_(tl_kv_unref(p, named));
    KV_STATS(p, 3, 0, 1);
    KV_REFUSED(tl_kv_cow(p, named, &out), TL_EINVAL);
    KV_REFUSED(tl_kv_cow(p, 4, &out), TL_EINVAL);
    tl_kv_pool_destroy(p);
}

TL_TEST_DOC(cow_in_a_full_pool_is_efull, "boundary", "a copy that cannot allocate changes nothing",
            "the scheduler preempts instead of corrupting", "s16") {
    tl_kv_pool *p = kv_new(2, 2, 1, 1, 2);
    const uint32_t a = kv_filled(p, 31, 1), b = kv_filled(p, 32, 2);
    tl_kv_ref(p, a);
    uint32_t out = 0x55555555u;
    KV_REFUSED(tl_kv_cow(p, a, &out), TL_EFULL);
    TL_EQ(out, 0x55555555u);
    KV_STATS(p, 0, 2, 0);
    kv_expect(p, a, 31, 1);
    kv_expect(p, b, 32, 2);
    TL_EQ(tl_kv_fill(p, a), 1);
    /* Both references are still there. */
    TL_OK_(tl_kv_unref(p, a));
    KV_STATS(p, 0, 2, 0);
    TL_OK_(tl_kv_unref(p, a));
    KV_STATS(p, 1, 1, 0);
    /* A cached block makes room for the copy. */
    TL_EQ(kv_cached(p, H0), a);
    tl_kv_ref(p, b);
    TL_OK_(tl_kv_cow(p, b, &out));
    TL_EQ(out, a);
    kv_expect(p, out, 32, 2);
    kv_expect_miss(p, H0);
    KV_STATS(p, 0, 2, 0);
    TL_EQ(kv_stats(p).evictions, 1);
    tl_kv_pool_destroy(p);
}

/* ---- registration -------------------------------------------------------------------------- */

TL_TEST_DOC(only_full_blocks_are_registered, "unit, boundary",
            "partial blocks, hash 0 and blocks nobody holds are refused; a hash that another block "
            "holds is TL_EBUSY; a registered block is immutable",
            "the hash of a partial block would name contents that still change", "s17 s18") {
    tl_kv_pool *p = kv_new(4, 4, 1, 1, 2);
    const uint32_t a = kv_filled(p, 41, 3);
    KV_REFUSED(tl_kv_register(p, a, H0), TL_EINVAL);
    kv_expect_miss(p, H0);
    TL_OK_(tl_kv_set_fill(p, a, 0));
    KV_REFUSED(tl_kv_register(p, a, H0), TL_EINVAL);
    kv_expect_miss(p, H0);
    TL_OK_(tl_kv_set_fill(p, a, 4));
    KV_REFUSED(tl_kv_register(p, a, 0), TL_EINVAL);
    KV_REFUSED(tl_kv_register(p, 4, H0), TL_EINVAL);
    TL_OK_(tl_kv_register(p, a, H0));
    TL_OK_(tl_kv_register(p, a, H0));

    /* Immutable: neither its fill nor its name changes. */
    KV_REFUSED(tl_kv_set_fill(p, a, 3), TL_EINVAL);
    KV_REFUSED(tl_kv_set_fill(p, a, 4), TL_EINVAL);
    TL_EQ(tl_kv_fill(p, a), 4);
    KV_REFUSED(tl_kv_register(p, a, H1), TL_EINVAL);
    kv_expect_miss(p, H1);

    /* The first holder keeps its hash; the second stays private and can get another. */
    const uint32_t b = kv_filled(p, 42, 4);
    KV_REFUSED(tl_kv_register(p, b, H0), TL_EBUSY);
    kv_expect_hit(p, H0, a);
    TL_OK_(tl_kv_unref(p, a));
    TL_OK_(tl_kv_set_fill(p, b, 4));
    TL_OK_(tl_kv_unref(p, a));
    KV_STATS(p, 2, 1, 1);
    kv_expect_hit(p, H0, a);
    TL_OK_(tl_kv_unref(p, a));
    KV_REFUSED(tl_kv_register(p, b, H0), TL_EBUSY); /* a cached holder is a holder */
    TL_OK_(tl_kv_unref(p, b));
    KV_STATS(p, 3, 0, 1);
    KV_REFUSED(tl_kv_register(p, b, H1), TL_EINVAL); /* free */
    KV_REFUSED(tl_kv_register(p, a, H0), TL_EINVAL); /* cached */
    KV_REFUSED(tl_kv_set_fill(p, b, 1), TL_EINVAL);
    KV_REFUSED(tl_kv_set_fill(p, a, 1), TL_EINVAL);
    KV_STATS(p, 3, 0, 1);

    const uint32_t c = kv_filled(p, 43, 4);
    KV_REFUSED(tl_kv_set_fill(p, c, 5), TL_EINVAL);
    TL_EQ(tl_kv_fill(p, c), 4);
    TL_OK_(tl_kv_register(p, c, H1));
    /* An evicted block gives up its name. */
    uint32_t order[4];
    TL_EQ(kv_drain(p, order), 3);
    kv_expect_miss(p, H0);
    TL_OK_(tl_kv_set_fill(p, a, 4));
    TL_OK_(tl_kv_register(p, a, H0));
    tl_kv_pool_destroy(p);
}

/* ---- contents ------------------------------------------------------------------------------ */

TL_TEST_DOC(block_ptr_layout, "unit, boundary",
            "every (block, layer, K or V) slab is distinct and exactly H * B * D values long; out "
            "of range gives NULL",
            "attention kernels index the slabs as [H][B][D]", "s19") {
    enum { N = 3, B = 4, L = 2, H = 3, D = 5, VALUES = H * B * D };
    tl_kv_pool *p = kv_new(N, B, L, H, D);
    TL_EQ(tl_kv_block_bytes(p), L * 2 * VALUES * 2);
    uint32_t ids[N];
    TL_OK_(tl_kv_alloc(p, N, ids));
    uint8_t *const slab = tl_kv_block_ptr(p, 0, 0, 0);
    TL_CHECK(slab != NULL);
    for (uint32_t id = 0; id < N; id++)
        for (uint32_t layer = 0; layer < L; layer++)
            for (int is_v = 0; is_v < 2; is_v++)
                TL_PTR_EQ(tl_kv_block_ptr(p, id, layer, is_v),
                          slab + (((size_t)id * L + layer) * 2 + (size_t)is_v) * VALUES * 2);
    TL_PTR_EQ(tl_kv_block_ptr(p, 1, 1, 7), tl_kv_block_ptr(p, 1, 1, 1));
    TL_PTR_EQ(tl_kv_block_ptr(p, 1, 1, -1), tl_kv_block_ptr(p, 1, 1, 1));
    /* All of them written in full, then read: none overlaps another or ends early. */
    for (uint32_t id = 0; id < N; id++)
        kv_write(p, id, id);
    for (uint32_t id = 0; id < N; id++)
        kv_expect(p, id, id, B);
    static const uint32_t bad[][2] = {{N, 0},          {0, L}, {UINT32_MAX, 0},
                                      {0, UINT32_MAX}, {N, L}, {UINT32_MAX, UINT32_MAX}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tl_set_last_error(NULL);
        TL_PTR_EQ(tl_kv_block_ptr(p, bad[i][0], bad[i][1], 0), NULL);
        TL_CHECK(tl_last_error()[0] != 0);
    }
    tl_set_last_error(NULL);
    TL_EQ(tl_kv_fill(p, N), 0);
    TL_CHECK(tl_last_error()[0] != 0);
    tl_kv_pool_destroy(p);
}

/* ---- export and import --------------------------------------------------------------------- */

TL_TEST_DOC(
    export_zeroes_past_the_fill_and_reports_its_size, "unit, boundary",
    "stale values past the fill are exported as zeros; a short buffer gets TL_EFULL and the "
    "size needed, and is left alone",
    "envelopes of equal data compare byte for byte; callers can size their buffer", "s20 s21") {
    enum { B = 4, L = 2, H = 3, D = 5, P = L * 2 * H * B * D * 2, FILL = 3, MAX = 28 + 12 + P + 4 };
    tl_kv_pool *p = kv_new(3, B, L, H, D);
    const uint32_t id = kv_filled(p, 51, FILL); /* the pattern goes on past the fill */
    uint8_t buf[MAX + 8], want[P];
    size_t written = 0;
    TL_EQ(tl_kv_export_bytes(p, 1), MAX);
    memset(buf, 0xEE, sizeof buf);
    TL_OK_(tl_kv_export(p, &id, 1, buf, sizeof buf, &written));
    TL_EQ(written, MAX);
    wire_f16(want, tl_kv_block_ptr(p, id, 0, 0), P);
    wire_zero_past(want, FILL, B, L, H, D);
    TL_MEM_EQ(buf + WIRE_HEADER + WIRE_RECORD, want, P);
    TL_EQ(wire_get(buf + MAX - 4, 4), wire_crc(buf, MAX - 4));
    TL_MEM_EQ(buf + MAX, "\xEE\xEE\xEE\xEE\xEE\xEE\xEE\xEE", 8);
    kv_expect(p, id, 51, B); /* the block itself keeps what it has */

    /* The same data over other stale values: the same bytes. */
    const uint32_t other = kv_alloc1(p);
    kv_write(p, other, 52);
    for (uint32_t layer = 0; layer < L; layer++)
        for (int is_v = 0; is_v < 2; is_v++)
            for (size_t h = 0; h < H; h++)
                memcpy((uint16_t *)tl_kv_block_ptr(p, other, layer, is_v) + h * B * D,
                       (uint16_t *)tl_kv_block_ptr(p, id, layer, is_v) + h * B * D, FILL * D * 2);
    TL_OK_(tl_kv_set_fill(p, other, FILL));
    uint8_t buf2[MAX];
    TL_OK_(tl_kv_export(p, &other, 1, buf2, MAX, &written));
    TL_MEM_EQ(buf2, buf, MAX);

    static const size_t caps[] = {0, 1, 27, 28, 60, MAX - 4, MAX - 1};
    for (size_t i = 0; i < sizeof caps / sizeof caps[0]; i++) {
        memset(buf2, 0xEE, MAX);
        written = 12345;
        KV_REFUSED(tl_kv_export(p, &id, 1, buf2, caps[i], &written), TL_EFULL);
        TL_EQ(written, MAX);
        for (size_t j = 0; j < MAX; j++)
            TL_EQ(buf2[j], 0xEE);
    }
    written = 12345;
    KV_REFUSED(tl_kv_export(p, &id, 1, NULL, 0, &written), TL_EFULL);
    TL_EQ(written, MAX);

    /* Blocks that no reader would take: empty, or nobody's. */
    const uint32_t empty = kv_alloc1(p);
    KV_REFUSED(tl_kv_export(p, &empty, 1, buf, sizeof buf, &written), TL_EINVAL);
    TL_EQ(written, 0);
    TL_OK_(tl_kv_unref(p, empty));
    KV_REFUSED(tl_kv_export(p, &empty, 1, buf, sizeof buf, &written), TL_EINVAL);
    KV_STATS(p, 1, 2, 0);
    tl_kv_pool_destroy(p);
}

TL_TEST_DOC(export_import_roundtrip, "unit",
            "export, import into another pool, export again: the same bytes; full blocks arrive "
            "registered, the tail does not",
            "a prefill engine hands its blocks to a decode engine", "s04 s22 s23") {
    enum { B = 4, L = 3, H = 2, D = 6, N = 3 };
    tl_kv_pool *a = kv_new(8, B, L, H, D), *b = kv_new(5, B, L, H, D);
    uint32_t ids[N] = {kv_registered(a, H0), kv_registered(a, H1), kv_filled(a, 61, 2)};
    const size_t size = tl_kv_export_bytes(a, N), P = tl_kv_block_bytes(a);
    uint8_t *env = malloc(size), *again = malloc(size);
    size_t written = 0;
    TL_OK_(tl_kv_export(a, ids, N, env, size, &written));
    TL_EQ(written, size);
    TL_EQ(wire_get(wire_record(env, 0, P), 8), H0);
    TL_EQ(wire_get(wire_record(env, 1, P), 8), H1);
    TL_EQ(wire_get(wire_record(env, 2, P), 8), 0);

    const uint32_t shift = kv_alloc1(b); /* other ids than in the first pool */
    uint32_t got[N + 1] = {0, 0, 0, 0x66666666u};
    TL_OK_(tl_kv_import(b, env, size, got));
    KV_STATS(b, 1, 4, 0);
    TL_EQ(got[N], 0x66666666u);
    for (int i = 0; i < N; i++)
        TL_CHECK(got[i] != shift);
    TL_EQ(tl_kv_fill(b, got[0]), 4);
    TL_EQ(tl_kv_fill(b, got[1]), 4);
    TL_EQ(tl_kv_fill(b, got[2]), 2);
    kv_expect(b, got[0], H0, 4);
    kv_expect(b, got[1], H1, 4);
    kv_expect(b, got[2], 61, 2);
    memset(again, 0, size);
    TL_OK_(tl_kv_export(b, got, N, again, size, &written));
    TL_EQ(written, size);
    TL_MEM_EQ(again, env, size);

    /* The full ones are found and cached, the tail is freed. */
    kv_expect_hit(b, H0, got[0]);
    TL_OK_(tl_kv_unref(b, got[0]));
    for (int i = 0; i < N; i++)
        TL_OK_(tl_kv_unref(b, got[i]));
    KV_STATS(b, 2, 1, 2);
    kv_expect_hit(b, H1, got[1]);
    kv_expect(b, got[1], H1, 4);
    free(env);
    free(again);
    tl_kv_pool_destroy(a);
    tl_kv_pool_destroy(b);
}

TL_TEST_DOC(import_keeps_the_first_holder_of_a_hash, "unit",
            "an imported block whose hash is held stays a private copy",
            "a transfer may bring what is there already", "s24") {
    tl_kv_pool *a = kv_new(2, 2, 1, 1, 2), *b = kv_new(4, 2, 1, 1, 2);
    uint32_t ids[2] = {kv_registered(a, H0), kv_registered(a, H1)};
    uint8_t env[28 + 2 * 28 + 4];
    size_t written;
    TL_OK_(tl_kv_export(a, ids, 2, env, sizeof env, &written));

    const uint32_t first = kv_registered(b, H0);
    kv_write(b, first, H0);
    uint32_t got[2];
    TL_OK_(tl_kv_import(b, env, sizeof env, got));
    TL_CHECK(got[0] != first && got[1] != first && got[0] != got[1]);
    KV_STATS(b, 1, 3, 0);
    kv_expect(b, got[0], H0, 2);
    kv_expect(b, got[1], H1, 2);
    kv_expect_hit(b, H0, first);
    TL_OK_(tl_kv_unref(b, first));
    kv_expect_hit(b, H1, got[1]);
    TL_OK_(tl_kv_unref(b, got[1]));
    /* Private: mutable, and freed at the end. */
    TL_OK_(tl_kv_set_fill(b, got[0], 1));
    TL_OK_(tl_kv_unref(b, got[0]));
    TL_OK_(tl_kv_unref(b, got[1]));
    TL_OK_(tl_kv_unref(b, first));
    KV_STATS(b, 2, 0, 2);

    /* A cached holder is a holder too. */
    TL_OK_(tl_kv_import(b, env, sizeof env, got));
    KV_STATS(b, 0, 2, 2);
    TL_OK_(tl_kv_unref(b, got[0]));
    TL_OK_(tl_kv_unref(b, got[1]));
    KV_STATS(b, 2, 0, 2);
    kv_expect_hit(b, H0, first);
    tl_kv_pool_destroy(a);
    tl_kv_pool_destroy(b);
}

TL_TEST_DOC(every_bit_flip_is_eformat, "fault",
            "all 480 single-bit flips of the worked envelope are refused, and every truncation; "
            "nothing is allocated",
            "a corrupted transfer is never decoded", "s25") {
    tl_kv_pool *p = kv_new(3, 2, 1, 1, 2);
    uint32_t got[1] = {0x44444444u};
    uint8_t env[61];
    for (size_t bit = 0; bit < 480; bit++) {
        tl_test_context("bit %zu of byte %zu flipped", bit % 8, bit / 8);
        memcpy(env, wire_example, 60);
        env[bit / 8] ^= (uint8_t)(1u << bit % 8);
        KV_REFUSED(tl_kv_import(p, env, 60, got), TL_EFORMAT);
        KV_STATS(p, 3, 0, 0);
        TL_EQ(got[0], 0x44444444u);
    }
    memcpy(env, wire_example, 60);
    env[60] = 0;
    for (size_t len = 0; len <= 61; len++) {
        if (len == 60)
            continue;
        tl_test_context("%zu bytes of 60", len);
        KV_REFUSED(tl_kv_import(p, env, len, got), TL_EFORMAT);
        KV_STATS(p, 3, 0, 0);
    }
    tl_test_context("%s", "");
    TL_EQ(kv_stats(p).evictions, 0);
    TL_OK_(tl_kv_import(p, env, 60, got));
    KV_STATS(p, 2, 1, 0);
    kv_expect_hit(p, H0, got[0]);
    tl_kv_pool_destroy(p);
}

/* A valid envelope of n full blocks in a shape of the caller's choice. */
static uint8_t *shaped_envelope(uint32_t n, uint32_t B, uint32_t L, uint32_t H, uint32_t D,
                                size_t *len) {
    const size_t P = (size_t)L * 2 * H * B * D * 2;
    *len = wire_bytes(n, P);
    uint8_t *env = malloc(*len);
    memset(env, 0x3C, *len);
    wire_header(env, n, B, L, H, D);
    for (uint32_t i = 0; i < n; i++) {
        wire_put(wire_record(env, i, P), 0x5000 + i, 8);
        wire_put(wire_record(env, i, P) + WIRE_N_TOKENS, B, 4);
    }
    wire_seal(env, *len);
    return env;
}

TL_TEST_DOC(import_reader_rules, "boundary",
            "another version or dtype, n_tokens out of range and a hashed partial block, each with "
            "a valid CRC, are TL_EFORMAT; another shape is TL_ESHAPE",
            "format v2 arrives only through its own migration", "s27 s28") {
    enum { B = 4, L = 2, H = 2, D = 4, P = L * 2 * H * B * D * 2 };
    tl_kv_pool *p = kv_new(4, B, L, H, D);
    static const struct {
        const char *what;
        size_t at, n_bytes;
        uint64_t value;
        tl_status status;
    } rules[] = {
        {"version 0", WIRE_VERSION, 2, 0, TL_EFORMAT},
        {"version 2", WIRE_VERSION, 2, 2, TL_EFORMAT},
        {"version 256", WIRE_VERSION, 2, 256, TL_EFORMAT},
        {"version 65535", WIRE_VERSION, 2, 65535, TL_EFORMAT},
        {"dtype 0 (float32)", WIRE_DTYPE, 2, 0, TL_EFORMAT},
        {"dtype 2 (bfloat16)", WIRE_DTYPE, 2, 2, TL_EFORMAT},
        {"dtype 3 (fp8)", WIRE_DTYPE, 2, 3, TL_EFORMAT},
        {"dtype 257", WIRE_DTYPE, 2, 257, TL_EFORMAT},
        {"magic TLKW", WIRE_MAGIC + 3, 1, 'W', TL_EFORMAT},
        {"n_tokens 0", WIRE_HEADER + WIRE_N_TOKENS, 4, 0, TL_EFORMAT},
        {"n_tokens B + 1", WIRE_HEADER + WIRE_N_TOKENS, 4, B + 1, TL_EFORMAT},
        {"n_tokens 2^32 - 1", WIRE_HEADER + WIRE_N_TOKENS, 4, UINT32_MAX, TL_EFORMAT},
        {"a hashed partial block", WIRE_HEADER + WIRE_N_TOKENS, 4, B - 1, TL_EFORMAT},
        {"n_tokens 0 in block 1", WIRE_HEADER + 12 + P + WIRE_N_TOKENS, 4, 0, TL_EFORMAT},
        {"a hashed partial block 1", WIRE_HEADER + 12 + P + WIRE_N_TOKENS, 4, 1, TL_EFORMAT},
        {"n_blocks 3 for 2", WIRE_N_BLOCKS, 4, 3, TL_EFORMAT},
        {"n_blocks 1 for 2", WIRE_N_BLOCKS, 4, 1, TL_EFORMAT},
        {"n_blocks 2^32 - 1", WIRE_N_BLOCKS, 4, UINT32_MAX, TL_EFORMAT},
    };
    size_t len;
    uint32_t got[4] = {0, 0, 0, 0};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        tl_test_context("%s", rules[i].what);
        uint8_t *env = shaped_envelope(2, B, L, H, D, &len);
        wire_put(env + rules[i].at, rules[i].value, rules[i].n_bytes);
        wire_seal(env, len);
        KV_REFUSED(tl_kv_import(p, env, len, got), rules[i].status);
        KV_STATS(p, 4, 0, 0);
        free(env);
    }

    /* Each dimension for itself, and each pair with the same payload size. */
    static const uint32_t shapes[][4] = {
        {B + 1, L, H, D},     {B, L + 1, H, D},     {B, L, H + 1, D},     {B, L, H, D + 1},
        {B - 1, L, H, D},     {B, L - 1, H, D},     {B, L, H - 1, D},     {B, L, H, D - 1},
        {B * 2, L / 2, H, D}, {B * 2, L, H / 2, D}, {B * 2, L, H, D / 2}, {B / 2, L * 2, H, D},
        {B, L * 2, H / 2, D}, {B, L * 2, H, D / 2}, {B / 2, L, H * 2, D}, {B, L / 2, H * 2, D},
        {B, L, H * 2, D / 2}, {B / 2, L, H, D * 2}, {B, L / 2, H, D * 2}, {B, L, H / 2, D * 2}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const uint32_t *s = shapes[i];
        tl_test_context("shape B %u L %u H %u D %u", s[0], s[1], s[2], s[3]);
        uint8_t *env = shaped_envelope(2, s[0], s[1], s[2], s[3], &len);
        KV_REFUSED(tl_kv_import(p, env, len, got), TL_ESHAPE);
        KV_STATS(p, 4, 0, 0);
        free(env);
    }
    tl_test_context("%s", "");

    /* What the rules allow: the envelope itself, a partial block without a hash, no blocks. */
    uint8_t *env = shaped_envelope(2, B, L, H, D, &len);
    wire_put(wire_record(env, 1, P), 0, 8);
    wire_put(wire_record(env, 1, P) + WIRE_N_TOKENS, 1, 4);
    wire_seal(env, len);
    TL_OK_(tl_kv_import(p, env, len, got));
    KV_STATS(p, 2, 2, 0);
    TL_EQ(tl_kv_fill(p, got[0]), B);
    TL_EQ(tl_kv_fill(p, got[1]), 1);
    free(env);
    env = shaped_envelope(0, B, L, H, D, &len);
    TL_EQ(len, 32);
    TL_OK_(tl_kv_import(p, env, len, got));
    KV_STATS(p, 2, 2, 0);
    free(env);
    /* More blocks than there are: nothing is taken. */
    env = shaped_envelope(3, B, L, H, D, &len);
    KV_REFUSED(tl_kv_import(p, env, len, got), TL_EFULL);
    KV_STATS(p, 2, 2, 0);
    free(env);
    tl_kv_pool_destroy(p);
}

/* ---- creation ------------------------------------------------------------------------------ */

TL_TEST_DOC(
    create_rules_and_alloc_failure, "boundary, fault",
    "format 2 and other dtypes are TL_EUNSUPPORTED, zero dimensions TL_EINVAL; every failing "
    "allocation of create is TL_ENOMEM with nothing leaked",
    "an engine starts or fails cleanly", "s29 s30") {
    const tl_kv_cfg good = {7, 4, 2, 3, 5, TL_F16, TL_KV_FORMAT_V1};
    tl_kv_pool *const junk = (tl_kv_pool *)(uintptr_t)0x1000;
    tl_kv_pool *p = junk;
#define CREATE_FAILS(cfg, status)                                                                  \
    do {                                                                                           \
        p = junk;                                                                                  \
        KV_REFUSED(tl_kv_pool_create(cfg, &p), status);                                            \
        TL_PTR_EQ(p, NULL);                                                                        \
        TL_EQ(tl_count_live(), 0);                                                                 \
    } while (0)

    CREATE_FAILS(NULL, TL_EINVAL);
    KV_REFUSED(tl_kv_pool_create(&good, NULL), TL_EINVAL);
    static const uint32_t formats[] = {0, 2, 3, 256, UINT32_MAX};
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        tl_kv_cfg cfg = good;
        cfg.format = formats[i];
        CREATE_FAILS(&cfg, TL_EUNSUPPORTED);
    }
    for (int32_t dtype = -1; dtype <= 10; dtype++) {
        tl_kv_cfg cfg = good;
        cfg.dtype = dtype;
        if (dtype != TL_F16)
            CREATE_FAILS(&cfg, TL_EUNSUPPORTED);
    }
    for (int field = 0; field < 5; field++) {
        tl_kv_cfg cfg = good;
        uint32_t *const dims[5] = {&cfg.n_blocks, &cfg.block_tokens, &cfg.n_layers, &cfg.n_kv_heads,
                                   &cfg.head_dim};
        *dims[field] = 0;
        CREATE_FAILS(&cfg, TL_EINVAL);
        cfg.format = 2; /* the dimension is reported first */
        cfg.dtype = TL_F32;
        CREATE_FAILS(&cfg, TL_EINVAL);
    }
    const tl_kv_cfg huge = {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, TL_F16, 1};
    CREATE_FAILS(&huge, TL_EINVAL);

    /* The k-th allocation fails, for every k that create gets to. */
    for (uint64_t k = 1;; k++) {
        tl_test_context("allocation %llu of create refused", (unsigned long long)k);
        const uint64_t before = tl_count_allocs();
        p = junk;
        tl_set_last_error(NULL);
        tl_count_fail_at(k);
        const tl_status status = tl_kv_pool_create(&good, &p);
        tl_count_fail_at(0);
        if (status == TL_OK) {
            TL_EQ(tl_count_allocs() - before, k - 1);
            TL_CHECK(k > 1);
            break;
        }
        TL_STATUS(status, TL_ENOMEM);
        TL_CHECK(tl_last_error()[0] != 0);
        TL_PTR_EQ(p, NULL);
        TL_EQ(tl_count_live(), 0);
        TL_CHECK(k < 100);
    }
    tl_test_context("%s", "");
    tl_kv_cfg back;
    memset(&back, 0xEE, sizeof back);
    tl_kv_pool_cfg(p, &back);
    TL_MEM_EQ(&back, &good, sizeof good);
    KV_STATS(p, 7, 0, 0);
    TL_EQ(kv_stats(p).evictions, 0);
    tl_kv_pool_destroy(p);
    TL_EQ(tl_count_live(), 0);
    tl_kv_pool_destroy(NULL);
}

/* ---- the random test ----------------------------------------------------------------------- */

/*
 * A pool beside a model of it: for each block its references, fill, name and bytes; the cached
 * blocks in order. Every operation is made on both with arguments good and bad, and everything
 * that can be seen is compared after every one.
 */
enum { MAX_BLOCKS = 24, MAX_PAYLOAD = 2 * 2 * 2 * 4 * 3 * 2, STEPS = 700 };

typedef struct {
    uint32_t ref, fill;
    uint64_t hash;
    uint8_t bytes[MAX_PAYLOAD];
} model_block;

typedef struct {
    tl_kv_pool *p;
    tl_kv_cfg c;
    size_t P;
    model_block b[MAX_BLOCKS];
    uint32_t lru[MAX_BLOCKS], n_cached; /* oldest first */
    uint32_t evictions;
    uint64_t rng;
} model;

static uint32_t model_count_free(const model *m) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->c.n_blocks; i++)
        n += m->b[i].ref == 0 && m->b[i].hash == 0;
    return n;
}

static int model_holder(const model *m, uint64_t hash) {
    for (uint32_t i = 0; i < m->c.n_blocks; i++)
        if (hash != 0 && m->b[i].hash == hash)
            return (int)i;
    return -1;
}

static void model_leave_lru(model *m, uint32_t id) {
    uint32_t i = 0;
    while (m->lru[i] != id)
        i++;
    m->n_cached--;
    memmove(&m->lru[i], &m->lru[i + 1], (m->n_cached - i) * sizeof m->lru[0]);
}

/* The pool took ids: they must be all free blocks if there are enough of them to choose from, and
 * the oldest cached ones for the rest. */
static void model_take(model *m, const uint32_t *ids, uint32_t n) {
    const uint32_t n_free = model_count_free(m);
    const uint32_t n_evicted = n > n_free ? n - n_free : 0;
    for (uint32_t i = 0; i < n; i++) {
        TL_CHECK(ids[i] < m->c.n_blocks);
        for (uint32_t j = 0; j < i; j++)
            TL_CHECK(ids[j] != ids[i]);
        const model_block *b = &m->b[ids[i]];
        TL_EQ(b->ref, 0);
        if (b->hash != 0) {
            uint32_t age = 0;
            while (m->lru[age] != ids[i])
                age++;
            TL_CHECK(age < n_evicted);
        }
    }
    m->n_cached -= n_evicted;
    memmove(m->lru, m->lru + n_evicted, m->n_cached * sizeof m->lru[0]);
    m->evictions += n_evicted;
    for (uint32_t i = 0; i < n; i++) {
        m->b[ids[i]].ref = 1;
        m->b[ids[i]].fill = 0;
        m->b[ids[i]].hash = 0;
    }
}

static void model_drop(model *m, uint32_t id) {
    if (--m->b[id].ref == 0 && m->b[id].hash != 0)
        m->lru[m->n_cached++] = id;
}

/* Random bytes into a block that may be written. */
static void model_write(model *m, uint32_t id) {
    const size_t half = m->P / m->c.n_layers / 2;
    for (uint32_t layer = 0; layer < m->c.n_layers; layer++)
        for (int is_v = 0; is_v < 2; is_v++) {
            uint8_t *mine = m->b[id].bytes + (layer * 2 + (uint32_t)is_v) * half;
            for (size_t i = 0; i < half; i++)
                mine[i] = (uint8_t)tl_test_rand(&m->rng);
            memcpy(tl_kv_block_ptr(m->p, id, layer, is_v), mine, half);
        }
}

static void model_read(const model *m, uint32_t id, uint8_t *bytes) {
    const size_t half = m->P / m->c.n_layers / 2;
    for (uint32_t layer = 0; layer < m->c.n_layers; layer++)
        for (int is_v = 0; is_v < 2; is_v++)
            memcpy(bytes + (layer * 2 + (uint32_t)is_v) * half,
                   tl_kv_block_ptr(m->p, id, layer, is_v), half);
}

/* The block holds `want` up to its fill (the rest is undefined after a copy or an import); from
 * here on it must keep all that it has. */
static void model_adopt(model *m, uint32_t id, const uint8_t *want) {
    uint8_t a[MAX_PAYLOAD], b[MAX_PAYLOAD];
    model_read(m, id, m->b[id].bytes);
    memcpy(a, m->b[id].bytes, m->P);
    memcpy(b, want, m->P);
    wire_zero_past(a, m->b[id].fill, m->c.block_tokens, m->c.n_layers, m->c.n_kv_heads,
                   m->c.head_dim);
    wire_zero_past(b, m->b[id].fill, m->c.block_tokens, m->c.n_layers, m->c.n_kv_heads,
                   m->c.head_dim);
    TL_MEM_EQ(a, b, m->P);
}

static void model_compare(const model *m) {
    const uint32_t n_free = model_count_free(m);
    KV_STATS(m->p, n_free, m->c.n_blocks - n_free - m->n_cached, m->n_cached);
    TL_EQ(kv_stats(m->p).evictions, m->evictions);
    for (uint32_t id = 0; id < m->c.n_blocks; id++) {
        if (m->b[id].ref == 0 && m->b[id].hash == 0)
            continue;
        uint8_t bytes[MAX_PAYLOAD];
        TL_EQ(tl_kv_fill(m->p, id), m->b[id].fill);
        model_read(m, id, bytes);
        TL_MEM_EQ(bytes, m->b[id].bytes, m->P);
    }
    POOL_CHECK(m->p);
}

/* The envelope of blocks as the model sees them. */
static size_t model_export(const model *m, const uint32_t *ids, uint32_t n, uint8_t *env) {
    wire_header(env, n, m->c.block_tokens, m->c.n_layers, m->c.n_kv_heads, m->c.head_dim);
    for (uint32_t i = 0; i < n; i++) {
        const model_block *b = &m->b[ids[i]];
        uint8_t *r = wire_record(env, i, m->P);
        wire_put(r, b->hash, 8);
        wire_put(r + WIRE_N_TOKENS, b->fill, 4);
        wire_f16(r + WIRE_RECORD, b->bytes, m->P);
        wire_zero_past(r + WIRE_RECORD, b->fill, m->c.block_tokens, m->c.n_layers, m->c.n_kv_heads,
                       m->c.head_dim);
    }
    const size_t len = wire_bytes(n, m->P);
    wire_seal(env, len);
    return len;
}

static uint64_t random_hash(model *m) {
    const uint32_t i = tl_test_below(&m->rng, 2 * m->c.n_blocks + 1);
    return i == 0 ? 0 : 0x9E3779B97F4A7C15u * i; /* few enough to meet again */
}

static void op_alloc(model *m) {
    const uint32_t room = model_count_free(m) + m->n_cached;
    uint32_t n = tl_test_below(&m->rng, 4);
    if (tl_test_below(&m->rng, 8) == 0)
        n = room + tl_test_below(&m->rng, 2); /* exactly all, or one too many */
    uint32_t ids[MAX_BLOCKS + 1];
    if (n > room) {
        KV_REFUSED(tl_kv_alloc(m->p, n, ids), TL_EFULL);
        return;
    }
    TL_OK_(tl_kv_alloc(m->p, n, ids));
    model_take(m, ids, n);
    for (uint32_t i = 0; i < n; i++) {
        TL_EQ(tl_kv_fill(m->p, ids[i]), 0);
        model_write(m, ids[i]);
    }
}

static void op_ref(model *m, uint32_t id) {
    tl_set_last_error(NULL);
    tl_kv_ref(m->p, id);
    if (id < m->c.n_blocks && m->b[id].ref > 0)
        m->b[id].ref++;
    else
        TL_CHECK(tl_last_error()[0] != 0);
}

static void op_unref(model *m, uint32_t id) {
    if (id >= m->c.n_blocks || m->b[id].ref == 0) {
        KV_REFUSED(tl_kv_unref(m->p, id), TL_EINVAL);
        return;
    }
    TL_OK_(tl_kv_unref(m->p, id));
    model_drop(m, id);
}

static void op_cow(model *m, uint32_t id) {
    uint32_t out = 0x33333333u;
    if (id >= m->c.n_blocks || m->b[id].ref == 0) {
        KV_REFUSED(tl_kv_cow(m->p, id, &out), TL_EINVAL);
        TL_EQ(out, 0x33333333u);
    } else if (m->b[id].ref == 1) {
        TL_OK_(tl_kv_cow(m->p, id, &out));
        TL_EQ(out, id);
        if (m->b[id].hash == 0)
            model_write(m, id);
    } else if (model_count_free(m) + m->n_cached == 0) {
        KV_REFUSED(tl_kv_cow(m->p, id, &out), TL_EFULL);
        TL_EQ(out, 0x33333333u);
    } else {
        TL_OK_(tl_kv_cow(m->p, id, &out));
        model_take(m, &out, 1);
        m->b[id].ref--;
        m->b[out].fill = m->b[id].fill;
        model_adopt(m, out, m->b[id].bytes);
    }
}

static void op_set_fill(model *m, uint32_t id) {
    uint32_t n = m->c.block_tokens; /* full half of the time, so that there is much to register */
    if (tl_test_below(&m->rng, 2) == 0)
        n = tl_test_below(&m->rng, m->c.block_tokens + 2);
    if (id >= m->c.n_blocks || m->b[id].ref == 0 || m->b[id].hash != 0 || n > m->c.block_tokens) {
        KV_REFUSED(tl_kv_set_fill(m->p, id, n), TL_EINVAL);
        return;
    }
    TL_OK_(tl_kv_set_fill(m->p, id, n));
    m->b[id].fill = n;
    if (m->b[id].ref == 1)
        model_write(m, id);
}

static void op_register(model *m, uint32_t id) {
    uint64_t hash = random_hash(m);
    if (id < m->c.n_blocks && m->b[id].hash != 0 && tl_test_below(&m->rng, 2) == 0)
        hash = m->b[id].hash;
    if (id >= m->c.n_blocks || hash == 0 || m->b[id].ref == 0 ||
        m->b[id].fill != m->c.block_tokens || (m->b[id].hash != 0 && m->b[id].hash != hash)) {
        KV_REFUSED(tl_kv_register(m->p, id, hash), TL_EINVAL);
    } else if (m->b[id].hash == 0 && model_holder(m, hash) >= 0) {
        KV_REFUSED(tl_kv_register(m->p, id, hash), TL_EBUSY);
    } else {
        TL_OK_(tl_kv_register(m->p, id, hash));
        m->b[id].hash = hash;
    }
}

static void op_lookup(model *m, uint64_t hash) {
    const int holder = model_holder(m, hash);
    if (holder < 0) {
        kv_expect_miss(m->p, hash);
        return;
    }
    const uint32_t id = (uint32_t)holder;
    kv_expect_hit(m->p, hash, id);
    if (m->b[id].ref++ == 0)
        model_leave_lru(m, id);
}

static void op_export(model *m) {
    uint32_t ids[6];
    const uint32_t n = tl_test_below(&m->rng, 6);
    int legal = 1;
    for (uint32_t i = 0; i < n; i++) {
        /* Look for a block that can be exported, but not very hard. */
        for (int tries = 0; tries < 6; tries++) {
            ids[i] = tl_test_below(&m->rng, m->c.n_blocks);
            if (m->b[ids[i]].ref > 0 && m->b[ids[i]].fill > 0)
                break;
        }
        legal &= m->b[ids[i]].ref > 0 && m->b[ids[i]].fill > 0;
    }
    const size_t len = wire_bytes(n, m->P);
    uint8_t got[WIRE_HEADER + 6 * (WIRE_RECORD + MAX_PAYLOAD) + WIRE_TRAILER + 1], want[sizeof got];
    TL_EQ(tl_kv_export_bytes(m->p, n), len);
    size_t written = 99;
    memset(got, 0xEE, sizeof got);
    if (!legal) {
        KV_REFUSED(tl_kv_export(m->p, ids, n, got, sizeof got, &written), TL_EINVAL);
        TL_EQ(written, 0);
        return;
    }
    TL_OK_(tl_kv_export(m->p, ids, n, got, sizeof got, &written));
    TL_EQ(written, len);
    TL_EQ(model_export(m, ids, n, want), len);
    TL_MEM_EQ(got, want, len);
    TL_EQ(got[len], 0xEE);
    KV_REFUSED(tl_kv_export(m->p, ids, n, got, len - 1, &written), TL_EFULL);
    TL_EQ(written, len);
}

static void op_import(model *m) {
    enum { MAX_IMPORT = 5 };
    const uint32_t B = m->c.block_tokens, n = tl_test_below(&m->rng, MAX_IMPORT + 1);
    uint8_t env[WIRE_HEADER + MAX_IMPORT * (WIRE_RECORD + MAX_PAYLOAD) + WIRE_TRAILER];
    const size_t len = wire_bytes(n, m->P);
    for (size_t i = 0; i < len; i++)
        env[i] = (uint8_t)tl_test_rand(&m->rng);
    wire_header(env, n, B, m->c.n_layers, m->c.n_kv_heads, m->c.head_dim);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *r = wire_record(env, i, m->P);
        const uint32_t fill = tl_test_below(&m->rng, 2) ? B : 1 + tl_test_below(&m->rng, B);
        wire_put(r, fill == B ? random_hash(m) : 0, 8);
        wire_put(r + WIRE_N_TOKENS, fill, 4);
    }
    wire_seal(env, len);
    uint32_t ids[MAX_IMPORT];
    for (uint32_t i = 0; i < MAX_IMPORT; i++)
        ids[i] = 0x22222222u;
    if (tl_test_below(&m->rng, 3) == 0) {
        const uint32_t bit = tl_test_below(&m->rng, (uint32_t)len * 8);
        env[bit / 8] ^= (uint8_t)(1u << bit % 8);
        KV_REFUSED(tl_kv_import(m->p, env, len, ids), TL_EFORMAT);
        TL_EQ(ids[0], 0x22222222u);
        return;
    }
    if (n > model_count_free(m) + m->n_cached) {
        KV_REFUSED(tl_kv_import(m->p, env, len, ids), TL_EFULL);
        TL_EQ(ids[0], 0x22222222u);
        return;
    }
    TL_OK_(tl_kv_import(m->p, env, len, ids));
    model_take(m, ids, n);
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *r = wire_record(env, i, m->P);
        const uint64_t hash = wire_get(r, 8);
        m->b[ids[i]].fill = (uint32_t)wire_get(r + WIRE_N_TOKENS, 4);
        uint8_t want[MAX_PAYLOAD];
        wire_f16(want, r + WIRE_RECORD, m->P);
        model_adopt(m, ids[i], want);
        if (model_holder(m, hash) < 0)
            m->b[ids[i]].hash = hash;
    }
}

static void random_run(uint64_t seed) {
    static model m; /* large */
    memset(&m, 0, sizeof m);
    m.rng = seed;
    tl_test_context("--seed %llu", (unsigned long long)seed);
    const uint32_t n = 1 + tl_test_below(&m.rng, MAX_BLOCKS), B = 1 + tl_test_below(&m.rng, 4);
    const uint32_t L = 1 + tl_test_below(&m.rng, 2), H = 1 + tl_test_below(&m.rng, 2);
    m.p = kv_new(n, B, L, H, 1 + tl_test_below(&m.rng, 3));
    m.c = kv_cfg(m.p);
    m.P = tl_kv_block_bytes(m.p);
    TL_CHECK(m.P <= MAX_PAYLOAD);
    const uint64_t allocs = tl_count_allocs();
    for (uint32_t step = 0; step < STEPS; step++) {
        static const char *const name[] = {"alloc",    "ref",    "unref",  "cow",   "set_fill",
                                           "register", "lookup", "export", "import"};
        static const uint8_t weight[] = {0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3,
                                         4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 7, 8};
        const uint8_t op = weight[tl_test_below(&m.rng, sizeof weight)];
        tl_test_context("--seed %llu, step %u: %s", (unsigned long long)seed, step, name[op]);
        const uint32_t id = tl_test_below(&m.rng, 16) ? tl_test_below(&m.rng, m.c.n_blocks)
                                                      : (uint32_t)tl_test_rand(&m.rng);
        switch (op) {
        case 0:
            op_alloc(&m);
            break;
        case 1:
            op_ref(&m, id);
            break;
        case 2:
            op_unref(&m, id);
            break;
        case 3:
            op_cow(&m, id);
            break;
        case 4:
            op_set_fill(&m, id);
            break;
        case 5:
            op_register(&m, id);
            break;
        case 6:
            op_lookup(&m, random_hash(&m));
            break;
        case 7:
            op_export(&m);
            break;
        default:
            op_import(&m);
        }
        model_compare(&m);
    }

    /* Every name still finds its block; every reference can be given back; then every block can be
     * had again, once: free ones first, cached ones in the order of the model. */
    tl_test_context("--seed %llu, at the end", (unsigned long long)seed);
    for (uint32_t i = 0; i <= 2 * m.c.n_blocks; i++)
        op_lookup(&m, 0x9E3779B97F4A7C15u * i);
    for (uint32_t id = 0; id < m.c.n_blocks; id++)
        while (m.b[id].ref > 0)
            op_unref(&m, id);
    model_compare(&m);
    uint32_t order[MAX_BLOCKS];
    TL_EQ(kv_drain(m.p, order), m.c.n_blocks);
    for (uint32_t i = 0; i < m.n_cached; i++)
        TL_EQ(order[m.c.n_blocks - m.n_cached + i], m.lru[i]);
    TL_EQ(tl_count_allocs(), allocs); /* only create allocates */
    tl_kv_pool_destroy(m.p);
    tl_test_context("%s", "");
}

TL_TEST_DOC(
    random_ops_keep_the_invariants, "property",
    "40 seeded runs of alloc, ref, unref, cow, set_fill, register, lookup, export and import "
    "against a model; held blocks keep their contents; no call allocates",
    "the pool's promises hold under any interleaving", "m03") {
    uint64_t seed;
    if (tl_test_seed(&seed)) {
        random_run(seed);
        return;
    }
    for (seed = 1; seed <= 40; seed++)
        random_run(seed);
}
