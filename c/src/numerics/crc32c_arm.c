/* crc32c_arm.c - ARMv8 with the CRC32 extension: three streams of crc32cx. */
#include "numerics/crc32c.h"

#if defined(__aarch64__) && defined(__ARM_BIG_ENDIAN)
#error "big-endian ARM: leave crc32c_arm.c out of the variants"
#elif defined(__aarch64__)

#include "numerics/crc32c_armv8.h"

#define STREAMS_FN(head)      ARM_CRC head
#define STREAMS_CRC8(r, word) ARM_CRC8(r, word)
#define STREAMS_CRC1(r, byte) ARM_CRC1(r, byte)
#include "numerics/crc32c_streams.h"

ARM_CRC uint32_t tl_crc32c_arm(uint32_t raw, const uint8_t *p, size_t n) {
    return streams_crc(raw, p, n);
}

#else
typedef int tl_crc32c_arm_is_for_aarch64; /* ISO C wants a declaration in every file */
#endif
