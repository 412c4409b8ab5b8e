/*
 * test_kv_import.c - bytes from outside. A refused import changes nothing at all: after every
 * truncation, every flipped bit and every field set to every interesting value (with the CRC made
 * right again) the whole pool is as it was. wire_judge, a second reader, says what to expect.
 */
#include "tinyllm/kv_pool_ext.h"
#include "tl_test.h"
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

static tl_kv_pool *lived_in(shape s) {
    return kv_lived_in(s.B, s.L, s.H, s.D);
}

/* An envelope of n blocks: hashes known to the pool, new ones and none; the last block partial. */
static uint8_t *envelope_for(shape s, uint32_t n, size_t *len) {
    const size_t P = (size_t)s.L * 2 * s.H * s.B * s.D * 2;
    uint64_t rng = n;
    *len = wire_bytes(n, P);
    uint8_t *env = malloc(*len);
    for (size_t i = 0; i < *len; i++)
        env[i] = (uint8_t)tl_test_rand(&rng);
    wire_header(env, n, s.B, s.L, s.H, s.D);
    static const uint64_t hashes[] = {0x101, 0x777, 0, 0x100, 0x778};
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t fill = i + 1 == n && s.B > 1 ? s.B - 1 : s.B;
        uint8_t *r = wire_record(env, i, P);
        wire_put(r, fill == s.B ? hashes[i % 5] : 0, 8);
        wire_put(r + WIRE_N_TOKENS, fill, 4);
        wire_zero_past(r + WIRE_RECORD, fill, s.B, s.L, s.H, s.D);
    }
    wire_seal(env, *len);
    return env;
}

/* Imports bytes that must be refused with the status, into a copy that ends where they end. */
static void expect_refused(tl_kv_pool *p, const kv_state *before, const uint8_t *env, size_t len,
                           tl_status status) {
    uint8_t *exact = malloc(len ? len : 1);
    uint32_t got[64] = {0};
    memcpy(exact, env, len);
    KV_REFUSED(tl_kv_import(p, exact, len, got), status);
    const char *changed = kv_state_changed(before, p);
    if (changed)
        tl_test_fail(__FILE__, __LINE__, "after a refused import %s", changed);
    for (int i = 0; i < 64; i++)
        TL_EQ(got[i], 0);
    free(exact);
}

/* The orders that only taking blocks shows: those of a pool nothing was imported into. */
static void expect_untouched_order(tl_kv_pool *p, shape s) {
    tl_kv_pool *twin = lived_in(s);
    uint32_t order[KV_LIVED_IN_BLOCKS], twin_order[KV_LIVED_IN_BLOCKS];
    const uint32_t n = kv_drain(p, order);
    TL_EQ(kv_drain(twin, twin_order), n);
    TL_MEM_EQ(order, twin_order, n * sizeof order[0]);
    tl_kv_pool_destroy(twin);
}

TL_TEST(the_second_reader_agrees_on_good_envelopes) {
    for (int i = 0; i < N_SHAPES; i++)
        for (uint32_t n = 0; n <= 5; n++) {
            const shape s = shapes[i];
            size_t len;
            uint8_t *env = envelope_for(s, n, &len);
            tl_kv_pool *p = lived_in(s);
            uint32_t got[5];
            tl_test_context("shape %d, %u blocks", i, n);
            TL_EQ(wire_judge(env, len, s.B, s.L, s.H, s.D), TL_OK);
            TL_OK_(tl_kv_import(p, env, len, got));
            TL_OK_(tl_kv_check(p));
            KV_STATS(p, n < 2 ? 2 - n : 0, 4 + n, n < 2 ? 3 : 5 - n);
            tl_kv_pool_destroy(p);
            free(env);
        }
    tl_test_context("%s", "");
    TL_EQ(wire_judge(wire_example, 60, 2, 1, 1, 2), TL_OK);
}

TL_TEST(every_truncation_is_refused_and_changes_nothing) {
    for (int i = 0; i < N_SHAPES; i++)
        for (uint32_t n = 0; n <= 3; n++) {
            size_t len;
            uint8_t *env = envelope_for(shapes[i], n, &len);
            tl_kv_pool *p = lived_in(shapes[i]);
            kv_state before = kv_state_of(p);
            for (size_t cut = 0; cut < len; cut++) {
                tl_test_context("shape %d, %u blocks, %zu of %zu bytes", i, n, cut, len);
                expect_refused(p, &before, env, cut, TL_EFORMAT);
                /* With a CRC that fits what is left. */
                uint8_t *sealed = malloc(cut ? cut : 1);
                memcpy(sealed, env, cut);
                wire_seal(sealed, cut);
                expect_refused(p, &before, sealed, cut, TL_EFORMAT);
                free(sealed);
            }
            /* And longer than it says. */
            uint8_t *longer = calloc(1, len + 40);
            memcpy(longer, env, len);
            for (size_t more = 1; more <= 40; more++) {
                wire_seal(longer, len + more);
                expect_refused(p, &before, longer, len + more, TL_EFORMAT);
            }
            free(longer);
            expect_untouched_order(p, shapes[i]);
            kv_state_free(&before);
            tl_kv_pool_destroy(p);
            free(env);
        }
}

