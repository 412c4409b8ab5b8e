/*
 * swiss_group.h - the 16 control bytes of a Swiss table's group, for swiss.c and ids.h.
 *
 *   [ t0 t1 ... t14 | over ]     15 tags, 1 count
 *
 *   t_i   0: slot i is empty; 1..255: eight bits of the hash of its key
 *   over  how many keys passed this group by: their home is here or earlier on their path, it was
 *         full, and they live further on; 255 means "255 or more" and stays
 *
 * A key's path starts at its home group and goes on to the next one, around the end. A lookup
 * compares all tags at once and leaves the path at the first group with over == 0, for nothing that
 * came this way ever went past it. Deleting a key empties its slot and takes it off the counts of
 * the groups it had passed, which are exactly those between its home and itself.
 *
 * Why no tombstones: a table that never grows and marks deleted slots instead of emptying them
 * runs out of empty slots under the pool's churn (register, evict, register, ...). Every lookup of
 * an absent key then walks the whole table, or for ever. The cure by rebuilding in place stops one
 * unlucky call for as long as a rebuild takes, half a second at ten million keys. The counts cost
 * one slot of 16 and keep every call short.
 *
 * The load is 9 keys for 15 slots at most (on average over the groups), so there is always an
 * empty slot and an insertion ends. One group in 25 is full then: nearly every key lives at home,
 * and the branches that ask for it are predicted. At 11, one insertion in 7 went further.
 */
#ifndef TL_DS_SWISS_GROUP_H
#define TL_DS_SWISS_GROUP_H

#include "runtime/internal.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TL_GROUP_SLOTS 15u
#define TL_GROUP_LOAD  9u
#define TL_GROUP_OVER  15u /* the index of the overflow count among the 16 control bytes */
#define TL_OVER_MAX    255u

typedef struct {
    uint8_t tags[16];
} tl_group;

TL_STATIC_ASSERT(sizeof(tl_group) == 16, "never astride a cache line");

/* The home group of a hash, from its upper half, and the tag, from its low byte. */
static inline size_t tl_group_home(size_t n_groups, uint64_t h) {
    return (size_t)(((h >> 32) * (uint64_t)n_groups) >> 32);
}

static inline uint8_t tl_group_tag(uint64_t h) {
    const uint8_t t = (uint8_t)h;
    return t == 0 ? 1 : t;
}

static inline size_t tl_group_next(size_t n_groups, size_t g) {
    return g + 1 == n_groups ? 0 : g + 1;
}

/* Groups for `keys` keys. 0 when there would be 2^32 or more. */
static inline size_t tl_groups_for(size_t keys) {
    const size_t n = keys / TL_GROUP_LOAD + (keys % TL_GROUP_LOAD != 0);
    return n > UINT32_MAX ? 0 : n == 0 ? 1 : n;
}

/* Bit i is set when tag i equals t, for i in 0..14. t = 0 finds the empty slots. */
static inline uint32_t tl_group_match(const tl_group *g, uint8_t t) {
    const uint32_t slots = (1u << TL_GROUP_SLOTS) - 1;
#if defined(__SSE2__)
    const __m128i c = _mm_load_si128((const __m128i *)(const void *)g->tags);
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(c, _mm_set1_epi8((char)t))) & slots;
#elif defined(__aarch64__)
    static const uint8_t weights[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t eq = vceqq_u8(vld1q_u8(g->tags), vdupq_n_u8(t));
    const uint8x16_t bits = vandq_u8(eq, vld1q_u8(weights));
    const uint32_t lo = vaddv_u8(vget_low_u8(bits)), hi = vaddv_u8(vget_high_u8(bits));
    return (lo | hi << 8) & slots;
#else
    uint32_t bits = 0;
    for (uint32_t i = 0; i < TL_GROUP_SLOTS; i++) {
        bits |= (uint32_t)(g->tags[i] == t) << i;
    }
    return bits & slots;
#endif
}

static inline uint32_t tl_group_lowest(uint32_t bits) {
#if defined(__GNUC__) || defined(__clang__)
    return (uint32_t)__builtin_ctz(bits);
#else
    uint32_t i = 0;
    while ((bits & 1u) == 0) {
        bits >>= 1;
        i++;
    }
    return i;
#endif
}

/* Marks the first empty slot on the path of h, which is free for its key then; counts the key where
 * it passed by. There must be an empty slot. Returns the slot's number, over all groups. */
static inline size_t tl_groups_take(tl_group *groups, size_t n_groups, uint64_t h) {
    for (size_t g = tl_group_home(n_groups, h);; g = tl_group_next(n_groups, g)) {
        const uint32_t empty = tl_group_match(&groups[g], 0);
        if (TL_LIKELY(empty != 0)) {
            const uint32_t i = tl_group_lowest(empty);
            groups[g].tags[i] = tl_group_tag(h);
            return g * TL_GROUP_SLOTS + i;
        }
        if (groups[g].tags[TL_GROUP_OVER] < TL_OVER_MAX) {
            groups[g].tags[TL_GROUP_OVER]++;
        }
    }
}

/* Empties a slot that the key of h has. */
static inline void tl_groups_release(tl_group *groups, size_t n_groups, uint64_t h, size_t at) {
    const size_t end = at / TL_GROUP_SLOTS;
    groups[end].tags[at % TL_GROUP_SLOTS] = 0;
    for (size_t g = tl_group_home(n_groups, h); TL_UNLIKELY(g != end);
         g = tl_group_next(n_groups, g)) {
        if (groups[g].tags[TL_GROUP_OVER] < TL_OVER_MAX) {
            groups[g].tags[TL_GROUP_OVER]--;
        }
    }
}

#endif /* TL_DS_SWISS_GROUP_H */
