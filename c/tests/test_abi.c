/* test_abi.c - status names, the error slot, the allocator hook: c/ABI.md held to its word. */
#include "tinyllm/abi.h"
#include "tl_count_alloc.h"
#include "tl_test.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

TL_TEST(the_library_has_the_abi_of_its_header) {
    TL_EQ(tl_abi_version(), TL_ABI_VERSION);
    TL_EQ(TL_ABI_VERSION, 1);
}

TL_TEST(numbers_of_the_abi_never_change) {
    static const int32_t status[] = {TL_OK,     TL_EINVAL,       TL_ENOMEM,    TL_ESHAPE,
                                     TL_EDTYPE, TL_EFULL,        TL_ENOTFOUND, TL_EFORMAT,
                                     TL_EBUSY,  TL_EUNSUPPORTED, TL_EIO};
    for (int32_t i = 0; i < 11; i++)
        TL_EQ(status[i], i);
    static const int32_t dtype[] = {TL_F32, TL_F16, TL_BF16, TL_F8_E4M3, TL_F8_E5M2,
                                    TL_I8,  TL_U8,  TL_I32,  TL_Q4_G};
    for (int32_t i = 0; i < 9; i++)
        TL_EQ(dtype[i], i);
}

TL_TEST(every_status_has_a_name) {
    static const char *const name[] = {"TL_OK",     "TL_EINVAL",       "TL_ENOMEM",    "TL_ESHAPE",
                                       "TL_EDTYPE", "TL_EFULL",        "TL_ENOTFOUND", "TL_EFORMAT",
                                       "TL_EBUSY",  "TL_EUNSUPPORTED", "TL_EIO"};
    for (int32_t i = 0; i < 11; i++)
        TL_STR_EQ(tl_status_str(i), name[i]);
    static const int32_t unknown[] = {-1, 11, 12, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < 5; i++)
        TL_STR_EQ(tl_status_str(unknown[i]), "TL_UNKNOWN");
}

TL_TEST(the_error_slot_keeps_what_it_is_told) {
    TL_STR_EQ(tl_last_error(), "");
    tl_set_last_error("disk on fire");
    TL_STR_EQ(tl_last_error(), "disk on fire");
    tl_set_last_error(NULL);
    TL_STR_EQ(tl_last_error(), "");
}

TL_TEST(the_error_slot_truncates_to_its_capacity) {
    char text[TL_LAST_ERROR_CAP + 50];
    memset(text, 'x', sizeof text);
    for (size_t n = TL_LAST_ERROR_CAP - 3; n < sizeof text; n++) {
        text[n] = 0;
        tl_set_last_error(text);
        TL_EQ(strlen(tl_last_error()), n < TL_LAST_ERROR_CAP - 1 ? n : TL_LAST_ERROR_CAP - 1);
        TL_CHECK(strncmp(tl_last_error(), text, TL_LAST_ERROR_CAP - 1) == 0);
        text[n] = 'x';
    }
}

TL_TEST(the_error_slot_can_be_set_from_itself) {
    tl_set_last_error("outer: inner: reason");
    tl_set_last_error(tl_last_error());
    TL_STR_EQ(tl_last_error(), "outer: inner: reason");
    tl_set_last_error(tl_last_error() + 7);
    TL_STR_EQ(tl_last_error(), "inner: reason");
}

static void *slot_of_another_thread(void *seen) {
    *(int *)seen = strcmp(tl_last_error(), "") == 0;
    tl_set_last_error("theirs");
    *(int *)seen += strcmp(tl_last_error(), "theirs") == 0;
    return NULL;
}

TL_TEST(every_thread_has_a_slot_of_its_own) {
    pthread_t t;
    int seen = 0;
    tl_set_last_error("mine");
    TL_EQ(pthread_create(&t, NULL, slot_of_another_thread, &seen), 0);
    TL_EQ(pthread_join(t, NULL), 0);
    TL_EQ(seen, 2);
    TL_STR_EQ(tl_last_error(), "mine");
}

TL_TEST(alloc_gives_aligned_memory_of_the_hook) {
    for (size_t align = 1; align <= 4096; align *= 2) {
        unsigned char *p = tl_alloc(100, align);
        TL_CHECK(p != NULL);
        TL_EQ((uintptr_t)p % align, 0);
        TL_EQ(tl_count_live(), 1);
        TL_EQ(tl_count_live_bytes(), 100);
        memset(p, 1, 100);
        tl_free(p);
        TL_EQ(tl_count_live(), 0);
    }
    tl_free(NULL);
}

TL_TEST(alloc_refuses_what_is_no_request) {
    static const struct {
        size_t n, align;
    } bad[] = {{0, 8}, {8, 0}, {8, 3}, {8, 12}, {0, 0}, {8, SIZE_MAX}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tl_set_last_error(NULL);
        TL_PTR_EQ(tl_alloc(bad[i].n, bad[i].align), NULL);
        TL_CHECK(strncmp(tl_last_error(), "tl_alloc", 8) == 0);
    }
    TL_EQ(tl_count_allocs(), 0);
}

TL_TEST(alloc_says_when_the_hook_refuses) {
    tl_set_last_error(NULL);
    tl_count_fail_at(1);
    TL_PTR_EQ(tl_alloc(8, 8), NULL);
    TL_CHECK(strncmp(tl_last_error(), "tl_alloc", 8) == 0);
    void *p = tl_alloc(8, 8);
    TL_CHECK(p != NULL);
    tl_free(p);
}

typedef struct {
    int allocs, frees;
    size_t n, align;
} log_of_calls;

static void *logging_alloc(void *user, size_t n, size_t align) {
    log_of_calls *log = user;
    log->allocs++;
    log->n = n;
    log->align = align;
    return malloc(n);
}

static void logging_free(void *user, void *p) {
    ((log_of_calls *)user)->frees++;
    free(p);
}

TL_TEST(a_hook_gets_its_user_pointer_and_the_request) {
    log_of_calls log = {0, 0, 0, 0};
    tl_allocator hook = {logging_alloc, logging_free, &log};
    TL_OK_(tl_set_allocator(&hook));
    memset(&hook, 0, sizeof hook); /* it was copied */
    void *p = tl_alloc(24, 16);
    TL_CHECK(p != NULL);
    TL_EQ(log.allocs, 1);
    TL_EQ(log.n, 24);
    TL_EQ(log.align, 16);
    tl_free(p);
    tl_free(NULL);
    TL_EQ(log.frees, 1);

    /* A hook without a function is refused, and the old one stays. */
    const tl_allocator no_alloc = {NULL, logging_free, NULL}, no_free = {logging_alloc, NULL, NULL};
    TL_STATUS(tl_set_allocator(&no_alloc), TL_EINVAL);
    TL_CHECK(strncmp(tl_last_error(), "tl_set_allocator", 16) == 0);
    TL_STATUS(tl_set_allocator(&no_free), TL_EINVAL);
    p = tl_alloc(8, 8);
    TL_EQ(log.allocs, 2);
    tl_free(p);

    /* NULL is malloc again. */
    TL_OK_(tl_set_allocator(NULL));
    for (size_t align = 1; align <= 4096; align *= 2) {
        p = tl_alloc(8, align);
        TL_CHECK(p != NULL && (uintptr_t)p % align == 0);
        tl_free(p);
    }
    TL_EQ(log.allocs, 2);
    TL_EQ(log.frees, 2);
}
