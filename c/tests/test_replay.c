/* test_replay.c - stack distances and eviction policies against what they are defined to be. */
#include "tinyllm/replay.h"

#include "tl_count_alloc.h"
#include "tl_test.h"

#include <math.h>
#include <string.h>

enum { MAX = 4096 };

/* A list of keys, newest first: what tl_stack is, in the plainest way. */
typedef struct {
    uint64_t key[MAX];
    double first[MAX], last[MAX];
    size_t n;
} plain;

static size_t plain_find(const plain *p, uint64_t key) {
    size_t i = 0;
    while (i < p->n && p->key[i] != key)
        i++;
    return i;
}

static void plain_touch(plain *p, uint64_t key, double now) {
    size_t at = plain_find(p, key);
    const double first = at < p->n ? p->first[at] : now;
    if (at == p->n)
        p->n++;
    for (; at > 0; at--) {
        p->key[at] = p->key[at - 1];
        p->first[at] = p->first[at - 1];
        p->last[at] = p->last[at - 1];
    }
    p->key[0] = key;
    p->first[0] = first;
    p->last[0] = now;
}

TL_TEST(depths_and_stamps_agree_with_a_list) {
    static plain p;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        uint64_t rng = seed;
        tl_stack *s;
        TL_STATUS(tl_stack_create((size_t)1 << 20, &s), TL_OK);
        p.n = 0;
        const uint32_t universe = seed % 2 ? 60 : 3000;
        for (int step = 0; step < 1500; step++) {
            tl_test_context("seed %llu, step %d", (unsigned long long)seed, step);
            uint64_t keys[40], depths[40];
            double stamps[40];
            const size_t n = tl_test_below(&rng, 41);
            const uint64_t base = tl_test_below(&rng, universe);
            for (size_t i = 0; i < n; i++) /* runs, repeats among them, and single keys */
                keys[i] = tl_test_below(&rng, 4) ? base + i : tl_test_below(&rng, universe);
            TL_STATUS(tl_stack_use(s, keys, n, step, depths, stamps), TL_OK);
            for (size_t i = 0; i < n; i++) {
                const size_t at = plain_find(&p, keys[i]);
                TL_EQ(depths[i], at < p.n ? at + 1 : 0);
                if (at < p.n) {
                    TL_CHECK(stamps[i] == p.last[at]);
                } else {
                    TL_CHECK(isnan(stamps[i]));
                }
            }
            for (size_t i = n; i-- > 0;)
                plain_touch(&p, keys[i], step);
            TL_EQ(tl_stack_len(s), p.n);
            if (step % 50 == 0 && p.n > 0) {
                const size_t depth = 1 + tl_test_below(&rng, (uint32_t)p.n);
                uint64_t key[8];
                double first[8], last[8];
                const size_t got = tl_stack_read(s, depth, 8, key, first, last);
                TL_EQ(got, p.n - depth + 1 < 8 ? p.n - depth + 1 : 8);
                for (size_t i = 0; i < got; i++) {
                    TL_EQ(key[i], p.key[depth - 1 + i]);
                    TL_CHECK(first[i] == p.first[depth - 1 + i]);
                    TL_CHECK(last[i] == p.last[depth - 1 + i]);
                }
            }
        }
        tl_stack_destroy(s);
    }
}

TL_TEST(what_is_deeper_than_max_keys_is_forgotten_and_nothing_else) {
    static plain p;
    enum { KEEP = 500 };
    tl_stack *s;
    TL_STATUS(tl_stack_create(KEEP, &s), TL_OK);
    uint64_t rng = 7;
    p.n = 0;
    size_t most = 0;
    for (int step = 0; step < 60000; step++) {
        const uint64_t key = tl_test_below(&rng, tl_test_below(&rng, 3) ? 400 : 4000);
        uint64_t depth;
        TL_STATUS(tl_stack_use(s, &key, 1, step, &depth, NULL), TL_OK);
        const size_t at = plain_find(&p, key);
        if (at < KEEP && at < p.n) {
            TL_EQ(depth, at + 1);
        } else {
            TL_CHECK(depth == 0 || depth == at + 1);
        }
        plain_touch(&p, key, step);
        most = tl_stack_len(s) > most ? tl_stack_len(s) : most;
    }
    TL_CHECK(most < 20000);
    TL_CHECK(p.n > 3500);
    tl_stack_destroy(s);
}

