/*
 * stack.c - stack distances (Mattson et al. 1970): how recently each block was used, for streams of
 * any length.
 *
 * Every use takes the next slot of an array; the slot of a key's last use is live, its older slots
 * are dead. The depth of a key is the number of live slots from its own to the newest:
 *
 *   slots   [ . c . . b1 b0 . a2 a1 a0 | unused ]      . dead      depth of b0: a0 a1 a2 b0 = 4
 *                                      next
 *
 * Live slots are counted by a bitmap, and a Fenwick tree over chunks of 512 slots: it is 512 times
 * smaller than the array and stays in cache. A request's keys take neighbouring slots, so their
 * updates go to the tree as one, and the depth of a key whose slot is next to that of the key
 * before it is one more than that key's.
 *
 * When the array is full, the live slots move to its front, in their order, and those deeper than
 * max_keys are forgotten. It is at least twice as long as what is live, so that this costs O(1)
 * a use.
 */
#include "tinyllm/replay.h"

#include "runtime/internal.h"
#include "tinyllm/ds.h"

#include <math.h>
#include <string.h>

enum { CHUNK = 512, WORDS = CHUNK / 64, FIRST_SLOTS = 16 * CHUNK };

/* While a call runs: a new key, in the map and without a slot yet; and its second place in the same
 * request, which does not count. */
#define PENDING      UINT64_MAX
#define AGAIN        (UINT64_MAX - 1)
#define HAD_SLOT(at) ((at) < AGAIN)

typedef struct {
    uint64_t key;
    double first, last;
} slot;

struct tl_stack {
    tl_map *map;       /* key -> slot */
    slot *slots;       /* n_slots of them, a multiple of CHUNK */
    uint64_t *live;    /* a bit for each slot */
    uint32_t *tree;    /* Fenwick tree over the live slots of each chunk, from index 1 on */
    uint64_t *scratch; /* the slots of one request's keys */
    size_t n_slots, next, len, max_keys, scratch_cap;
    size_t pending_chunk; /* changes of the tree that are not made yet, all of one chunk */
    int64_t pending;
};

static int is_live(const tl_stack *s, uint64_t at) {
    return (int)(s->live[at / 64] >> (at % 64) & 1);
}

static void flush(tl_stack *s) {
    const size_t n = s->n_slots / CHUNK;
    if (s->pending != 0) {
        for (size_t i = s->pending_chunk + 1; i <= n; i += i & (0 - i)) {
            s->tree[i] = (uint32_t)(s->tree[i] + s->pending);
        }
        s->pending = 0;
    }
}

static void set_live(tl_stack *s, uint64_t at, int live) {
    s->live[at / 64] ^= (uint64_t)1 << (at % 64);
    if (at / CHUNK != s->pending_chunk) {
        flush(s);
        s->pending_chunk = at / CHUNK;
    }
    s->pending += live ? 1 : -1;
}

/* Live slots at and above `at`, nothing pending. */
static uint64_t depth_of(const tl_stack *s, uint64_t at) {
    uint64_t below = 0; /* live slots under `at` */
    for (size_t i = at / CHUNK; i > 0; i -= i & (0 - i)) {
        below += s->tree[i];
    }
    for (uint64_t w = at / CHUNK * WORDS; w < at / 64; w++) {
        below += (uint64_t)__builtin_popcountll(s->live[w]);
    }
    const uint64_t under = s->live[at / 64] & (((uint64_t)1 << (at % 64)) - 1);
    below += (uint64_t)__builtin_popcountll(under);
    return s->len - below;
}

/* The slot with `rank` live slots under it; rank < len, nothing pending. */
static size_t slot_of_rank(const tl_stack *s, size_t rank) {
    const size_t n = s->n_slots / CHUNK;
    size_t chunk = 0, step = 1;
    while (step * 2 <= n) {
        step *= 2;
    }
    for (; step > 0; step /= 2) {
        if (chunk + step <= n && s->tree[chunk + step] <= rank) {
            chunk += step;
            rank -= s->tree[chunk];
        }
    }
    for (size_t w = chunk * WORDS;; w++) {
        uint64_t bits = s->live[w];
        const size_t count = (size_t)__builtin_popcountll(bits);
        if (rank < count) {
            for (; rank > 0; rank--) {
                bits &= bits - 1;
            }
            return w * 64 + (size_t)__builtin_ctzll(bits);
        }
        rank -= count;
    }
}

