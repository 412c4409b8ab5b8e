/*
 * test_kv_pool_ext.c - the batches of kv_pool_ext.h: each is the loop over the single calls when
 * all of them would succeed, and nothing at all when one would not.
 */
#include "tinyllm/kv_pool_ext.h"
#include "tl_count_alloc.h"
#include "tl_test.h"
#include "tl_test_kv.h"
#include "tl_test_state.h"

#include <stdlib.h>
#include <sys/resource.h>

enum { N = 10, B = 2 };

/* Blocks 0..9 of a fresh pool: 0..3 registered and used (0 three times), 4 5 private (5 partial),
 * 6 7 cached (7 the older), 8 9 free. */
static tl_kv_pool *mixed(void) {
    tl_kv_pool *p = kv_new(N, B, 1, 1, 2);
    uint32_t id[N];
    for (uint32_t i = 0; i < N; i++) {
        id[i] = i < 4 || i == 6 || i == 7 ? kv_registered(p, 0x100 + i) : kv_filled(p, i, B);
        TL_EQ(id[i], i); /* a fresh pool hands its blocks out in order */
    }
    TL_OK_(tl_kv_set_fill(p, 5, 1));
    tl_kv_ref(p, 0);
    tl_kv_ref(p, 0);
    static const uint32_t back[] = {7, 6, 9, 8};
    for (int i = 0; i < 4; i++)
        TL_OK_(tl_kv_unref(p, back[i]));
    KV_STATS(p, 2, 6, 2);
    TL_OK_(tl_kv_check(p));
    return p;
}

/* The call is refused, the slot names the function and the position, and the pool is as it was,
 * down to the order in which its blocks would be taken. */
#define REFUSED(p, call, text)                                                                     \
    do {                                                                                           \
        kv_state before = kv_state_of(p);                                                          \
        KV_REFUSED(call, TL_EINVAL);                                                               \
        TL_CHECK(strncmp(tl_last_error(), text, strcspn(text, "[")) == 0);                         \
        TL_CHECK(strstr(tl_last_error(), strchr(text, '[') ? strchr(text, '[') : text) != NULL);   \
        const char *changed = kv_state_changed(&before, p);                                        \
        if (changed)                                                                               \
            tl_test_fail(__FILE__, __LINE__, "after a refused call %s", changed);                  \
        kv_state_free(&before);                                                                    \
    } while (0)

static void expect_order_of_mixed(tl_kv_pool *p) {
    uint32_t order[N];
    TL_EQ(kv_drain(p, order), 4);
    static const uint32_t want[] = {8, 9, 7, 6};
    TL_MEM_EQ(order, want, sizeof want);
}

TL_TEST(ref_many_counts_every_appearance) {
    tl_kv_pool *p = mixed();
    static const uint32_t ids[] = {4, 0, 4, 4};
    TL_OK_(tl_kv_ref_many(p, ids, 4));
    TL_EQ(tl_kv_refs(p, 4), 4);
    TL_EQ(tl_kv_refs(p, 0), 4);
    TL_OK_(tl_kv_ref_many(p, NULL, 0));
    TL_OK_(tl_kv_check(p));
    tl_kv_pool_destroy(p);
}

TL_TEST(ref_many_is_all_or_nothing) {
    tl_kv_pool *p = mixed();
    static const uint32_t is_free[] = {0, 1, 8}, is_cached[] = {6, 0}, no_block[] = {0, N};
    REFUSED(p, tl_kv_ref_many(p, is_free, 3), "tl_kv_ref_many: ids[2]");
    REFUSED(p, tl_kv_ref_many(p, is_cached, 2), "tl_kv_ref_many: ids[0]");
    REFUSED(p, tl_kv_ref_many(p, no_block, 2), "tl_kv_ref_many: ids[1]");
    REFUSED(p, tl_kv_ref_many(p, NULL, 1), "tl_kv_ref_many");
    REFUSED(p, tl_kv_ref_many(NULL, is_free, 1), "tl_kv_ref_many");
    expect_order_of_mixed(p);
    tl_kv_pool_destroy(p);
}

