/*
 * test_swiss.c - tl_map against an array that always tells the truth, and its promise that a table
 * made for n keys takes n keys for ever without allocating.
 */
#include "ds/swiss.h"
#include "tinyllm/ds.h"
#include "tl_count_alloc.h"
#include "tl_test.h"

#include <stdlib.h>
#include <string.h>

static tl_map *map_for(size_t n) {
    tl_map *m = NULL;
    TL_OK_(tl_map_create(n, &m));
    TL_CHECK(m != NULL);
    TL_EQ(tl_map_len(m), 0);
    return m;
}

static void expect_value(const tl_map *m, uint64_t k, uint64_t v) {
    uint64_t got = ~v;
    TL_EQ(tl_map_get(m, k, &got), 1);
    TL_EQ(got, v);
}

static void expect_none(const tl_map *m, uint64_t k) {
    uint64_t got = 0x1234;
    tl_set_last_error("earlier");
    TL_EQ(tl_map_get(m, k, &got), 0);
    TL_EQ(got, 0x1234);
    TL_STR_EQ(tl_last_error(), "earlier");
}

TL_TEST(every_key_is_legal) {
    static const uint64_t keys[] = {0,
                                    1,
                                    2,
                                    127,
                                    128,
                                    254,
                                    255,
                                    256,
                                    UINT32_MAX,
                                    1ull << 63,
                                    UINT64_MAX,
                                    UINT64_MAX - 1,
                                    0x8080808080808080u};
    const size_t n = sizeof keys / sizeof keys[0];
    tl_map *m = map_for(0);
    for (size_t i = 0; i < n; i++)
        expect_none(m, keys[i]);
    for (size_t i = 0; i < n; i++) {
        TL_OK_(tl_map_put(m, keys[i], ~keys[i]));
        TL_EQ(tl_map_len(m), i + 1);
    }
    for (size_t i = 0; i < n; i++) {
        expect_value(m, keys[i], ~keys[i]);
        TL_EQ(tl_map_get(m, keys[i], NULL), 1);
        TL_OK_(tl_map_put(m, keys[i], i)); /* replaced, not added */
        expect_value(m, keys[i], i);
        TL_EQ(tl_map_len(m), n);
    }
    for (size_t i = 0; i < n; i++) {
        TL_EQ(tl_map_del(m, keys[i]), 1);
        TL_EQ(tl_map_del(m, keys[i]), 0);
        expect_none(m, keys[i]);
        TL_EQ(tl_map_len(m), n - i - 1);
        TL_OK_(tl_map_check(m));
    }
    tl_map_destroy(m);
}

TL_TEST(null_is_an_empty_map) {
    uint64_t v = 5;
    TL_EQ(tl_map_get(NULL, 1, &v), 0);
    TL_EQ(v, 5);
    TL_EQ(tl_map_del(NULL, 1), 0);
    TL_EQ(tl_map_len(NULL), 0);
    TL_STATUS(tl_map_put(NULL, 1, 1), TL_EINVAL);
    TL_CHECK(strncmp(tl_last_error(), "tl_map_put", 10) == 0);
    TL_STATUS(tl_map_create(1, NULL), TL_EINVAL);
    tl_map_destroy(NULL);
    tl_map *m = (tl_map *)(uintptr_t)16;
    TL_STATUS(tl_map_create(SIZE_MAX, &m), TL_EINVAL);
    TL_PTR_EQ(m, NULL);
    m = (tl_map *)(uintptr_t)16;
    TL_STATUS(tl_map_create(SIZE_MAX / 16, &m), TL_EINVAL);
    TL_PTR_EQ(m, NULL);
    TL_EQ(tl_count_allocs(), 0);
}

TL_TEST(every_failing_allocation_of_create_is_enomem) {
    for (uint64_t k = 1;; k++) {
        tl_map *m = (tl_map *)(uintptr_t)16;
        tl_count_fail_at(k);
        const tl_status status = tl_map_create(100, &m);
        tl_count_fail_at(0);
        if (status == TL_OK) {
            TL_CHECK(k > 1);
            tl_map_destroy(m);
            return;
        }
        TL_STATUS(status, TL_ENOMEM);
        TL_PTR_EQ(m, NULL);
        TL_EQ(tl_count_live(), 0);
    }
}

