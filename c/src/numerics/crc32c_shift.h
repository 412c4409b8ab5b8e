/*
 * crc32c_shift.h - what n zero bytes do to a CRC-32C, without reading n zero bytes.
 *
 * The raw remainder r of a message is that message times x^32, modulo P. Eight more zero bits
 * multiply it by x^8, so n zero bytes multiply it by the constant x^(8n) mod P. Two uses:
 *
 *   a run of zeros in an envelope      its CRC costs one multiplication, whatever its length
 *   pieces checksummed side by side    raw(a then b) = raw(a) * x^(8 * bytes of b)  ^  raw0(b)
 *
 * where raw0 starts from remainder 0. A multiplication by a constant is linear, so it is a table
 * lookup for each 4 bits of r: 8 tables of 16, filled from their values at the powers of two.
 */
#ifndef TL_NUMERICS_CRC32C_SHIFT_H
#define TL_NUMERICS_CRC32C_SHIFT_H

#include <stdint.h>

/* Multiplication by x^(8 n_bytes) mod P: map[i][v] is (v << 4 i) times that. */
typedef struct {
    uint32_t map[8][16];
} tl_crc32c_shift;

/* x^(2^31 - 1) is 1: exponents count modulo this. */
#define TL_CRC32C_ORDER 0x7FFFFFFFu

/* x^e mod P, bit i standing for x^(31 - i). About 20 ns for each bit set in e. */
uint32_t tl_crc32c_xpow(uint64_t e);

/* a * b mod P in the same form. */
uint32_t tl_crc32c_mul(uint32_t a, uint32_t b);

/* Fills *s for runs of n_bytes zeros. A few hundred nanoseconds. */
void tl_crc32c_shift_init(tl_crc32c_shift *s, uint64_t n_bytes);

/* The raw remainder r after the run: 8 lookups. */
static inline uint32_t tl_crc32c_shift_raw(const tl_crc32c_shift *s, uint32_t r) {
    uint32_t out = 0;
    for (int i = 0; i < 8; i++) {
        out ^= s->map[i][(r >> (4 * i)) & 15u];
    }
    return out;
}

/* The same for a CRC as tl_crc32c gives it. */
static inline uint32_t tl_crc32c_shift_crc(const tl_crc32c_shift *s, uint32_t crc) {
    return ~tl_crc32c_shift_raw(s, ~crc);
}

#endif /* TL_NUMERICS_CRC32C_SHIFT_H */
