/*
 * cow_copies_shared_blocks - a lone holder writes in place, one of several gets a copy, and the
 * others never see what it writes; K and V of every layer are places of their own.
 *
 * Catches: a copy that keeps the writer's reference (s15), a shared block written in place (s16), K
 * and V in one slab (s19).
 */
#include "tl_test_kv.h"

TL_TEST(cow_copies_shared_blocks) {
    tl_kv_pool *p = kv_new(2, 4, 2, 2, 3);
    const uint32_t parent = kv_filled(p, 0xA, 3);
    kv_expect(p, parent, 0xA, 4); /* all of it: no slab is part of another */
    uint32_t child = UINT32_MAX;
    TL_OK_(tl_kv_cow(p, parent, &child));
    TL_EQ(child, parent);
    KV_STATS(p, 1, 1, 0);

    tl_kv_ref(p, parent); /* a fork */
    TL_OK_(tl_kv_cow(p, parent, &child));
    TL_CHECK(child != parent);
    KV_STATS(p, 0, 2, 0);
    TL_EQ(tl_kv_fill(p, child), 3);
    kv_expect(p, child, 0xA, 3);
    kv_write(p, child, 0xB);
    kv_expect(p, parent, 0xA, 3);
    kv_expect(p, child, 0xB, 4);

    /* No room for a copy: refused, and the fork still shares. */
    tl_kv_ref(p, parent);
    uint32_t out = 7;
    KV_REFUSED(tl_kv_cow(p, parent, &out), TL_EFULL);
    TL_EQ(out, 7);
    KV_STATS(p, 0, 2, 0);
    TL_OK_(tl_kv_unref(p, parent));

    /* Each of the two has one holder, and comes back when that one goes. */
    TL_OK_(tl_kv_unref(p, parent));
    KV_STATS(p, 1, 1, 0);

    /* Of three holders one takes a copy: two are left. */
    tl_kv_ref(p, child);
    tl_kv_ref(p, child);
    TL_OK_(tl_kv_cow(p, child, &out));
    TL_CHECK(out != child);
    TL_OK_(tl_kv_unref(p, out));
    TL_OK_(tl_kv_unref(p, child));
    KV_STATS(p, 1, 1, 0);
    TL_OK_(tl_kv_unref(p, child));
    KV_STATS(p, 2, 0, 0);
    KV_REFUSED(tl_kv_cow(p, parent, &out), TL_EINVAL);
    tl_kv_pool_destroy(p);
}
