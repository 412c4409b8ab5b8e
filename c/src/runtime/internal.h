/*
 * internal.h - what the library's own files share beyond the public headers: failing with a text,
 * and memory for large arrays. Nothing here is exported.
 */
#ifndef TL_RUNTIME_INTERNAL_H
#define TL_RUNTIME_INTERNAL_H

#include "tinyllm/abi.h"

#if defined(__GNUC__) || defined(__clang__)
#define TL_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define TL_LIKELY(x)         __builtin_expect(!!(x), 1)
#define TL_UNLIKELY(x)       __builtin_expect(!!(x), 0)
#define TL_PREFETCH(p)       __builtin_prefetch((p), 1)
#define TL_COLD              __attribute__((cold, noinline))
#else
#define TL_PRINTF(fmt, args)
#define TL_LIKELY(x)   (x)
#define TL_UNLIKELY(x) (x)
#define TL_PREFETCH(p) ((void)(p))
#define TL_COLD
#endif

/* Sets the error slot to the formatted text. Texts start with the name of the public function, then
 * say what was expected and found. */
TL_COLD void tl_errorf(const char *fmt, ...) TL_PRINTF(1, 2);

/* The same, as the value status: `return tl_fail(TL_EINVAL, "tl_kv_alloc: ids is NULL")`. */
#define tl_fail(status, ...) (tl_errorf(__VA_ARGS__), (status))

/*
 * tl_alloc for an array that may be large and is visited at random. From TL_HUGE_PAGE bytes up it
 * is aligned to a huge page and, if `huge`, the system is advised to back it with huge pages: one
 * TLB entry then covers what 512 did. Touches no page.
 */
#define TL_HUGE_PAGE ((size_t)2 << 20)
void *tl_alloc_array(size_t n_bytes, int huge);

/* *out = a * b, or 0 when that overflows size_t. */
int tl_mul_size(size_t a, size_t b, size_t *out);

/* Fills n bytes, up to 256, that nobody outside the process can guess. 0 when the system has none
 * to give: then they come from clock and address layout, good enough to spread a table, not to keep
 * a secret. */
int tl_secret(void *out, size_t n);

#endif /* TL_RUNTIME_INTERNAL_H */
