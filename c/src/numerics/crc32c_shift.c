/*
 * crc32c_shift.c - powers of x modulo P, and tables that multiply by one.
 *
 * A remainder is a polynomial of degree below 32 whose bit i stands for x^(31 - i) (reflected): 1
 * is 0x80000000, x is 0x40000000. Multiplying by x shifts right by one; what falls off is x^32,
 * which P makes the polynomial 0x82F63B78.
 *
 * x^e for any e is a product of x^(2^k), one for each bit of e. Squaring is the only work, and the
 * first 31 squares are constants: 2^31 - 1 is the order of x (P is x + 1 times a primitive
 * polynomial of degree 31), so x^(2^31) = x and the list repeats.
 */
#include "numerics/crc32c_shift.h"

#include "numerics/crc32c.h"

static inline uint32_t times_x(uint32_t a) {
    return (a >> 1) ^ (TL_CRC32C_POLY & (0u - (a & 1u)));
}

uint32_t tl_crc32c_mul(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a != 0; a <<= 1) { /* from bit 31, which stands for 1, to x, x^2, ... */
        if (a & 0x80000000u) {
            product ^= b;
        }
        b = times_x(b);
    }
    return product;
}

/* x^(2^k) mod P, each the square of the one before. */
static const uint32_t square[31] = {
    0x40000000u, 0x20000000u, 0x08000000u, 0x00800000u, 0x00008000u, 0x82F63B78u, 0x6EA2D55Cu,
    0x18B8EA18u, 0x510AC59Au, 0xB82BE955u, 0xB8FDB1E7u, 0x88E56F72u, 0x74C360A4u, 0xE4172B16u,
    0x0D65762Au, 0x35D73A62u, 0x28461564u, 0xBF455269u, 0xE2EA32DCu, 0xFE7740E6u, 0xF946610Bu,
    0x3C204F8Fu, 0x538586E3u, 0x59726915u, 0x734D5309u, 0xBC1AC763u, 0x7D0722CCu, 0xD289CABEu,
    0xE94CA9BCu, 0x05B74F3Fu, 0xA51E1F42u,
};

uint32_t tl_crc32c_xpow(uint64_t e) {
    uint32_t power = 0x80000000u;
    for (unsigned k = 0; e != 0; e >>= 1, k = k == 30 ? 0 : k + 1) {
        if (e & 1u) {
            power = tl_crc32c_mul(square[k], power);
        }
    }
    return power;
}

void tl_crc32c_shift_init(tl_crc32c_shift *s, uint64_t n_bytes) {
    /* 8 n_bytes overflows for lengths nobody has; x^8 has the order of x, so reduce before. */
    uint32_t column = tl_crc32c_xpow(n_bytes % TL_CRC32C_ORDER * 8);
    for (int i = 7; i >= 0; i--) { /* bit 31 stands for 1: its column is the constant itself */
        uint32_t *map = s->map[i];
        map[0] = 0;
        for (unsigned bit = 8; bit > 0; bit >>= 1) {
            map[bit] = column;
            column = times_x(column);
        }
        for (unsigned v = 3; v < 16; v++) { /* v & (v - 1) drops the lowest bit set */
            map[v] = map[v & (v - 1)] ^ map[v & (0u - v)];
        }
    }
}
