/*
 * tl_test.h - the test helper. A test is a named function body; it registers itself, so a test
 * program is any number of C files linked with tl_test.c and tl_count_alloc.c:
 *
 *     #include "tl_test.h"
 *
 *     TL_TEST(an_empty_pool_has_no_room) {
 *         TL_EQ(1 + 1, 2);
 *         TL_STATUS(tl_kv_alloc(p, 1, &id), TL_EFULL);
 *     }
 *
 * A failed check prints its place, its expression and both values and ends that test; the others
 * still run. Every test runs on the counting allocator and fails when it leaves memory allocated.
 *
 * The program:   PROG [NAME...]        runs all tests, or the named ones
 *                PROG --list           their names, one a line
 *                PROG --catalog        what is written about them, as JSON
 *                PROG --seed N         random tests run this one seed (see tl_test_seed)
 *                PROG --isolate        each test in a process of its own: a crash or a hang is one
 *                                      failed test, not the end of the run
 *                PROG --timeout S      seconds a test may take (default 60; with --isolate)
 * One line a test; the last line is "N passed, N failed"; the exit code is the verdict.
 */
#ifndef TL_TEST_H
#define TL_TEST_H

#include "tinyllm/abi.h"

#include <stddef.h>
#include <stdint.h>

/* ---- defining tests ------------------------------------------------------------------------ */

typedef struct tl_test_case {
    const char *name, *file;
    int line;
    void (*fn)(void);
    const char *kind, *checks, *why; /* for people */
    const char *catches;             /* ids of the planted bugs it must catch, space-separated */
    struct tl_test_case *next;
} tl_test_case;

void tl_test_add(tl_test_case *c);

#define TL_TEST_DOC(name_, kind_, checks_, why_, catches_)                                         \
    static void name_(void);                                                                       \
    static tl_test_case name_##_case = {#name_,  __FILE__, __LINE__, name_, kind_,                 \
                                        checks_, why_,     catches_, NULL};                        \
    __attribute__((constructor)) static void name_##_add(void) {                                   \
        tl_test_add(&name_##_case);                                                                \
    }                                                                                              \
    static void name_(void)

#define TL_TEST(name_) TL_TEST_DOC(name_, "unit", "", "", "")

/* ---- checks -------------------------------------------------------------------------------- */

_Noreturn void tl_test_fail(const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Ends the test as skipped: neither passed nor failed, with the reason printed. */
_Noreturn void tl_test_skip(const char *why);

void tl_test_eq(const char *file, int line, const char *a_text, const char *b_text, uint64_t a,
                uint64_t b);
void tl_test_status(const char *file, int line, const char *text, tl_status got, tl_status want);
void tl_test_str(const char *file, int line, const char *text, const char *got, const char *want);
void tl_test_mem(const char *file, int line, const char *text, const void *got, const void *want,
                 size_t n);

#define TL_CHECK(cond)                                                                             \
    do {                                                                                           \
        if (!(cond))                                                                               \
            tl_test_fail(__FILE__, __LINE__, "%s does not hold", #cond);                           \
    } while (0)

/* Integers and pointers-as-integers; both are compared as uint64_t. */
#define TL_EQ(a, b) tl_test_eq(__FILE__, __LINE__, #a, #b, (uint64_t)(a), (uint64_t)(b))
#define TL_PTR_EQ(a, b)                                                                            \
    tl_test_eq(__FILE__, __LINE__, #a, #b, (uint64_t)(uintptr_t)(a), (uint64_t)(uintptr_t)(b))
/* A call and the status it must return; shows the error slot when it returns another. */
#define TL_STATUS(call, want)   tl_test_status(__FILE__, __LINE__, #call, (call), (want))
#define TL_OK_(call)            TL_STATUS(call, TL_OK)
#define TL_STR_EQ(got, want)    tl_test_str(__FILE__, __LINE__, #got, (got), (want))
#define TL_MEM_EQ(got, want, n) tl_test_mem(__FILE__, __LINE__, #got, (got), (want), (n))

/* What a failing check should say besides: the seed, the step, the byte. "" forgets it. */
void tl_test_context(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* 1 in a program built with AddressSanitizer or ThreadSanitizer: their allocators touch memory of
 * their own, and time means little. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TL_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TL_TEST_SANITIZED 1
#endif
#endif
#ifndef TL_TEST_SANITIZED
#define TL_TEST_SANITIZED 0
#endif

/* ---- randomness ---------------------------------------------------------------------------- */

/* 1 and *seed when --seed was given. A random test runs its own list of seeds otherwise. */
int tl_test_seed(uint64_t *seed);

/* splitmix64: every seed gives a good sequence, 0 too. */
static inline uint64_t tl_test_rand(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Uniform enough in 0..n-1; n at least 1. */
static inline uint32_t tl_test_below(uint64_t *state, uint32_t n) {
    return (uint32_t)((tl_test_rand(state) >> 32) * n >> 32);
}

#endif /* TL_TEST_H */
