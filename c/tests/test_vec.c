/* test_vec.c - tl_vec against a plain array. */
#include "tinyllm/ds.h"
#include "tl_count_alloc.h"
#include "tl_test.h"

#include <string.h>

static tl_vec vec_of(size_t elem) {
    tl_vec v;
    TL_OK_(tl_vec_init(&v, elem));
    return v;
}

/* A call that is refused says which function it was, and the vector stays as it was. */
#define REFUSED(v, call, status, name)                                                             \
    do {                                                                                           \
        const tl_vec before = v;                                                                   \
        tl_set_last_error(NULL);                                                                   \
        TL_STATUS(call, status);                                                                   \
        TL_CHECK(strncmp(tl_last_error(), name, strlen(name)) == 0);                               \
        TL_MEM_EQ(&v, &before, sizeof v);                                                          \
    } while (0)

TL_TEST(init_makes_an_empty_vector_and_allocates_nothing) {
    tl_vec v = vec_of(12);
    TL_EQ(v.len, 0);
    TL_EQ(v.cap, 0);
    TL_EQ(v.elem, 12);
    TL_PTR_EQ(tl_vec_at(&v, 0), NULL);
    TL_EQ(tl_count_allocs(), 0);
    tl_vec_free(&v);
    REFUSED(v, tl_vec_init(&v, 0), TL_EINVAL, "tl_vec_init");
    TL_STATUS(tl_vec_init(NULL, 4), TL_EINVAL);
}

TL_TEST(push_keeps_every_element_in_order) {
    static const size_t sizes[] = {1, 3, 4, 8, 24};
    for (size_t s = 0; s < 5; s++) {
        const size_t elem = sizes[s];
        tl_vec v = vec_of(elem);
        for (size_t i = 0; i < 1000; i++) {
            unsigned char x[24];
            memset(x, (int)(i % 251), sizeof x);
            TL_OK_(tl_vec_push(&v, x));
            TL_EQ(v.len, i + 1);
            TL_CHECK(v.cap >= v.len);
        }
        for (size_t i = 0; i < 1000; i++) {
            unsigned char *x = tl_vec_at(&v, i);
            TL_PTR_EQ(x, (unsigned char *)v.data + i * elem);
            for (size_t j = 0; j < elem; j++)
                TL_EQ(x[j], i % 251);
        }
        tl_vec_free(&v);
        TL_EQ(tl_count_live(), 0);
        TL_EQ(v.elem, elem);
        TL_EQ(v.len + v.cap, 0);
        TL_OK_(tl_vec_push(&v, "and on it goes, 24 bytes of it"));
        tl_vec_free(&v);
        tl_vec_free(&v);
    }
}

TL_TEST(push_at_least_doubles) {
    tl_vec v = vec_of(4);
    uint32_t x = 0;
    size_t growths = 0, cap = 0;
    for (; x < 100000; x++) {
        TL_OK_(tl_vec_push(&v, &x));
        if (v.cap != cap) {
            TL_CHECK(v.cap >= 2 * cap);
            cap = v.cap;
            growths++;
        }
    }
    TL_CHECK(growths <= 17);
    TL_EQ(tl_count_allocs(), growths);
    tl_vec_free(&v);
}

TL_TEST(an_element_of_the_vector_itself_can_be_pushed) {
    tl_vec v = vec_of(8);
    for (uint64_t i = 0; i < 500; i++) {
        /* Pushing element i / 2 makes element i + 1 its copy, across every growth. */
        const uint64_t first = 0xABCD;
        TL_OK_(tl_vec_push(&v, i == 0 ? &first : tl_vec_at(&v, (size_t)i / 2)));
        TL_EQ(*(uint64_t *)tl_vec_at(&v, (size_t)i), 0xABCD);
    }
    tl_vec_free(&v);
}

