/*
 * test_kv_pool_edges.c - what the header promises beyond the 20 tests of the chapter: NULL
 * arguments, texts in the error slot, sizes that overflow, memory that cannot be had, envelopes
 * without blocks and with equal ones, orders of taking blocks.
 */
#include "tinyllm/kv_pool.h"
#include "tinyllm/numerics.h"
#include "tl_count_alloc.h"
#include "tl_test.h"
#include "tl_test_kv.h"
#include "tl_test_wire.h"

#include <stdlib.h>

/* The call fails with the status, and the slot starts with the function's name. */
static void expect_text(const char *file, int line, const char *name) {
    const char *text = tl_last_error();
    const size_t n = strlen(name);
    if (strncmp(text, name, n) != 0 || text[n] != ':')
        tl_test_fail(file, line, "the error slot is \"%s\", but must start with \"%s:\"", text,
                     name);
}
#define SAYS(name, call, status)                                                                   \
    do {                                                                                           \
        KV_REFUSED(call, status);                                                                  \
        expect_text(__FILE__, __LINE__, name);                                                     \
    } while (0)
/* The same for a function without a status. */
#define SAYS_AFTER(name, call)                                                                     \
    do {                                                                                           \
        tl_set_last_error(NULL);                                                                   \
        call;                                                                                      \
        expect_text(__FILE__, __LINE__, name);                                                     \
    } while (0)

TL_TEST(null_arguments_are_refused_by_every_function) {
    tl_kv_pool *p = kv_new(2, 2, 1, 1, 2), *q = p;
    const tl_kv_cfg good = kv_cfg(p);
    uint32_t id = 0;
    size_t written = 7;
    uint8_t buf[60];
    SAYS("tl_kv_pool_create", tl_kv_pool_create(NULL, &q), TL_EINVAL);
    TL_PTR_EQ(q, NULL);
    SAYS("tl_kv_pool_create", tl_kv_pool_create(&good, NULL), TL_EINVAL);
    SAYS("tl_kv_pool_create", tl_kv_pool_create(NULL, NULL), TL_EINVAL);
    tl_kv_pool_destroy(NULL);

    tl_kv_cfg cfg;
    tl_kv_stats stats;
    static const uint8_t zeros[sizeof cfg] = {0};
    memset(&cfg, 0xEE, sizeof cfg);
    memset(&stats, 0xEE, sizeof stats);
    SAYS_AFTER("tl_kv_pool_cfg", tl_kv_pool_cfg(p, NULL));
    SAYS_AFTER("tl_kv_pool_cfg", tl_kv_pool_cfg(NULL, &cfg));
    TL_MEM_EQ(&cfg, zeros, sizeof cfg);
    SAYS_AFTER("tl_kv_stats_get", tl_kv_stats_get(p, NULL));
    SAYS_AFTER("tl_kv_stats_get", tl_kv_stats_get(NULL, &stats));

    SAYS("tl_kv_alloc", tl_kv_alloc(NULL, 1, &id), TL_EINVAL);
    SAYS("tl_kv_alloc", tl_kv_alloc(p, 1, NULL), TL_EINVAL);
    SAYS_AFTER("tl_kv_ref", tl_kv_ref(NULL, 0));
    SAYS("tl_kv_unref", tl_kv_unref(NULL, 0), TL_EINVAL);
    SAYS("tl_kv_cow", tl_kv_cow(NULL, 0, &id), TL_EINVAL);
    SAYS("tl_kv_cow", tl_kv_cow(p, kv_alloc1(p), NULL), TL_EINVAL);
    SAYS("tl_kv_set_fill", tl_kv_set_fill(NULL, 0, 0), TL_EINVAL);
    SAYS_AFTER("tl_kv_fill", TL_EQ(tl_kv_fill(NULL, 0), 0));
    SAYS_AFTER("tl_kv_block_ptr", TL_PTR_EQ(tl_kv_block_ptr(NULL, 0, 0, 0), NULL));
    SAYS_AFTER("tl_kv_block_bytes", TL_EQ(tl_kv_block_bytes(NULL), 0));
    SAYS_AFTER("tl_kv_export_bytes", TL_EQ(tl_kv_export_bytes(NULL, 1), 0));
    SAYS("tl_kv_register", tl_kv_register(NULL, 0, 1), TL_EINVAL);
    SAYS("tl_kv_lookup", tl_kv_lookup(NULL, 1, &id), TL_EINVAL);
    SAYS("tl_kv_lookup", tl_kv_lookup(p, 1, NULL), TL_EINVAL);

    id = kv_filled(p, 1, 2);
    SAYS("tl_kv_export", tl_kv_export(NULL, &id, 1, buf, 60, &written), TL_EINVAL);
    TL_EQ(written, 0);
    written = 7;
    SAYS("tl_kv_export", tl_kv_export(p, NULL, 1, buf, 60, &written), TL_EINVAL);
    TL_EQ(written, 0);
    written = 7;
    SAYS("tl_kv_export", tl_kv_export(p, &id, 1, NULL, 60, &written), TL_EINVAL);
    TL_EQ(written, 0);
    SAYS("tl_kv_export", tl_kv_export(p, &id, 1, buf, 60, NULL), TL_EINVAL);
    SAYS("tl_kv_import", tl_kv_import(NULL, wire_example, 60, &id), TL_EINVAL);
    SAYS("tl_kv_import", tl_kv_import(p, NULL, 60, &id), TL_EINVAL);
    SAYS("tl_kv_import", tl_kv_import(p, NULL, 0, &id), TL_EINVAL);
    SAYS("tl_kv_import", tl_kv_import(p, wire_example, 60, NULL), TL_EINVAL);
    KV_STATS(p, 0, 2, 0);
    tl_kv_pool_destroy(p);
}