/* ---- against a model ----------------------------------------------------------------------- */

enum { UNIVERSE = 600 };

/* Random puts, deletes and lookups over a universe of keys, compared with present[] and value[]. */
static void compare_with_array(uint64_t seed, size_t hint, uint64_t (*key)(uint32_t i)) {
    uint8_t present[UNIVERSE] = {0};
    uint64_t value[UNIVERSE], rng = seed;
    size_t len = 0;
    tl_map *m = map_for(hint);
    for (int step = 0; step < 20000; step++) {
        tl_test_context("seed %llu, hint %zu, step %d", (unsigned long long)seed, hint, step);
        const uint32_t i = tl_test_below(&rng, UNIVERSE);
        /* Now mostly filling, now mostly emptying. */
        const uint32_t puts = step / 2500 % 2 ? 2 : 5;
        if (tl_test_below(&rng, 8) < puts) {
            value[i] = tl_test_rand(&rng);
            TL_OK_(tl_map_put(m, key(i), value[i]));
            len += !present[i];
            present[i] = 1;
        } else {
            TL_EQ(tl_map_del(m, key(i)), present[i]);
            len -= present[i];
            present[i] = 0;
        }
        TL_EQ(tl_map_len(m), len);
        const uint32_t j = tl_test_below(&rng, UNIVERSE);
        if (present[j])
            expect_value(m, key(j), value[j]);
        else
            expect_none(m, key(j));
        if (step % 500 == 0) {
            TL_OK_(tl_map_check(m));
            for (uint32_t u = 0; u < UNIVERSE; u++)
                TL_EQ(tl_map_get(m, key(u), NULL), present[u]);
        }
    }
    tl_test_context("%s", "");
    tl_map_destroy(m);
}

static uint64_t key_small(uint32_t i) {
    return i;
}
static uint64_t key_high_bits(uint32_t i) {
    return (uint64_t)i << 54; /* nothing in the low bits */
}
static uint64_t key_same_low(uint32_t i) {
    return (uint64_t)i << 16 | 0xBEEF;
}
static uint64_t key_random(uint32_t i) {
    uint64_t s = i;
    return tl_test_rand(&s);
}
static uint64_t key_stride(uint32_t i) {
    return i * 0x9E3779B97F4A7C15u; /* the multiplier of many a hash */
}

TL_TEST(random_operations_agree_with_an_array) {
    uint64_t (*const keys[])(uint32_t) = {key_small, key_high_bits, key_same_low, key_random,
                                          key_stride};
    static const size_t hints[] = {0, 1, 13, 100, UNIVERSE};
    for (uint64_t seed = 1; seed <= 5; seed++)
        for (size_t h = 0; h < 5; h++)
            compare_with_array(seed, hints[h], keys[(seed + h) % 5]);
}

/* ---- the promise --------------------------------------------------------------------------- */

/* n keys held at all times, one replaced by a new one at every step; a bounded number of steps
 * later nothing has been allocated and every key is where it should be. */
static void churn_at_full_load(size_t n, size_t steps) {
    uint64_t rng = n, *keys = malloc(n * sizeof *keys);
    tl_map *m = map_for(n);
    const uint64_t allocs = tl_count_allocs();
    const size_t live = tl_count_live_bytes();
    for (size_t i = 0; i < n; i++) {
        keys[i] = tl_test_rand(&rng);
        TL_OK_(tl_map_put(m, keys[i], i));
    }
    TL_EQ(tl_map_len(m), n);
    for (size_t step = 0; step < steps; step++) {
        const size_t i = (size_t)(tl_test_rand(&rng) % n);
        TL_EQ(tl_map_del(m, keys[i]), 1);
        TL_EQ(tl_map_get(m, keys[i], NULL), 0);
        /* Sometimes a key that was there before, mostly one that never was. */
        keys[i] = step % 8 == 0 ? keys[i] : tl_test_rand(&rng);
        TL_OK_(tl_map_put(m, keys[i], i));
        TL_EQ(tl_map_get(m, tl_test_rand(&rng), NULL), 0); /* an absent key: the lookup ends */
    }
    TL_EQ(tl_map_len(m), n);
    for (size_t i = 0; i < n; i++)
        expect_value(m, keys[i], i);
    TL_OK_(tl_map_check(m));
    TL_EQ(tl_count_allocs(), allocs);
    TL_EQ(tl_count_live_bytes(), live);
    free(keys);
    tl_map_destroy(m);
}

