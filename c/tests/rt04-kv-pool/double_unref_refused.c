/*
 * double_unref_refused - a reference that is not there cannot be given back, and a block that
 * nobody holds cannot be referenced.
 *
 * Catches: a reference count below zero (s09), tl_kv_ref reviving a block (s10), a freed id that is
 * lost (m03).
 */
#include "tl_test_kv.h"

TL_TEST(double_unref_refused) {
    tl_kv_pool *p = kv_new(3, 2, 1, 1, 2);
    const uint32_t cached = kv_cached(p, 0x10), freed = kv_alloc1(p);
    TL_OK_(tl_kv_unref(p, freed));
    KV_STATS(p, 2, 0, 1);
    const uint32_t bad[] = {freed, cached, 3, UINT32_MAX};
    for (int i = 0; i < 4; i++) {
        KV_REFUSED(tl_kv_unref(p, bad[i]), TL_EINVAL);
        KV_STATS(p, 2, 0, 1);
        tl_set_last_error(NULL);
        tl_kv_ref(p, bad[i]);
        TL_CHECK(tl_last_error()[0] != 0);
        KV_STATS(p, 2, 0, 1);
        KV_REFUSED(tl_kv_unref(p, bad[i]), TL_EINVAL);
        KV_STATS(p, 2, 0, 1);
    }
    /* Every block is there exactly once; kv_drain checks that none comes twice. */
    uint32_t order[3];
    TL_EQ(kv_drain(p, order), 3);
    KV_STATS(p, 0, 3, 0);
    for (int i = 0; i < 3; i++) {
        TL_OK_(tl_kv_unref(p, order[i]));
        KV_REFUSED(tl_kv_unref(p, order[i]), TL_EINVAL);
        KV_STATS(p, (uint32_t)i + 1, 2 - (uint32_t)i, 0);
    }
    tl_kv_pool_destroy(p);
}
