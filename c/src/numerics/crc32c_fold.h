/*
 * crc32c_fold.h - the body shared by the processors that multiply without carries: folding, and
 * folding beside streams of the CRC instruction. docs/design/crc32c.md derives it at length.
 *
 * A lane of 128 bits holds the polynomial A = lo x^64 + hi (lo is its lower half: the first bytes
 * of a message are the high powers). "A, then d more bits" is A x^d, and modulo P that is
 *
 *     A x^d = lo (x^(d + 64) mod P) + hi (x^d mod P),
 *
 * two carry-less multiplications and less than 96 bits: A moves over d bits and is added to the 128
 * bits that stand there. A product of two reflected polynomials comes out multiplied by x, so the
 * constants are x^(d + 63) and x^(d - 1), in the upper half of their 64 bits. Four vectors a b c d
 * move over a whole step, 4 vectors, at a time; at the end they move onto the last, and the CRC
 * instruction takes its 16 bytes modulo P.
 *
 * The CRC instruction is another unit, idle meanwhile. So inputs that are in cache are taken in
 * rounds of four steps for the vectors and three streams of 128 bytes for the instruction:
 *
 *     [ step | step | step | step ][ r0 128 | r1 128 | r2 128 ][ step ...        next round
 *
 * A stream starts at remainder 0, so that the three are independent. What they leave belongs at the
 * end of their piece, that is 256, 128 and 0 bytes before the next round; there it is a product
 * with x^(8 * 256), with x^(8 * 128), and r2 itself, and joins the message as more bits of its
 * first 8 bytes. The vectors jump over the streams with a constant of their own. Nothing is ever
 * reduced between rounds. Rounds are short so that memory is still read in order: with 2 KiB
 * streams the same loop is faster in cache and four times slower out of it.
 *
 * A variant defines, before it includes this, for its own target attribute:
 *
 *   FOLD_FN                         static inline, with that attribute
 *   vec, VEC_BYTES                  a vector of lanes
 *   load(p)  store(p, v)            16 to 64 bytes, anywhere
 *   stream(p, v)  stream_end()      a streaming store, aligned; a fence behind the last one
 *   add(v, w)                       v ^ w
 *   by(lo, hi)                      the two constants of a move, in every lane
 *   move(v, k, onto)                v moved by such constants, ^ onto
 *   first(r)                        remainder r as the first 4 bytes, zeros behind
 *   left(r0, r1, r2)                what three streams leave, as the first 8 bytes
 *   reduce(v)                       the remainder of a vector's bytes
 *   crc8(r, word) crc4 crc2 crc1    the CRC instruction on 8, 4, 2, 1 bytes
 *   BY_VEC BY_2_VECS BY_STEP        the constants (lo, hi) for moves over that many bytes, and
 *   BY_GAP                          over STEP + 3 * STREAM
 *   STREAMS_BELOW                   use the streams for inputs shorter than this
 */
#include "numerics/crc32c.h"
#include "numerics/crc32c_powers.h"

#include <string.h>

#define STEP     (4u * VEC_BYTES)
#define STREAM   128u
#define ROUND    (4u * STEP + 3u * STREAM)
#define FOLD_MIN 96u /* below, the CRC instruction alone is done before a reduction would be */

enum fold_store { NO_STORE, PLAIN_STORE, STREAM_STORE };

FOLD_FN void put(uint8_t *dst, vec v, enum fold_store how) {
    if (how == PLAIN_STORE) {
        store(dst, v);
    } else if (how == STREAM_STORE) {
        stream(dst, v);
    }
}

FOLD_FN uint64_t load8(const uint8_t *p) {
    uint64_t word; /* these processors are little-endian */
    memcpy(&word, p, sizeof word);
    return word;
}

/* Few bytes: what is left of more, or all there is. */
FOLD_FN uint32_t fold_tail(uint32_t raw, const uint8_t *p, size_t n) {
    uint64_t r = raw;
    for (; n >= 8; n -= 8, p += 8) {
        r = crc8(r, load8(p));
    }
    raw = (uint32_t)r;
    if (n & 4) {
        uint32_t word;
        memcpy(&word, p, 4);
        raw = crc4(raw, word);
        p += 4;
    }
    if (n & 2) {
        uint16_t word;
        memcpy(&word, p, 2);
        raw = crc2(raw, word);
        p += 2;
    }
    return n & 1 ? crc1(raw, *p) : raw;
}

/* 8 bytes of each stream, behind the move that made v. The barrier keeps the compiler from
 * collecting these in one place: they have to be spread among the moves to run beside them. */
#if defined(__x86_64__)
#define IN_VECTOR "v" /* the constraint for a register that holds a vec */
#else
#define IN_VECTOR "w"
#endif
#define STREAM_WORDS(at, v)                                                                        \
    do {                                                                                           \
        r0 = crc8(r0, load8(s + (at)));                                                            \
        r1 = crc8(r1, load8(s + STREAM + (at)));                                                   \
        r2 = crc8(r2, load8(s + 2 * STREAM + (at)));                                               \
        __asm__ volatile("" : "+r"(s), "+" IN_VECTOR(v));                                          \
    } while (0)

