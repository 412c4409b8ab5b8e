/*
 * roundtrip_and_bit_flip - the envelope of the worked example to the byte, a sequence there and
 * back again, and nothing accepted that is not exactly an envelope for this pool.
 *
 * Catches: header fields out of order (s03), hash 0 for registered blocks (s04), a CRC over the
 * payload only (s05) or without its first inversion (s06), stale data past the fill (s20), the size
 * needed not reported (s21), import dropping the fill (s22), never registering (s23) or fighting
 * the first holder (s24), no CRC check (s25), any version read (s27), the shape ignored (s28),
 * version 0 written (m02).
 */
#include "tl_test_kv.h"
#include "tl_test_wire.h"

enum { B = 4, L = 2, H = 3, D = 5, P = L * 2 * H * B * D * 2, N = 2 };
enum { SIZE = WIRE_HEADER + N * (WIRE_RECORD + P) + WIRE_TRAILER };

static void the_worked_example(void) {
    static const uint16_t k[] = {0x3C00, 0x4000, 0x4200, 0x4400}, v[] = {0x3800, 0xBC00, 0, 0x3400};
    tl_kv_pool *p = kv_new(2, 2, 1, 1, 2);
    const uint32_t id = kv_alloc1(p);
    memcpy(tl_kv_block_ptr(p, id, 0, 0), k, sizeof k);
    memcpy(tl_kv_block_ptr(p, id, 0, 1), v, sizeof v);
    TL_OK_(tl_kv_set_fill(p, id, 2));
    TL_OK_(tl_kv_register(p, id, WIRE_EXAMPLE_HASH));
    uint8_t env[60];
    size_t written = 0;
    TL_OK_(tl_kv_export(p, &id, 1, env, sizeof env, &written));
    TL_EQ(written, 60);
    TL_MEM_EQ(env, wire_example, 60);
    TL_EQ(tl_crc32c("123456789", 9, 0), 0xE3069283u);
    TL_EQ(tl_crc32c("6789", 4, tl_crc32c("12345", 5, 0)), 0xE3069283u);

    uint32_t got;
    for (int bit = 0; bit < 480; bit++) {
        tl_test_context("bit %d flipped", bit);
        env[bit / 8] ^= (uint8_t)(1 << bit % 8);
        KV_REFUSED(tl_kv_import(p, env, 60, &got), TL_EFORMAT);
        KV_STATS(p, 1, 1, 0);
        env[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    tl_test_context("%s", "");
    tl_kv_pool_destroy(p);
}

/* A full registered block and a tail of 3, with stale values in its last position. */
static void send(uint8_t *env) {
    tl_kv_pool *p = kv_new(3, B, L, H, D);
    const uint32_t ids[N] = {kv_registered(p, 0xF00D), kv_filled(p, 0xBEEF, 3)};
    size_t written = 0;
    KV_REFUSED(tl_kv_export(p, ids, N, env, SIZE - 1, &written), TL_EFULL);
    TL_EQ(written, SIZE);
    TL_OK_(tl_kv_export(p, ids, N, env, SIZE, &written));
    TL_EQ(written, SIZE);

    uint8_t want[SIZE];
    wire_header(want, N, B, L, H, D);
    for (int i = 0; i < N; i++) {
        uint8_t *r = wire_record(want, (size_t)i, P);
        wire_put(r, i == 0 ? 0xF00D : 0, 8);
        wire_put(r + WIRE_N_TOKENS, i == 0 ? B : 3, 4);
        for (size_t j = 0; j < P / 2; j++) { /* layer by layer, K then V */
            const size_t plane = j / (H * B * D);
            wire_put(r + WIRE_RECORD + 2 * j,
                     kv_value(i == 0 ? 0xF00D : 0xBEEF, (uint32_t)plane / 2, plane % 2 != 0,
                              j % (H * B * D)),
                     2);
        }
        wire_zero_past(r + WIRE_RECORD, i == 0 ? B : 3, B, L, H, D);
    }
    wire_seal(want, SIZE);
    TL_MEM_EQ(env, want, SIZE);
    tl_kv_pool_destroy(p);
}

static void receive(const uint8_t *env) {
    tl_kv_pool *p = kv_new(6, B, L, H, D);
    uint32_t first[N], second[N];
    TL_OK_(tl_kv_import(p, env, SIZE, first));
    KV_STATS(p, 4, 2, 0);
    TL_EQ(tl_kv_fill(p, first[0]), B);
    TL_EQ(tl_kv_fill(p, first[1]), 3);
    kv_expect(p, first[0], 0xF00D, B);
    kv_expect(p, first[1], 0xBEEF, 3);
    uint8_t again[SIZE];
    size_t written = 0;
    TL_OK_(tl_kv_export(p, first, N, again, SIZE, &written));
    TL_MEM_EQ(again, env, SIZE);

    /* Once more: the name stays with its first holder, the new block is private. */
    TL_OK_(tl_kv_import(p, env, SIZE, second));
    KV_STATS(p, 2, 4, 0);
    kv_expect_hit(p, 0xF00D, first[0]);
    TL_OK_(tl_kv_unref(p, second[0]));
    TL_OK_(tl_kv_unref(p, second[1]));
    KV_STATS(p, 4, 2, 0);
    tl_kv_pool_destroy(p);
}

static void refused(const uint8_t *good, size_t at, uint64_t value, size_t n_bytes,
                    tl_status status) {
    tl_kv_pool *p = kv_new(6, B, L, H, D);
    uint8_t env[SIZE];
    uint32_t got[N];
    memcpy(env, good, SIZE);
    wire_put(env + at, value, n_bytes);
    wire_seal(env, SIZE);
    KV_REFUSED(tl_kv_import(p, env, SIZE, got), status);
    KV_STATS(p, 6, 0, 0);
    tl_kv_pool_destroy(p);
}

TL_TEST(roundtrip_and_bit_flip) {
    the_worked_example();
    uint8_t env[SIZE];
    send(env);
    receive(env);

    refused(env, WIRE_VERSION, 2, 2, TL_EFORMAT);
    refused(env, WIRE_VERSION, 0, 2, TL_EFORMAT);
    refused(env, WIRE_DTYPE, 2, 2, TL_EFORMAT);
    refused(env, WIRE_HEADER + WIRE_N_TOKENS, 0, 4, TL_EFORMAT);
    refused(env, WIRE_HEADER + WIRE_N_TOKENS, B + 1, 4, TL_EFORMAT);
    refused(env, WIRE_HEADER + WIRE_N_TOKENS, B - 1, 4, TL_EFORMAT); /* hashed, but partial */

    /* Pools of other shapes: one dimension off, or as many bytes in another order. */
    static const uint32_t shapes[][4] = {{B + 1, L, H, D}, {B, L + 1, H, D}, {B, L, H + 1, D},
                                         {B, L, H, D + 1}, {B, H, L, D},     {L, B, H, D}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const uint32_t *s = shapes[i];
        tl_kv_pool *p = kv_new(6, s[0], s[1], s[2], s[3]);
        uint32_t got[N];
        tl_test_context("B %u, L %u, H %u, D %u", s[0], s[1], s[2], s[3]);
        KV_REFUSED(tl_kv_import(p, env, SIZE, got), TL_ESHAPE);
        KV_STATS(p, 6, 0, 0);
        tl_kv_pool_destroy(p);
    }
    tl_test_context("%s", "");
}
