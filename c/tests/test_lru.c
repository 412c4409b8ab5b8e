/* test_lru.c - tl_lru against an array that moves its elements by hand. */
#include "tinyllm/ds.h"
#include "tl_test.h"

#include <string.h>

typedef struct {
    uint32_t before; /* the node is not the first field: TL_CONTAINER_OF has something to do */
    tl_list_node node;
    uint32_t number;
} record;

enum { N = 16 };

static void expect_order(const tl_lru *l, const uint32_t *order, size_t n) {
    TL_EQ(l->len, n);
    const tl_list_node *at = l->head.next;
    for (size_t i = 0; i < n; i++, at = at->next) {
        TL_EQ(TL_CONTAINER_OF(at, record, node)->number, order[i]);
        TL_PTR_EQ(at->next->prev, at);
    }
    TL_PTR_EQ(at, &l->head);
}

static void expect_unlinked(const tl_list_node *n) {
    TL_PTR_EQ(n->prev, NULL);
    TL_PTR_EQ(n->next, NULL);
}

TL_TEST(random_operations_agree_with_an_array) {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        record r[N];
        memset(r, 0, sizeof r);
        for (uint32_t i = 0; i < N; i++)
            r[i].number = i;
        tl_lru l;
        memset(&l, 0xEE, sizeof l);
        tl_lru_init(&l);
        uint32_t order[N + 1];
        size_t n = 0;
        uint64_t rng = seed;
        for (int step = 0; step < 2000; step++) {
            tl_test_context("seed %llu, step %d", (unsigned long long)seed, step);
            const uint32_t i = tl_test_below(&rng, N), op = tl_test_below(&rng, 4);
            size_t at = 0;
            while (at < n && order[at] != i)
                at++;
            if (op == 3) {
                tl_list_node *popped = tl_lru_pop_oldest(&l);
                if (n == 0) {
                    TL_PTR_EQ(popped, NULL);
                } else {
                    TL_EQ(TL_CONTAINER_OF(popped, record, node)->number, order[0]);
                    expect_unlinked(popped);
                    memmove(order, order + 1, --n * sizeof order[0]);
                }
            } else {
                if (op == 2)
                    tl_lru_remove(&l, &r[i].node);
                else
                    tl_lru_touch(&l, &r[i].node);
                if (at < n)
                    memmove(order + at, order + at + 1, (--n - at) * sizeof order[0]);
                if (op == 2)
                    expect_unlinked(&r[i].node);
                else
                    order[n++] = i;
            }
            expect_order(&l, order, n);
        }
    }
    tl_test_context("%s", "");
}

TL_TEST(a_node_in_no_list_is_left_alone) {
    tl_lru l;
    tl_lru_init(&l);
    record a = {0, {NULL, NULL}, 1}, b = {0, {NULL, NULL}, 2};
    tl_lru_remove(&l, &a.node);
    TL_EQ(l.len, 0);
    tl_lru_touch(&l, &b.node);
    tl_lru_remove(&l, &a.node);
    TL_EQ(l.len, 1);
    expect_unlinked(&a.node);
    tl_lru_remove(&l, &b.node);
    tl_lru_remove(&l, &b.node);
    TL_EQ(l.len, 0);
    TL_PTR_EQ(tl_lru_pop_oldest(&l), NULL);
}

TL_TEST(touching_the_newest_changes_nothing) {
    tl_lru l;
    tl_lru_init(&l);
    record r[2] = {{0, {NULL, NULL}, 0}, {0, {NULL, NULL}, 1}};
    static const uint32_t order[] = {0, 1};
    tl_lru_touch(&l, &r[0].node);
    tl_lru_touch(&l, &r[1].node);
    tl_lru_touch(&l, &r[1].node);
    expect_order(&l, order, 2);
}

TL_TEST(null_arguments_are_ignored) {
    tl_lru l;
    record a = {0, {NULL, NULL}, 1};
    tl_lru_init(NULL);
    tl_lru_init(&l);
    tl_lru_touch(&l, NULL);
    tl_lru_touch(NULL, &a.node);
    tl_lru_remove(&l, NULL);
    tl_lru_remove(NULL, &a.node);
    TL_PTR_EQ(tl_lru_pop_oldest(NULL), NULL);
    TL_EQ(l.len, 0);
    expect_unlinked(&a.node);
}