TL_TEST(a_map_for_n_keys_never_allocates_again) {
    static const size_t sizes[] = {1, 2, 8, 9, 10, 15, 16, 18, 19, 100, 1000, 4096, 4400};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        tl_test_context("%zu keys", sizes[i]);
        churn_at_full_load(sizes[i], 100000);
    }
    tl_test_context("%s", "");
    churn_at_full_load(50000, 1000000);
}

/* Filling and emptying the whole table in waves, in the order of insertion: what a pool does when
 * every block is evicted and registered again. */
TL_TEST(waves_of_full_and_empty_leave_no_trace) {
    enum { N = 1000 };
    tl_map *m = map_for(N);
    const uint64_t allocs = tl_count_allocs();
    uint64_t rng = 9;
    for (int wave = 0; wave < 300; wave++) {
        const uint64_t first = rng;
        for (int i = 0; i < N; i++)
            TL_OK_(tl_map_put(m, tl_test_rand(&rng), 1));
        TL_EQ(tl_map_len(m), N);
        uint64_t again = first;
        for (int i = 0; i < N; i++)
            TL_EQ(tl_map_del(m, tl_test_rand(&again)), 1);
        TL_EQ(tl_map_len(m), 0);
    }
    TL_OK_(tl_map_check(m));
    TL_EQ(tl_count_allocs(), allocs);
    tl_map_destroy(m);
}

TL_TEST(a_growth_that_fails_leaves_the_table_as_it_was) {
    tl_map *m = map_for(0);
    uint64_t n = 0;
    int failures = 0;
    while (failures < 8) {
        /* Refuse the next allocation; a put that needs none succeeds, one that grows fails. */
        tl_count_fail_at(1);
        tl_set_last_error(NULL);
        const tl_status status = tl_map_put(m, n, n * n);
        tl_count_fail_at(0);
        if (status == TL_OK) {
            n++;
            continue;
        }
        failures++;
        TL_STATUS(status, TL_ENOMEM);
        TL_CHECK(strncmp(tl_last_error(), "tl_map_put", 10) == 0);
        TL_EQ(tl_map_len(m), n);
        expect_none(m, n);
        TL_OK_(tl_map_check(m));
        for (uint64_t k = 0; k < n; k++)
            expect_value(m, k, k * k);
        /* Replacing needs no room even now. */
        tl_count_fail_at(1);
        if (n > 0)
            TL_OK_(tl_map_put(m, 0, 0));
        tl_count_fail_at(0);
        TL_OK_(tl_map_put(m, n, n * n));
        n++;
    }
    TL_EQ(tl_map_len(m), n);
    TL_OK_(tl_map_check(m));
    tl_map_destroy(m);
}

/* ---- what the pool uses -------------------------------------------------------------------- */

TL_TEST(insert_puts_only_what_is_absent) {
    tl_map *m = map_for(4);
    uint64_t held = 99;
    TL_OK_(tl_map_insert(m, 7, 70, &held));
    TL_EQ(held, 99);
    tl_set_last_error("earlier");
    TL_STATUS(tl_map_insert(m, 7, 71, &held), TL_EBUSY);
    TL_STR_EQ(tl_last_error(), "earlier");
    TL_EQ(held, 70);
    expect_value(m, 7, 70);
    TL_EQ(tl_map_len(m), 1);
    tl_map_prefetch_tags(m, 7);
    tl_map_prefetch_slot(m, 8);
    TL_EQ(tl_map_bytes(m), tl_count_live_bytes());
    tl_map_destroy(m);
}