TL_TEST(every_refusal_names_its_function) {
    tl_kv_pool *p = kv_new(2, 2, 1, 1, 2);
    const uint32_t cached = kv_cached(p, 5);
    uint32_t id = 0, ids[4];
    uint8_t env[60], buf[60];
    size_t written;
    SAYS("tl_kv_alloc", tl_kv_alloc(p, 3, ids), TL_EFULL);
    SAYS_AFTER("tl_kv_ref", tl_kv_ref(p, cached));
    SAYS_AFTER("tl_kv_ref", tl_kv_ref(p, 2));
    SAYS("tl_kv_unref", tl_kv_unref(p, cached), TL_EINVAL);
    SAYS("tl_kv_unref", tl_kv_unref(p, 2), TL_EINVAL);
    SAYS("tl_kv_cow", tl_kv_cow(p, cached, &id), TL_EINVAL);
    SAYS("tl_kv_cow", tl_kv_cow(p, 2, &id), TL_EINVAL);
    SAYS("tl_kv_set_fill", tl_kv_set_fill(p, cached, 1), TL_EINVAL);
    SAYS("tl_kv_set_fill", tl_kv_set_fill(p, 2, 1), TL_EINVAL);
    SAYS_AFTER("tl_kv_fill", TL_EQ(tl_kv_fill(p, 2), 0));
    SAYS_AFTER("tl_kv_block_ptr", TL_PTR_EQ(tl_kv_block_ptr(p, 2, 0, 0), NULL));
    SAYS_AFTER("tl_kv_block_ptr", TL_PTR_EQ(tl_kv_block_ptr(p, 0, 1, 0), NULL));
    SAYS("tl_kv_register", tl_kv_register(p, cached, 5), TL_EINVAL);
    SAYS("tl_kv_register", tl_kv_register(p, 2, 5), TL_EINVAL);
    SAYS("tl_kv_export", tl_kv_export(p, &cached, 1, buf, 60, &written), TL_EINVAL);

    id = kv_filled(p, 1, 1);
    SAYS("tl_kv_set_fill", tl_kv_set_fill(p, id, 3), TL_EINVAL);
    SAYS("tl_kv_register", tl_kv_register(p, id, 6), TL_EINVAL);
    SAYS("tl_kv_register", tl_kv_register(p, id, 0), TL_EINVAL);
    TL_OK_(tl_kv_set_fill(p, id, 2));
    SAYS("tl_kv_register", tl_kv_register(p, id, 5), TL_EBUSY);
    TL_OK_(tl_kv_register(p, id, 6));
    SAYS("tl_kv_register", tl_kv_register(p, id, 7), TL_EINVAL);
    SAYS("tl_kv_set_fill", tl_kv_set_fill(p, id, 2), TL_EINVAL);
    SAYS("tl_kv_export", tl_kv_export(p, &id, 1, buf, 59, &written), TL_EFULL);
    kv_expect_hit(p, 5, cached);
    SAYS("tl_kv_alloc", tl_kv_alloc(p, 1, ids), TL_EFULL);
    kv_expect_hit(p, 5, cached);
    SAYS("tl_kv_cow", tl_kv_cow(p, cached, &id), TL_EFULL);

    SAYS("tl_kv_import", tl_kv_import(p, wire_example, 31, ids), TL_EFORMAT);
    SAYS("tl_kv_import", tl_kv_import(p, wire_example, 59, ids), TL_EFORMAT);
    static const struct {
        size_t at, n_bytes;
        uint64_t value;
        int seal;
        tl_status status;
    } bad[] = {{WIRE_MAGIC, 4, 0, 1, TL_EFORMAT},
               {WIRE_HEADER, 8, 9, 0, TL_EFORMAT}, /* the CRC */
               {WIRE_VERSION, 2, 2, 1, TL_EFORMAT},
               {WIRE_DTYPE, 2, 0, 1, TL_EFORMAT},
               {WIRE_HEADER + WIRE_N_TOKENS, 4, 0, 1, TL_EFORMAT},
               {WIRE_HEADER + WIRE_N_TOKENS, 4, 1, 1, TL_EFORMAT},
               {0, 0, 0, 1, TL_EFULL}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        memcpy(env, wire_example, 60);
        wire_put(env + bad[i].at, bad[i].value, bad[i].n_bytes);
        if (bad[i].seal)
            wire_seal(env, 60);
        SAYS("tl_kv_import", tl_kv_import(p, env, 60, ids), bad[i].status);
    }
    tl_kv_pool *other = kv_new(2, 2, 1, 2, 1);
    SAYS("tl_kv_import", tl_kv_import(other, wire_example, 60, ids), TL_ESHAPE);
    tl_kv_pool_destroy(other);
    tl_kv_pool_destroy(p);
}

