/*
 * unref_caches_registered_blocks - the last reference sends a registered block to the cache and any
 * other back to the free list; the cache gives up its oldest block first, and counts it.
 *
 * Catches: registered blocks freed at 0 references (s08), the newest cached block evicted (s13),
 * evictions not counted (s14), a freed id that is lost (m03).
 */
#include "tl_test_kv.h"

TL_TEST(unref_caches_registered_blocks) {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    const uint32_t oldest = kv_registered(p, 0x10), middle = kv_registered(p, 0x20);
    const uint32_t newest = kv_registered(p, 0x30), plain = kv_filled(p, 1, 2);
    tl_kv_ref(p, oldest);
    TL_OK_(tl_kv_unref(p, oldest));
    KV_STATS(p, 0, 4, 0); /* one of two references */
    TL_OK_(tl_kv_unref(p, oldest));
    KV_STATS(p, 0, 3, 1);
    TL_OK_(tl_kv_unref(p, middle));
    TL_OK_(tl_kv_unref(p, newest));
    KV_STATS(p, 0, 1, 3);
    TL_OK_(tl_kv_unref(p, plain));
    KV_STATS(p, 1, 0, 3);

    /* Cached means found again, with what it held. */
    kv_expect_hit(p, 0x20, middle);
    kv_expect(p, middle, 0x20, 2);
    KV_STATS(p, 1, 1, 2);
    TL_OK_(tl_kv_unref(p, middle)); /* the newest now */
    KV_STATS(p, 1, 0, 3);

    /* Free first, then the cached ones by age. */
    uint32_t order[4];
    TL_EQ(kv_stats(p).evictions, 0);
    TL_EQ(kv_drain(p, order), 4);
    TL_EQ(order[0], plain);
    TL_EQ(order[1], oldest);
    TL_EQ(order[2], newest);
    TL_EQ(order[3], middle);
    TL_EQ(kv_stats(p).evictions, 3);
    kv_expect_miss(p, 0x10);
    kv_expect_miss(p, 0x20);
    kv_expect_miss(p, 0x30);
    tl_kv_pool_destroy(p);
}