/*
 * All of n >= VEC_BYTES bytes at src, stored at dst if `how` says so (dst is stepped along either
 * way). With streams, nothing is stored.
 *
 * A step is stored after the next one is loaded. Where dst is a little ahead of src in the address
 * bits by which the processor matches loads with earlier stores (an envelope's payload is: 40 bytes
 * behind the start of its buffer), it would otherwise take each load for one of the bytes just
 * stored, and wait: 36 GB/s, and 48 in this order.
 */
FOLD_FN uint32_t fold(uint32_t raw, uint8_t *dst, const uint8_t *src, size_t n, enum fold_store how,
                      int streams) {
    const vec k_vec = by(BY_VEC);
    vec w0 = load(src), a = add(w0, first(raw));
    if (n >= STEP) {
        const vec k_step = by(BY_STEP);
        vec w1 = load(src + VEC_BYTES), b = w1;
        vec w2 = load(src + 2 * VEC_BYTES), c = w2;
        vec w3 = load(src + 3 * VEC_BYTES), d = w3;
        if (streams) {
            const vec k_gap = by(BY_GAP);
            for (; n >= ROUND + STEP; n -= ROUND) {
                const uint8_t *s = src + 4 * STEP;
                uint64_t r0 = 0, r1 = 0, r2 = 0;
                for (int i = 0; i < 3; i++, s += 32) {
                    src += STEP;
                    a = move(a, k_step, load(src));
                    STREAM_WORDS(0, a);
                    b = move(b, k_step, load(src + VEC_BYTES));
                    STREAM_WORDS(8, b);
                    c = move(c, k_step, load(src + 2 * VEC_BYTES));
                    STREAM_WORDS(16, c);
                    d = move(d, k_step, load(src + 3 * VEC_BYTES));
                    STREAM_WORDS(24, d);
                }
                STREAM_WORDS(0, a);
                STREAM_WORDS(8, b);
                STREAM_WORDS(16, c);
                STREAM_WORDS(24, d);
                src += STEP + 3 * STREAM;
                a = move(a, k_gap, add(load(src), left(r0, r1, r2)));
                b = move(b, k_gap, load(src + VEC_BYTES));
                c = move(c, k_gap, load(src + 2 * VEC_BYTES));
                d = move(d, k_gap, load(src + 3 * VEC_BYTES));
            }
        }
        for (src += STEP, n -= STEP; n >= STEP; src += STEP, n -= STEP) {
            const vec v0 = load(src), v1 = load(src + VEC_BYTES);
            const vec v2 = load(src + 2 * VEC_BYTES), v3 = load(src + 3 * VEC_BYTES);
            if (how != NO_STORE) {
                __asm__ volatile("" ::IN_VECTOR(v0), IN_VECTOR(v1), IN_VECTOR(v2), IN_VECTOR(v3)
                                 : "memory"); /* loaded */
                put(dst, w0, how);
                put(dst + VEC_BYTES, w1, how);
                put(dst + 2 * VEC_BYTES, w2, how);
                put(dst + 3 * VEC_BYTES, w3, how);
                w0 = v0, w1 = v1, w2 = v2, w3 = v3;
            }
            dst += STEP;
            a = move(a, k_step, v0);
            b = move(b, k_step, v1);
            c = move(c, k_step, v2);
            d = move(d, k_step, v3);
        }
        put(dst, w0, how);
        put(dst + VEC_BYTES, w1, how);
        put(dst + 2 * VEC_BYTES, w2, how);
        put(dst + 3 * VEC_BYTES, w3, how);
        dst += STEP;
        a = move(a, k_vec, b);
        c = move(c, k_vec, d);
        a = move(a, by(BY_2_VECS), c);
    } else {
        put(dst, w0, how);
        src += VEC_BYTES, dst += VEC_BYTES, n -= VEC_BYTES;
    }
    for (; n >= VEC_BYTES; src += VEC_BYTES, dst += VEC_BYTES, n -= VEC_BYTES) {
        w0 = load(src);
        put(dst, w0, how);
        a = move(a, k_vec, w0);
    }
    if (how != NO_STORE) {
        memcpy(dst, src, n);
    }
    return fold_tail(reduce(a), src, n);
}

FOLD_FN uint32_t fold_crc(uint32_t raw, const uint8_t *p, size_t n) {
    if (n < FOLD_MIN) {
        return fold_tail(raw, p, n);
    }
    uint8_t *unused = (uint8_t *)(uintptr_t)p; /* stepped along, never stored to */
    return n < STREAMS_BELOW ? fold(raw, unused, p, n, NO_STORE, 1)
                             : fold(raw, unused, p, n, NO_STORE, 0);
}

/* Aligns the destination: a store that crosses a cache line costs more than a load that does, and
 * a streaming store has to be aligned. */
FOLD_FN uint32_t fold_copy(uint32_t raw, uint8_t *dst, const uint8_t *src, size_t n, int streamed) {
    if (n < FOLD_MIN) {
        memcpy(dst, src, n);
        return fold_tail(raw, src, n);
    }
    if (n < 4 * STEP) {
        return fold(raw, dst, src, n, PLAIN_STORE, 0);
    }
    const size_t head = (0u - (uintptr_t)dst) & (VEC_BYTES - 1);
    memcpy(dst, src, head);
    raw = fold_tail(raw, src, head);
    dst += head, src += head, n -= head;
    if (!streamed) {
        return fold(raw, dst, src, n, PLAIN_STORE, 0);
    }
    raw = fold(raw, dst, src, n, STREAM_STORE, 0);
    stream_end();
    return raw;
}
