/*
 * tinyllm/numerics.h - FNV-1a 64 and the two directions between float32 and float16.
 * (CRC-32C, tl_crc32c, is part of the wire format and declared in kv_pool.h.)
 *
 * Pure functions: no state, no allocation, no error slot; safe from any thread.
 */
#ifndef TINYLLM_NUMERICS_H
#define TINYLLM_NUMERICS_H

#include "tinyllm/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TL_FNV1A64_BASIS 0xCBF29CE484222325u
#define TL_FNV1A64_PRIME 0x00000100000001B3u

/* FNV-1a over n bytes, continued from h: start with TL_FNV1A64_BASIS, or go on from an earlier
 * result. data may be NULL when n is 0. tl_fnv1a64("a", 1, TL_FNV1A64_BASIS) is
 * 0xAF63DC4C8601EC8C. O(n), one multiplication a byte. */
TL_API uint64_t tl_fnv1a64(const void *data, size_t n, uint64_t h);

/*
 * IEEE 754 binary16 as its bit pattern. To float16: rounds to nearest, ties to even; overflow
 * gives infinity, underflow subnormals and signed zeros; a NaN keeps its sign and the upper 10
 * bits of its payload, and is made quiet. To float32: exact, but for a signaling NaN, which is
 * made quiet.
 */
TL_API uint16_t tl_f32_to_f16(float x);
TL_API float tl_f16_to_f32(uint16_t x);

/* The same over n elements; src and dst must not overlap. NULL is legal only when n is 0. */
TL_API void tl_f32_to_f16_n(uint16_t *dst, const float *src, size_t n);
TL_API void tl_f16_to_f32_n(float *dst, const uint16_t *src, size_t n);

#ifdef __cplusplus
}
#endif

#endif /* TINYLLM_NUMERICS_H */
