/* swiss.h - what the pool needs of tl_map beyond ds.h: inserting only when absent, in one probe,
 * and prefetching for batches. */
#ifndef TL_DS_SWISS_H
#define TL_DS_SWISS_H

#include "tinyllm/ds.h"

/* TL_OK and k -> v when k was absent. TL_EBUSY, with *held the value k has and nothing changed,
 * when it was there: no error, so the slot is left alone. TL_ENOMEM as tl_map_put. */
tl_status tl_map_insert(tl_map *m, uint64_t k, uint64_t v, uint64_t *held);

/* A lookup of k waits for two cache lines: the tags of its home group, then the slot they point
 * at; in a table of some 10,000 keys the tags are near. A batch asks for all tags first, then for
 * all slots, then looks up; one that inserts asks for the empty slot. */
void tl_map_prefetch_tags(const tl_map *m, uint64_t k);
void tl_map_prefetch_slot(const tl_map *m, uint64_t k);
void tl_map_prefetch_empty(const tl_map *m, uint64_t k);

/* Bytes allocated for the table, and whether its counts agree with its contents (for tl_kv_check
 * and the tests; the slot says what does not). O(size of the table). */
size_t tl_map_bytes(const tl_map *m);
tl_status tl_map_check(const tl_map *m);

#endif /* TL_DS_SWISS_H */