TL_TEST(unref_many_is_the_loop_in_order) {
    tl_kv_pool *p = mixed();
    static const uint32_t ids[] = {3, 0, 4, 0, 2, 0, 1, 5};
    TL_OK_(tl_kv_unref_many(p, ids, 8));
    KV_STATS(p, 4, 0, 6);
    TL_OK_(tl_kv_check(p));
    TL_OK_(tl_kv_unref_many(p, NULL, 0));
    uint32_t order[N];
    TL_EQ(kv_drain(p, order), N);
    static const uint32_t want[] = {5, 4, 8, 9, 7, 6, 3, 2, 0, 1};
    TL_MEM_EQ(order, want, sizeof want);
    tl_kv_pool_destroy(p);
}

TL_TEST(unref_many_is_all_or_nothing) {
    tl_kv_pool *p = mixed();
    static const uint32_t twice[] = {4, 4}, four_of_three[] = {1, 0, 0, 0, 0}, is_free[] = {0, 9},
                          is_cached[] = {0, 1, 7}, no_block[] = {UINT32_MAX}, thrice[] = {3, 2, 3};
    REFUSED(p, tl_kv_unref_many(p, twice, 2), "tl_kv_unref_many: ids[1]");
    REFUSED(p, tl_kv_unref_many(p, four_of_three, 5), "tl_kv_unref_many: ids[4]");
    REFUSED(p, tl_kv_unref_many(p, is_free, 2), "tl_kv_unref_many: ids[1]");
    REFUSED(p, tl_kv_unref_many(p, is_cached, 3), "tl_kv_unref_many: ids[2]");
    REFUSED(p, tl_kv_unref_many(p, no_block, 1), "tl_kv_unref_many: ids[0]");
    REFUSED(p, tl_kv_unref_many(p, thrice, 3), "tl_kv_unref_many: ids[2]");
    REFUSED(p, tl_kv_unref_many(p, NULL, 1), "tl_kv_unref_many");
    REFUSED(p, tl_kv_unref_many(NULL, twice, 1), "tl_kv_unref_many");
    expect_order_of_mixed(p);
    tl_kv_pool_destroy(p);
}

TL_TEST(set_fill_many_lets_the_last_of_equal_ids_win) {
    tl_kv_pool *p = mixed();
    static const uint32_t ids[] = {4, 5, 4}, fills[] = {0, 2, 1};
    TL_OK_(tl_kv_set_fill_many(p, ids, fills, 3));
    TL_EQ(tl_kv_fill(p, 4), 1);
    TL_EQ(tl_kv_fill(p, 5), 2);
    TL_OK_(tl_kv_set_fill_many(p, NULL, NULL, 0));
    tl_kv_pool_destroy(p);
}

TL_TEST(set_fill_many_is_all_or_nothing) {
    tl_kv_pool *p = mixed();
    static const uint32_t good[] = {4, 5}, registered[] = {4, 0}, is_free[] = {4, 8},
                          is_cached[] = {4, 6}, no_block[] = {4, N};
    static const uint32_t fills[] = {0, 0}, too_many[] = {0, B + 1};
    REFUSED(p, tl_kv_set_fill_many(p, good, too_many, 2), "tl_kv_set_fill_many: fills[1]");
    REFUSED(p, tl_kv_set_fill_many(p, registered, fills, 2), "tl_kv_set_fill_many: ids[1]");
    REFUSED(p, tl_kv_set_fill_many(p, is_free, fills, 2), "tl_kv_set_fill_many: ids[1]");
    REFUSED(p, tl_kv_set_fill_many(p, is_cached, fills, 2), "tl_kv_set_fill_many: ids[1]");
    REFUSED(p, tl_kv_set_fill_many(p, no_block, fills, 2), "tl_kv_set_fill_many: ids[1]");
    REFUSED(p, tl_kv_set_fill_many(p, NULL, fills, 1), "tl_kv_set_fill_many");
    REFUSED(p, tl_kv_set_fill_many(p, good, NULL, 1), "tl_kv_set_fill_many");
    REFUSED(p, tl_kv_set_fill_many(NULL, good, fills, 1), "tl_kv_set_fill_many");
    expect_order_of_mixed(p);
    tl_kv_pool_destroy(p);
}

