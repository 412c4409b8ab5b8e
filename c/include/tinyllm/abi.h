/*
 * tinyllm/abi.h - what every tl_ function has in common: status codes, element types,
 * the per-thread error slot and the allocator hook. The rules behind them: c/ABI.md.
 *
 *   status       the truth; what a caller branches on
 *   error slot   the explanation; one text per thread, for people and logs
 *   hook         the one door to memory; tests count and fail allocations through it
 */
#ifndef TINYLLM_ABI_H
#define TINYLLM_ABI_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define TL_API __attribute__((visibility("default")))
#else
#define TL_API
#endif

#ifdef __cplusplus
#define TL_STATIC_ASSERT(cond, msg) static_assert(cond, msg)
extern "C" {
#else
#define TL_STATIC_ASSERT(cond, msg) _Static_assert(cond, msg)
#endif

#define TL_ABI_VERSION    1u
#define TL_LAST_ERROR_CAP 256u /* bytes of the error slot, its terminating NUL included */

/* The numbers are part of the ABI: they never change and are never reused. */
typedef int32_t tl_status;
enum {
    TL_OK = 0,
    TL_EINVAL = 1,       /* an argument is outside its documented range */
    TL_ENOMEM = 2,       /* the allocator hook answered NULL */
    TL_ESHAPE = 3,       /* dimensions disagree */
    TL_EDTYPE = 4,       /* element types disagree */
    TL_EFULL = 5,        /* no room: blocks of a pool, bytes of a buffer */
    TL_ENOTFOUND = 6,    /* a lookup missed; the error slot is left alone */
    TL_EFORMAT = 7,      /* bytes from outside that break the format's rules */
    TL_EBUSY = 8,        /* somebody else holds it */
    TL_EUNSUPPORTED = 9, /* well formed, but not in this version */
    TL_EIO = 10          /* the system refused to read or write */
};

/* Element types. A pool stores TL_F16 only; the others are names the wire format reserves. */
typedef int32_t tl_dtype;
enum {
    TL_F32 = 0,
    TL_F16 = 1,
    TL_BF16 = 2,
    TL_F8_E4M3 = 3,
    TL_F8_E5M2 = 4,
    TL_I8 = 5,
    TL_U8 = 6,
    TL_I32 = 7,
    TL_Q4_G = 8
};

/* The ABI this library was built with; a program compares it with its TL_ABI_VERSION. */
TL_API uint32_t tl_abi_version(void);

/* "TL_OK", "TL_EINVAL", ...; "TL_UNKNOWN" for any other value. Never NULL; static storage. */
TL_API const char *tl_status_str(tl_status status);

/*
 * The calling thread's last error: "" before any, never NULL. The text belongs to the library and
 * stays valid until this thread's next tl_ call; copy it to keep it. A call that succeeds does not
 * clear the slot, and may have met and handled an error: read it only after a call that failed.
 */
TL_API const char *tl_last_error(void);

/* Sets the calling thread's slot; NULL means "". Truncated to TL_LAST_ERROR_CAP - 1 bytes. */
TL_API void tl_set_last_error(const char *msg);

/*
 * Where memory comes from. alloc gives n bytes aligned to align (a power of two) or NULL; free
 * takes back what alloc gave and ignores NULL. Both are called with user, from whichever thread
 * made the tl_ call.
 */
typedef struct {
    void *(*alloc)(void *user, size_t n, size_t align);
    void (*free)(void *user, void *p);
    void *user;
} tl_allocator;

/*
 * Installs a hook (copied); NULL goes back to malloc. TL_EINVAL when a function is missing, and
 * the old hook stays. For the whole process: set it before the first object is made and change it
 * only while none made through the old hook is alive. Not safe against concurrent tl_ calls.
 */
TL_API tl_status tl_set_allocator(const tl_allocator *hook);

/*
 * Memory from the hook. NULL, with the slot set, when n is 0, align is not a power of two, or the
 * hook answers NULL. The contents are undefined. tl_free(NULL) does nothing.
 */
TL_API void *tl_alloc(size_t n, size_t align);
TL_API void tl_free(void *p);

#ifdef __cplusplus
}
#endif

#if UINTPTR_MAX == 0xFFFFFFFFFFFFFFFFu
TL_STATIC_ASSERT(sizeof(tl_allocator) == 24, "tl_allocator is 24 bytes in this ABI");
#endif

#endif /* TINYLLM_ABI_H */
