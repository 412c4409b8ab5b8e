/*
 * tl_test_wire.h - the wire format v1, written a second time for the tests: one byte at a time,
 * straight from formats/kv-block.md, sharing nothing with the library.
 *
 *   header  "TLKV"  version u16  dtype u16  n_blocks  block_tokens  n_layers  n_kv_heads  head_dim
 *           0       4            6          8         12            16        20          24
 *   record  block_hash u64  n_tokens u32  payload [P]                            n_blocks times
 *   trailer crc32c u32 of everything before it
 */
#ifndef TL_TEST_WIRE_H
#define TL_TEST_WIRE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    WIRE_MAGIC = 0,
    WIRE_VERSION = 4,
    WIRE_DTYPE = 6,
    WIRE_N_BLOCKS = 8,
    WIRE_BLOCK_TOKENS = 12,
    WIRE_N_LAYERS = 16,
    WIRE_N_KV_HEADS = 20,
    WIRE_HEAD_DIM = 24,
    WIRE_HEADER = 28,
    WIRE_RECORD = 12,  /* bytes of a record before its payload */
    WIRE_N_TOKENS = 8, /* offset inside a record */
    WIRE_TRAILER = 4
};

static inline void wire_put(uint8_t *at, uint64_t v, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i++)
        at[i] = (uint8_t)(v >> (8 * i));
}

static inline uint64_t wire_get(const uint8_t *at, size_t n_bytes) {
    uint64_t v = 0;
    for (size_t i = 0; i < n_bytes; i++)
        v |= (uint64_t)at[i] << (8 * i);
    return v;
}

/* n_bytes of float16 values from the host's byte order to the wire's, or back: the same swap. */
static inline void wire_f16(void *to, const void *from, size_t n_bytes) {
    uint8_t *d = to;
    const uint8_t *s = from;
    const uint16_t one = 1;
    const size_t low = *(const uint8_t *)&one ? 0 : 1; /* where the host keeps the low byte */
    for (size_t i = 0; i + 1 < n_bytes; i += 2) {
        const uint8_t lo = s[i + low], hi = s[i + 1 - low];
        d[i] = lo;
        d[i + 1] = hi;
    }
}