TL_TEST(a_call_that_succeeds_leaves_the_error_slot_alone) {
    tl_set_last_error("earlier");
    tl_kv_pool *p = kv_new(3, 2, 1, 1, 2);
    uint32_t id = kv_registered(p, 5), ids[2], out;
    uint8_t buf[60];
    size_t written;
    tl_kv_ref(p, id);
    TL_OK_(tl_kv_cow(p, id, &out));
    TL_OK_(tl_kv_export(p, &id, 1, buf, 60, &written));
    TL_OK_(tl_kv_import(p, buf, 60, ids)); /* a duplicate hash inside is no error */
    TL_OK_(tl_kv_lookup(p, 5, &id));
    TL_OK_(tl_kv_unref(p, out));
    TL_OK_(tl_kv_register(p, id, 5));
    (void)tl_kv_export_bytes(p, 3);
    (void)tl_crc32c(buf, 60, 0);
    (void)kv_stats(p);
    TL_STR_EQ(tl_last_error(), "earlier");
    tl_kv_pool_destroy(p);
    TL_STR_EQ(tl_last_error(), "earlier");
}

/* ---- creation ------------------------------------------------------------------------------ */

static void create_fails(tl_kv_cfg cfg, tl_status status) {
    tl_kv_pool *p = (tl_kv_pool *)(uintptr_t)64;
    tl_test_context("n_blocks %u, B %u, L %u, H %u, D %u", cfg.n_blocks, cfg.block_tokens,
                    cfg.n_layers, cfg.n_kv_heads, cfg.head_dim);
    SAYS("tl_kv_pool_create", tl_kv_pool_create(&cfg, &p), status);
    TL_PTR_EQ(p, NULL);
    TL_EQ(tl_count_live(), 0);
    tl_test_context("%s", "");
}

TL_TEST(sizes_that_overflow_are_einval_before_anything_is_allocated) {
    const uint32_t max = UINT32_MAX, half = 1u << 31;
    const tl_kv_cfg overflow[] = {
        {max, max, max, max, max, TL_F16, 1},
        {1, max, max, max, max, TL_F16, 1},
        {1, max, max, max, 1, TL_F16, 1},
        {1, max, 1, max, max, TL_F16, 1},
        {max, max, max, 1, 1, TL_F16, 1},
        {1, half, 1, half, 1, TL_F16, 1},                    /* 4 * 2^62 is 2^64: 0 if it wrapped */
        {4, 1 << 15, 1 << 15, 1 << 15, 1 << 15, TL_F16, 1},  /* 4 * 4 * 2^60 */
        {16, half, 2, 1 << 15, 1 << 11, TL_F16, 1},          /* 16 * 4 * 2^58 */
        {17, 1 << 14, 1 << 15, 1 << 15, 1 << 14, TL_F16, 1}, /* just past 2^64 */
    };
    for (size_t i = 0; i < sizeof overflow / sizeof overflow[0]; i++)
        create_fails(overflow[i], TL_EINVAL);
    TL_EQ(tl_count_allocs(), 0);
}

