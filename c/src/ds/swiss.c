/*
 * swiss.c (ds.02) - a Swiss table from u64 to u64 without tombstones.
 *
 *   group (256 bytes, 64-byte aligned)
 *   [ t0 t1 ... t14 | over ][ key0 value0 ][ key1 value1 ] ... [ key14 value14 ]
 *     15 tags, 1 count       15 slots of 16 bytes
 *
 *   t_i   0: slot i is empty; 1..255: eight bits of the hash of its key
 *   over  how many keys passed this group by: their home is here or earlier on their path, it was
 *         full, and they live further on; 255 means "255 or more" and stays
 *
 * A key's path starts at its home group and goes on to the next one, around the end. A lookup
 * compares 16 tags at once and leaves the path at the first group with over == 0, for nothing that
 * came this way ever went past it. Deleting a key empties its slot and takes it off the counts of
 * the groups it had passed, which are exactly those between its home and itself.
 *
 * Why no tombstones: a table that never grows and marks deleted slots instead of emptying them
 * runs out of empty slots under the pool's churn (register, evict, register, ...). Every lookup of
 * an absent key then walks the whole table, or for ever. The cure by rebuilding in place stops one
 * unlucky call for as long as a rebuild takes, half a second at ten million keys. The counts cost
 * one slot of 16 and keep every call short.
 *
 * The load is 11 keys for 15 slots at most (on average over the groups), so there is always an
 * empty slot and an insertion ends. Block hashes can be chosen by whoever writes the prompt, so
 * home and tag come from a mix with a secret of the process: nobody can aim at one group.
 */
#include "ds/swiss.h"

#include "runtime/internal.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define GROUP_SLOTS 15u
#define GROUP_LOAD  11u /* keys a group, on average, before the table grows */
#define OVER        15u /* the index of the overflow count among the 16 control bytes */
#define OVER_MAX    255u
#define SLOT_MASK   0x7FFFu

#define TWO_64_OVER_PHI 0x9E3779B97F4A7C15u /* 2^64 / the golden ratio: no pattern in its bits */

typedef struct {
    uint64_t key, value;
} slot;

typedef struct {
    uint8_t control[16];
    slot slots[GROUP_SLOTS];
} group;

TL_STATIC_ASSERT(sizeof(group) == 256, "a group is four cache lines");

struct tl_map {
    group *groups;
    size_t n_groups; /* below 2^32 */
    size_t len;
    uint64_t secret, factor; /* of mix(); factor is odd */
};

/* ---- hashing ------------------------------------------------------------------------------- */

/* One secret for the process, drawn at the first create. Racing threads may draw two; the first to
 * store wins, and each map keeps the one it was made with anyway. */
static uint64_t process_secret(void) {
    static _Atomic uint64_t secret;
    uint64_t s = atomic_load_explicit(&secret, memory_order_relaxed);
    if (s == 0) {
        (void)tl_secret(&s, sizeof s);
        uint64_t expected = 0;
        if (!atomic_compare_exchange_strong(&secret, &expected, s)) {
            s = expected;
        }
    }
    return s;
}

/*
 * The key and the secret, multiplied to 128 bits and folded: every bit of the key reaches every bit
 * of the result, and which ones cannot be told without the secret. The upper half picks the group,
 * the low byte is the tag.
 */
static inline uint64_t mix(const tl_map *m, uint64_t k) {
#if defined(__SIZEOF_INT128__)
    __extension__ typedef unsigned __int128 u128;
    const u128 product = (u128)(k ^ m->secret) * m->factor;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    k = (k ^ m->secret) * 0xBF58476D1CE4E5B9u;
    k = (k ^ (k >> 32)) * m->factor;
    return k ^ (k >> 29);
#endif
}

static inline size_t home_of(const tl_map *m, uint64_t h) {
    return (size_t)(((h >> 32) * (uint64_t)m->n_groups) >> 32);
}

static inline uint8_t tag_of(uint64_t h) {
    const uint8_t t = (uint8_t)h;
    return t == 0 ? 1 : t;
}

/* ---- a group's 16 control bytes ------------------------------------------------------------ */

/* Bit i is set when tag i equals t, for i in 0..14. */
static inline uint32_t match(const group *g, uint8_t t) {
#if defined(__SSE2__)
    const __m128i c = _mm_load_si128((const __m128i *)(const void *)g->control);
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(c, _mm_set1_epi8((char)t))) & SLOT_MASK;
#elif defined(__aarch64__)
    static const uint8_t weights[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t eq = vceqq_u8(vld1q_u8(g->control), vdupq_n_u8(t));
    const uint8x16_t bits = vandq_u8(eq, vld1q_u8(weights));
    const uint32_t lo = vaddv_u8(vget_low_u8(bits)), hi = vaddv_u8(vget_high_u8(bits));
    return (lo | hi << 8) & SLOT_MASK;
#else
    uint32_t bits = 0;
    for (uint32_t i = 0; i < GROUP_SLOTS; i++) {
        bits |= (uint32_t)(g->control[i] == t) << i;
    }
    return bits;
#endif
}

