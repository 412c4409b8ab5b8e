/* crc32c_pmull.c - ARMv8 with the CRC32 extension and PMULL: folding in 128 bits. */
#include "numerics/crc32c.h"

#if defined(__aarch64__) && !defined(__ARM_BIG_ENDIAN)

#include "numerics/crc32c_armv8.h"
#include "numerics/crc32c_powers.h"

#if defined(__clang__)
#define PMULL __attribute__((target("crc,aes")))
#else
#define PMULL __attribute__((target("+crc+crypto")))
#endif
#define FOLD_FN PMULL __attribute__((always_inline)) static inline

#include <arm_neon.h>

typedef uint64x2_t vec;
#define VEC_BYTES 16u

#define BY_VEC        TL_X191, TL_X127
#define BY_2_VECS     TL_X319, TL_X255
#define BY_STEP       TL_X575, TL_X511
#define BY_GAP        TL_X3647, TL_X3583
#define STREAMS_BELOW SIZE_MAX

FOLD_FN vec load(const uint8_t *p) {
    return vreinterpretq_u64_u8(vld1q_u8(p));
}

FOLD_FN void store(uint8_t *p, vec v) {
    vst1q_u8(p, vreinterpretq_u8_u64(v));
}

FOLD_FN void stream(uint8_t *p, vec v) {
    store(p, v); /* these processors see a run of whole lines and stop reading them by themselves */
}

FOLD_FN void stream_end(void) {}

FOLD_FN vec add(vec v, vec w) {
    return veorq_u64(v, w);
}

FOLD_FN vec by(uint32_t lo, uint32_t hi) {
    return vcombine_u64(vcreate_u64((uint64_t)lo << 32), vcreate_u64((uint64_t)hi << 32));
}

FOLD_FN vec times(uint64_t a, uint64_t b) {
    return vreinterpretq_u64_p128(vmull_p64((poly64_t)a, (poly64_t)b));
}

FOLD_FN vec move(vec v, vec k, vec onto) {
    const vec lo = times(vgetq_lane_u64(v, 0), vgetq_lane_u64(k, 0));
    const vec hi =
        vreinterpretq_u64_p128(vmull_high_p64(vreinterpretq_p64_u64(v), vreinterpretq_p64_u64(k)));
    return add(add(lo, hi), onto);
}

FOLD_FN vec first(uint64_t x) {
    return vcombine_u64(vcreate_u64(x), vcreate_u64(0));
}

FOLD_FN vec left(uint64_t r0, uint64_t r1, uint64_t r2) {
    return add(add(times(r0, TL_X2079), times(r1, TL_X1055)), first(r2));
}

FOLD_FN uint64_t crc8(uint64_t r, uint64_t word) {
    return ARM_CRC8((uint32_t)r, word);
}

FOLD_FN uint32_t crc4(uint32_t r, uint32_t word) {
    return ARM_CRC4(r, word);
}

FOLD_FN uint32_t crc2(uint32_t r, uint16_t word) {
    return ARM_CRC2(r, word);
}

FOLD_FN uint32_t crc1(uint32_t r, uint8_t byte) {
    return ARM_CRC1(r, byte);
}

FOLD_FN uint32_t reduce(vec v) {
    return (uint32_t)crc8(crc8(0, vgetq_lane_u64(v, 0)), vgetq_lane_u64(v, 1));
}

#include "numerics/crc32c_fold.h"

PMULL uint32_t tl_crc32c_pmull(uint32_t raw, const uint8_t *p, size_t n) {
    return fold_crc(raw, p, n);
}

PMULL uint32_t tl_crc32c_copy_pmull(uint32_t raw, uint8_t *dst, const uint8_t *src, size_t n,
                                    int stream) {
    return fold_copy(raw, dst, src, n, stream);
}

#else
typedef int tl_crc32c_pmull_is_for_aarch64; /* ISO C wants a declaration in every file */
#endif