TL_TEST(a_stack_that_gets_no_memory_stays_as_it_was) {
    for (uint64_t fail = 1; fail < 40; fail++) {
        tl_stack *s = NULL;
        tl_count_fail_at(fail);
        tl_status st = tl_stack_create(1 << 20, &s);
        uint64_t keys[64], depths[64];
        size_t len = 0;
        for (uint64_t r = 0; st == TL_OK && r < 400; r++) {
            for (uint64_t i = 0; i < 64; i++)
                keys[i] = r * 64 + i;
            len = tl_stack_len(s);
            st = tl_stack_use(s, keys, 64, 0, depths, NULL);
        }
        tl_count_fail_at(0);
        if (st != TL_OK) {
            TL_EQ(st, TL_ENOMEM);
        }
        if (s != NULL) {
            if (st != TL_OK) {
                TL_EQ(tl_stack_len(s), len);
                TL_STATUS(tl_stack_use(s, keys, 64, 0, depths, NULL), TL_OK);
                for (int i = 0; i < 64; i++)
                    TL_EQ(depths[i], 0);
            }
            TL_STATUS(tl_stack_use(s, keys, 64, 0, depths, NULL), TL_OK);
            for (uint64_t i = 0; i < 64; i++)
                TL_EQ(depths[i], i + 1);
        }
        tl_stack_destroy(s);
    }
}

TL_TEST(stack_arguments_are_checked) {
    tl_stack *s;
    uint64_t key = 1;
    TL_STATUS(tl_stack_create(1, NULL), TL_EINVAL);
    TL_STATUS(tl_stack_create(0, &s), TL_EINVAL);
    TL_PTR_EQ(s, NULL);
    TL_STATUS(tl_stack_use(NULL, &key, 1, 0, NULL, NULL), TL_EINVAL);
    TL_STATUS(tl_stack_create(1, &s), TL_OK);
    TL_STATUS(tl_stack_use(s, NULL, 1, 0, NULL, NULL), TL_EINVAL);
    TL_STATUS(tl_stack_use(s, NULL, 0, 0, NULL, NULL), TL_OK);
    TL_EQ(tl_stack_len(s), 0);
    TL_EQ(tl_stack_read(s, 1, 5, NULL, NULL, NULL), 0);
    TL_EQ(tl_stack_len(NULL), 0);
    tl_stack_destroy(s);
    tl_stack_destroy(NULL);
}

/* ---- policies ------------------------------------------------------------------------------- */

enum { NODES = 300, REQUESTS = 400 };

typedef struct {
    uint32_t blocks[REQUESTS * 12], parents[NODES];
    uint64_t starts[REQUESTS + 1];
    tl_trace t;
} random_trace;

/* A random tree, and requests that each follow it from a root down. */
static void make_trace(random_trace *r, uint64_t seed, uint32_t roots) {
    uint64_t rng = seed;
    uint32_t depth[NODES];
    for (uint32_t i = 0; i < NODES; i++) {
        do {
            r->parents[i] = i < roots ? UINT32_MAX : tl_test_below(&rng, i);
            depth[i] = i < roots ? 1 : depth[r->parents[i]] + 1;
        } while (depth[i] > 12);
    }
    uint64_t n = 0;
    for (uint32_t q = 0; q < REQUESTS; q++) {
        r->starts[q] = n;
        uint32_t node = tl_test_below(&rng, tl_test_below(&rng, 2) ? NODES : NODES / 6 + 1);
        const uint64_t end = n + depth[node];
        for (uint64_t i = end; i-- > n; node = r->parents[node])
            r->blocks[i] = node;
        n = end;
    }
    r->starts[REQUESTS] = n;
    r->t = (tl_trace){r->blocks, r->starts, r->parents, REQUESTS, NODES};
}

