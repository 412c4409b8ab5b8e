/*
 * test_kv_wire.c - the other ways to an envelope: in parts, side by side, in pieces. Whatever way
 * it was made, it is byte for byte the envelope of tl_kv_export. And the hashes of many prompts at
 * once, which are those of each alone. And the reader rules without a pool.
 */
#include "tinyllm/kv_pool_ext.h"
#include "tl_test.h"
#include "tl_test_kv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 5, B = 3 };

typedef struct {
    tl_kv_pool *p;
    uint32_t ids[N];
    uint8_t *envelope; /* of all of them, by tl_kv_export */
    size_t size;
} exported;

/* Full and partial blocks in turn, the full ones registered; 0 first if `partial_first`. */
static exported make(int partial_first) {
    exported e = {.p = kv_new(N, B, 2, 2, 5)};
    TL_OK_(tl_kv_alloc(e.p, N, e.ids));
    for (uint32_t i = 0; i < N; i++) {
        const int partial = (i % 2 == 0) == (partial_first != 0);
        kv_write(e.p, e.ids[i], i + 1);
        TL_OK_(tl_kv_set_fill(e.p, e.ids[i], partial ? 1 + i % (B - 1) : B));
        if (!partial)
            TL_OK_(tl_kv_register(e.p, e.ids[i], 0x1000 + i));
    }
    e.size = tl_kv_export_bytes(e.p, N);
    e.envelope = tl_alloc(e.size, 64);
    size_t written;
    TL_OK_(tl_kv_export(e.p, e.ids, N, e.envelope, e.size, &written));
    TL_EQ(written, e.size);
    return e;
}

static void done(exported *e) {
    tl_free(e->envelope);
    tl_kv_pool_destroy(e->p);
}

TL_TEST(parts_that_follow_one_another_are_the_envelope) {
    exported e = make(1);
    uint8_t *out = tl_alloc(e.size + 1, 64);
    for (uint32_t a = 0; a <= N; a++)
        for (uint32_t b = a; b <= N; b++) { /* 0..a, a..b, b..N, any of them may be empty */
            tl_test_context("cut at %u and %u", a, b);
            memset(out, 0xEE, e.size + 1);
            const uint32_t cuts[] = {0, a, b, N};
            uint32_t crc = 0xDEADBEEF; /* ignored with first 0 */
            size_t at = 0;
            for (int i = 0; i < 3; i++) {
                if (i > 0 && cuts[i] == N && cuts[i + 1] == N && at == e.size)
                    continue; /* the part before had the trailer */
                size_t written = 1;
                TL_OK_(tl_kv_export_part(e.p, e.ids, N, cuts[i], cuts[i + 1] - cuts[i], out + at,
                                         e.size - at, &written, &crc));
                at += written;
                if (cuts[i + 1] == 0)
                    at = 0; /* an empty part at the front is a header, and the next has it again */
            }
            TL_EQ(at, e.size);
            TL_MEM_EQ(out, e.envelope, e.size);
            TL_EQ(out[e.size], 0xEE);
        }
    tl_test_context("%s", "");
    tl_free(out);
    done(&e);
}

TL_TEST(parts_made_side_by_side_are_joined_by_their_crcs) {
    exported e = make(0);
    uint8_t *out = tl_alloc(e.size, 64);
    for (uint32_t cut = 1; cut < N; cut++) {
        size_t head, tail;
        uint32_t crc_head = 0, crc_tail = 0;
        TL_OK_(tl_kv_export_part(e.p, e.ids, N, 0, cut, out, e.size, &head, &crc_head));
        TL_OK_(tl_kv_export_part(e.p, e.ids, N, cut, N - cut, out + head, e.size - head, &tail,
                                 &crc_tail));
        TL_EQ(head + tail, e.size);
        const uint32_t crc = tl_crc32c_combine(crc_head, crc_tail, tail - 4);
        for (int i = 0; i < 4; i++)
            out[e.size - 4 + (size_t)i] = (uint8_t)(crc >> (8 * i));
        TL_MEM_EQ(out, e.envelope, e.size);
    }
    tl_free(out);
    done(&e);
}

