/*
 * crc32c.h - the variants of tl_crc32c and how they are chosen.
 *
 * A variant works on the raw remainder: no inversion before or after. tl_crc32c inverts, picks the
 * last variant in the table whose needs the processor meets (once), and inverts back. The math is
 * derived in docs/design/crc32c.md.
 */
#ifndef TL_NUMERICS_CRC32C_H
#define TL_NUMERICS_CRC32C_H

#include <stddef.h>
#include <stdint.h>

#define TL_CRC32C_POLY 0x82F63B78u /* reflected: the bit for x^31 is the lowest */

typedef uint32_t tl_crc32c_fn(uint32_t raw, const uint8_t *p, size_t n);

/* The same while copying src to dst (copy_crc.h). */
typedef uint32_t tl_crc32c_copy_fn(uint32_t raw, uint8_t *dst, const uint8_t *src, size_t n,
                                   int stream);

typedef struct {
    const char *name; /* NULL ends the table */
    unsigned need;    /* TL_CPU_ bits */
    tl_crc32c_fn *fn;
    tl_crc32c_copy_fn *copy;
} tl_crc32c_variant;

/* Slowest first; the first two need nothing. */
extern const tl_crc32c_variant tl_crc32c_variants[];

/* The name of the variant tl_crc32c uses in this process. */
const char *tl_crc32c_selected(void);

#if defined(__x86_64__)
tl_crc32c_fn tl_crc32c_sse42;
tl_crc32c_fn tl_crc32c_pclmul, tl_crc32c_vpclmul, tl_crc32c_avx512;
tl_crc32c_copy_fn tl_crc32c_copy_pclmul, tl_crc32c_copy_vpclmul, tl_crc32c_copy_avx512;
#endif
#if defined(__aarch64__)
tl_crc32c_fn tl_crc32c_arm, tl_crc32c_pmull;
tl_crc32c_copy_fn tl_crc32c_copy_pmull;
#endif

#endif /* TL_NUMERICS_CRC32C_H */
