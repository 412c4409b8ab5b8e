/*
 * tl_count_alloc.c - see tl_count_alloc.h. The live blocks are kept in an array beside the memory
 * itself, so that under AddressSanitizer every block ends exactly where its user's bytes end.
 */
#include "tl_count_alloc.h"

#include "tinyllm/abi.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#define WATCHED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WATCHED 1
#endif
#endif

#ifdef WATCHED
static const size_t guard_bytes = 0; /* the sanitizer watches the bytes after the block itself */
#else
static const size_t guard_bytes = 32;
#endif

#define FRESH      0xA5
#define FREED      0xDD
#define GUARD_BYTE 0xFD
#define PAINT_MAX  ((size_t)1 << 24) /* a slab of gigabytes must not be touched by its test */

typedef struct {
    unsigned char *p;
    size_t n;
    uint64_t serial;
} live_block;

static struct {
    pthread_mutex_t lock;
    live_block *block;
    size_t n_blocks, cap, bytes;
    uint64_t allocs, fail_at;
} g = {.lock = PTHREAD_MUTEX_INITIALIZER};

_Noreturn static void die(const char *what, const void *p, uint64_t serial) {
    fprintf(stderr, "counting allocator: %s: %p (allocation %llu)\n", what, p,
            (unsigned long long)serial);
    abort();
}

static void paint(unsigned char *p, size_t n, int byte) {
    memset(p, byte, n < PAINT_MAX ? n : PAINT_MAX / 256);
}

static void check_guard(const live_block *b) {
    for (size_t i = 0; i < guard_bytes; i++)
        if (b->p[b->n + i] != GUARD_BYTE)
            die("written past its end", b->p, b->serial);
}

static void *count_alloc(void *user, size_t n, size_t align) {
    (void)user;
    void *p = NULL;
    pthread_mutex_lock(&g.lock);
    g.allocs++;
    if (g.fail_at != 0 && --g.fail_at == 0)
        goto out;
    if (n > TL_COUNT_MAX)
        goto out;
    if (g.n_blocks == g.cap) {
        size_t cap = g.cap ? 2 * g.cap : 64;
        live_block *grown = realloc(g.block, cap * sizeof *grown);
        if (!grown)
            goto out;
        g.block = grown;
        g.cap = cap;
    }
    if (posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, n + guard_bytes) != 0) {
        p = NULL;
        goto out;
    }
    if (n < PAINT_MAX)
        paint(p, n, FRESH);
    for (size_t i = 0; i < guard_bytes; i++)
        ((unsigned char *)p)[n + i] = GUARD_BYTE;
    g.block[g.n_blocks++] = (live_block){p, n, g.allocs};
    g.bytes += n;
out:
    pthread_mutex_unlock(&g.lock);
    return p;
}

static void count_free(void *user, void *p) {
    (void)user;
    if (!p)
        return;
    pthread_mutex_lock(&g.lock);
    size_t i = g.n_blocks;
    while (i > 0 && g.block[i - 1].p != p)
        i--;
    if (i == 0)
        die("freed, but not live", p, 0);
    live_block b = g.block[i - 1];
    check_guard(&b);
    g.block[i - 1] = g.block[--g.n_blocks];
    g.bytes -= b.n;
    paint(b.p, b.n, FREED);
    free(b.p);
    pthread_mutex_unlock(&g.lock);
}

void tl_count_install(void) {
    const tl_allocator hook = {count_alloc, count_free, NULL};
    pthread_mutex_lock(&g.lock);
    g.allocs = g.fail_at = 0;
    pthread_mutex_unlock(&g.lock);
    tl_set_allocator(&hook);
}

void tl_count_uninstall(void) {
    tl_set_allocator(NULL);
}

void tl_count_fail_at(uint64_t k) {
    pthread_mutex_lock(&g.lock);
    g.fail_at = k;
    pthread_mutex_unlock(&g.lock);
}

void tl_count_release(void) {
    pthread_mutex_lock(&g.lock);
    for (size_t i = 0; i < g.n_blocks; i++)
        free(g.block[i].p);
    free(g.block);
    g.block = NULL;
    g.n_blocks = g.cap = g.bytes = 0;
    pthread_mutex_unlock(&g.lock);
}

size_t tl_count_live(void) {
    pthread_mutex_lock(&g.lock);
    size_t n = g.n_blocks;
    pthread_mutex_unlock(&g.lock);
    return n;
}

size_t tl_count_live_bytes(void) {
    pthread_mutex_lock(&g.lock);
    size_t n = g.bytes;
    pthread_mutex_unlock(&g.lock);
    return n;
}

uint64_t tl_count_allocs(void) {
    pthread_mutex_lock(&g.lock);
    uint64_t n = g.allocs;
    pthread_mutex_unlock(&g.lock);
    return n;
}
