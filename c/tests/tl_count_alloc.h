/*
 * tl_count_alloc.h - an allocator that tells on its users. It counts live blocks and bytes, fails
 * the allocation it is told to fail, fills fresh memory with garbage and freed memory with poison,
 * and stops the program when a pointer is freed twice or was written past its end.
 *
 * tl_test.c installs it before every test and fails a test that leaves anything live. It may be
 * called from many threads.
 */
#ifndef TL_COUNT_ALLOC_H
#define TL_COUNT_ALLOC_H

#include <stddef.h>
#include <stdint.h>

void tl_count_install(void);   /* as the library's hook; nothing may be live */
void tl_count_uninstall(void); /* back to malloc; nothing may be live */

size_t tl_count_live(void);       /* blocks allocated and not freed */
size_t tl_count_live_bytes(void); /* their bytes */
uint64_t tl_count_allocs(void);   /* allocations asked for since install, refused ones included */

/* Refuses the k-th allocation from now on (1 is the next), once; 0 refuses none. */
void tl_count_fail_at(uint64_t k);

/* Frees whatever is live: after a test that failed halfway. */
void tl_count_release(void);

/* Larger requests are always refused: no machine has that much. */
#define TL_COUNT_MAX ((size_t)1 << 42)

#endif /* TL_COUNT_ALLOC_H */
