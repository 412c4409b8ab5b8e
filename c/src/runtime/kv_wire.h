/*
 * kv_wire.h - the envelope's bytes (formats/kv-block.md): loads and stores of its fields, and the
 * parts of an export, shared by kv_pool.c (one buffer) and kv_wire.c (parts and pieces).
 *
 *   [ header 28 ] n x { [ hash 8 | n_tokens 4 ] [ payload P ] } [ CRC-32C 4 ]
 */
#ifndef TL_RUNTIME_KV_WIRE_H
#define TL_RUNTIME_KV_WIRE_H

#include "tinyllm/kv_pool_ext.h"

#define TL_KV_RECORD  12u /* before each payload: hash and n_tokens */
#define TL_KV_TRAILER 4u  /* the CRC */

static inline void put_u16(uint8_t *p, uint16_t x) {
    p[0] = (uint8_t)x;
    p[1] = (uint8_t)(x >> 8);
}

static inline void put_u32(uint8_t *p, uint32_t x) {
    put_u16(p, (uint16_t)x);
    put_u16(p + 2, (uint16_t)(x >> 16));
}

static inline void put_u64(uint8_t *p, uint64_t x) {
    put_u32(p, (uint32_t)x);
    put_u32(p + 4, (uint32_t)(x >> 32));
}

static inline uint16_t get_u16(const uint8_t *p) {
    return (uint16_t)(p[0] | p[1] << 8);
}

static inline uint32_t get_u32(const uint8_t *p) {
    return (uint32_t)get_u16(p) | (uint32_t)get_u16(p + 2) << 16;
}

static inline uint64_t get_u64(const uint8_t *p) {
    return (uint64_t)get_u32(p) | (uint64_t)get_u32(p + 4) << 32;
}

/* 28 + n * (12 + block_bytes) + 4, or SIZE_MAX when that overflows. */
size_t tl_kv_envelope_bytes(uint64_t n, size_t block_bytes);

/* TL_OK when these blocks can be exported, with *size the envelope's; `who` is named in errors. */
tl_status tl_kv_export_check(const tl_kv_pool *p, const uint32_t *ids, uint32_t n, const char *who,
                             size_t *size);

/* The three parts before the trailer. Each writes its bytes at out; the record is TL_KV_RECORD of
 * them, and tl_kv_put_blocks writes records and payloads. Those that return a CRC continue it. */
uint32_t tl_kv_put_header(const tl_kv_pool *p, uint32_t n, uint8_t *out);
uint32_t tl_kv_put_record(const tl_kv_pool *p, uint32_t id, uint8_t *out, uint32_t crc);
uint32_t tl_kv_put_blocks(const tl_kv_pool *p, const uint32_t *ids, uint32_t n, uint8_t *out,
                          uint32_t crc, int stream);

/* The reader rules (kv_pool.c), whole and in steps; `who` is named in errors. */
tl_status tl_kv_rules_header(const uint8_t *in, size_t len, const char *who, tl_kv_envelope *e);
tl_status tl_kv_rule_crc(const tl_kv_envelope *e, uint32_t stored, uint32_t crc, const char *who);
tl_status tl_kv_rules_kind(const tl_kv_envelope *e, const tl_kv_cfg *cfg, const char *who);
tl_status tl_kv_rule_records(const tl_kv_envelope *e, uint32_t first, uint32_t count,
                             const uint8_t *in, size_t stride, const char *who);
tl_status tl_kv_validate(const tl_kv_cfg *cfg, const uint8_t *in, size_t len, const char *who,
                         tl_kv_envelope *e);

#endif /* TL_RUNTIME_KV_WIRE_H */
