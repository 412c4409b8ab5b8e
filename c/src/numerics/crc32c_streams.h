/*
 * crc32c_streams.h - the body shared by the processors that have a CRC-32C instruction. Include it
 * after defining
 *
 *   STREAMS_FN(name)        the function's head, target attribute included
 *   STREAMS_CRC8(r, word)   the raw remainder r after 8 little-endian bytes
 *   STREAMS_CRC1(r, byte)   after 1 byte
 *
 * The instruction takes 3 cycles but a new one can start every cycle, so one chain uses a third of
 * it. Three streams run side by side over three neighbouring pieces of L bytes:
 *
 *     [ piece a | piece b | piece c ]       remainders ra (continues raw), rb, rc (start at 0)
 *
 * and are joined by linearity: the remainder of "x then L zero bytes" is a linear map S_L of x, so
 * the remainder of a then b is S_L(ra) ^ rb, and with c behind it, S_L(S_L(ra) ^ rb) ^ rc. S_L is
 * four tables of 256, one for each byte of x. Two sizes of L: long pieces spread the cost of the
 * join thin, short ones serve what is left.
 */
#include "numerics/linear.h"

#include <string.h>

#define STREAMS_LONG  4096u
#define STREAMS_SHORT 256u

/* clang-format off */
static const uint32_t shift_long[4][256] = {
    {TL_LINEAR_256(0xC2A5B65Eu, 0x80A71A4Du, 0x04A2426Bu, 0x094484D6u, 0x128909ACu, 0x25121358u, 0x4A2426B0u, 0x94484D60u)},
    {TL_LINEAR_256(0x2D7CEC31u, 0x5AF9D862u, 0xB5F3B0C4u, 0x6E0B1779u, 0xDC162EF2u, 0xBDC02B15u, 0x7E6C20DBu, 0xFCD841B6u)},
    {TL_LINEAR_256(0xFC5CF59Du, 0xFD559DCBu, 0xFF474D67u, 0xFB62EC3Fu, 0xF329AE8Fu, 0xE3BF2BEFu, 0xC292212Fu, 0x80C834AFu)},
    {TL_LINEAR_256(0x047C1FAFu, 0x08F83F5Eu, 0x11F07EBCu, 0x23E0FD78u, 0x47C1FAF0u, 0x8F83F5E0u, 0x1AEB9D31u, 0x35D73A62u)},
};
static const uint32_t shift_short[4][256] = {
    {TL_LINEAR_256(0xDCB17AA4u, 0xBC8E83B9u, 0x7CF17183u, 0xF9E2E306u, 0xF629B0FDu, 0xE9BF170Bu, 0xD69258E7u, 0xA8C8C73Fu)},
    {TL_LINEAR_256(0x547DF88Fu, 0xA8FBF11Eu, 0x541B94CDu, 0xA837299Au, 0x558225C5u, 0xAB044B8Au, 0x53E4E1E5u, 0xA7C9C3CAu)},
    {TL_LINEAR_256(0x4A7FF165u, 0x94FFE2CAu, 0x2C13B365u, 0x582766CAu, 0xB04ECD94u, 0x6571EDD9u, 0xCAE3DBB2u, 0x902BC195u)},
    {TL_LINEAR_256(0x25BBF5DBu, 0x4B77EBB6u, 0x96EFD76Cu, 0x2833D829u, 0x5067B052u, 0xA0CF60A4u, 0x4472B7B9u, 0x88E56F72u)},
};
/* clang-format on */

static inline uint32_t streams_shift(const uint32_t s[4][256], uint32_t x) {
    return s[0][x & 255] ^ s[1][(x >> 8) & 255] ^ s[2][(x >> 16) & 255] ^ s[3][x >> 24];
}

static inline uint64_t streams_load(const uint8_t *p) {
    uint64_t word; /* both processors are little-endian here */
    memcpy(&word, p, sizeof word);
    return word;
}

/* As many whole triples of pieces as there are; *p and *n move on. */
STREAMS_FN(static inline uint32_t streams_triples)
(uint32_t raw, const uint8_t **p, size_t *n, size_t piece, const uint32_t shift[4][256]) {
    while (*n >= 3 * piece) {
        const uint8_t *a = *p, *b = a + piece, *c = b + piece;
        uint32_t ra = raw, rb = 0, rc = 0;
        for (size_t i = 0; i < piece; i += 8) {
            ra = STREAMS_CRC8(ra, streams_load(a + i));
            rb = STREAMS_CRC8(rb, streams_load(b + i));
            rc = STREAMS_CRC8(rc, streams_load(c + i));
        }
        raw = streams_shift(shift, streams_shift(shift, ra) ^ rb) ^ rc;
        *p += 3 * piece;
        *n -= 3 * piece;
    }
    return raw;
}

STREAMS_FN(static inline uint32_t streams_crc)(uint32_t raw, const uint8_t *p, size_t n) {
    raw = streams_triples(raw, &p, &n, STREAMS_LONG, shift_long);
    raw = streams_triples(raw, &p, &n, STREAMS_SHORT, shift_short);
    for (; n >= 8; n -= 8, p += 8) {
        raw = STREAMS_CRC8(raw, streams_load(p));
    }
    for (; n > 0; n--, p++) {
        raw = STREAMS_CRC1(raw, *p);
    }
    return raw;
}
