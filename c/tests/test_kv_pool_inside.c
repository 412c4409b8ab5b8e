/*
 * test_kv_pool_inside.c - what cannot be reached from outside in reasonable time: reference counts
 * at their limit, and a pool that has gone wrong. These tests reach into the records
 * (src/runtime/kv_pool_impl.h), damage one thing, ask, and repair it.
 */
#include "runtime/kv_pool_impl.h"
#include "tinyllm/kv_pool_ext.h"
#include "tl_test.h"
#include "tl_test_kv.h"
#include "tl_test_state.h"

TL_TEST(a_count_of_uint32_max_takes_no_reference_more) {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    const uint32_t id = kv_registered(p, 5), other = kv_registered(p, 6), cached = kv_cached(p, 7);
    uint32_t out = 99;
    p->blocks[id].refs = UINT32_MAX - 1;
    tl_kv_ref(p, id);
    TL_EQ(p->blocks[id].refs, UINT32_MAX);

    kv_state before = kv_state_of(p);
    tl_set_last_error(NULL);
    tl_kv_ref(p, id);
    TL_CHECK(strncmp(tl_last_error(), "tl_kv_ref:", 10) == 0);
    TL_STR_EQ(kv_state_changed(&before, p) ? "changed" : "same", "same");
    KV_REFUSED(tl_kv_lookup(p, 5, &out), TL_EINVAL);
    TL_EQ(out, 99);
    TL_STR_EQ(kv_state_changed(&before, p) ? "changed" : "same", "same");
    const uint32_t ids[] = {other, id};
    KV_REFUSED(tl_kv_ref_many(p, ids, 2), TL_EINVAL);
    TL_STR_EQ(kv_state_changed(&before, p) ? "changed" : "same", "same");
    const uint64_t hashes[] = {7, 6, 7, 5};
    int64_t found[4];
    KV_REFUSED(tl_kv_lookup_many(p, hashes, 4, found), TL_EINVAL);
    TL_STR_EQ(kv_state_changed(&before, p) ? "changed" : "same", "same");
    /* Still cached, and still the one to be evicted. */
    uint32_t order[4];
    TL_EQ(kv_drain(p, order), 2);
    TL_EQ(order[1], cached);
    kv_state_free(&before);

    /* The limit within one batch. */
    p->blocks[other].refs = UINT32_MAX - 2;
    const uint32_t three[] = {other, other, other};
    KV_REFUSED(tl_kv_ref_many(p, three, 3), TL_EINVAL);
    TL_EQ(p->blocks[other].refs, UINT32_MAX - 2);
    const uint64_t thrice[] = {6, 6, 6};
    KV_REFUSED(tl_kv_lookup_many(p, thrice, 3, found), TL_EINVAL);
    TL_EQ(p->blocks[other].refs, UINT32_MAX - 2);
    TL_OK_(tl_kv_ref_many(p, three, 2));
    TL_EQ(p->blocks[other].refs, UINT32_MAX);
    tl_kv_pool_destroy(p);
}

/* Damages `lvalue`, expects the checker to see it, repairs it, expects peace. */
#define SEEN(lvalue, wrong)                                                                        \
    do {                                                                                           \
        const __typeof__(lvalue) was = (lvalue);                                                   \
        (lvalue) = (wrong);                                                                        \
        tl_test_context("%s set to %s", #lvalue, #wrong);                                          \
        KV_REFUSED(tl_kv_check(p), TL_EINVAL);                                                     \
        TL_CHECK(strncmp(tl_last_error(), "tl_", 3) == 0);                                         \
        (lvalue) = was;                                                                            \
        TL_OK_(tl_kv_check(p));                                                                    \
    } while (0)

TL_TEST(the_checker_sees_every_kind_of_damage) {
    tl_kv_pool *p = kv_new(8, 2, 1, 1, 2);
    const uint32_t used = kv_registered(p, 5), plain = kv_filled(p, 1, 1), a = kv_registered(p, 7),
                   b = kv_registered(p, 8);
    TL_OK_(tl_kv_unref(p, a));
    TL_OK_(tl_kv_unref(p, b));
    TL_OK_(tl_kv_check(p));
    tl_kv_block *blocks = p->blocks;
    uint32_t *free_ids = p->free_ids.data;
    const uint32_t free_id = free_ids[0];

    /* The partition into states. */
    SEEN(free_ids[1], free_ids[0]);
    SEEN(free_ids[1], 8);
    SEEN(free_ids[1], used);
    SEEN(free_ids[1], a);
    SEEN(p->free_ids.len, p->free_ids.len - 1);
    SEEN(p->free_ids.len, 9);
    SEEN(blocks[free_id].refs, 1);
    SEEN(blocks[free_id].hash, 99);
    SEEN(blocks[used].refs, 0);
    SEEN(blocks[plain].refs, 0);
    SEEN(blocks[a].refs, 1);

    /* The LRU list. */
    SEEN(p->cached.len, 1);
    SEEN(p->cached.len, 3);
    SEEN(blocks[a].lru.next, &p->cached.head); /* b is lost */
    SEEN(blocks[a].lru.prev, &blocks[b].lru);
    SEEN(blocks[b].lru.next, &blocks[a].lru); /* a loop past the sentinel */
    SEEN(blocks[b].lru.next, NULL);

    /* The index, both ways. */
    SEEN(blocks[a].hash, 0);
    SEEN(blocks[a].hash, 6);
    SEEN(blocks[a].hash, 8);
    SEEN(blocks[used].hash, 0);
    SEEN(blocks[plain].hash, 5);
    TL_OK_(tl_map_put(p->index, 5, plain));
    KV_REFUSED(tl_kv_check(p), TL_EINVAL);
    TL_OK_(tl_map_put(p->index, 5, used));
    TL_OK_(tl_kv_check(p));
    TL_OK_(tl_map_put(p->index, 1234, used));
    KV_REFUSED(tl_kv_check(p), TL_EINVAL);
    TL_EQ(tl_map_del(p->index, 1234), 1);
    TL_EQ(tl_map_del(p->index, 7), 1);
    KV_REFUSED(tl_kv_check(p), TL_EINVAL);
    TL_OK_(tl_map_put(p->index, 7, a));
    TL_OK_(tl_kv_check(p));

    /* Fills. */
    SEEN(blocks[plain].fill, 3);
    SEEN(blocks[used].fill, 1);
    SEEN(blocks[a].fill, 0);
    tl_test_context("%s", "");
    tl_kv_pool_destroy(p);
}