TL_TEST(a_part_says_what_it_needs_and_refuses_what_is_wrong) {
    exported e = make(1);
    uint8_t out[2000];
    size_t written = 7;
    uint32_t crc = 5;
    const size_t P = tl_kv_block_bytes(e.p);
    TL_STATUS(tl_kv_export_part(e.p, e.ids, N, 1, 2, NULL, 0, &written, &crc), TL_EFULL);
    TL_EQ(written, 2 * (12 + P));
    TL_STATUS(tl_kv_export_part(e.p, e.ids, N, 0, 1, out, 0, &written, &crc), TL_EFULL);
    TL_EQ(written, 28 + 12 + P);
    TL_STATUS(tl_kv_export_part(e.p, e.ids, N, N, 0, out, 3, &written, &crc), TL_EFULL);
    TL_EQ(written, 4);
    TL_EQ(crc, 5);
    KV_REFUSED(tl_kv_export_part(e.p, e.ids, N, 3, 3, out, sizeof out, &written, &crc), TL_EINVAL);
    TL_EQ(written, 0);
    KV_REFUSED(tl_kv_export_part(e.p, e.ids, N, N + 1, 0, out, sizeof out, &written, &crc),
               TL_EINVAL);
    KV_REFUSED(tl_kv_export_part(e.p, NULL, N, 0, 1, out, sizeof out, &written, &crc), TL_EINVAL);
    KV_REFUSED(tl_kv_export_part(e.p, e.ids, N, 0, 1, NULL, 9, &written, &crc), TL_EINVAL);
    KV_REFUSED(tl_kv_export_part(e.p, e.ids, N, 0, 1, out, sizeof out, NULL, &crc), TL_EINVAL);
    KV_REFUSED(tl_kv_export_part(e.p, e.ids, N, 0, 1, out, sizeof out, &written, NULL), TL_EINVAL);
    KV_REFUSED(tl_kv_export_part(NULL, e.ids, N, 0, 1, out, sizeof out, &written, &crc), TL_EINVAL);
    /* Only the blocks of the part have to be exportable. */
    TL_OK_(tl_kv_unref(e.p, e.ids[4]));
    TL_OK_(tl_kv_export_part(e.p, e.ids, N, 3, 1, out, sizeof out, &written, &crc));
    KV_REFUSED(tl_kv_export_part(e.p, e.ids, N, 3, 2, out, sizeof out, &written, &crc), TL_EINVAL);
    done(&e);
}

TL_TEST(combining_is_the_crc_of_both) {
    uint8_t data[600];
    uint64_t rng = 5;
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)tl_test_rand(&rng);
    for (size_t cut = 0; cut <= sizeof data; cut++)
        TL_EQ(tl_crc32c_combine(tl_crc32c(data, cut, 0),
                                tl_crc32c(data + cut, sizeof data - cut, 0), sizeof data - cut),
              tl_crc32c(data, sizeof data, 0));
    /* Lengths past 2^32: in three bytes, or in one and three. */
    const uint64_t far = (uint64_t)1 << 40;
    const uint32_t a = 0x12345678u, zero = 0;
    TL_EQ(tl_crc32c_combine(tl_crc32c_combine(a, zero, far), zero, 3 * far),
          tl_crc32c_combine(a, zero, 4 * far));
    TL_EQ(tl_crc32c_combine(a, zero, 0x7FFFFFFFu), a); /* the order of x^8 */
}

