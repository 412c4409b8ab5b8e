/*
 * ids.h - an index of ids whose keys lie elsewhere: a Swiss table (swiss_group.h) with 4 bytes a
 * slot. The owner has a hash for each key, spread over all 64 bits by something nobody outside can
 * steer, and tells whether an id is the one that is looked for. Made for a number of ids, it takes
 * that many through any history, without allocating.
 */
#ifndef TL_DS_IDS_H
#define TL_DS_IDS_H

#include "ds/swiss_group.h"

typedef struct {
    tl_group *groups;
    uint32_t *ids; /* TL_GROUP_SLOTS a group, behind the last of the groups */
    size_t n_groups;
} tl_ids;

#define TL_IDS_NONE UINT32_MAX /* no id */

static inline size_t tl_ids_bytes(const tl_ids *t) {
    return t->n_groups * (sizeof(tl_group) + TL_GROUP_SLOTS * sizeof(uint32_t));
}

/* Room for n ids, below 2^32 each; 0 without memory for it. tl_ids_free also takes one that was
 * never made and is all zeros. */
static inline int tl_ids_make(tl_ids *t, size_t n) {
    *t = (tl_ids){NULL, NULL, tl_groups_for(n)};
    t->groups = t->n_groups == 0 ? NULL : tl_alloc_array(tl_ids_bytes(t), 1);
    if (t->groups == NULL) {
        return 0;
    }
    t->ids = (uint32_t *)(void *)(t->groups + t->n_groups);
    memset(t->groups, 0, t->n_groups * sizeof(tl_group));
    return 1;
}

static inline void tl_ids_free(tl_ids *t) {
    tl_free(t->groups);
    *t = (tl_ids){0};
}

/* Asks for a group: its tags, and its ids, which mostly lie in one line. */
static inline void tl_ids_prefetch(const tl_ids *t, uint64_t h) {
    const size_t g = tl_group_home(t->n_groups, h);
    TL_PREFETCH(&t->groups[g]);
    TL_PREFETCH(&t->ids[g * TL_GROUP_SLOTS]);
}

/* Adds an id that is not there. */
static inline void tl_ids_add(tl_ids *t, uint64_t h, uint32_t id) {
    t->ids[tl_groups_take(t->groups, t->n_groups, h)] = id;
}

/* Whether id is the one; owner and key are the caller's. */
typedef int (*tl_ids_same)(const void *owner, uint32_t id, const void *key);

/* The place of the id of hash h that is the one, or SIZE_MAX. With a constant `same` the compiler
 * makes one loop of it. Ends even if every count has stuck at its maximum. */
static inline size_t tl_ids_place(const tl_ids *t, uint64_t h, tl_ids_same same, const void *owner,
                                  const void *key) {
    const uint8_t tag = tl_group_tag(h);
    size_t g = tl_group_home(t->n_groups, h);
    for (size_t steps = 0; steps < t->n_groups; steps++) {
        for (uint32_t bits = tl_group_match(&t->groups[g], tag); bits != 0; bits &= bits - 1) {
            const size_t at = g * TL_GROUP_SLOTS + tl_group_lowest(bits);
            if (TL_LIKELY(same(owner, t->ids[at], key))) {
                return at;
            }
        }
        if (TL_LIKELY(t->groups[g].tags[TL_GROUP_OVER] == 0)) {
            break;
        }
        g = tl_group_next(t->n_groups, g);
    }
    return SIZE_MAX;
}

static inline uint32_t tl_ids_find(const tl_ids *t, uint64_t h, tl_ids_same same, const void *owner,
                                   const void *key) {
    const size_t at = tl_ids_place(t, h, same, owner, key);
    return at == SIZE_MAX ? TL_IDS_NONE : t->ids[at];
}

static inline int tl_ids_is(const void *owner, uint32_t id, const void *key) {
    (void)owner;
    return id == *(const uint32_t *)key;
}

/* Takes an id out that is there. */
static inline void tl_ids_remove(tl_ids *t, uint64_t h, uint32_t id) {
    const size_t at = tl_ids_place(t, h, tl_ids_is, NULL, &id);
    if (TL_LIKELY(at != SIZE_MAX)) {
        tl_groups_release(t->groups, t->n_groups, h, at);
    }
}

#endif /* TL_DS_IDS_H */
