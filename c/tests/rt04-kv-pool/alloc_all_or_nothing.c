/*
 * alloc_all_or_nothing - blocks are taken all or none, every one that was given back can be had
 * again, and create itself is all or nothing.
 *
 * Catches: blocks taken one at a time (s07), a freed id that is lost (m03), a pool of format 2
 * (s29), a failed create that leaks (s30).
 */
#include "tl_count_alloc.h"
#include "tl_test_kv.h"

TL_TEST(alloc_all_or_nothing) {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    uint32_t ids[5];
    KV_REFUSED(tl_kv_alloc(p, 5, ids), TL_EFULL);
    KV_STATS(p, 4, 0, 0);

    /* One of each: free, used, cached. Two can be had, three cannot. */
    const uint32_t used = kv_alloc1(p), other = kv_alloc1(p);
    kv_cached(p, 0xC0FFEE);
    KV_STATS(p, 1, 2, 1);
    KV_REFUSED(tl_kv_alloc(p, 3, ids), TL_EFULL);
    KV_STATS(p, 1, 2, 1);
    TL_EQ(kv_stats(p).evictions, 0);
    TL_OK_(tl_kv_alloc(p, 2, ids));
    KV_STATS(p, 0, 4, 0);
    TL_CHECK(ids[0] != ids[1]);

    /* Round after round: what goes back can be taken again, all of it. */
    TL_OK_(tl_kv_unref(p, used));
    TL_OK_(tl_kv_unref(p, other));
    TL_OK_(tl_kv_unref(p, ids[0]));
    TL_OK_(tl_kv_unref(p, ids[1]));
    for (int round = 0; round < 10; round++) {
        KV_STATS(p, 4, 0, 0);
        TL_EQ(kv_drain(p, ids), 4);
        KV_STATS(p, 0, 4, 0);
        for (int i = 0; i < 4; i++)
            TL_OK_(tl_kv_unref(p, ids[i]));
    }
    tl_kv_pool_destroy(p);

    /* create: a pool or nothing. */
    tl_kv_cfg cfg = {4, 2, 1, 1, 2, TL_F16, 2};
    KV_REFUSED(tl_kv_pool_create(&cfg, &p), TL_EUNSUPPORTED);
    TL_PTR_EQ(p, NULL);
    cfg.format = TL_KV_FORMAT_V1;
    for (uint64_t k = 1; p == NULL; k++) {
        TL_EQ(tl_count_live(), 0);
        tl_count_fail_at(k);
        const tl_status status = tl_kv_pool_create(&cfg, &p);
        tl_count_fail_at(0);
        TL_EQ(status, p ? TL_OK : TL_ENOMEM);
    }
    KV_STATS(p, 4, 0, 0);
    tl_kv_pool_destroy(p);
}
