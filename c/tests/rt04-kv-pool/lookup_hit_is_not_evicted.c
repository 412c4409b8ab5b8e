/*
 * lookup_hit_is_not_evicted - a block that a lookup has revived belongs to its caller: whatever is
 * allocated next is somebody else's. And a miss says nothing.
 *
 * Catches: a revived block left on the eviction list (s11, the one that every suite must catch), a
 * miss that overwrites the error slot (s12), the newest block evicted (s13), evictions not counted
 * (s14).
 */
#include "tl_test_kv.h"

TL_TEST(lookup_hit_is_not_evicted) {
    for (uint32_t hit = 0; hit < 3; hit++) {
        tl_kv_pool *p = kv_new(3, 2, 1, 1, 2);
        uint32_t id[3];
        for (uint32_t i = 0; i < 3; i++)
            id[i] = kv_registered(p, 0x10 + i);
        for (uint32_t i = 0; i < 3; i++)
            TL_OK_(tl_kv_unref(p, id[i]));
        kv_expect_hit(p, 0x10 + hit, id[hit]);
        KV_STATS(p, 0, 1, 2);

        /* The other two go, oldest first; the third allocation finds nothing. */
        const uint32_t a = kv_alloc1(p), b = kv_alloc1(p);
        TL_EQ(a, id[hit == 0 ? 1 : 0]);
        TL_EQ(b, id[hit == 2 ? 1 : 2]);
        TL_EQ(kv_stats(p).evictions, 2);
        uint32_t none;
        KV_REFUSED(tl_kv_alloc(p, 1, &none), TL_EFULL);
        kv_write(p, a, 1);
        kv_write(p, b, 2);
        kv_expect(p, id[hit], 0x10 + hit, 2);

        /* The evicted names are gone, quietly; the hit's name still leads to it. */
        for (uint32_t i = 0; i < 3; i++)
            if (i != hit)
                kv_expect_miss(p, 0x10 + i);
        kv_expect_hit(p, 0x10 + hit, id[hit]);
        TL_OK_(tl_kv_unref(p, id[hit]));
        KV_STATS(p, 0, 3, 0);
        TL_OK_(tl_kv_unref(p, id[hit]));
        KV_STATS(p, 0, 2, 1);
        tl_kv_pool_destroy(p);
    }
}