TL_TEST(a_slab_that_no_machine_has_is_enomem_and_leaks_nothing) {
    create_fails((tl_kv_cfg){8, 1 << 14, 1 << 15, 1 << 15, 1 << 13, TL_F16, 1}, TL_ENOMEM);
    create_fails((tl_kv_cfg){1, 1 << 15, 1 << 15, 1 << 15, 1 << 14, TL_F16, 1}, TL_ENOMEM);
    create_fails((tl_kv_cfg){1u << 20, 1 << 14, 1 << 10, 1 << 8, 1 << 8, TL_F16, 1}, TL_ENOMEM);
}

TL_TEST(a_fresh_pool_is_free_and_empty) {
    tl_kv_pool *p = kv_new(5, 3, 2, 2, 8);
    KV_STATS(p, 5, 0, 0);
    TL_EQ(kv_stats(p).evictions, 0);
    for (uint32_t id = 0; id < 5; id++)
        TL_EQ(tl_kv_fill(p, id), 0);
    TL_EQ(tl_kv_export_bytes(p, 0), 32);
    TL_EQ(tl_kv_export_bytes(p, 3), 28 + 3 * (12 + tl_kv_block_bytes(p)) + 4);
    tl_kv_pool_destroy(p);
}

TL_TEST(blocks_are_aligned_to_cache_lines) {
    tl_kv_pool *p = kv_new(4, 16, 1, 2, 2);
    TL_EQ(tl_kv_block_bytes(p) % 64, 0);
    for (uint32_t id = 0; id < 4; id++)
        TL_EQ((uintptr_t)tl_kv_block_ptr(p, id, 0, 0) % 64, 0);
    tl_kv_pool_destroy(p);
}

TL_TEST(an_envelope_too_long_for_size_t_has_size_max_bytes) {
    /* P is 2^32, so 2^32 - 1 blocks need more than 2^64 bytes. Nothing touches the slab. */
    const tl_kv_cfg cfg = {1, 1 << 15, 1, 1, 1 << 15, TL_F16, 1};
    tl_kv_pool *p;
    if (tl_kv_pool_create(&cfg, &p) != TL_OK)
        tl_test_skip("no 4 GiB of address space");
    TL_EQ(tl_kv_block_bytes(p), (uint64_t)1 << 32);
    TL_EQ(tl_kv_export_bytes(p, UINT32_MAX), SIZE_MAX);
    TL_EQ(tl_kv_export_bytes(p, 2), 28 + 2 * (12 + ((uint64_t)1 << 32)) + 4);
    const uint32_t id = kv_alloc1(p);
    TL_OK_(tl_kv_set_fill(p, id, 1));
    size_t written = 0;
    KV_REFUSED(tl_kv_export(p, &id, 1, NULL, 0, &written), TL_EFULL);
    TL_EQ(written, 28 + 12 + ((uint64_t)1 << 32) + 4);
    tl_kv_pool_destroy(p);
}

/* ---- hashes -------------------------------------------------------------------------------- */

TL_TEST(a_hash_that_comes_out_as_0_becomes_1) {
    /* FNV-1a is linear in small numbers once the low bytes of its states are fixed, so a lattice
     * gives ids for any result; these give 0. */
    static const uint32_t ids[4] = {0x370251BA, 0x06022D0F, 0x0A173A14, 0x25250A10};
    uint8_t bytes[8 + 16] = {0};
    for (size_t i = 0; i < 4; i++)
        wire_put(bytes + 8 + 4 * i, ids[i], 4);
    TL_EQ(tl_fnv1a64(bytes, sizeof bytes, TL_FNV1A64_BASIS), 0);
    TL_EQ(tl_kv_block_hash(0, ids, 4), 1);
}