TL_TEST(register_many_says_which_block_carries_its_hash) {
    tl_kv_pool *p = mixed();
    TL_OK_(tl_kv_set_fill(p, 5, B));
    uint32_t extra[2];
    TL_OK_(tl_kv_alloc(p, 2, extra));
    TL_OK_(tl_kv_set_fill(p, extra[0], B));
    TL_OK_(tl_kv_set_fill(p, extra[1], B));
    /* New; held by a used block; held by a cached one; equal to one of this batch; its own again;
     * the pair itself again. */
    const uint32_t ids[] = {4, 5, extra[0], extra[1], 1, 4};
    static const uint64_t hashes[] = {0x200, 0x100, 0x106, 0x200, 0x101, 0x200};
    uint8_t registered[6];
    memset(registered, 0xEE, sizeof registered);
    tl_set_last_error("earlier");
    TL_OK_(tl_kv_register_many(p, ids, hashes, 6, registered));
    TL_MEM_EQ(registered, "\1\0\0\0\1\1", 6);
    TL_STR_EQ(tl_last_error(), "earlier"); /* a hash that is held is no error here */
    TL_EQ(tl_kv_hash(p, 4), 0x200);
    TL_EQ(tl_kv_hash(p, 5), 0);
    TL_EQ(tl_kv_hash(p, extra[1]), 0);
    TL_OK_(tl_kv_check(p));
    kv_expect_hit(p, 0x200, 4);
    TL_OK_(tl_kv_register_many(p, NULL, NULL, 0, NULL));
    tl_kv_pool_destroy(p);
}

TL_TEST(register_many_is_all_or_nothing) {
    tl_kv_pool *p = mixed();
    static const uint64_t hashes[] = {0x200, 0x201}, zero[] = {0x200, 0};
    static const uint32_t partial[] = {4, 5}, other_name[] = {4, 0}, is_free[] = {4, 8},
                          is_cached[] = {4, 6}, no_block[] = {4, N}, two_names[] = {4, 4};
    uint8_t reg[2];
    REFUSED(p, tl_kv_register_many(p, partial, hashes, 2, reg), "tl_kv_register");
    REFUSED(p, tl_kv_register_many(p, other_name, hashes, 2, reg), "tl_kv_register");
    REFUSED(p, tl_kv_register_many(p, is_free, hashes, 2, reg), "tl_kv_register_many: ids[1]");
    REFUSED(p, tl_kv_register_many(p, is_cached, hashes, 2, reg), "tl_kv_register_many: ids[1]");
    REFUSED(p, tl_kv_register_many(p, no_block, hashes, 2, reg), "tl_kv_register_many: ids[1]");
    REFUSED(p, tl_kv_register_many(p, two_names, hashes, 2, reg), "tl_kv_register");
    REFUSED(p, tl_kv_register_many(p, two_names, zero, 2, reg), "tl_kv_register");
    REFUSED(p, tl_kv_register_many(p, NULL, hashes, 1, reg), "tl_kv_register_many");
    REFUSED(p, tl_kv_register_many(p, partial, NULL, 1, reg), "tl_kv_register_many");
    REFUSED(p, tl_kv_register_many(p, partial, hashes, 1, NULL), "tl_kv_register_many");
    REFUSED(p, tl_kv_register_many(NULL, partial, hashes, 1, reg), "tl_kv_register_many");
    kv_expect_miss(p, 0x200);
    kv_expect_miss(p, 0x201);
    expect_order_of_mixed(p);
    tl_kv_pool_destroy(p);
}