/* CRC-32C bit by bit: the definition. */
static inline uint32_t wire_crc(const uint8_t *p, size_t n) {
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

/* Makes the trailer agree with the bytes before it. */
static inline void wire_seal(uint8_t *env, size_t len) {
    if (len >= WIRE_TRAILER)
        wire_put(env + len - WIRE_TRAILER, wire_crc(env, len - WIRE_TRAILER), 4);
}

/* The header alone. */
static inline void wire_header(uint8_t *env, uint32_t n_blocks, uint32_t block_tokens,
                               uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim) {
    memcpy(env, "TLKV", 4);
    wire_put(env + WIRE_VERSION, 1, 2);
    wire_put(env + WIRE_DTYPE, 1, 2);
    wire_put(env + WIRE_N_BLOCKS, n_blocks, 4);
    wire_put(env + WIRE_BLOCK_TOKENS, block_tokens, 4);
    wire_put(env + WIRE_N_LAYERS, n_layers, 4);
    wire_put(env + WIRE_N_KV_HEADS, n_kv_heads, 4);
    wire_put(env + WIRE_HEAD_DIM, head_dim, 4);
}

/* Bytes of an envelope of n blocks with P payload bytes each, and the place of record i. */
static inline size_t wire_bytes(size_t n, size_t P) {
    return WIRE_HEADER + n * (WIRE_RECORD + P) + WIRE_TRAILER;
}
static inline uint8_t *wire_record(uint8_t *env, size_t i, size_t P) {
    return env + WIRE_HEADER + i * (WIRE_RECORD + P);
}

/* Zeroes the positions at and past `fill` of a payload [n_layers][K, V][n_kv_heads][B][D] f16. */
static inline void wire_zero_past(uint8_t *payload, uint32_t fill, uint32_t block_tokens,
                                  uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim) {
    const size_t row = (size_t)head_dim * 2, rows = (size_t)n_layers * 2 * n_kv_heads;
    for (size_t r = 0; r < rows; r++)
        memset(payload + (r * block_tokens + fill) * row, 0, (block_tokens - fill) * row);
}

/* The size that a header's own values ask for, or SIZE_MAX when nothing could be that long. */
static inline size_t wire_claimed_bytes(const uint8_t *env) {
    static const uint8_t at[4] = {WIRE_BLOCK_TOKENS, WIRE_N_LAYERS, WIRE_N_KV_HEADS, WIRE_HEAD_DIM};
    const uint64_t enough = (uint64_t)1 << 31; /* longer than any test's envelope */
    uint64_t P = 4;
    for (int i = 0; i < 4; i++) {
        P *= wire_get(env + at[i], 4); /* below 2^31 * 2^32 */
        if (P >= enough)
            P = enough;
    }
    /* A zero later in the product makes it 0 again, whatever came before. */
    for (int i = 0; i < 4; i++)
        if (wire_get(env + at[i], 4) == 0)
            P = 0;
    const uint64_t n = wire_get(env + WIRE_N_BLOCKS, 4);
    return n >= enough || n * (WIRE_RECORD + P) >= enough ? SIZE_MAX : wire_bytes(n, P);
}

/* What a reader with a pool of this shape must say to the bytes, by the reader rules in their
 * order: 0 (TL_OK), 7 (TL_EFORMAT) or 3 (TL_ESHAPE). Whether there is room is another question. */
static inline int32_t wire_judge(const uint8_t *env, size_t len, uint32_t block_tokens,
                                 uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim) {
    enum { OK = 0, ESHAPE = 3, EFORMAT = 7 };
    if (len < WIRE_HEADER + WIRE_TRAILER || len != wire_claimed_bytes(env))
        return EFORMAT;
    if (memcmp(env, "TLKV", 4) != 0)
        return EFORMAT;
    if (wire_get(env + len - WIRE_TRAILER, 4) != wire_crc(env, len - WIRE_TRAILER))
        return EFORMAT;
    if (wire_get(env + WIRE_VERSION, 2) != 1 || wire_get(env + WIRE_DTYPE, 2) != 1)
        return EFORMAT;
    if (wire_get(env + WIRE_BLOCK_TOKENS, 4) != block_tokens ||
        wire_get(env + WIRE_N_LAYERS, 4) != n_layers ||
        wire_get(env + WIRE_N_KV_HEADS, 4) != n_kv_heads ||
        wire_get(env + WIRE_HEAD_DIM, 4) != head_dim)
        return ESHAPE;
    const size_t P = (size_t)n_layers * 2 * n_kv_heads * block_tokens * head_dim * 2;
    for (uint64_t i = 0; i < wire_get(env + WIRE_N_BLOCKS, 4); i++) {
        const uint8_t *r = env + WIRE_HEADER + i * (WIRE_RECORD + P);
        const uint64_t hash = wire_get(r, 8), n_tokens = wire_get(r + WIRE_N_TOKENS, 4);
        if (n_tokens < 1 || n_tokens > block_tokens || (hash != 0 && n_tokens != block_tokens))
            return EFORMAT;
    }
    return OK;
}

/* The worked example of seed section 3: B 2, L 1, H 1, D 2, one full block of tokens 1 2. */
static const uint8_t wire_example[60] = {
    0x54, 0x4c, 0x4b, 0x56, 0x01, 0x00, 0x01, 0x00, 0x01, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00,
    0x00, 0x01, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x66, 0x93,
    0x7b, 0x02, 0xc1, 0xb0, 0x1a, 0xa9, 0x02, 0x00, 0x00, 0x00, 0x00, 0x3c, 0x00, 0x40, 0x00,
    0x42, 0x00, 0x44, 0x00, 0x38, 0x00, 0xbc, 0x00, 0x00, 0x00, 0x34, 0x1c, 0x54, 0x0b, 0x4f};
#define WIRE_EXAMPLE_HASH 0xA91AB0C1027B9366u

#endif /* TL_TEST_WIRE_H */
