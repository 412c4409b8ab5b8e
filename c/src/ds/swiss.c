/*
 * swiss.c (ds.02) - a Swiss table from u64 to u64 without tombstones.
 *
 *   groups   [ t0 t1 ... t14 | over ][ t0 t1 ... t14 | over ] ...     16 bytes a group
 *   slots    [ key0 value0 ] ... [ key14 value14 ][ key0 value0 ] ... 15 of 16 bytes a group
 *
 * What the bytes of a group say, how keys find their way, and why there are no tombstones: see
 * swiss_group.h. The control bytes of all groups stand together, not each beside its slots: those
 * of 10,000 keys are 18 KB, which stay near, so that most calls wait for one line, of a slot.
 *
 * Block hashes can be chosen by whoever writes the prompt, so home and tag come from a mix with a
 * secret of the process: nobody can aim at one group.
 */
#include "ds/swiss.h"

#include "ds/swiss_group.h"

#include <stdatomic.h>

#define TWO_64_OVER_PHI 0x9E3779B97F4A7C15u /* 2^64 / the golden ratio: no pattern in its bits */

typedef struct {
    uint64_t key, value;
} slot;

TL_STATIC_ASSERT(sizeof(slot) == 16, "never astride a cache line");

#define GROUP_BYTES (sizeof(tl_group) + TL_GROUP_SLOTS * sizeof(slot))

struct tl_map {
    tl_group *groups;
    slot *slots;     /* behind the last of the groups, in the same allocation */
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

/* ---- finding and inserting ----------------------------------------------------------------- */

/* The slot of k, or NULL. Ends even if every count has stuck at its maximum. */
static inline slot *find(const tl_map *m, uint64_t k, uint64_t h) {
    const uint8_t t = tl_group_tag(h);
    size_t g = tl_group_home(m->n_groups, h);
    for (size_t steps = 0; steps < m->n_groups; steps++) {
        for (uint32_t bits = tl_group_match(&m->groups[g], t); bits != 0; bits &= bits - 1) {
            slot *s = &m->slots[g * TL_GROUP_SLOTS + tl_group_lowest(bits)];
            if (TL_LIKELY(s->key == k)) {
                return s;
            }
        }
        if (TL_LIKELY(m->groups[g].tags[TL_GROUP_OVER] == 0)) {
            return NULL;
        }
        g = tl_group_next(m->n_groups, g);
    }
    return NULL;
}

/* Inserts a key that is absent; there is an empty slot. */
static inline void insert_absent(tl_map *m, uint64_t k, uint64_t v, uint64_t h) {
    m->slots[tl_groups_take(m->groups, m->n_groups, h)] = (slot){k, v};
    m->len++;
}

/* ---- life ---------------------------------------------------------------------------------- */

static size_t groups_for(size_t keys) {
    const size_t n = tl_groups_for(keys);
    return n > SIZE_MAX / GROUP_BYTES ? 0 : n;
}

/* Memory for m->n_groups empty groups; 0 without it. */
static int make_groups(tl_map *m) {
    m->groups = tl_alloc_array(m->n_groups * GROUP_BYTES, 1);
    if (m->groups == NULL) {
        return 0;
    }
    m->slots = (slot *)(void *)(m->groups + m->n_groups);
    memset(m->groups, 0, m->n_groups * sizeof(tl_group));
    return 1;
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
    *m = (tl_map){NULL, NULL, n_groups, 0, secret, (secret * TWO_64_OVER_PHI) | 1u};
    if (!make_groups(m)) {
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
    const size_t n_groups = groups_for(m->n_groups * TL_GROUP_LOAD * 2);
    if (n_groups == 0) {
        return tl_fail(TL_ENOMEM, "tl_map_put: %zu keys are too many", m->len);
    }
    tl_map bigger = {NULL, NULL, n_groups, 0, m->secret, m->factor};
    if (!make_groups(&bigger)) {
        return tl_fail(TL_ENOMEM, "tl_map_put: no memory to grow to %zu groups", n_groups);
    }
    for (size_t g = 0; g < m->n_groups; g++) {
        for (uint32_t i = 0; i < TL_GROUP_SLOTS; i++) {
            if (m->groups[g].tags[i] != 0) {
                const slot *s = &m->slots[g * TL_GROUP_SLOTS + i];
                insert_absent(&bigger, s->key, s->value, mix(m, s->key));
            }
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
    *status = TL_OK;
    /* Nearly always: nothing like k in its home group, and nothing ever went past it. */
    const tl_group *g = &m->groups[tl_group_home(m->n_groups, h)];
    if (TL_UNLIKELY((tl_group_match(g, tl_group_tag(h)) | g->tags[TL_GROUP_OVER]) != 0)) {
        slot *s = find(m, k, h);
        if (s != NULL) {
            return s;
        }
    }
    if (m->len >= m->n_groups * TL_GROUP_LOAD) {
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
    const slot *s = find(m, k, mix(m, k));
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
    const slot *s = find(m, k, h);
    if (s == NULL) {
        return 0;
    }
    tl_groups_release(m->groups, m->n_groups, h, (size_t)(s - m->slots));
    m->len--;
    return 1;
}

size_t tl_map_len(const tl_map *m) {
    return m == NULL ? 0 : m->len;
}

/* ---- for the pool -------------------------------------------------------------------------- */

void tl_map_prefetch_tags(const tl_map *m, uint64_t k) {
    TL_PREFETCH(&m->groups[tl_group_home(m->n_groups, mix(m, k))]);
}

/* The first slot of k's home group whose tag is t. */
static inline void prefetch_tagged(const tl_map *m, uint64_t h, uint8_t t) {
    const size_t g = tl_group_home(m->n_groups, h);
    const uint32_t bits = tl_group_match(&m->groups[g], t);
    if (bits != 0) {
        TL_PREFETCH(&m->slots[g * TL_GROUP_SLOTS + tl_group_lowest(bits)]);
    }
}

void tl_map_prefetch_slot(const tl_map *m, uint64_t k) {
    const uint64_t h = mix(m, k);
    prefetch_tagged(m, h, tl_group_tag(h));
}

void tl_map_prefetch_empty(const tl_map *m, uint64_t k) {
    prefetch_tagged(m, mix(m, k), 0);
}

size_t tl_map_bytes(const tl_map *m) {
    return sizeof *m + m->n_groups * GROUP_BYTES;
}

tl_status tl_map_check(const tl_map *m) {
    size_t n = 0;
    size_t passes = 0; /* the sum over all keys of the groups they passed by */
    size_t counted = 0, stuck = 0;
    for (size_t g = 0; g < m->n_groups; g++) {
        const uint8_t *tags = m->groups[g].tags;
        counted += tags[TL_GROUP_OVER];
        stuck += tags[TL_GROUP_OVER] == TL_OVER_MAX;
        for (uint32_t i = 0; i < TL_GROUP_SLOTS; i++) {
            if (tags[i] == 0) {
                continue;
            }
            const slot *s = &m->slots[g * TL_GROUP_SLOTS + i];
            const uint64_t h = mix(m, s->key);
            const size_t home = tl_group_home(m->n_groups, h);
            if (tags[i] != tl_group_tag(h)) {
                return tl_fail(TL_EINVAL, "tl_map_check: wrong tag in group %zu slot %u", g, i);
            }
            if (find(m, s->key, h) != s) {
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