TL_TEST(lookup_many_takes_a_reference_for_every_hit) {
    tl_kv_pool *p = mixed();
    static const uint64_t hashes[] = {0x107, 0x999, 0x101, 0, 0x107, 0x104};
    int64_t got[6];
    tl_set_last_error("earlier");
    TL_OK_(tl_kv_lookup_many(p, hashes, 6, got));
    TL_STR_EQ(tl_last_error(), "earlier");
    static const int64_t want[] = {7, -1, 1, -1, 7, -1};
    TL_MEM_EQ(got, want, sizeof want);
    TL_EQ(tl_kv_refs(p, 7), 2);
    TL_EQ(tl_kv_refs(p, 1), 2);
    KV_STATS(p, 2, 7, 1);
    TL_OK_(tl_kv_check(p));
    kv_expect(p, 7, 0x107, B);
    /* Revived: the next allocations take the free ones and the other cached one. */
    uint32_t order[N];
    TL_EQ(kv_drain(p, order), 3);
    TL_EQ(order[2], 6);
    TL_OK_(tl_kv_lookup_many(p, NULL, 0, NULL));
    KV_REFUSED(tl_kv_lookup_many(p, NULL, 1, got), TL_EINVAL);
    KV_REFUSED(tl_kv_lookup_many(p, hashes, 1, NULL), TL_EINVAL);
    KV_REFUSED(tl_kv_lookup_many(NULL, hashes, 1, got), TL_EINVAL);
    tl_kv_pool_destroy(p);
}

TL_TEST(evict_frees_one_cached_block_wherever_it_is_in_the_order) {
    tl_kv_pool *p = mixed();
    TL_OK_(tl_kv_unref(p, 1)); /* cached now, oldest first: 7 6 1 */
    TL_OK_(tl_kv_evict(p, 6));
    KV_STATS(p, 3, 5, 2);
    TL_EQ(kv_stats(p).evictions, 0); /* nobody needed the room */
    TL_OK_(tl_kv_check(p));
    kv_expect_miss(p, 0x106);
    TL_EQ(tl_kv_hash(p, 6), 0);
    static const uint32_t not_cached[] = {6, 8, 0, 4, N, UINT32_MAX};
    for (int i = 0; i < 6; i++)
        REFUSED(p, tl_kv_evict(p, not_cached[i]), "tl_kv_evict");
    REFUSED(p, tl_kv_evict(NULL, 0), "tl_kv_evict");
    uint32_t order[N];
    TL_EQ(kv_drain(p, order), 5);
    static const uint32_t want[] = {6, 8, 9, 7, 1};
    TL_MEM_EQ(order, want, sizeof want);
    tl_kv_pool_destroy(p);
}

TL_TEST(block_hashes_is_the_chain) {
    uint32_t toks[100];
    uint64_t rng = 6, out[101];
    for (int i = 0; i < 100; i++)
        toks[i] = (uint32_t)tl_test_rand(&rng) >> (i % 32);
    static const uint32_t sizes[] = {1, 2, 3, 7, 16, 50, 51, 100, 101, UINT32_MAX};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (size_t n = 0; n <= 100; n += 1 + n % 3) {
            const uint64_t root = tl_test_rand(&rng);
            uint64_t parent = root;
            memset(out, 0xEE, sizeof out);
            TL_OK_(tl_kv_block_hashes(root, toks, n, sizes[s], out));
            for (size_t i = 0; i < n / sizes[s]; i++) {
                parent = tl_kv_block_hash(parent, toks + i * sizes[s], sizes[s]);
                TL_EQ(out[i], parent);
            }
            TL_EQ(out[n / sizes[s]], 0xEEEEEEEEEEEEEEEEu);
        }
    static const uint32_t example[] = {1, 2, 3, 4, 5};
    TL_OK_(tl_kv_block_hashes(0, example, 5, 2, out));
    TL_EQ(out[0], 0xA91AB0C1027B9366u);
    TL_EQ(out[1], 0x03DF829571605C60u);
    KV_REFUSED(tl_kv_block_hashes(0, toks, 4, 0, out), TL_EINVAL);
    KV_REFUSED(tl_kv_block_hashes(0, NULL, 4, 2, out), TL_EINVAL);
    KV_REFUSED(tl_kv_block_hashes(0, toks, 4, 2, NULL), TL_EINVAL);
    TL_OK_(tl_kv_block_hashes(0, NULL, 1, 2, NULL)); /* no full block, nothing to read or write */
    TL_OK_(tl_kv_block_hashes(0, NULL, 0, 2, NULL));
}