TL_TEST(pieces_one_after_another_are_the_envelope) {
    for (int partial_first = 0; partial_first < 2; partial_first++) {
        exported e = make(partial_first);
        size_t scratch_bytes = 1, n = 1;
        TL_STATUS(tl_kv_export_pieces(e.p, e.ids, N, NULL, 0, NULL, 0, &scratch_bytes, &n),
                  TL_EFULL);
        TL_CHECK(n <= 2 * N + 1 && scratch_bytes <= e.size); /* all of it where bytes are swapped */
        uint8_t *scratch = tl_alloc(scratch_bytes + 1, 1);
        tl_kv_piece pieces[2 * N + 1];
        scratch[scratch_bytes] = 0xEE;
        const size_t scratch_cap = scratch_bytes, cap = n;
        TL_STATUS(tl_kv_export_pieces(e.p, e.ids, N, scratch, scratch_cap - 1, pieces, cap,
                                      &scratch_bytes, &n),
                  TL_EFULL);
        TL_STATUS(tl_kv_export_pieces(e.p, e.ids, N, scratch, scratch_cap, pieces, cap - 1,
                                      &scratch_bytes, &n),
                  TL_EFULL);
        TL_OK_(tl_kv_export_pieces(e.p, e.ids, N, scratch, scratch_cap, pieces, cap, &scratch_bytes,
                                   &n));
        TL_EQ(scratch_bytes, scratch_cap);
        TL_EQ(n, cap);
        size_t at = 0;
        for (size_t i = 0; i < n; i++) {
            TL_CHECK(pieces[i].len > 0 && pieces[i].len <= e.size - at);
            TL_MEM_EQ(pieces[i].ptr, e.envelope + at, pieces[i].len);
            at += pieces[i].len;
        }
        TL_EQ(at, e.size);
        TL_EQ(scratch[scratch_bytes], 0xEE);
        /* A full block was not copied: its piece is the block (where no bytes are swapped). */
        if (scratch_bytes < e.size)
            TL_PTR_EQ(pieces[1].ptr, tl_kv_block_ptr(e.p, e.ids[partial_first ? 1 : 0], 0, 0));

        KV_REFUSED(tl_kv_export_pieces(e.p, e.ids, N, NULL, 9, pieces, cap, &scratch_bytes, &n),
                   TL_EINVAL);
        TL_EQ(scratch_bytes | n, 0);
        KV_REFUSED(tl_kv_export_pieces(e.p, e.ids, N, scratch, 9, NULL, 1, &scratch_bytes, &n),
                   TL_EINVAL);
        KV_REFUSED(tl_kv_export_pieces(e.p, e.ids, N, scratch, 9, pieces, 1, NULL, &n), TL_EINVAL);
        KV_REFUSED(tl_kv_export_pieces(e.p, e.ids, N, scratch, 9, pieces, 1, &scratch_bytes, NULL),
                   TL_EINVAL);
        TL_OK_(tl_kv_unref(e.p, e.ids[2]));
        KV_REFUSED(tl_kv_export_pieces(e.p, e.ids, N, scratch, scratch_cap, pieces, cap,
                                       &scratch_bytes, &n),
                   TL_EINVAL);
        tl_free(scratch);
        done(&e);
    }
}

TL_TEST(pieces_of_nothing_are_the_32_bytes_of_an_empty_envelope) {
    tl_kv_pool *p = kv_new(1, 1, 1, 1, 1);
    uint8_t scratch[32], whole[32];
    tl_kv_piece piece;
    size_t scratch_bytes, n, written;
    TL_OK_(tl_kv_export_pieces(p, NULL, 0, scratch, 32, &piece, 1, &scratch_bytes, &n));
    TL_EQ(n, 1);
    TL_EQ(piece.len, 32);
    TL_OK_(tl_kv_export(p, NULL, 0, whole, 32, &written));
    TL_MEM_EQ(piece.ptr, whole, 32);
    tl_kv_pool_destroy(p);
}

