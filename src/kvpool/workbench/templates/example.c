/*
 * An example, commented out. Every .c file in this folder is compiled into one program; a TL_TEST
 * registers itself. The checks are in tl_test.h; tl_test_kv.h makes pools and fills blocks.
 *
 *     ol tdd red rt.04      your tests compile, and each of them fails against the stub
 *     ol tdd green rt.04    they pass on your kv_pool.c
 *     ol check rt.04        how many of the planted bugs do they notice?
 *
 * The chapter's eight: hash_chain_by_hand, alloc_all_or_nothing, unref_caches_registered_blocks,
 * double_unref_refused, lookup_hit_is_not_evicted, cow_copies_shared_blocks,
 * partial_blocks_not_registered, roundtrip_and_bit_flip.
 *
 * #include "tl_test_kv.h"
 *
 * TL_TEST(alloc_all_or_nothing) {
 *     tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);        // 4 blocks of 2 tokens, 1 layer, 1 head, dim 2
 *     uint32_t ids[5];
 *     TL_STATUS(tl_kv_alloc(p, 5, ids), TL_EFULL);  // one more than there are
 *     KV_STATS(p, 4, 0, 0);                         // free, used, cached: nothing was taken
 *     tl_kv_pool_destroy(p);                        // a test that leaves memory behind fails
 * }
 */