TL_TEST(every_bit_flip_is_refused_and_changes_nothing) {
    for (int i = 0; i < N_SHAPES; i++)
        for (uint32_t n = 0; n <= 2; n++) {
            size_t len;
            uint8_t *env = envelope_for(shapes[i], n, &len);
            tl_kv_pool *p = lived_in(shapes[i]);
            kv_state before = kv_state_of(p);
            for (size_t bit = 0; bit < 8 * len; bit++) {
                tl_test_context("shape %d, %u blocks, bit %zu of byte %zu", i, n, bit % 8, bit / 8);
                env[bit / 8] ^= (uint8_t)(1u << bit % 8);
                expect_refused(p, &before, env, len, TL_EFORMAT);
                env[bit / 8] ^= (uint8_t)(1u << bit % 8);
            }
            expect_untouched_order(p, shapes[i]);
            kv_state_free(&before);
            tl_kv_pool_destroy(p);
            free(env);
        }
}

TL_TEST(an_envelope_of_too_many_blocks_is_refused_and_changes_nothing) {
    for (int i = 0; i < N_SHAPES; i++)
        for (uint32_t n = 6; n <= 9; n++) { /* 2 blocks are free, 3 cached */
            size_t len;
            uint8_t *env = envelope_for(shapes[i], n, &len);
            tl_kv_pool *p = lived_in(shapes[i]);
            kv_state before = kv_state_of(p);
            expect_refused(p, &before, env, len, TL_EFULL);
            expect_untouched_order(p, shapes[i]);
            kv_state_free(&before);
            tl_kv_pool_destroy(p);
            free(env);
        }
}

/* What a field is set to: the edges of its type and the neighbourhood of what it was. */
static uint64_t interesting(uint64_t was, uint32_t which) {
    static const uint64_t fixed[] = {0,          1,          2,          3,          255,
                                     256,        0x7FFF,     0x8000,     0xFFFF,     0x10000,
                                     0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF, 0x100000000,
                                     0x40000000, 0x10001,    UINT64_MAX, 1ull << 63, 0x33333333};
    enum { N = sizeof fixed / sizeof fixed[0] };
    switch (which) {
    case 0:
        return was + 1;
    case 1:
        return was - 1;
    case 2:
        return was * 2;
    case 3:
        return was / 2;
    case 4:
        return was ^ 1ull << 31;
    case 5:
        return was + (1ull << 16);
    default:
        return fixed[(which - 6) % N];
    }
}
enum { INTERESTING = 26 };

/* Field f of an envelope of P payload bytes a block: 8 in the header, 2 in each record. */
static uint8_t *field_of(uint8_t *env, uint32_t f, size_t P, size_t *n_bytes) {
    static const uint8_t at[] = {0, 4, 6, 8, 12, 16, 20, 24}, size[] = {4, 2, 2, 4, 4, 4, 4, 4};
    if (f < 8) {
        *n_bytes = size[f];
        return env + at[f];
    }
    *n_bytes = f % 2 == 0 ? 8 : 4;
    return wire_record(env, (f - 8) / 2, P) + (f % 2 == 0 ? 0 : WIRE_N_TOKENS);
}

/* The verdict on mutated bytes is the second reader's, and nothing but a verdict happened. */
static void expect_verdict(shape s, tl_kv_pool **p, const kv_state *before, const uint8_t *env,
                           size_t len) {
    const tl_status want = wire_judge(env, len, s.B, s.L, s.H, s.D);
    if (want != TL_OK) {
        expect_refused(*p, before, env, len, want);
        return;
    }
    uint32_t got[64];
    TL_OK_(tl_kv_import(*p, env, len, got));
    TL_OK_(tl_kv_check(*p));
    tl_kv_pool_destroy(*p);
    *p = lived_in(s);
}