TL_TEST(prompts_hashed_together_have_the_hashes_of_each_alone) {
    enum { PROMPTS = 11, LEN = 200 };
    static uint32_t toks[PROMPTS][LEN];
    static uint64_t got[PROMPTS][LEN + 1], want[LEN + 1];
    uint64_t rng = 11;
    for (int round = 0; round < 300; round++) {
        const uint32_t block_tokens = 1 + tl_test_below(&rng, round % 3 ? 20 : 3);
        const uint32_t n = tl_test_below(&rng, PROMPTS + 1);
        tl_kv_prompt prompts[PROMPTS];
        for (uint32_t i = 0; i < n; i++) {
            const uint64_t below = tl_test_below(&rng, 4) ? 1u << 18 : (uint64_t)1 << 32;
            for (uint32_t t = 0; t < LEN; t++)
                toks[i][t] = (uint32_t)(tl_test_rand(&rng) % below);
            memset(got[i], 0xEE, sizeof got[i]);
            prompts[i] = (tl_kv_prompt){.toks = toks[i],
                                        .n = tl_test_below(&rng, LEN + 1),
                                        .parent = tl_test_below(&rng, 2) ? tl_test_rand(&rng) : 0,
                                        .out = got[i]};
        }
        TL_OK_(tl_kv_block_hashes_batch(prompts, n, block_tokens));
        for (uint32_t i = 0; i < n; i++) {
            tl_test_context("round %d, prompt %u of %u, blocks of %u", round, i, n, block_tokens);
            memset(want, 0xEE, sizeof want);
            uint64_t h = prompts[i].parent;
            for (size_t b = 0; b < prompts[i].n / block_tokens; b++)
                want[b] = h = tl_kv_block_hash(h, toks[i] + b * block_tokens, block_tokens);
            TL_MEM_EQ(got[i], want, sizeof want); /* and nothing after the last full block */
        }
    }
    tl_test_context("%s", "");
}

TL_TEST(prompts_that_cannot_be_hashed_are_refused_before_anything_is_written) {
    const uint32_t toks[4] = {1, 2, 3, 4};
    uint64_t out[4] = {7, 7, 7, 7};
    tl_kv_prompt prompts[2] = {{toks, 4, 0, out}, {toks, 4, 0, NULL}};
    KV_REFUSED(tl_kv_block_hashes_batch(prompts, 2, 2), TL_EINVAL);
    prompts[1] = (tl_kv_prompt){NULL, 4, 0, out + 2};
    KV_REFUSED(tl_kv_block_hashes_batch(prompts, 2, 2), TL_EINVAL);
    KV_REFUSED(tl_kv_block_hashes_batch(prompts, 1, 0), TL_EINVAL);
    KV_REFUSED(tl_kv_block_hashes_batch(NULL, 1, 2), TL_EINVAL);
    TL_EQ(out[0], 7);
    prompts[1] = (tl_kv_prompt){NULL, 1, 0, NULL}; /* no full block: nothing to read or write */
    TL_OK_(tl_kv_block_hashes_batch(prompts, 2, 2));
    TL_EQ(out[1], tl_kv_block_hash(tl_kv_block_hash(0, toks, 2), toks + 2, 2));
    TL_OK_(tl_kv_block_hashes_batch(NULL, 0, 2));
}

TL_TEST(an_envelope_is_checked_without_a_pool) {
    exported e = make(0);
    tl_kv_cfg cfg;
    tl_kv_pool_cfg(e.p, &cfg);
    tl_kv_envelope h;
    TL_OK_(tl_kv_envelope_check(e.envelope, e.size, &cfg, &h));
    TL_OK_(tl_kv_envelope_check(e.envelope, e.size, NULL, &h));
    TL_EQ(h.version, 1);
    TL_EQ(h.dtype, TL_F16);
    TL_EQ(h.n_blocks, N);
    TL_EQ(h.block_tokens, B);
    TL_EQ(h.n_layers, 2);
    TL_EQ(h.n_kv_heads, 2);
    TL_EQ(h.head_dim, 5);
    TL_EQ(h.block_bytes, tl_kv_block_bytes(e.p));
    TL_EQ(h.size_bytes, e.size);
    TL_EQ(h.crc, tl_crc32c(e.envelope, e.size - 4, 0));
    cfg.head_dim = 6;
    TL_EQ(tl_kv_envelope_check(e.envelope, e.size, &cfg, &h), TL_ESHAPE);
    TL_EQ(tl_kv_envelope_check(e.envelope, e.size - 1, NULL, &h), TL_EFORMAT);
    e.envelope[40] ^= 1;
    TL_EQ(tl_kv_envelope_check(e.envelope, e.size, NULL, &h), TL_EFORMAT);
    TL_CHECK(strstr(tl_last_error(), "tl_kv_envelope_check: CRC-32C") != NULL);
    TL_CHECK(strstr(tl_last_error(), "(rule 3)") != NULL);
    TL_EQ(tl_kv_envelope_check(NULL, 0, NULL, &h), TL_EINVAL);
    TL_EQ(tl_kv_envelope_check(e.envelope, e.size, NULL, NULL), TL_EINVAL);
    done(&e);
}