/* ---- references ---------------------------------------------------------------------------- */

TL_TEST(the_last_block_freed_is_the_first_taken) {
    tl_kv_pool *p = kv_new(6, 2, 1, 1, 2);
    uint32_t ids[6], order[6];
    TL_OK_(tl_kv_alloc(p, 6, ids));
    static const uint32_t freed[] = {3, 0, 5, 1};
    for (int i = 0; i < 4; i++)
        TL_OK_(tl_kv_unref(p, ids[freed[i]]));
    TL_EQ(kv_drain(p, order), 4);
    for (int i = 0; i < 4; i++)
        TL_EQ(order[i], ids[freed[3 - i]]);
    tl_kv_pool_destroy(p);
}

TL_TEST(one_alloc_takes_free_blocks_then_cached_ones_oldest_first) {
    tl_kv_pool *p = kv_new(5, 2, 1, 1, 2);
    uint32_t id[5], got[5];
    for (uint32_t i = 0; i < 5; i++)
        id[i] = kv_registered(p, 10 + i);
    static const uint32_t age[] = {1, 4, 0, 2};
    for (int i = 0; i < 4; i++)
        TL_OK_(tl_kv_unref(p, id[age[i]]));
    TL_OK_(tl_kv_alloc(p, 1, got)); /* evicts id[1]; give it back: it is free now */
    TL_EQ(got[0], id[1]);
    TL_OK_(tl_kv_unref(p, got[0]));
    KV_STATS(p, 1, 1, 3);
    TL_OK_(tl_kv_alloc(p, 3, got));
    TL_EQ(got[0], id[1]);
    TL_EQ(got[1], id[4]);
    TL_EQ(got[2], id[0]);
    TL_EQ(kv_stats(p).evictions, 3);
    kv_expect_hit(p, 12, id[2]);
    tl_kv_pool_destroy(p);
}

TL_TEST(a_refused_alloc_leaves_the_order_of_the_cache) {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    uint32_t id[4], order[4], none[5];
    for (uint32_t i = 0; i < 4; i++)
        id[i] = kv_registered(p, 10 + i);
    for (uint32_t i = 0; i < 4; i++)
        TL_OK_(tl_kv_unref(p, id[3 - i]));
    KV_REFUSED(tl_kv_alloc(p, 5, none), TL_EFULL);
    for (uint32_t i = 0; i < 4; i++) {
        kv_expect_miss(p, 99);
        KV_REFUSED(tl_kv_unref(p, id[i]), TL_EINVAL);
    }
    TL_EQ(kv_drain(p, order), 4);
    for (uint32_t i = 0; i < 4; i++)
        TL_EQ(order[i], id[3 - i]);
    tl_kv_pool_destroy(p);
}

TL_TEST(cow_of_a_registered_block_with_one_holder_is_itself) {
    tl_kv_pool *p = kv_new(2, 2, 1, 1, 2);
    const uint32_t id = kv_registered(p, 5);
    uint32_t out = 9;
    TL_OK_(tl_kv_cow(p, id, &out));
    TL_EQ(out, id);
    KV_REFUSED(tl_kv_set_fill(p, out, 1), TL_EINVAL);
    tl_kv_pool_destroy(p);
}

TL_TEST(cow_may_evict_but_never_what_it_copies) {
    tl_kv_pool *p = kv_new(3, 2, 1, 1, 2);
    const uint32_t older = kv_cached(p, 7), newer = kv_cached(p, 8), id = kv_registered(p, 5);
    TL_CHECK(older != newer && id != older);
    tl_kv_ref(p, id);
    uint32_t out;
    TL_OK_(tl_kv_cow(p, id, &out));
    TL_EQ(out, older);
    kv_expect(p, out, 5, 2);
    kv_expect_hit(p, 5, id);
    kv_expect_hit(p, 8, newer);
    kv_expect_miss(p, 7);
    tl_kv_pool_destroy(p);
}

/* ---- export and import --------------------------------------------------------------------- */

static const uint8_t empty_envelope[32] = {0x54, 0x4c, 0x4b, 0x56, 1, 0, 1, 0, 0, 0, 0, 0, 2, 0,
                                           0,    0,    1,    0,    0, 0, 1, 0, 0, 0, 2, 0, 0, 0};

