/*
 * tinyllm/ds.h - the three data structures under the pool.
 *
 *   tl_vec    one growing array of equal elements
 *
 *               data -> [ e0 | e1 | ... | e(len-1) | spare ... ]     cap elements of elem bytes
 *
 *   tl_map    a Swiss table from u64 to u64 that deletes without tombstones (src/ds/swiss.c)
 *
 *               group: [ 15 tags | 1 overflow count ][ 15 x (key, value) ]      256 bytes
 *
 *   tl_lru    a circular list with a sentinel; the nodes live inside the caller's records
 *
 *               head <-> oldest <-> ... <-> newest <-> head
 *
 * None of them is thread-safe: the caller serializes the calls on one object. All memory comes
 * from the hook of abi.h.
 */
#ifndef TINYLLM_DS_H
#define TINYLLM_DS_H

#include "tinyllm/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- tl_vec -------------------------------------------------------------------------------- */

/* data is owned by the vector. len <= cap, both in elements; elem is the element size in bytes.
 * Reading the fields and shortening len are the caller's right; the rest is the functions'. */
typedef struct {
    void *data;
    size_t len, cap, elem;
} tl_vec;

/* Makes *v an empty vector; allocates nothing. TL_EINVAL: v NULL, elem 0 (then *v is untouched). */
TL_API tl_status tl_vec_init(tl_vec *v, size_t elem);

/*
 * Makes room for cap_min elements in all; never shrinks. TL_EINVAL: v NULL, elem 0, or a size that
 * overflows; TL_ENOMEM. *v is unchanged on failure. Moves the elements when it grows: O(len).
 */
TL_API tl_status tl_vec_reserve(tl_vec *v, size_t cap_min);

/*
 * Appends a copy of the elem bytes at x (which may lie inside the vector). Grows by doubling at
 * least, so amortized O(1). TL_EINVAL: v or x NULL, elem 0, or overflow; TL_ENOMEM. *v is
 * unchanged on failure.
 */
TL_API tl_status tl_vec_push(tl_vec *v, const void *x);

/* The address of element i, valid until the vector grows; NULL with the slot set when i >= len or
 * v is NULL. O(1). */
TL_API void *tl_vec_at(const tl_vec *v, size_t i);

/* Gives the memory back and leaves an empty vector of the same elem. NULL does nothing. */
TL_API void tl_vec_free(tl_vec *v);

/* ---- tl_map -------------------------------------------------------------------------------- */

typedef struct tl_map tl_map;

/*
 * A table that takes `hint` keys, through any history of puts and deletes, without allocating
 * again. Every u64 is a legal key. hint 0 is legal. TL_EINVAL: out NULL, or a size that overflows;
 * TL_ENOMEM. *out is NULL on failure. O(hint). Memory: 256 / 11, about 24 bytes a key.
 */
TL_API tl_status tl_map_create(size_t hint, tl_map **out);

/*
 * k -> v, replacing an earlier value of k. TL_EINVAL: m NULL; TL_ENOMEM: the table had to grow and
 * could not (then it is as it was). O(1) expected; O(len) in a call that grows.
 */
TL_API tl_status tl_map_put(tl_map *m, uint64_t k, uint64_t v);

/* 1 and *v when k is there (v may be NULL), else 0 with *v untouched; m NULL counts as empty. A
 * miss leaves the error slot alone. O(1) expected. */
TL_API int tl_map_get(const tl_map *m, uint64_t k, uint64_t *v);

/* 1 when k was there and is gone now, else 0. Never allocates, never moves another key. O(1)
 * expected. */
TL_API int tl_map_del(tl_map *m, uint64_t k);

/* The number of keys; 0 for NULL. */
TL_API size_t tl_map_len(const tl_map *m);

/* NULL does nothing. */
TL_API void tl_map_destroy(tl_map *m);

/* ---- tl_lru -------------------------------------------------------------------------------- */

/* A node in no list has both pointers NULL: zero a record and its node is ready. */
typedef struct tl_list_node {
    struct tl_list_node *prev, *next;
} tl_list_node;

/* head.next is the oldest node, head.prev the newest. The list owns nothing. */
typedef struct {
    tl_list_node head;
    size_t len;
} tl_lru;

/* The record around its embedded node: TL_CONTAINER_OF(node, struct block, lru). */
#define TL_CONTAINER_OF(ptr, type, member)                                                         \
    ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

/* All O(1), none can fail; NULL arguments are ignored (pop answers NULL). A list must not be moved
 * in memory while it holds nodes, and a node is in one list at most. */
TL_API void tl_lru_init(tl_lru *l);
TL_API void tl_lru_touch(tl_lru *l, tl_list_node *n);  /* inserts at, or moves to, the newest end */
TL_API void tl_lru_remove(tl_lru *l, tl_list_node *n); /* a node in no list is left alone */
TL_API tl_list_node *tl_lru_pop_oldest(tl_lru *l);     /* NULL when empty */

#ifdef __cplusplus
}
#endif

#if UINTPTR_MAX == 0xFFFFFFFFFFFFFFFFu
TL_STATIC_ASSERT(sizeof(tl_vec) == 32, "tl_vec is 32 bytes in this ABI");
TL_STATIC_ASSERT(sizeof(tl_list_node) == 16, "tl_list_node is 16 bytes in this ABI");
TL_STATIC_ASSERT(sizeof(tl_lru) == 24, "tl_lru is 24 bytes in this ABI");
#endif

#endif /* TINYLLM_DS_H */