TL_TEST(every_field_takes_every_interesting_value) {
    for (int i = 0; i < N_SHAPES; i++) {
        const shape s = shapes[i];
        const size_t P = (size_t)s.L * 2 * s.H * s.B * s.D * 2;
        const uint32_t n = 3;
        size_t len, n_bytes;
        uint8_t *env = envelope_for(s, n, &len);
        tl_kv_pool *p = lived_in(s);
        kv_state before = kv_state_of(p);
        for (uint32_t f = 0; f < 8 + 2 * n; f++)
            for (uint32_t v = 0; v < INTERESTING; v++) {
                uint8_t *at = field_of(env, f, P, &n_bytes);
                const uint64_t was = wire_get(at, n_bytes);
                wire_put(at, interesting(was, v), n_bytes);
                wire_seal(env, len);
                tl_test_context("shape %d, field %u is 0x%llx instead of 0x%llx", i, f,
                                (unsigned long long)wire_get(at, n_bytes), (unsigned long long)was);
                expect_verdict(s, &p, &before, env, len);
                wire_put(at, was, n_bytes);
            }
        expect_untouched_order(p, s);
        kv_state_free(&before);
        tl_kv_pool_destroy(p);
        free(env);
    }
}

TL_TEST(fields_changed_together_are_judged_in_the_order_of_the_rules) {
    uint64_t rng = 11, seed;
    if (tl_test_seed(&seed))
        rng = seed;
    unsigned verdicts[16] = {0};
    for (int round = 0; round < 6000; round++) {
        const shape s = shapes[round % N_SHAPES];
        const size_t P = (size_t)s.L * 2 * s.H * s.B * s.D * 2;
        const uint32_t n = tl_test_below(&rng, 4);
        size_t len, n_bytes;
        uint8_t *env = envelope_for(s, n, &len);
        tl_kv_pool *p = lived_in(s);
        kv_state before = kv_state_of(p);
        for (uint32_t k = 1 + tl_test_below(&rng, 4); k > 0; k--) {
            uint8_t *at = field_of(env, tl_test_below(&rng, 8 + 2 * n), P, &n_bytes);
            wire_put(at, interesting(wire_get(at, n_bytes), tl_test_below(&rng, INTERESTING)),
                     n_bytes);
        }
        /* Half of the time as long as it now says, if that is possible, so that the later rules are
         * reached; the bytes that come or go are the records'. */
        const size_t claimed = wire_claimed_bytes(env);
        if (tl_test_below(&rng, 2) && claimed < 5000) {
            uint8_t *fit = calloc(1, claimed);
            memcpy(fit, env, claimed < len ? claimed : len);
            free(env);
            env = fit;
            len = claimed;
        }
        if (tl_test_below(&rng, 8))
            wire_seal(env, len);
        tl_test_context("--seed 11, round %d", round);
        const tl_status want = wire_judge(env, len, s.B, s.L, s.H, s.D);
        verdicts[want & 15]++;
        const int no_room = want == TL_OK && wire_get(env + WIRE_N_BLOCKS, 4) > 5;
        if (no_room)
            expect_refused(p, &before, env, len, TL_EFULL);
        else
            expect_verdict(s, &p, &before, env, len);
        if (no_room || want != TL_OK)
            expect_untouched_order(p, s);
        kv_state_free(&before);
        tl_kv_pool_destroy(p);
        free(env);
    }
    tl_test_context("%s", "");
    /* The mutations reach every verdict. */
    TL_CHECK(verdicts[TL_OK] > 50 && verdicts[TL_ESHAPE] > 50 && verdicts[TL_EFORMAT] > 50);
}

TL_TEST(the_rules_have_an_order) {
    const shape s = {4, 2, 2, 3};
    tl_kv_pool *p = lived_in(s);
    kv_state before = kv_state_of(p);
    static const struct {
        const char *what;
        shape other;
        uint64_t version, n_tokens;
        int seal;
        tl_status status;
    } cases[] = {
        {"another shape and a bad CRC", {4, 2, 3, 2}, 1, 4, 0, TL_EFORMAT},
        {"another shape and version 2", {4, 2, 3, 2}, 2, 4, 1, TL_EFORMAT},
        {"another shape and n_tokens 0", {4, 2, 3, 2}, 1, 0, 1, TL_ESHAPE},
        {"another shape and a partial hashed block", {4, 2, 3, 2}, 1, 1, 1, TL_ESHAPE},
        {"this shape and n_tokens 0", {4, 2, 2, 3}, 1, 0, 1, TL_EFORMAT},
        {"this shape and a partial hashed block", {4, 2, 2, 3}, 1, 1, 1, TL_EFORMAT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t len;
        uint8_t *env = envelope_for(cases[i].other, 2, &len);
        tl_test_context("%s", cases[i].what);
        wire_put(env + WIRE_VERSION, cases[i].version, 2);
        wire_put(env + WIRE_HEADER + WIRE_N_TOKENS, cases[i].n_tokens, 4);
        if (cases[i].seal)
            wire_seal(env, len);
        else
            env[len - 1] ^= 1;
        TL_EQ(wire_judge(env, len, s.B, s.L, s.H, s.D), cases[i].status);
        expect_refused(p, &before, env, len, cases[i].status);
        free(env);
    }
    tl_test_context("%s", "");
    kv_state_free(&before);
    tl_kv_pool_destroy(p);
}