TL_TEST(no_blocks_make_an_envelope_of_32_bytes) {
    tl_kv_pool *p = kv_new(2, 2, 1, 1, 2);
    uint8_t want[32], got[33];
    size_t written;
    memcpy(want, empty_envelope, 32);
    wire_seal(want, 32);
    memset(got, 0xEE, sizeof got);
    KV_REFUSED(tl_kv_export(p, NULL, 0, NULL, 0, &written), TL_EFULL);
    TL_EQ(written, 32);
    KV_REFUSED(tl_kv_export(p, NULL, 0, got, 31, &written), TL_EFULL);
    TL_EQ(written, 32);
    TL_OK_(tl_kv_export(p, NULL, 0, got, 33, &written));
    TL_EQ(written, 32);
    TL_MEM_EQ(got, want, 32);
    TL_EQ(got[32], 0xEE);
    TL_OK_(tl_kv_import(p, got, 32, NULL));
    KV_STATS(p, 2, 0, 0);
    /* A pool without room for a block has room for none. */
    kv_alloc1(p);
    kv_alloc1(p);
    TL_OK_(tl_kv_import(p, got, 32, NULL));
    tl_kv_pool_destroy(p);
}

TL_TEST(a_block_may_be_exported_twice_in_one_envelope) {
    tl_kv_pool *p = kv_new(6, 2, 1, 1, 2);
    const uint32_t a = kv_registered(p, 5), b = kv_filled(p, 6, 1);
    const uint32_t ids[4] = {a, b, a, b};
    uint8_t env[28 + 4 * 28 + 4];
    size_t written;
    TL_OK_(tl_kv_export(p, ids, 4, env, sizeof env, &written));
    TL_MEM_EQ(wire_record(env, 2, 16), wire_record(env, 0, 16), 2 * 28);
    uint32_t got[4];
    TL_OK_(tl_kv_import(p, env, written, got));
    KV_STATS(p, 0, 6, 0);
    for (int i = 0; i < 4; i++)
        kv_expect(p, got[i], i % 2 ? 6 : 5, i % 2 ? 1 : 2);
    tl_kv_pool_destroy(p);
}

TL_TEST(a_refused_export_touches_neither_buffer_nor_pool) {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    const uint32_t good = kv_filled(p, 1, 2), empty = kv_alloc1(p), cached = kv_cached(p, 5);
    const uint32_t lists[][2] = {{good, empty},      {good, cached}, {good, 4},
                                 {good, UINT32_MAX}, {good, 3},      {empty, good}};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        uint8_t buf[100];
        size_t written = 7;
        memset(buf, 0xEE, sizeof buf);
        KV_REFUSED(tl_kv_export(p, lists[i], 2, buf, sizeof buf, &written), TL_EINVAL);
        TL_EQ(written, 0);
        for (size_t j = 0; j < sizeof buf; j++)
            TL_EQ(buf[j], 0xEE);
        /* A bad block is reported even when only the size is asked for. */
        KV_REFUSED(tl_kv_export(p, lists[i], 2, NULL, 0, &written), TL_EINVAL);
        TL_EQ(written, 0);
    }
    KV_STATS(p, 1, 2, 1);
    tl_kv_pool_destroy(p);
}

/* An envelope for B 2, L 1, H 1, D 2 (P 16) with these hashes; block i holds bytes 0x10 + i. */
static size_t envelope_of(uint8_t *env, const uint64_t *hashes, uint32_t n) {
    wire_header(env, n, 2, 1, 1, 2);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *r = wire_record(env, i, 16);
        wire_put(r, hashes[i], 8);
        wire_put(r + WIRE_N_TOKENS, 2, 4);
        memset(r + WIRE_RECORD, 0x10 + (int)i, 16);
    }
    wire_seal(env, wire_bytes(n, 16));
    return wire_bytes(n, 16);
}