tl_status tl_stack_create(size_t max_keys, tl_stack **out) {
    if (out == NULL) {
        return tl_fail(TL_EINVAL, "tl_stack_create: out is NULL");
    }
    *out = NULL;
    if (max_keys == 0 || max_keys > (size_t)1 << 31) {
        return tl_fail(TL_EINVAL, "tl_stack_create: max_keys is %zu, expected 1 to 2^31", max_keys);
    }
    tl_stack *s = tl_alloc(sizeof *s, _Alignof(tl_stack));
    if (s == NULL) {
        return TL_ENOMEM;
    }
    memset(s, 0, sizeof *s);
    s->max_keys = max_keys;
    const tl_status st = tl_map_create(0, &s->map);
    if (st != TL_OK) {
        tl_free(s);
        return st;
    }
    *out = s;
    return TL_OK;
}

void tl_stack_destroy(tl_stack *s) {
    if (s != NULL) {
        tl_map_destroy(s->map);
        tl_free(s->slots);
        tl_free(s->live);
        tl_free(s->tree);
        tl_free(s->scratch);
        tl_free(s);
    }
}

size_t tl_stack_len(const tl_stack *s) {
    return s == NULL ? 0 : s->len;
}

/* Rebuilds bitmap and tree for `len` live slots at the front. */
static void count_again(tl_stack *s) {
    const size_t n = s->n_slots / CHUNK;
    memset(s->live, 0, s->n_slots / 8);
    memset(s->live, 0xFF, s->len / 64 * 8);
    if (s->len % 64 != 0) {
        s->live[s->len / 64] = ((uint64_t)1 << (s->len % 64)) - 1;
    }
    memset(s->tree, 0, (n + 1) * sizeof *s->tree);
    for (size_t i = 1; i <= n; i++) {
        const size_t begin = (i - 1) * CHUNK;
        const size_t here = s->len <= begin ? 0 : s->len - begin < CHUNK ? s->len - begin : CHUNK;
        s->tree[i] += (uint32_t)here;
        const size_t up = i + (i & (0 - i));
        if (up <= n) {
            s->tree[up] += s->tree[i];
        }
    }
    s->pending = 0;
    s->pending_chunk = 0;
}

/* Moves the live slots to the front of `to`, which may be the array itself, and forgets those that
 * lie deeper than max_keys. The keys are in the map, so nothing allocates. */
static void gather(tl_stack *s, slot *to) {
    size_t n = 0, skip = s->len > s->max_keys ? s->len - s->max_keys : 0;
    for (size_t w = 0; w * 64 < s->next; w++) {
        for (uint64_t bits = s->live[w]; bits != 0; bits &= bits - 1) {
            const slot *from = &s->slots[w * 64 + (size_t)__builtin_ctzll(bits)];
            if (skip > 0) {
                skip--;
                tl_map_del(s->map, from->key);
                continue;
            }
            tl_map_put(s->map, from->key, n);
            to[n++] = *from;
        }
    }
    s->len = s->next = n;
}

/* Makes room for n more uses. */
static tl_status reserve(tl_stack *s, size_t n) {
    if (s->n_slots - s->next >= n) {
        return TL_OK;
    }
    flush(s);
    const size_t kept = s->len < s->max_keys ? s->len : s->max_keys;
    size_t want = (2 * kept + n + CHUNK - 1) / CHUNK * CHUNK;
    want = want < FIRST_SLOTS ? FIRST_SLOTS : want;
    if (want <= s->n_slots) {
        gather(s, s->slots);
        count_again(s);
        return TL_OK;
    }
    slot *slots = tl_alloc_array(want * sizeof *slots, 1);
    uint64_t *live = slots ? tl_alloc_array(want / 8, 0) : NULL;
    uint32_t *tree = live ? tl_alloc_array((want / CHUNK + 1) * sizeof *tree, 0) : NULL;
    if (tree == NULL) {
        tl_free(slots);
        tl_free(live);
        return tl_fail(TL_ENOMEM, "tl_stack_use: no memory for %zu slots", want);
    }
    gather(s, slots);
    tl_free(s->slots);
    tl_free(s->live);
    tl_free(s->tree);
    s->slots = slots;
    s->live = live;
    s->tree = tree;
    s->n_slots = want;
    count_again(s);
    return TL_OK;
}