static inline uint32_t lowest(uint32_t bits) {
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

static inline size_t next_group(const tl_map *m, size_t g) {
    return g + 1 == m->n_groups ? 0 : g + 1;
}

/* ---- finding and inserting ----------------------------------------------------------------- */

/* The slot of k, or NULL; *at is its group. Ends after n_groups steps even if every count has
 * stuck at its maximum. */
static inline slot *find(const tl_map *m, uint64_t k, uint64_t h, size_t *at) {
    const uint8_t t = tag_of(h);
    size_t g = home_of(m, h);
    for (size_t steps = 0; steps < m->n_groups; steps++) {
        group *gr = &m->groups[g];
        for (uint32_t bits = match(gr, t); bits != 0; bits &= bits - 1) {
            slot *s = &gr->slots[lowest(bits)];
            if (TL_LIKELY(s->key == k)) {
                *at = g;
                return s;
            }
        }
        if (TL_LIKELY(gr->control[OVER] == 0)) {
            return NULL;
        }
        g = next_group(m, g);
    }
    return NULL;
}

/* Puts a key that is absent into the first group on its path with an empty slot. There is one. */
static void insert_absent(tl_map *m, uint64_t k, uint64_t v, uint64_t h) {
    size_t g = home_of(m, h);
    for (;;) {
        group *gr = &m->groups[g];
        const uint32_t empty = match(gr, 0);
        if (empty != 0) {
            const uint32_t i = lowest(empty);
            gr->control[i] = tag_of(h);
            gr->slots[i] = (slot){k, v};
            m->len++;
            return;
        }
        if (gr->control[OVER] < OVER_MAX) {
            gr->control[OVER]++;
        }
        g = next_group(m, g);
    }
}

/* ---- life ---------------------------------------------------------------------------------- */

/* Groups for `keys` keys, all empty. 0 when the size overflows. */
static size_t groups_for(size_t keys) {
    const size_t n = keys / GROUP_LOAD + (keys % GROUP_LOAD != 0);
    if (n > UINT32_MAX || n > SIZE_MAX / sizeof(group)) {
        return 0;
    }
    return n == 0 ? 1 : n;
}

static group *groups_new(size_t n_groups) {
    group *groups = tl_alloc_array(n_groups * sizeof(group), 1);
    if (groups != NULL) {
        for (size_t g = 0; g < n_groups; g++) {
            memset(groups[g].control, 0, sizeof groups[g].control);
        }
    }
    return groups;
}

tl_status tl_map_create(size_t hint, tl_map **out) {
    if (out == NULL) {
        return tl_fail(TL_EINVAL, "tl_map_create: out is NULL");
    }
    *out = NULL;
    const size_t n_groups = groups_for(hint);
    if (n_groups == 0) {
        return tl_fail(TL_EINVAL, "tl_map_create: a table for %zu keys overflows", hint);
    }
    tl_map *m = tl_alloc(sizeof *m, _Alignof(tl_map));
    if (m == NULL) {
        return tl_fail(TL_ENOMEM, "tl_map_create: no memory for %zu bytes", sizeof *m);
    }
    const uint64_t secret = process_secret();
    *m = (tl_map){groups_new(n_groups), n_groups, 0, secret, (secret * TWO_64_OVER_PHI) | 1u};
    if (m->groups == NULL) {
        tl_free(m);
        return tl_fail(TL_ENOMEM, "tl_map_create: no memory for %zu groups", n_groups);
    }
    *out = m;
    return TL_OK;
}

void tl_map_destroy(tl_map *m) {
    if (m != NULL) {
        tl_free(m->groups);
        tl_free(m);
    }
}

/* Moves every key into a table of twice the size; on failure the old one is as it was. */
static tl_status grow(tl_map *m) {
    const size_t n_groups = groups_for(m->n_groups * GROUP_LOAD * 2);
    if (n_groups == 0) {
        return tl_fail(TL_ENOMEM, "tl_map_put: %zu keys are too many", m->len);
    }
    tl_map bigger = {groups_new(n_groups), n_groups, 0, m->secret, m->factor};
    if (bigger.groups == NULL) {
        return tl_fail(TL_ENOMEM, "tl_map_put: no memory to grow to %zu groups", n_groups);
    }
    for (size_t g = 0; g < m->n_groups; g++) {
        const group *gr = &m->groups[g];
        for (uint32_t bits = ~match(gr, 0) & SLOT_MASK; bits != 0; bits &= bits - 1) {
            const slot *s = &gr->slots[lowest(bits)];
            insert_absent(&bigger, s->key, s->value, mix(m, s->key));
        }
    }
    tl_free(m->groups);
    *m = bigger;
    return TL_OK;
}

/* ---- the public operations ----------------------------------------------------------------- */

/* The slot that k has, or NULL after inserting k -> v; *status is TL_ENOMEM when that failed. */
static slot *find_or_insert(tl_map *m, uint64_t k, uint64_t v, tl_status *status) {
    const uint64_t h = mix(m, k);
    size_t at;
    *status = TL_OK;
    slot *s = find(m, k, h, &at);
    if (s != NULL) {
        return s;
    }
    if (m->len >= m->n_groups * GROUP_LOAD) {
        *status = grow(m);
        if (*status != TL_OK) {
            return NULL;
        }
    }
    insert_absent(m, k, v, h);
    return NULL;
}

tl_status tl_map_insert(tl_map *m, uint64_t k, uint64_t v, uint64_t *held) {
    tl_status status;
    const slot *s = find_or_insert(m, k, v, &status);
    if (s != NULL) {
        *held = s->value;
        return TL_EBUSY;
    }
    return status;
}

tl_status tl_map_put(tl_map *m, uint64_t k, uint64_t v) {
    if (m == NULL) {
        return tl_fail(TL_EINVAL, "tl_map_put: m is NULL");
    }
    tl_status status;
    slot *s = find_or_insert(m, k, v, &status);
    if (s != NULL) {
        s->value = v;
    }
    return status;
}

int tl_map_get(const tl_map *m, uint64_t k, uint64_t *v) {
    if (m == NULL) {
        return 0;
    }
    size_t at;
    const slot *s = find(m, k, mix(m, k), &at);
    if (s == NULL) {
        return 0;
    }
    if (v != NULL) {
        *v = s->value;
    }
    return 1;
}

int tl_map_del(tl_map *m, uint64_t k) {
    if (m == NULL) {
        return 0;
    }
    const uint64_t h = mix(m, k);
    size_t at;
    const slot *s = find(m, k, h, &at);
    if (s == NULL) {
        return 0;
    }
    m->groups[at].control[s - m->groups[at].slots] = 0;
    m->len--;
    for (size_t g = home_of(m, h); g != at; g = next_group(m, g)) {
        uint8_t *over = &m->groups[g].control[OVER];
        if (*over < OVER_MAX) {
            (*over)--;
        }
    }
    return 1;
}

size_t tl_map_len(const tl_map *m) {
    return m == NULL ? 0 : m->len;
}

/* ---- for the pool -------------------------------------------------------------------------- */

void tl_map_prefetch_tags(const tl_map *m, uint64_t k) {
    TL_PREFETCH(&m->groups[home_of(m, mix(m, k))]);
}

void tl_map_prefetch_group(const tl_map *m, uint64_t k) {
    const char *g = (const char *)&m->groups[home_of(m, mix(m, k))];
    for (size_t line = 0; line < sizeof(group); line += 64) {
        TL_PREFETCH(g + line);
    }
}

void tl_map_prefetch_slot(const tl_map *m, uint64_t k) {
    const uint64_t h = mix(m, k);
    const group *gr = &m->groups[home_of(m, h)];
    const uint32_t bits = match(gr, tag_of(h));
    if (bits != 0) {
        TL_PREFETCH(&gr->slots[lowest(bits)]);
    }
}

size_t tl_map_bytes(const tl_map *m) {
    return sizeof *m + m->n_groups * sizeof(group);
}

tl_status tl_map_check(const tl_map *m) {
    size_t n = 0;
    size_t passes = 0; /* the sum over all keys of the groups they passed by */
    size_t counted = 0, stuck = 0;
    for (size_t g = 0; g < m->n_groups; g++) {
        const group *gr = &m->groups[g];
        counted += gr->control[OVER];
        stuck += gr->control[OVER] == OVER_MAX;
        for (uint32_t bits = ~match(gr, 0) & SLOT_MASK; bits != 0; bits &= bits - 1) {
            const uint32_t i = lowest(bits);
            const uint64_t h = mix(m, gr->slots[i].key);
            const size_t home = home_of(m, h);
            size_t at;
            if (gr->control[i] != tag_of(h)) {
                return tl_fail(TL_EINVAL, "tl_map_check: wrong tag in group %zu slot %u", g, i);
            }
            if (find(m, gr->slots[i].key, h, &at) != &gr->slots[i]) {
                return tl_fail(TL_EINVAL, "tl_map_check: key in group %zu slot %u is not found", g,
                               i);
            }
            passes += g >= home ? g - home : m->n_groups - home + g;
            n++;
        }
    }
    if (n != m->len) {
        return tl_fail(TL_EINVAL, "tl_map_check: len %zu but %zu keys", m->len, n);
    }
    if (stuck == 0 && passes != counted) {
        return tl_fail(TL_EINVAL, "tl_map_check: keys passed %zu groups, the counts say %zu",
                       passes, counted);
    }
    return TL_OK;
}
