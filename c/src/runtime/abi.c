/*
 * abi.c (rt.02) - status names, the error slot, the allocator hook.
 *
 * The slot is a thread-local buffer, so an error in one thread never overwrites the explanation
 * another is about to read. The hook is process-wide and read without a lock: abi.h allows changing
 * it only while nothing is alive.
 */
#include "runtime/internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__linux__) || defined(__APPLE__)
#include <sys/random.h>
#elif defined(__unix__)
#include <unistd.h>
#endif

static _Thread_local char error_slot[TL_LAST_ERROR_CAP];

uint32_t tl_abi_version(void) {
    return TL_ABI_VERSION;
}

const char *tl_status_str(tl_status status) {
    static const char *const names[] = {
        "TL_OK",        "TL_EINVAL",  "TL_ENOMEM", "TL_ESHAPE",       "TL_EDTYPE", "TL_EFULL",
        "TL_ENOTFOUND", "TL_EFORMAT", "TL_EBUSY",  "TL_EUNSUPPORTED", "TL_EIO"};
    const size_t n = sizeof names / sizeof names[0];
    return status >= 0 && (size_t)status < n ? names[status] : "TL_UNKNOWN";
}

const char *tl_last_error(void) {
    return error_slot;
}

void tl_set_last_error(const char *msg) {
    if (msg == NULL) {
        msg = "";
    }
    /* msg may be the slot itself, or a part of it: a caller may shorten the text in place. */
    size_t n = 0;
    while (n < TL_LAST_ERROR_CAP - 1 && msg[n] != '\0') {
        n++;
    }
    memmove(error_slot, msg, n);
    error_slot[n] = '\0';
}

void tl_errorf(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(error_slot, sizeof error_slot, fmt, args);
    va_end(args);
}

static void *malloc_alloc(void *user, size_t n, size_t align) {
    (void)user;
    if (align <= _Alignof(max_align_t)) {
        return malloc(n);
    }
    void *p = NULL;
    return posix_memalign(&p, align, n) == 0 ? p : NULL;
}

static void malloc_free(void *user, void *p) {
    (void)user;
    free(p);
}

static const tl_allocator malloc_hook = {malloc_alloc, malloc_free, NULL};
static tl_allocator hook = {malloc_alloc, malloc_free, NULL};

tl_status tl_set_allocator(const tl_allocator *new_hook) {
    if (new_hook == NULL) {
        hook = malloc_hook;
        return TL_OK;
    }
    if (new_hook->alloc == NULL || new_hook->free == NULL) {
        return tl_fail(TL_EINVAL, "tl_set_allocator: the hook's %s function is NULL",
                       new_hook->alloc == NULL ? "alloc" : "free");
    }
    hook = *new_hook;
    return TL_OK;
}

void *tl_alloc(size_t n, size_t align) {
    if (n == 0) {
        tl_set_last_error("tl_alloc: n is 0");
        return NULL;
    }
    if (align == 0 || (align & (align - 1)) != 0) {
        tl_errorf("tl_alloc: align %zu is not a power of two", align);
        return NULL;
    }
    void *p = hook.alloc(hook.user, n, align);
    if (p == NULL) {
        tl_errorf("tl_alloc: no memory for %zu bytes", n);
    }
    return p;
}

void tl_free(void *p) {
    if (p != NULL) {
        hook.free(hook.user, p);
    }
}

void *tl_alloc_array(size_t n_bytes, int huge) {
    if (n_bytes < TL_HUGE_PAGE) {
        return tl_alloc(n_bytes, 64);
    }
    void *p = tl_alloc(n_bytes, TL_HUGE_PAGE);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (p != NULL && huge) {
        /* Whole huge pages only: the tail may share its page with a neighbour. Advice may be
         * refused (no such feature, memory of an odd kind); nothing depends on it. */
        (void)madvise(p, n_bytes & ~(TL_HUGE_PAGE - 1), MADV_HUGEPAGE);
    }
#else
    (void)huge;
#endif
    return p;
}

int tl_mul_size(size_t a, size_t b, size_t *out) {
    if (a != 0 && b > SIZE_MAX / a) {
        return 0;
    }
    *out = a * b;
    return 1;
}

int tl_secret(void *out, size_t n) {
#if defined(__linux__)
    ssize_t got;
    do { /* blocks only until the system has collected its first entropy, early in its boot */
        got = getrandom(out, n, 0);
    } while (got < 0 && errno == EINTR);
    if (got == (ssize_t)n) {
        return 1;
    }
#elif defined(__unix__) || defined(__APPLE__)
    if (getentropy(out, n) == 0) {
        return 1;
    }
#endif
    uint64_t x = ((uint64_t)(uintptr_t)&hook << 20) ^ ((uint64_t)time(NULL) << 40) ^
                 (uint64_t)clock() ^ (uint64_t)(uintptr_t)out;
    uint8_t *bytes = out;
    for (size_t i = 0; i < n; i++) { /* splitmix64 */
        x += 0x9E3779B97F4A7C15u;
        uint64_t z = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        bytes[i] = (uint8_t)(z >> 56);
    }
    return 0;
}