TL_TEST(an_envelope_is_checked_in_steps) {
    exported e = make(1);
    tl_kv_envelope h;
    TL_OK_(tl_kv_envelope_open(e.envelope, SIZE_MAX, &h)); /* a stream: the length is unknown */
    TL_EQ(h.size_bytes, e.size);
    TL_EQ(h.crc, 0);
    TL_OK_(tl_kv_envelope_open(e.envelope, e.size, &h));
    TL_EQ(tl_kv_envelope_open(e.envelope, e.size + 1, &h), TL_EFORMAT);
    TL_EQ(tl_kv_envelope_open(e.envelope, 31, &h), TL_EFORMAT);
    uint8_t giant[TL_KV_ENVELOPE_HEADER]; /* whose size overflows: no stream is that long */
    memcpy(giant, e.envelope, sizeof giant);
    memset(giant + 12, 0xFF, 16);
    TL_EQ(tl_kv_envelope_open(giant, SIZE_MAX, &h), TL_EFORMAT);
    TL_EQ(tl_kv_envelope_open(NULL, 60, &h), TL_EINVAL);
    TL_EQ(tl_kv_envelope_open(e.envelope, 60, NULL), TL_EINVAL);
    TL_OK_(tl_kv_envelope_open(e.envelope, e.size, &h));

    TL_OK_(tl_kv_envelope_accept(&h, NULL));
    tl_kv_envelope other = h;
    other.version = 2;
    TL_EQ(tl_kv_envelope_accept(&other, NULL), TL_EFORMAT);
    TL_EQ(tl_kv_envelope_accept(NULL, NULL), TL_EINVAL);
    other = h;
    other.n_kv_heads = 0; /* no pool has that */
    TL_EQ(tl_kv_envelope_accept(&other, NULL), TL_ESHAPE);
    TL_CHECK(strstr(tl_last_error(), "n_kv_heads 0 at offset 20, expected at least 1") != NULL);

    const size_t record = 12 + h.block_bytes;
    uint8_t *records = e.envelope + TL_KV_ENVELOPE_HEADER;
    TL_OK_(tl_kv_envelope_records(&h, 0, N, records, record));
    TL_OK_(tl_kv_envelope_records(&h, N, 0, NULL, 0));
    TL_EQ(tl_kv_envelope_records(&h, N, 1, records, record), TL_EINVAL);
    TL_EQ(tl_kv_envelope_records(&h, UINT32_MAX, 2, records, record), TL_EINVAL);
    TL_EQ(tl_kv_envelope_records(&h, 0, 1, NULL, record), TL_EINVAL);
    TL_EQ(tl_kv_envelope_records(NULL, 0, 1, records, record), TL_EINVAL);
    records[3 * record + 8] = B + 1;
    TL_OK_(tl_kv_envelope_records(&h, 0, 3, records, record));
    TL_EQ(tl_kv_envelope_records(&h, 3, 1, records + 3 * record, 12), TL_EFORMAT);
    char where[64]; /* told by its place in the envelope, whatever buffer it came in */
    snprintf(where, sizeof where, "of block 3 at offset %zu", 28 + 3 * record + 8);
    TL_CHECK(strstr(tl_last_error(), where) != NULL);

    TL_OK_(tl_kv_envelope_crc(&h, 7, 7));
    TL_EQ(tl_kv_envelope_crc(&h, 7, 8), TL_EFORMAT);
    TL_EQ(tl_kv_envelope_crc(NULL, 7, 7), TL_EINVAL);
    done(&e);
}
