/*
 * linear.h - tables of linear maps over GF(2), written by the preprocessor.
 *
 * A CRC's tables are linear: T[i ^ j] = T[i] ^ T[j]. So the eight values at the powers of two say
 * everything, and TL_LINEAR_256(c0, ..., c7), with c_b = T[1 << b], expands to all 256 entries as
 * constant expressions. Nothing is computed at run time, and no thread can see a half-made table.
 */
#ifndef TL_NUMERICS_LINEAR_H
#define TL_NUMERICS_LINEAR_H

#define TL_LINEAR_1(x, c0, c1) (x), (x) ^ (c0), (x) ^ (c1), (x) ^ (c0) ^ (c1)
#define TL_LINEAR_4(x, c0, c1, c2, c3)                                                             \
    TL_LINEAR_1(x, c0, c1), TL_LINEAR_1((x) ^ (c2), c0, c1), TL_LINEAR_1((x) ^ (c3), c0, c1),      \
        TL_LINEAR_1((x) ^ (c2) ^ (c3), c0, c1)
#define TL_LINEAR_16(x, c0, c1, c2, c3, c4, c5)                                                    \
    TL_LINEAR_4(x, c0, c1, c2, c3), TL_LINEAR_4((x) ^ (c4), c0, c1, c2, c3),                       \
        TL_LINEAR_4((x) ^ (c5), c0, c1, c2, c3), TL_LINEAR_4((x) ^ (c4) ^ (c5), c0, c1, c2, c3)
#define TL_LINEAR_256(c0, c1, c2, c3, c4, c5, c6, c7)                                              \
    TL_LINEAR_16(0u, c0, c1, c2, c3, c4, c5), TL_LINEAR_16(c6, c0, c1, c2, c3, c4, c5),            \
        TL_LINEAR_16(c7, c0, c1, c2, c3, c4, c5),                                                  \
        TL_LINEAR_16((c6) ^ (c7), c0, c1, c2, c3, c4, c5)

#endif /* TL_NUMERICS_LINEAR_H */