TL_TEST(lru_is_what_the_stack_says_and_nothing_beats_optimal) {
    static random_trace r;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        make_trace(&r, seed, 1 + (uint32_t)seed % 5);
        for (uint32_t capacity = 12; capacity <= NODES; capacity += 1 + capacity / 5) {
            tl_test_context("seed %llu, capacity %lu", (unsigned long long)seed,
                            (unsigned long)capacity);
            tl_stack *s;
            TL_STATUS(tl_stack_create(NODES, &s), TL_OK);
            uint64_t expected[2] = {0, 0}, hits, best, ceiling = 0;
            for (uint32_t q = 0; q < REQUESTS; q++) {
                uint64_t keys[12], depths[12];
                const uint64_t n = r.starts[q + 1] - r.starts[q];
                for (uint64_t i = 0; i < n; i++)
                    keys[i] = r.blocks[r.starts[q] + i];
                TL_STATUS(tl_stack_use(s, keys, n, 0, depths, NULL), TL_OK);
                for (uint64_t i = 0; i < n; i++) {
                    const int hit = depths[i] > 0 && depths[i] <= capacity;
                    expected[1] += (uint64_t)hit;
                    expected[0] += (uint64_t)(hit && i + 1 < n);
                    ceiling += depths[i] > 0;
                }
            }
            tl_stack_destroy(s);
            for (int last = 0; last < 2; last++) {
                TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &r.t, capacity, 0, last, &hits), TL_OK);
                TL_EQ(hits, expected[last]);
            }
            TL_STATUS(tl_policy_hits(TL_POLICY_OPTIMAL, &r.t, capacity, 0, 1, &best), TL_OK);
            TL_CHECK(best <= ceiling);
            for (tl_policy p = 0; p < TL_N_POLICIES; p++) {
                TL_STATUS(tl_policy_hits(p, &r.t, capacity, 0, 1, &hits), TL_OK);
                TL_CHECK(hits <= best);
                TL_STATUS(tl_policy_hits(p, &r.t, NODES, 0, 1, &hits), TL_OK);
                TL_EQ(hits, ceiling); /* with room for everything they are all the same */
            }
        }
    }
}

TL_TEST(optimal_is_the_best_of_all_choices) {
    /* Blocks of one each, so that a cache is a set: try every choice of what to keep. */
    enum { USES = 14, KINDS = 5, ROOM = 2 };
    for (uint64_t seed = 1; seed <= 60; seed++) {
        uint64_t rng = seed;
        uint32_t blocks[USES], parents[KINDS];
        uint64_t starts[USES + 1];
        for (uint32_t i = 0; i <= USES; i++)
            starts[i] = i;
        for (uint32_t i = 0; i < USES; i++)
            blocks[i] = tl_test_below(&rng, KINDS);
        for (uint32_t i = 0; i < KINDS; i++)
            parents[i] = UINT32_MAX;
        int best[1 << KINDS], next[1 << KINDS]; /* most hits so far, by what is cached */
        for (int set = 0; set < 1 << KINDS; set++)
            best[set] = set == 0 ? 0 : -1000;
        for (uint32_t i = 0; i < USES; i++) {
            for (int set = 0; set < 1 << KINDS; set++)
                next[set] = -1000;
            for (int set = 0; set < 1 << KINDS; set++) {
                const int hit = set >> blocks[i] & 1, with = set | 1 << blocks[i];
                for (int to = 0; to < 1 << KINDS; to++) /* any part of it that fits */
                    if ((to & ~with) == 0 && __builtin_popcount((unsigned)to) <= ROOM &&
                        best[set] + hit > next[to])
                        next[to] = best[set] + hit;
            }
            memcpy(best, next, sizeof best);
        }
        int most = 0;
        for (int set = 0; set < 1 << KINDS; set++)
            most = best[set] > most ? best[set] : most;
        const tl_trace t = {blocks, starts, parents, USES, KINDS};
        uint64_t hits;
        TL_STATUS(tl_policy_hits(TL_POLICY_OPTIMAL, &t, ROOM, 0, 1, &hits), TL_OK);
        tl_test_context("seed %llu", (unsigned long long)seed);
        TL_EQ(hits, (uint64_t)most);
    }
}

