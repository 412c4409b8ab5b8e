/*
 * copy_crc.h - memcpy and tl_crc32c in one pass, and memcpy past the caches.
 *
 * A checksum beside a copy costs a second read of every byte; a checksum inside it costs
 * arithmetic that runs while the copy waits for memory. So an envelope is written at the speed of
 * the copy alone.
 *
 * `stream` writes past the caches. An ordinary store to a line that is not in cache reads the line
 * first, to overwrite it: a third of the memory's bandwidth for nothing. A streaming store does
 * not, but where the line is in cache, or is read again soon, it is the slower one. It is a hint,
 * which a processor's variant may ignore.
 */
#ifndef TL_NUMERICS_COPY_CRC_H
#define TL_NUMERICS_COPY_CRC_H

#include <stddef.h>
#include <stdint.h>

/* Copies n bytes from src to dst, which do not overlap. Safe from any thread. NULL is legal only
 * when n is 0; so too below. */
void tl_copy(void *dst, const void *src, size_t n, int stream);

/* The same, and returns tl_crc32c(src, n, crc). */
uint32_t tl_copy_crc32c(void *dst, const void *src, size_t n, uint32_t crc, int stream);

/* Whether to stream into a destination of n bytes in all: it is too large to be in cache. */
#define TL_STREAM_BYTES ((size_t)16 << 20)
static inline int tl_copy_streams(size_t n) {
    return n >= TL_STREAM_BYTES;
}

#endif /* TL_NUMERICS_COPY_CRC_H */
