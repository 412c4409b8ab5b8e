/* crc32c_sse42.c - x86-64 with SSE4.2: three streams of the crc32 instruction. */
#include "numerics/crc32c.h"

#if defined(__x86_64__)

#include <nmmintrin.h>

#define STREAMS_FN(head)      __attribute__((target("sse4.2"))) head
#define STREAMS_CRC8(r, word) ((uint32_t)_mm_crc32_u64((r), (word)))
#define STREAMS_CRC1(r, byte) _mm_crc32_u8((r), (byte))
#include "numerics/crc32c_streams.h"

__attribute__((target("sse4.2"))) uint32_t tl_crc32c_sse42(uint32_t raw, const uint8_t *p,
                                                           size_t n) {
    return streams_crc(raw, p, n);
}

#else
typedef int tl_crc32c_sse42_is_for_x86_64; /* ISO C wants a declaration in every file */
#endif