TL_TEST(policies_do_what_their_names_say) {
    const uint32_t none[4] = {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX};
    const uint64_t starts[10] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    uint64_t hits;
    /* 0 is used all the time; a cache of two: FIFO drops it, LRU and LFU keep it. */
    const uint32_t hot[] = {0, 1, 0, 2, 0, 3, 0, 1, 0};
    const tl_trace a = {hot, starts, none, 9, 4};
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &a, 2, 0, 1, &hits), TL_OK);
    TL_EQ(hits, 4);
    TL_STATUS(tl_policy_hits(TL_POLICY_LFU, &a, 2, 0, 1, &hits), TL_OK);
    TL_EQ(hits, 4);
    TL_STATUS(tl_policy_hits(TL_POLICY_FIFO, &a, 2, 0, 1, &hits), TL_OK);
    TL_EQ(hits, 2); /* 0 at the third use, and 0 after it came back */
    /* A scan of new blocks: LRU loses what was used twice before it, LFU and S3-FIFO do not. */
    const uint32_t scan[] = {0, 0, 0, 1, 2, 3, 0, 0, 0};
    const tl_trace b = {scan, starts, none, 9, 4};
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &b, 2, 0, 1, &hits), TL_OK);
    TL_EQ(hits, 4);
    TL_STATUS(tl_policy_hits(TL_POLICY_LFU, &b, 2, 0, 1, &hits), TL_OK);
    TL_EQ(hits, 5);
    TL_STATUS(tl_policy_hits(TL_POLICY_S3FIFO, &b, 2, 0, 1, &hits), TL_OK);
    TL_EQ(hits, 5);
    TL_STATUS(tl_policy_hits(TL_POLICY_TINYLFU, &b, 2, 0, 1, &hits), TL_OK);
    TL_EQ(hits, 5);
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &b, 2, 7, 1, &hits), TL_OK);
    TL_EQ(hits, 2); /* counted from the eighth request on */
}

TL_TEST(a_request_never_evicts_its_own_blocks) {
    /* 0 1 | 2 | 2 | 2 | 0 1 3 | 0 1 3 in a cache of three: 3 needs the room of 2, which is used
     * more often than 1, the block before 3. */
    const uint32_t blocks[] = {0, 1, 2, 2, 2, 0, 1, 3, 0, 1, 3};
    const uint32_t parents[4] = {UINT32_MAX, 0, UINT32_MAX, 1};
    const uint64_t starts[7] = {0, 2, 3, 4, 5, 8, 11};
    const tl_trace t = {blocks, starts, parents, 6, 4};
    uint64_t hits;
    TL_STATUS(tl_policy_hits(TL_POLICY_LFU, &t, 3, 0, 1, &hits), TL_OK);
    TL_EQ(hits, 0 + 0 + 1 + 1 + 2 + 3);
}

TL_TEST(a_trace_that_makes_no_sense_is_refused) {
    uint32_t blocks[3] = {0, 1, 2}, parents[3] = {UINT32_MAX, 0, 1};
    uint64_t starts[2] = {0, 3}, hits = 9;
    tl_trace t = {blocks, starts, parents, 1, 3};
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &t, 2, 0, 1, &hits), TL_OK);
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, NULL, 2, 0, 1, &hits), TL_EINVAL);
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &t, 2, 0, 1, NULL), TL_EINVAL);
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &t, 0, 0, 1, &hits), TL_EINVAL);
    TL_STATUS(tl_policy_hits(-1, &t, 2, 0, 1, &hits), TL_EINVAL);
    TL_STATUS(tl_policy_hits(TL_N_POLICIES, &t, 2, 0, 1, &hits), TL_EINVAL);
    hits = 9;
    blocks[2] = 3;
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &t, 2, 0, 1, &hits), TL_EINVAL);
    TL_EQ(hits, 0);
    blocks[2] = 1; /* follows itself, which is not its parent */
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &t, 2, 0, 1, &hits), TL_EINVAL);
    blocks[2] = 2;
    starts[0] = 1;
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &t, 2, 0, 1, &hits), TL_EINVAL);
    starts[0] = 0;
    starts[1] = 0;
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &t, 2, 0, 1, &hits), TL_OK);
    const uint64_t falling[3] = {0, (uint64_t)1 << 40, 3}; /* told before blocks[3] is read */
    t.starts = falling;
    t.n_requests = 2;
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &t, 2, 0, 1, &hits), TL_EINVAL);
    TL_CHECK(strstr(tl_last_error(), "starts[2] falls") != NULL);
    t.parents = NULL;
    TL_STATUS(tl_policy_hits(TL_POLICY_LRU, &t, 2, 0, 1, &hits), TL_EINVAL);
}

TL_TEST(a_simulation_without_memory_leaves_nothing_behind) {
    static random_trace r;
    make_trace(&r, 3, 2);
    for (tl_policy p = 0; p < TL_N_POLICIES; p++) {
        uint64_t hits;
        tl_status st = TL_ENOMEM;
        for (uint64_t fail = 1; st == TL_ENOMEM && fail < 50; fail++) {
            tl_count_fail_at(fail);
            st = tl_policy_hits(p, &r.t, 20, 0, 1, &hits);
            tl_count_fail_at(0);
            if (st == TL_ENOMEM) {
                TL_EQ(hits, 0);
            }
        }
        TL_EQ(st, TL_OK);
    }
}
