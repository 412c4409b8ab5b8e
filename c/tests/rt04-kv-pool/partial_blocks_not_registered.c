/*
 * partial_blocks_not_registered - only a full block gets a name, a name has one holder, and a block
 * with a name does not change.
 *
 * Catches: a partial block registered (s17), a second holder replacing the first (s18).
 */
#include "tl_test_kv.h"

TL_TEST(partial_blocks_not_registered) {
    tl_kv_pool *p = kv_new(3, 4, 1, 1, 2);
    const uint32_t a = kv_alloc1(p), b = kv_filled(p, 2, 4);
    kv_write(p, a, 1);
    for (uint32_t fill = 0; fill < 4; fill++) {
        TL_OK_(tl_kv_set_fill(p, a, fill));
        KV_REFUSED(tl_kv_register(p, a, 0x10), TL_EINVAL);
        kv_expect_miss(p, 0x10);
    }
    TL_OK_(tl_kv_set_fill(p, a, 4));
    KV_REFUSED(tl_kv_register(p, a, 0), TL_EINVAL);
    TL_OK_(tl_kv_register(p, a, 0x10));
    TL_OK_(tl_kv_register(p, a, 0x10));
    KV_REFUSED(tl_kv_register(p, a, 0x20), TL_EINVAL);
    KV_REFUSED(tl_kv_set_fill(p, a, 3), TL_EINVAL);

    /* The same tokens computed twice: the second block stays private. */
    KV_REFUSED(tl_kv_register(p, b, 0x10), TL_EBUSY);
    kv_expect_hit(p, 0x10, a);
    TL_OK_(tl_kv_unref(p, a));
    TL_OK_(tl_kv_unref(p, b));
    KV_STATS(p, 2, 1, 0); /* b was free to go, a is still held */
    TL_OK_(tl_kv_unref(p, a));
    KV_STATS(p, 2, 0, 1);
    kv_expect_hit(p, 0x10, a);
    kv_expect(p, a, 1, 4);
    TL_OK_(tl_kv_unref(p, a));

    KV_REFUSED(tl_kv_register(p, a, 0x10), TL_EINVAL); /* nobody holds it */
    KV_REFUSED(tl_kv_register(p, b, 0x20), TL_EINVAL);
    KV_STATS(p, 2, 0, 1);
    tl_kv_pool_destroy(p);
}