static tl_status reserve_scratch(tl_stack *s, size_t n) {
    if (n <= s->scratch_cap) {
        return TL_OK;
    }
    uint64_t *scratch = tl_alloc_array(2 * n * sizeof *scratch, 0);
    if (scratch == NULL) {
        return tl_fail(TL_ENOMEM, "tl_stack_use: no memory for a request of %zu keys", n);
    }
    tl_free(s->scratch);
    s->scratch = scratch;
    s->scratch_cap = 2 * n;
    return TL_OK;
}

/* Every key gets an entry, PENDING for a new one, so that nothing can fail later; at[i] is its
 * slot, PENDING or AGAIN. */
static tl_status enter(tl_stack *s, const uint64_t *keys, size_t n, uint64_t *at) {
    for (size_t i = 0; i < n; i++) {
        if (tl_map_get(s->map, keys[i], &at[i])) {
            at[i] = at[i] == PENDING ? AGAIN : at[i];
            continue;
        }
        at[i] = PENDING;
        if (tl_map_put(s->map, keys[i], PENDING) != TL_OK) {
            while (i-- > 0) {
                uint64_t value;
                if (tl_map_get(s->map, keys[i], &value) && value == PENDING) {
                    tl_map_del(s->map, keys[i]);
                }
            }
            return tl_fail(TL_ENOMEM, "tl_stack_use: no memory for %zu keys", s->len + n);
        }
    }
    return TL_OK;
}

tl_status tl_stack_use(tl_stack *s, const uint64_t *keys, size_t n, double now, uint64_t *depths,
                       double *stamps) {
    if (s == NULL || (keys == NULL && n > 0)) {
        return tl_fail(TL_EINVAL, "tl_stack_use: %s is NULL", s == NULL ? "s" : "keys");
    }
    if (n > (size_t)1 << 31) {
        return tl_fail(TL_EINVAL, "tl_stack_use: n is %zu, expected at most 2^31", n);
    }
    tl_status st = reserve_scratch(s, n);
    if (st == TL_OK) {
        st = reserve(s, n);
    }
    uint64_t *const at = s->scratch;
    if (st == TL_OK) {
        st = enter(s, keys, n, at);
    }
    if (st != TL_OK) {
        return st;
    }
    flush(s);
    uint64_t depth = 0;
    for (size_t i = 0; i < n; i++) {
        const int there = HAD_SLOT(at[i]);
        if (there && depths != NULL) {
            const int neighbour = i > 0 && at[i] + 1 == at[i - 1];
            depth = neighbour ? depth + 1 : depth_of(s, at[i]);
            depths[i] = depth;
        } else if (depths != NULL) {
            depths[i] = 0;
        }
        if (stamps != NULL) {
            stamps[i] = there ? s->slots[at[i]].last : NAN;
        }
    }
    for (size_t i = n; i-- > 0;) {
        uint64_t old = at[i];
        if (old == AGAIN) {
            continue;
        }
        if (old != PENDING && !is_live(s, old)) {
            tl_map_get(s->map, keys[i], &old); /* used behind this place already */
        }
        slot *const to = &s->slots[s->next];
        to->key = keys[i];
        to->last = now;
        if (old == PENDING) {
            to->first = now;
            s->len++;
        } else {
            to->first = s->slots[old].first;
            set_live(s, old, 0); /* a key's second place: the bit is set and cleared again below */
        }
        tl_map_put(s->map, keys[i], s->next); /* the key is there: cannot fail */
        at[i] = s->next++;
    }
    for (size_t i = n; i-- > 0;) { /* apart from the loop above: a run in one or two chunks */
        if (at[i] != AGAIN) {
            set_live(s, at[i], 1);
        }
    }
    return TL_OK;
}

size_t tl_stack_read(const tl_stack *s, size_t depth, size_t n, uint64_t *keys, double *firsts,
                     double *lasts) {
    if (s == NULL || depth == 0 || depth > s->len || n == 0) {
        return 0;
    }
    flush((tl_stack *)s); /* how its numbers are kept is no part of its value */
    const size_t count = n < s->len - depth + 1 ? n : s->len - depth + 1;
    size_t at = slot_of_rank(s, s->len - depth);
    for (size_t i = 0; i < count; at--) {
        if (is_live(s, at)) {
            if (keys != NULL) {
                keys[i] = s->slots[at].key;
            }
            if (firsts != NULL) {
                firsts[i] = s->slots[at].first;
            }
            if (lasts != NULL) {
                lasts[i] = s->slots[at].last;
            }
            i++;
        }
    }
    return count;
}
