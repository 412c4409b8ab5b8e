/* test_ids.c - ids.h, the index of ids whose keys lie elsewhere, against an array that says where
 * every id is. */
#include "ds/ids.h"
#include "tl_test.h"

#include <string.h>

enum { N = 600 };

/* The owner: a key for each id. A hash that keeps only a few of the key's bits where homes come
 * from makes groups overflow, which ids of a good hash hardly ever do. */
typedef struct {
    uint64_t keys[N];
    int present[N];
} owner;

static int same_key(const void *o, uint32_t id, const void *key) {
    return ((const owner *)o)->keys[id] == *(const uint64_t *)key;
}

static uint64_t spread(uint64_t key) {
    key *= 0x9E3779B97F4A7C15u;
    return key ^ key >> 29;
}

static uint64_t crowded(uint64_t key) { /* three homes, 255 tags */
    return (key % 3) << 62 | (spread(key) & 0xFF);
}

static uint64_t one_tag(uint64_t key) {
    return spread(key) & ~(uint64_t)0xFF;
}

static void churn(size_t made_for, uint64_t (*hash)(uint64_t), uint64_t seed) {
    tl_ids t;
    TL_CHECK(tl_ids_make(&t, made_for));
    static owner o;
    memset(&o, 0, sizeof o);
    for (uint32_t id = 0; id < N; id++) {
        o.keys[id] = id * 7u + 1;
    }
    size_t n = 0;
    uint64_t r = seed;
    for (int step = 0; step < 40000; step++) {
        r = r * 6364136223846793005u + 1442695040888963407u;
        const uint32_t id = (uint32_t)(r >> 33) % N;
        const uint64_t h = hash(o.keys[id]);
        TL_EQ(tl_ids_find(&t, h, same_key, &o, &o.keys[id]), o.present[id] ? id : TL_IDS_NONE);
        if (o.present[id]) {
            tl_ids_remove(&t, h, id);
            o.present[id] = 0;
            n--;
        } else if (n < made_for) {
            tl_ids_add(&t, h, id);
            o.present[id] = 1;
            n++;
        }
    }
    for (uint32_t id = 0; id < N; id++) { /* emptied, it is as new: no count is left behind */
        if (o.present[id]) {
            tl_ids_remove(&t, hash(o.keys[id]), id);
        }
    }
    for (size_t g = 0; g < t.n_groups; g++) {
        for (int i = 0; i < 16; i++) {
            TL_EQ(t.groups[g].tags[i], 0);
        }
    }
    tl_ids_free(&t);
    TL_CHECK(t.groups == NULL);
}

TL_TEST(random_operations_agree_with_an_array) {
    static const size_t sizes[] = {1, 9, 10, 100, 255, N};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        churn(sizes[i], spread, i + 1);
        churn(sizes[i], one_tag, i + 1);
    }
}

/* Fewer keys than a count can hold, so that all of them come back down. */
TL_TEST(keys_that_all_want_three_groups_are_found) {
    churn(100, crowded, 1);
    churn(240, crowded, 2);
}

TL_TEST(an_absent_id_is_not_taken_out) {
    tl_ids t;
    TL_CHECK(tl_ids_make(&t, 4));
    tl_ids_add(&t, 5, 2);
    tl_ids_remove(&t, 5, 3);
    const uint32_t two = 2;
    TL_EQ(tl_ids_find(&t, 5, tl_ids_is, NULL, &two), 2);
    tl_ids_free(&t);
    tl_ids_free(&t); /* twice is as good as once */
}