TL_TEST(of_equal_hashes_in_one_envelope_the_first_is_registered) {
    tl_kv_pool *p = kv_new(5, 2, 1, 1, 2);
    static const uint64_t hashes[] = {7, 9, 7, 0, 9};
    uint8_t env[28 + 5 * 28 + 4];
    uint32_t got[5];
    TL_OK_(tl_kv_import(p, env, envelope_of(env, hashes, 5), got));
    KV_STATS(p, 0, 5, 0);
    for (uint32_t i = 0; i < 5; i++)
        TL_EQ(*(uint8_t *)tl_kv_block_ptr(p, got[i], 0, 0), 0x10 + i);
    kv_expect_hit(p, 7, got[0]);
    kv_expect_hit(p, 9, got[1]);
    kv_expect_miss(p, 0);
    TL_OK_(tl_kv_unref(p, got[0]));
    TL_OK_(tl_kv_unref(p, got[1]));
    for (int i = 0; i < 5; i++)
        TL_OK_(tl_kv_unref(p, got[i]));
    KV_STATS(p, 3, 0, 2);
    tl_kv_pool_destroy(p);
}

TL_TEST(an_import_that_evicts_the_holder_of_its_own_hash_registers_the_new_block) {
    tl_kv_pool *p = kv_new(2, 2, 1, 1, 2);
    const uint32_t old = kv_cached(p, 7);
    kv_alloc1(p); /* the only other block: the import has to take the holder of 7 */
    static const uint64_t hash = 7;
    uint8_t env[28 + 28 + 4];
    uint32_t got;
    TL_OK_(tl_kv_import(p, env, envelope_of(env, &hash, 1), &got));
    TL_EQ(got, old);
    KV_STATS(p, 0, 2, 0);
    TL_EQ(kv_stats(p).evictions, 1);
    kv_expect_hit(p, 7, got);
    TL_EQ(*(uint8_t *)tl_kv_block_ptr(p, got, 0, 1), 0x10);
    TL_OK_(tl_kv_unref(p, got));
    TL_OK_(tl_kv_unref(p, got));
    KV_STATS(p, 0, 1, 1);
    tl_kv_pool_destroy(p);
}

TL_TEST(an_import_with_room_leaves_the_cached_holder_its_hash_and_its_place) {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    const uint32_t older = kv_cached(p, 7), newer = kv_cached(p, 8);
    static const uint64_t hashes[] = {7, 6};
    uint8_t env[28 + 2 * 28 + 4];
    uint32_t got[2], out;
    TL_OK_(tl_kv_import(p, env, envelope_of(env, hashes, 2), got));
    KV_STATS(p, 0, 2, 2);
    TL_OK_(tl_kv_alloc(p, 1, &out));
    TL_EQ(out, older); /* the import was no use of the cached block */
    TL_OK_(tl_kv_alloc(p, 1, &out));
    TL_EQ(out, newer);
    kv_expect_miss(p, 7); /* the imported one stayed private */
    kv_expect_hit(p, 6, got[1]);
    tl_kv_pool_destroy(p);
}

TL_TEST(an_import_without_room_changes_nothing) {
    tl_kv_pool *p = kv_new(3, 2, 1, 1, 2);
    const uint32_t a = kv_cached(p, 7), b = kv_cached(p, 8);
    kv_alloc1(p);
    static const uint64_t hashes[] = {1, 2, 3};
    uint8_t env[28 + 3 * 28 + 4];
    uint32_t got[3] = {77, 77, 77}, order[3];
    const tl_kv_stats before = kv_stats(p);
    KV_REFUSED(tl_kv_import(p, env, envelope_of(env, hashes, 3), got), TL_EFULL);
    KV_SAME_STATS(p, before);
    TL_EQ(got[0], 77);
    kv_expect_miss(p, 1);
    TL_EQ(kv_drain(p, order), 2);
    TL_EQ(order[0], a);
    TL_EQ(order[1], b);
    tl_kv_pool_destroy(p);
}

TL_TEST(values_past_the_fill_of_an_imported_block_are_not_exported_again) {
    tl_kv_pool *p = kv_new(2, 2, 1, 1, 2);
    static const uint64_t none = 0;
    uint8_t env[60], again[60];
    uint32_t got;
    size_t written;
    (void)envelope_of(env, &none, 1);
    wire_put(wire_record(env, 0, 16) + WIRE_N_TOKENS, 1, 4);
    wire_seal(env, 60);
    TL_OK_(tl_kv_import(p, env, 60, &got)); /* legal, though no writer would write it */
    TL_OK_(tl_kv_export(p, &got, 1, again, 60, &written));
    wire_zero_past(wire_record(env, 0, 16) + WIRE_RECORD, 1, 2, 1, 1, 2);
    wire_seal(env, 60);
    TL_MEM_EQ(again, env, 60);
    tl_kv_pool_destroy(p);
}