TL_TEST(reserve_makes_room_and_never_shrinks) {
    tl_vec v = vec_of(4);
    TL_OK_(tl_vec_reserve(&v, 0));
    TL_OK_(tl_vec_reserve(&v, 100));
    TL_CHECK(v.cap >= 100);
    TL_EQ(v.len, 0);
    const tl_vec before = v;
    const uint64_t allocs = tl_count_allocs();
    TL_OK_(tl_vec_reserve(&v, 10));
    TL_OK_(tl_vec_reserve(&v, 100));
    for (uint32_t i = 0; i < 100; i++)
        TL_OK_(tl_vec_push(&v, &i));
    TL_PTR_EQ(v.data, before.data);
    TL_EQ(v.cap, before.cap);
    TL_EQ(tl_count_allocs(), allocs);
    TL_OK_(tl_vec_reserve(&v, 1000));
    for (uint32_t i = 0; i < 100; i++)
        TL_EQ(*(uint32_t *)tl_vec_at(&v, i), i);
    /* Shortening len is the caller's right: that is how a stack pops. */
    v.len = 50;
    const uint32_t x = 77;
    TL_OK_(tl_vec_push(&v, &x));
    TL_EQ(*(uint32_t *)tl_vec_at(&v, 50), 77);
    tl_vec_free(&v);
}

TL_TEST(at_past_the_end_is_null_with_the_slot_set) {
    tl_vec v = vec_of(4);
    const uint32_t x = 1;
    TL_OK_(tl_vec_push(&v, &x));
    TL_CHECK(v.cap > 1);
    static const size_t bad[] = {1, 2, SIZE_MAX};
    for (size_t i = 0; i < 3; i++) {
        tl_set_last_error(NULL);
        TL_PTR_EQ(tl_vec_at(&v, bad[i]), NULL);
        TL_CHECK(strncmp(tl_last_error(), "tl_vec_at", 9) == 0);
    }
    TL_PTR_EQ(tl_vec_at(NULL, 0), NULL);
    tl_vec_free(&v);
    tl_vec_free(NULL);
}

TL_TEST(a_failed_growth_changes_nothing) {
    tl_vec v = vec_of(4);
    uint32_t x = 0;
    tl_count_fail_at(1);
    REFUSED(v, tl_vec_push(&v, &x), TL_ENOMEM, "tl_vec_");
    for (; v.len == 0 || v.len < v.cap; x++)
        TL_OK_(tl_vec_push(&v, &x));
    tl_count_fail_at(1);
    REFUSED(v, tl_vec_push(&v, &x), TL_ENOMEM, "tl_vec_");
    tl_count_fail_at(1);
    REFUSED(v, tl_vec_reserve(&v, v.cap + 1), TL_ENOMEM, "tl_vec_reserve");
    for (size_t i = 0; i < v.len; i++)
        TL_EQ(*(uint32_t *)tl_vec_at(&v, i), i);
    TL_OK_(tl_vec_push(&v, &x));
    TL_EQ(*(uint32_t *)tl_vec_at(&v, v.len - 1), x);
    tl_vec_free(&v);
}

TL_TEST(impossible_requests_are_einval) {
    tl_vec v = vec_of(16);
    REFUSED(v, tl_vec_reserve(&v, SIZE_MAX), TL_EINVAL, "tl_vec_reserve");
    REFUSED(v, tl_vec_reserve(&v, SIZE_MAX / 16 + 1), TL_EINVAL, "tl_vec_reserve");
    REFUSED(v, tl_vec_push(&v, NULL), TL_EINVAL, "tl_vec_push");
    TL_STATUS(tl_vec_push(NULL, &v), TL_EINVAL);
    TL_STATUS(tl_vec_reserve(NULL, 1), TL_EINVAL);
    tl_vec zeroed;
    memset(&zeroed, 0, sizeof zeroed);
    REFUSED(zeroed, tl_vec_reserve(&zeroed, 1), TL_EINVAL, "tl_vec_reserve");
    REFUSED(zeroed, tl_vec_push(&zeroed, &v), TL_EINVAL, "tl_vec_push");
    TL_EQ(tl_count_allocs(), 0);
}