/* ---- random batches against single calls --------------------------------------------------- */

/* Two pools live the same life: one by batches, one by single calls that are made only when all of
 * them would succeed. They must never differ, not even in the order of their free blocks. */
static int singles(tl_kv_pool *p, uint32_t op, const uint32_t *ids, const uint32_t *fills,
                   const uint64_t *hashes, uint32_t n, int64_t *out, uint8_t *registered) {
    uint32_t left[64];
    for (uint32_t i = 0; i < n && op != 4; i++) {
        if (ids[i] >= kv_cfg(p).n_blocks || tl_kv_refs(p, ids[i]) == 0)
            return 0;
        left[ids[i]] = tl_kv_refs(p, ids[i]);
    }
    uint64_t named[64];
    for (uint32_t i = 0; i < n; i++) {
        if (op == 2 && left[ids[i]]-- == 0)
            return 0;
        if (op == 3 && (fills[i] > B || tl_kv_hash(p, ids[i]) != 0))
            return 0;
        if (op == 5 && i == 0)
            for (uint32_t j = 0; j < kv_cfg(p).n_blocks; j++)
                named[j] = tl_kv_hash(p, j);
        if (op == 5) {
            const uint32_t id = ids[i];
            if (hashes[i] == 0 || tl_kv_fill(p, id) != B ||
                (named[id] != 0 && named[id] != hashes[i]))
                return 0;
            int held = 0;
            for (uint32_t j = 0; j < kv_cfg(p).n_blocks; j++)
                held |= named[j] == hashes[i] && j != id;
            if (!held)
                named[id] = hashes[i];
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = 0;
        switch (op) {
        case 1:
            tl_kv_ref(p, ids[i]);
            break;
        case 2:
            TL_OK_(tl_kv_unref(p, ids[i]));
            break;
        case 3:
            TL_OK_(tl_kv_set_fill(p, ids[i], fills[i]));
            break;
        case 4:
            out[i] = tl_kv_lookup(p, hashes[i], &id) == TL_OK ? (int64_t)id : -1;
            break;
        default:
            registered[i] = tl_kv_register(p, ids[i], hashes[i]) == TL_OK;
        }
    }
    return 1;
}

static void twin_lives(uint64_t seed) {
    enum { BLOCKS = 40, MAX = 50 };
    tl_kv_pool *a = kv_new(BLOCKS, B, 1, 1, 1), *b = kv_new(BLOCKS, B, 1, 1, 1);
    uint64_t rng = seed;
    memset(tl_kv_block_ptr(a, 0, 0, 0), 0, BLOCKS * tl_kv_block_bytes(a));
    memset(tl_kv_block_ptr(b, 0, 0, 0), 0, BLOCKS * tl_kv_block_bytes(b));
    for (int step = 0; step < 3000; step++) {
        uint32_t ids[MAX], fills[MAX], more[MAX];
        uint64_t hashes[MAX];
        int64_t out_a[MAX], out_b[MAX];
        uint8_t reg_a[MAX], reg_b[MAX];
        const uint32_t n = tl_test_below(&rng, tl_test_below(&rng, 4) ? 6 : MAX + 1);
        const uint32_t op = tl_test_below(&rng, 6);
        tl_test_context("--seed %llu, step %d, op %u", (unsigned long long)seed, step, op);
        for (uint32_t i = 0; i < n; i++) {
            /* Mostly ids that are used, so that many batches succeed. */
            for (int tries = 0; tries < 12; tries++) {
                ids[i] = tl_test_below(&rng, BLOCKS + (tries == 0 && step % 16 == 0 ? 1u : 0u));
                if (ids[i] < BLOCKS && tl_kv_refs(a, ids[i]) > 0 &&
                    (op != 3 || tl_kv_hash(a, ids[i]) == 0) &&
                    (op != 5 || (tl_kv_fill(a, ids[i]) == B && tl_kv_hash(a, ids[i]) == 0)))
                    break;
            }
            fills[i] = tl_test_below(&rng, 8) ? B : tl_test_below(&rng, B + 2);
            hashes[i] = tl_test_below(&rng, 50) ? 1 + tl_test_below(&rng, 3 * BLOCKS) : 0;
        }
        tl_status got = TL_OK;
        int legal = 1;
        if (op == 0) {
            legal = n <= kv_stats(b).free + kv_stats(b).cached;
            got = tl_kv_alloc(a, n, ids);
            TL_STATUS(got, legal ? TL_OK : TL_EFULL);
            if (legal) {
                TL_OK_(tl_kv_alloc(b, n, more));
                TL_MEM_EQ(ids, more, n * sizeof ids[0]);
            }
        } else {
            switch (op) {
            case 1:
                got = tl_kv_ref_many(a, ids, n);
                break;
            case 2:
                got = tl_kv_unref_many(a, ids, n);
                break;
            case 3:
                got = tl_kv_set_fill_many(a, ids, fills, n);
                break;
            case 4:
                got = tl_kv_lookup_many(a, hashes, n, out_a);
                break;
            default:
                got = tl_kv_register_many(a, ids, hashes, n, reg_a);
            }
            legal = singles(b, op, ids, fills, hashes, n, out_b, reg_b);
            TL_STATUS(got, legal ? TL_OK : TL_EINVAL);
            if (legal && op == 4)
                TL_MEM_EQ(out_a, out_b, n * sizeof out_a[0]);
            if (legal && op == 5)
                TL_MEM_EQ(reg_a, reg_b, n);
        }
        kv_state state = kv_state_of(b);
        const char *differs = kv_state_changed(&state, a);
        if (differs)
            tl_test_fail(__FILE__, __LINE__, "batch and single calls differ: %s", differs);
        kv_state_free(&state);
    }
    uint32_t order_a[BLOCKS], order_b[BLOCKS];
    const uint32_t n = kv_drain(a, order_a);
    TL_EQ(kv_drain(b, order_b), n);
    TL_MEM_EQ(order_a, order_b, n * sizeof order_a[0]);
    tl_kv_pool_destroy(a);
    tl_kv_pool_destroy(b);
    tl_test_context("%s", "");
}

TL_TEST(random_batches_are_the_single_calls_or_nothing) {
    uint64_t seed;
    if (tl_test_seed(&seed)) {
        twin_lives(seed);
        return;
    }
    for (seed = 1; seed <= 20; seed++)
        twin_lives(seed);
}

/* ---- creation and state -------------------------------------------------------------------- */

TL_TEST(create_opt_takes_known_flags_only) {
    const tl_kv_cfg cfg = {4, 2, 1, 1, 2, TL_F16, 1};
    tl_kv_pool *p = NULL;
    for (uint32_t flags = 0; flags <= TL_KV_ALL_FLAGS; flags++) {
        const tl_kv_options opt = {.flags = flags};
        TL_OK_(tl_kv_pool_create_opt(&cfg, &opt, &p));
        TL_OK_(tl_kv_check(p));
        KV_STATS(p, 4, 0, 0);
        tl_kv_pool_destroy(p);
    }
    TL_OK_(tl_kv_pool_create_opt(&cfg, NULL, &p));
    tl_kv_pool_destroy(p);
    static const uint32_t unknown[] = {4, 8, 0x80000000, UINT32_MAX};
    for (int i = 0; i < 4; i++) {
        const tl_kv_options opt = {.flags = unknown[i]};
        p = (tl_kv_pool *)(uintptr_t)64;
        KV_REFUSED(tl_kv_pool_create_opt(&cfg, &opt, &p), TL_EINVAL);
        TL_CHECK(strncmp(tl_last_error(), "tl_kv_pool_create_opt:", 22) == 0);
        TL_PTR_EQ(p, NULL);
    }
    KV_REFUSED(tl_kv_pool_create_opt(&cfg, NULL, NULL), TL_EINVAL);
    KV_REFUSED(tl_kv_pool_create_opt(NULL, NULL, &p), TL_EINVAL);
}

TL_TEST(meta_bytes_is_what_was_allocated_besides_the_slab_and_stays_small) {
    static const uint32_t sizes[] = {1, 2, 100, 1000, 1000000};
    for (int i = 0; i < 5; i++) {
        tl_kv_pool *p = kv_new(sizes[i], 1, 1, 1, 1);
        const size_t slab = sizes[i] * tl_kv_block_bytes(p);
        TL_EQ(tl_kv_meta_bytes(p), tl_count_live_bytes() - slab);
        if (sizes[i] >= 1000)
            TL_CHECK(tl_kv_meta_bytes(p) <= (size_t)80 * sizes[i]);
        tl_kv_pool_destroy(p);
    }
    tl_set_last_error(NULL);
    TL_EQ(tl_kv_meta_bytes(NULL), 0);
    TL_CHECK(tl_last_error()[0] != 0);
}

TL_TEST(create_does_not_touch_the_pages_of_the_slab) {
    const tl_kv_cfg cfg = {1024, 64, 16, 8, 256, TL_F16, 1}; /* 8 MiB a block, 8 GiB in all */
    struct rusage before, after;
    tl_kv_pool *p;
    if (TL_TEST_SANITIZED)
        tl_test_skip("a sanitizer's allocator touches a shadow of the slab");
    getrusage(RUSAGE_SELF, &before);
    if (tl_kv_pool_create(&cfg, &p) != TL_OK)
        tl_test_skip("no 8 GiB of address space");
    getrusage(RUSAGE_SELF, &after);
    TL_EQ(tl_kv_block_bytes(p), 8 << 20);
    TL_CHECK(after.ru_maxrss - before.ru_maxrss < 256 * 1024); /* KiB; an emulator needs some */
    tl_kv_pool_destroy(p);
}

TL_TEST(refs_and_hash_of_a_block_out_of_range_are_0_with_the_slot_set) {
    tl_kv_pool *p = mixed();
    TL_EQ(tl_kv_refs(p, 0), 3);
    TL_EQ(tl_kv_refs(p, 6), 0);
    TL_EQ(tl_kv_hash(p, 6), 0x106);
    TL_EQ(tl_kv_hash(p, 8), 0);
    static const uint32_t bad[] = {N, UINT32_MAX};
    for (int i = 0; i < 2; i++) {
        tl_set_last_error(NULL);
        TL_EQ(tl_kv_refs(p, bad[i]), 0);
        TL_CHECK(strncmp(tl_last_error(), "tl_kv_refs:", 11) == 0);
        tl_set_last_error(NULL);
        TL_EQ(tl_kv_hash(p, bad[i]), 0);
        TL_CHECK(strncmp(tl_last_error(), "tl_kv_hash:", 11) == 0);
    }
    tl_set_last_error(NULL);
    TL_EQ(tl_kv_refs(NULL, 0), 0);
    TL_CHECK(tl_last_error()[0] != 0);
    KV_REFUSED(tl_kv_check(NULL), TL_EINVAL);
    tl_kv_pool_destroy(p);
}
