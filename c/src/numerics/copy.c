/* copy.c - memcpy, or the same with streaming stores; see copy_crc.h. */
#include "numerics/copy_crc.h"

#include <string.h>

#if defined(__x86_64__)

#include <emmintrin.h>

/* Below this the head and the tail, which are copied plainly, are most of it. */
#define STREAM_MIN 1024u

/* SSE2, which every x86-64 has: the four stores of a line meet in a write-combining buffer, and
 * the memory is what takes the time. */
static void copy_stream(uint8_t *dst, const uint8_t *src, size_t n) {
    const size_t head = (0u - (uintptr_t)dst) & 63u;
    memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    for (; n >= 64; n -= 64, dst += 64, src += 64) {
        for (int i = 0; i < 64; i += 16) {
            _mm_stream_si128((void *)(dst + i), _mm_loadu_si128((const void *)(src + i)));
        }
    }
    _mm_sfence(); /* streamed bytes are there for whoever sees this call return */
    memcpy(dst, src, n);
}

void tl_copy(void *dst, const void *src, size_t n, int stream) {
    if (stream && n >= STREAM_MIN) {
        copy_stream(dst, src, n);
    } else if (n > 0) {
        memcpy(dst, src, n);
    }
}

#else

void tl_copy(void *dst, const void *src, size_t n, int stream) {
    (void)stream; /* no such stores, or none the compiler can name */
    if (n > 0) {
        memcpy(dst, src, n);
    }
}

#endif
