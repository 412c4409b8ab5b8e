/* fnv1a.c (M06.3) - FNV-1a 64: for each byte, XOR it in, multiply by the prime. */
#include "tinyllm/numerics.h"

uint64_t tl_fnv1a64(const void *data, size_t n, uint64_t h) {
    const uint8_t *p = data;
    for (size_t i = 0; i < n; i++) {
        h = (h ^ p[i]) * TL_FNV1A64_PRIME;
    }
    return h;
}
