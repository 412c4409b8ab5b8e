/*
 * hash_chain_by_hand - the two hashes of the worked example, and what a chain must tell apart.
 *
 * How these tests are found: every .c file in this folder is compiled into one program with
 * tl_test.c, tl_count_alloc.c and the library; a TL_TEST registers itself. Eight tests, together
 * they fail on every planted bug of the chapter; each says which ones are its own.
 *
 * Catches: a hash without its parent (s01), token ids of the wrong width (s02), FNV-1a started from
 * 0 (m01).
 */
#include "tl_test_kv.h"

TL_TEST(hash_chain_by_hand) {
    static const uint32_t toks[] = {1, 2, 3, 4};
    const uint64_t h0 = tl_kv_block_hash(0, toks, 2);
    TL_EQ(h0, 0xA91AB0C1027B9366u);
    TL_EQ(tl_kv_block_hash(h0, toks + 2, 2), 0x03DF829571605C60u);

    /* Equal tokens after different prompts are different blocks, to the last bit of the parent. */
    for (int bit = 0; bit < 64; bit++)
        TL_CHECK(tl_kv_block_hash((uint64_t)1 << bit, toks, 2) != h0);

    /* Every byte of an id counts, and so do order and number. */
    for (int bit = 0; bit < 32; bit++) {
        const uint32_t other[] = {1, 2u ^ (uint32_t)1 << bit};
        TL_CHECK(tl_kv_block_hash(0, other, 2) != h0);
    }
    static const uint32_t swapped[] = {2, 1}, wide[] = {1u | 2u << 16};
    TL_CHECK(tl_kv_block_hash(0, swapped, 2) != h0);
    TL_CHECK(tl_kv_block_hash(0, wide, 1) != h0);
    TL_CHECK(tl_kv_block_hash(0, toks, 1) != h0);

    /* One id of four different bytes, by hand: FNV-1a over 8 zero bytes and 78 56 34 12. */
    static const uint32_t id = 0x12345678;
    static const uint8_t bytes[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0x78, 0x56, 0x34, 0x12};
    uint64_t h = 0xCBF29CE484222325u;
    for (int i = 0; i < 12; i++)
        h = (h ^ bytes[i]) * 0x100000001B3u;
    TL_EQ(tl_kv_block_hash(0, &id, 1), h);

    /* Ids whose FNV-1a is 0; but 0 means "no hash". */
    static const uint32_t zero[4] = {0x370251BA, 0x06022D0F, 0x0A173A14, 0x25250A10};
    TL_EQ(tl_kv_block_hash(0, zero, 4), 1);
}
