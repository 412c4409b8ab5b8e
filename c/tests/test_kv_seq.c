/*
 * test_kv_seq.c - sequences over a pool: the chapter's example, each rule of kv_seq.h, and random
 * runs in which the contents of every position are a function of the tokens up to it. A prefix hit
 * on the wrong block, a write into a shared one, a block handed out twice or a name given too early
 * shows as a value that does not follow from the tokens.
 */
#include "runtime/kv_mgr.h"
#include "tinyllm/kv_pool_ext.h"
#include "tinyllm/kv_seq.h"
#include "tl_count_alloc.h"
#include "tl_test.h"
#include "tl_test_kv.h"
#include "tl_test_state.h"

#include <stdlib.h>

static tl_kv_mgr *mgr_new(tl_kv_pool *p, uint32_t flags, uint32_t watermark) {
    const tl_kv_mgr_options opt = {
        flags,      watermark,      tl_kv_evict,          tl_kv_find,
        tl_kv_refs, tl_kv_prefetch, tl_kv_import_private, tl_kv_copy_block};
    tl_kv_mgr *m = NULL;
    TL_OK_(tl_kv_mgr_create(p, &opt, &m));
    return m;
}

static void mgr_end(tl_kv_mgr *m, tl_kv_pool *p) {
    TL_OK_(tl_kv_mgr_check(m));
    tl_kv_mgr_destroy(m);
    TL_EQ(kv_stats(p).used, 0); /* destroy gives everything back */
    TL_OK_(tl_kv_check(p));
    tl_kv_pool_destroy(p);
}

static void fill_tokens(uint32_t *toks, size_t n, uint32_t first) {
    for (size_t i = 0; i < n; i++)
        toks[i] = first + (uint32_t)i;
}

static tl_kv_seq must_allocate(tl_kv_mgr *m, const uint32_t *toks, size_t n, size_t want_cached) {
    tl_kv_seq s = 0;
    TL_OK_(tl_kv_seq_allocate(m, toks, n, NULL, &s));
    tl_kv_seq_info info;
    TL_OK_(tl_kv_seq_info_get(m, s, &info));
    TL_EQ(info.n_tokens, n);
    TL_EQ(info.n_cached, want_cached);
    return s;
}

static tl_kv_mgr_stats stats_of(const tl_kv_mgr *m) {
    tl_kv_mgr_stats s;
    TL_OK_(tl_kv_mgr_stats_get(m, &s));
    return s;
}

TL_TEST(what_was_found_elsewhere_is_committed_and_counts_as_cached) {
    tl_kv_pool *p = kv_new(16, 4, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t toks[14];
    fill_tokens(toks, 14, 1);
    tl_kv_seq s = must_allocate(m, toks, 6, 0);
    TL_OK_(tl_kv_seq_commit(m, s, 4));
    TL_OK_(tl_kv_seq_free(m, s));
    s = must_allocate(m, toks, 14, 4);
    const tl_kv_mgr_stats before = stats_of(m);
    TL_STATUS(tl_kv_seq_found(m, s, 16, 1), TL_EINVAL); /* above the length */
    TL_STATUS(tl_kv_seq_found(m, s, 10, 1), TL_EINVAL); /* no whole blocks */
    TL_STATUS(tl_kv_seq_found(m, s, 0, 1), TL_EINVAL);  /* allocate has found more */
    TL_EQ(stats_of(m).hit_tokens, before.hit_tokens);
    TL_OK_(tl_kv_seq_found(m, s, 12, 1));
    tl_kv_seq_info info;
    TL_OK_(tl_kv_seq_info_get(m, s, &info));
    TL_EQ(info.n_cached, 12);
    TL_EQ(info.n_computed, 12);
    TL_EQ(stats_of(m).hit_tokens, before.hit_tokens + 8);
    TL_EQ(stats_of(m).hit_blocks, before.hit_blocks + 2);
    TL_EQ(stats_of(m).n_findable, 3);
    TL_OK_(tl_kv_seq_found(m, s, 12, 1)); /* again: nothing more */
    TL_EQ(stats_of(m).hit_tokens, before.hit_tokens + 8);
    TL_OK_(tl_kv_seq_commit(m, s, 13));
    TL_STATUS(tl_kv_seq_found(m, s, 12, 1), TL_EINVAL); /* something was computed */
    TL_OK_(tl_kv_seq_truncate(m, s, 5));
    TL_OK_(tl_kv_seq_info_get(m, s, &info));
    TL_EQ(info.n_cached, 5);
    TL_OK_(tl_kv_seq_free(m, s));
    TL_STATUS(tl_kv_seq_found(m, s, 12, 1), TL_EINVAL);

    const tl_kv_request resumed = {0, 0, 1, 0}; /* and nothing from the index */
    TL_OK_(tl_kv_seq_allocate(m, toks, 14, &resumed, &s));
    const tl_kv_mgr_stats then = stats_of(m);
    TL_OK_(tl_kv_seq_found(m, s, 8, 0));
    TL_EQ(stats_of(m).hit_tokens, then.hit_tokens);
    TL_EQ(stats_of(m).duplicates, then.duplicates + 2); /* findable already: these stay private */
    mgr_end(m, p);
}

TL_TEST(the_example_of_the_chapter) {
    tl_kv_pool *p = kv_new(8, 4, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[10], b[11], c[8], d[8];
    fill_tokens(a, 10, 1);
    fill_tokens(b, 8, 1);
    b[8] = 99, b[9] = 98, b[10] = 97;
    fill_tokens(c, 8, 1);
    fill_tokens(d, 4, 5); /* the tokens of A's second block, at the beginning */
    fill_tokens(d + 4, 4, 50);

    tl_kv_seq sa = must_allocate(m, a, 10, 0);
    KV_STATS(p, 5, 3, 0);
    TL_OK_(tl_kv_seq_commit(m, sa, 10));
    TL_OK_(tl_kv_seq_free(m, sa));
    KV_STATS(p, 6, 0, 2); /* two full blocks stay, the tail does not */

    tl_kv_seq sb = must_allocate(m, b, 11, 8);
    TL_EQ(stats_of(m).hit_tokens, 8);
    TL_EQ(stats_of(m).prompt_tokens, 21);     /* hit rate 8 / 21 */
    tl_kv_seq sc = must_allocate(m, c, 8, 4); /* the last token is always computed */
    tl_kv_seq sd = must_allocate(m, d, 8, 0); /* the same tokens elsewhere never hit */
    TL_OK_(tl_kv_seq_free(m, sb));
    TL_OK_(tl_kv_seq_free(m, sc));
    TL_OK_(tl_kv_seq_free(m, sd));
    mgr_end(m, p);
}

TL_TEST(match_last_and_max_cached_bound_the_prefix) {
    tl_kv_pool *p = kv_new(8, 4, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[8];
    fill_tokens(a, 8, 1);
    tl_kv_seq s = must_allocate(m, a, 8, 0), t;
    TL_OK_(tl_kv_seq_commit(m, s, 8));
    tl_kv_seq_info info;
    tl_kv_request req = {0, SIZE_MAX, 0, 1};
    TL_OK_(tl_kv_seq_allocate(m, a, 8, &req, &t));
    TL_OK_(tl_kv_seq_info_get(m, t, &info));
    TL_EQ(info.n_cached, 8);
    TL_OK_(tl_kv_seq_free(m, t));
    req = (tl_kv_request){0, 7, 0, 1};
    TL_OK_(tl_kv_seq_allocate(m, a, 8, &req, &t));
    TL_OK_(tl_kv_seq_info_get(m, t, &info));
    TL_EQ(info.n_cached, 4);
    /* a request that comes back after a preemption does not count as a prompt again */
    const tl_kv_mgr_stats before = stats_of(m);
    req = (tl_kv_request){0, SIZE_MAX, 1, 0};
    tl_kv_seq u;
    TL_OK_(tl_kv_seq_allocate(m, a, 8, &req, &u));
    TL_EQ(stats_of(m).prompt_tokens, before.prompt_tokens);
    TL_EQ(stats_of(m).hit_tokens, before.hit_tokens);
    mgr_end(m, p);
}

TL_TEST(nothing_is_findable_before_its_commit) {
    tl_kv_pool *p = kv_new(8, 4, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[9];
    fill_tokens(a, 9, 1);
    tl_kv_seq s = must_allocate(m, a, 9, 0);
    tl_kv_seq t = must_allocate(m, a, 9, 0);
    TL_OK_(tl_kv_seq_commit(m, s, 7)); /* one full block and three positions of the next */
    TL_EQ(tl_kv_fill(p, tl_kv_seq_blocks(m, s)[1]), 3);
    tl_kv_seq u = must_allocate(m, a, 5, 4);
    TL_OK_(tl_kv_seq_free(m, u));
    TL_OK_(tl_kv_seq_free(m, s)); /* freed before the rest was computed */
    TL_OK_(tl_kv_seq_commit(m, t, 9));
    TL_EQ(stats_of(m).duplicates, 1); /* block 0: the first keeps the name */
    TL_OK_(tl_kv_seq_free(m, t));
    KV_STATS(p, 6, 0, 2);
    TL_STATUS(tl_kv_seq_free(m, t), TL_EINVAL);
    TL_STATUS(tl_kv_seq_commit(m, s, 1), TL_EINVAL);
    mgr_end(m, p);
}

TL_TEST(a_refused_allocate_changes_nothing) {
    tl_kv_pool *p = kv_new(6, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 1);
    uint32_t a[8], b[16];
    fill_tokens(a, 8, 1);
    fill_tokens(b, 16, 1);
    tl_kv_seq s = must_allocate(m, a, 8, 0);
    TL_OK_(tl_kv_seq_commit(m, s, 8));
    TL_OK_(tl_kv_seq_free(m, s));
    KV_STATS(p, 2, 0, 4);
    kv_state before = kv_state_of(p);
    tl_kv_seq out = 77;
    /* 12 tokens: 4 cached hits + 2 new + watermark 1 > 6 */
    KV_REFUSED(tl_kv_seq_allocate(m, b, 12, NULL, &out), TL_EFULL);
    TL_EQ(out, 77);
    size_t n_cached, n_new;
    TL_STATUS(tl_kv_seq_can_allocate(m, b, 12, NULL, &n_cached, &n_new), TL_EFULL);
    TL_EQ(n_cached, 8);
    TL_EQ(n_new, 2);
    /* more blocks than the pool has: refused before it is read, and nothing is kept for it */
    const size_t bytes = tl_kv_mgr_bytes(m);
    static uint32_t giant[100000];
    KV_REFUSED(tl_kv_seq_allocate(m, giant, 100000, NULL, &out), TL_EFULL);
    TL_STATUS(tl_kv_seq_can_allocate(m, giant, 100000, NULL, &n_cached, &n_new), TL_EFULL);
    TL_EQ(n_new, 50000);
    /* asking about a namespace does not make it known */
    for (uint64_t root = 1; root < 100; root++) {
        const tl_kv_request req = {root, SIZE_MAX, 0, 0};
        TL_STATUS(tl_kv_seq_can_allocate(m, b, 2, &req, &n_cached, &n_new), TL_OK);
        TL_EQ(n_new, 1);
    }
    TL_EQ(tl_kv_mgr_bytes(m), bytes);
    TL_STATUS(tl_kv_seq_can_allocate(m, b, 9, NULL, &n_cached, &n_new), TL_OK);
    const char *changed = kv_state_changed(&before, p);
    if (changed)
        tl_test_fail(__FILE__, __LINE__, "after refusals %s", changed);
    kv_state_free(&before);
    /* a hit at the eviction end of a full pool survives: it is taken before anything is evicted */
    s = must_allocate(m, b, 10, 8);
    KV_STATS(p, 1, 5, 0);
    mgr_end(m, p);
}

TL_TEST(forks_copy_only_what_they_write) {
    tl_kv_pool *p = kv_new(8, 4, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[6], more[3] = {60, 70, 80};
    fill_tokens(a, 6, 1);
    tl_kv_seq seqs[3];
    seqs[0] = must_allocate(m, a, 6, 0);
    const uint32_t tail = tl_kv_seq_blocks(m, seqs[0])[1];
    TL_OK_(tl_kv_seq_commit(m, seqs[0], 6));
    TL_OK_(tl_kv_seq_fork(m, seqs[0], &seqs[1]));
    TL_OK_(tl_kv_seq_fork(m, seqs[0], &seqs[2]));
    KV_STATS(p, 6, 2, 0);
    tl_kv_copy copies[3];
    size_t n_copies;
    TL_OK_(tl_kv_seq_append_batch(m, seqs, 3, more, copies, &n_copies));
    TL_EQ(n_copies, 2); /* of three holders two copy, the last keeps the block */
    TL_EQ(copies[0].src, tail);
    TL_EQ(copies[1].src, tail);
    TL_EQ(tl_kv_seq_blocks(m, seqs[2])[1], tail);
    TL_EQ(tl_kv_fill(p, copies[0].dst), 2);
    KV_STATS(p, 4, 4, 0);
    TL_OK_(tl_kv_mgr_check(m));
    TL_STATUS(tl_kv_seq_append_batch(m, (tl_kv_seq[]){seqs[0], seqs[0]}, 2, more, NULL, NULL),
              TL_EINVAL);
    mgr_end(m, p);
}

TL_TEST(a_batch_that_does_not_fit_changes_nothing) {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[4], more[3] = {7, 8, 9};
    fill_tokens(a, 4, 1);
    tl_kv_seq seqs[3];
    seqs[0] = must_allocate(m, a, 2, 0);
    seqs[1] = must_allocate(m, a + 1, 2, 0);
    seqs[2] = must_allocate(m, a + 2, 1, 0);
    kv_state before = kv_state_of(p);
    KV_REFUSED(tl_kv_seq_append_batch(m, seqs, 3, more, NULL, NULL), TL_EFULL);
    const char *changed = kv_state_changed(&before, p);
    if (changed)
        tl_test_fail(__FILE__, __LINE__, "after a refused batch %s", changed);
    kv_state_free(&before);
    TL_OK_(tl_kv_mgr_check(m));
    TL_OK_(tl_kv_seq_append_batch(m, seqs + 1, 2, more, NULL, NULL));
    mgr_end(m, p);
}

TL_TEST(truncate_cuts_names_and_never_writes_a_registered_block) {
    tl_kv_pool *p = kv_new(8, 4, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[12], other = 1000;
    fill_tokens(a, 12, 1);
    tl_kv_seq s = must_allocate(m, a, 12, 0);
    TL_OK_(tl_kv_seq_commit(m, s, 12));
    const uint32_t middle = tl_kv_seq_blocks(m, s)[1];
    TL_OK_(tl_kv_seq_truncate(m, s, 6)); /* into a registered block */
    KV_STATS(p, 5, 2, 1);
    TL_EQ(tl_kv_fill(p, middle), 4); /* registered: immutable */
    tl_kv_copy copy;
    size_t n_copies;
    TL_OK_(tl_kv_seq_append(m, s, &other, 1, &copy, &n_copies));
    TL_EQ(n_copies, 1);
    TL_EQ(copy.src, middle);
    TL_CHECK(tl_kv_seq_blocks(m, s)[1] != middle);
    TL_EQ(tl_kv_fill(p, copy.dst), 2); /* what is computed of it */
    KV_STATS(p, 4, 2, 2);
    TL_STATUS(tl_kv_seq_truncate(m, s, 8), TL_EINVAL);
    TL_OK_(tl_kv_seq_append(m, s, &other, 1, NULL, NULL));
    TL_OK_(tl_kv_seq_commit(m, s, 8));
    tl_kv_seq t = must_allocate(m, a, 12, 8); /* the old chain is still whole */
    TL_OK_(tl_kv_mgr_check(m));
    (void)t;
    mgr_end(m, p);
}

TL_TEST(reset_ends_hits_and_running_sequences_go_on) {
    tl_kv_pool *p = kv_new(8, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, TL_KV_MGR_EVENTS, 0);
    uint32_t a[6];
    fill_tokens(a, 6, 1);
    tl_kv_seq s = must_allocate(m, a, 6, 0);
    TL_OK_(tl_kv_seq_commit(m, s, 4));
    TL_OK_(tl_kv_mgr_reset(m, NULL));
    tl_kv_seq t = must_allocate(m, a, 6, 0);
    TL_OK_(tl_kv_seq_commit(m, s, 6)); /* computed with the old weights: never findable */
    TL_OK_(tl_kv_seq_free(m, s));
    KV_STATS(p, 5, 3, 0); /* not cached: freed */
    TL_OK_(tl_kv_seq_commit(m, t, 6));
    TL_OK_(tl_kv_seq_free(m, t));
    must_allocate(m, a, 6, 4);
    tl_kv_event events[16];
    size_t n;
    TL_OK_(tl_kv_mgr_events(m, events, 16, NULL, &n));
    TL_EQ(n, 6); /* two stored, cleared, three stored */
    TL_EQ(events[2].type, TL_KV_CLEARED);
    TL_EQ(events[5].number, 5);
    TL_EQ(events[1].parent, events[0].hash);
    mgr_end(m, p);
}

TL_TEST(namespaces_do_not_share_and_reset_alone) {
    tl_kv_pool *p = kv_new(16, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[5];
    fill_tokens(a, 5, 1);
    const uint64_t root = 0x1234567890ABCDEFu;
    const tl_kv_request req = {root, SIZE_MAX, 0, 0};
    tl_kv_seq s, t;
    TL_OK_(tl_kv_seq_allocate(m, a, 5, &req, &s));
    TL_OK_(tl_kv_seq_commit(m, s, 5));
    t = must_allocate(m, a, 5, 0);
    TL_OK_(tl_kv_seq_commit(m, t, 5));
    TL_EQ(stats_of(m).duplicates, 0); /* other names */
    TL_OK_(tl_kv_mgr_reset(m, &root));
    must_allocate(m, a, 5, 4);
    tl_kv_seq u;
    tl_kv_seq_info info;
    TL_OK_(tl_kv_seq_allocate(m, a, 5, &req, &u));
    TL_OK_(tl_kv_seq_info_get(m, u, &info));
    TL_EQ(info.n_cached, 0);
    mgr_end(m, p);
}

TL_TEST(evict_makes_a_held_block_unfindable_and_frees_it_later) {
    tl_kv_pool *p = kv_new(8, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[5];
    fill_tokens(a, 5, 1);
    tl_kv_seq s = must_allocate(m, a, 5, 0);
    TL_OK_(tl_kv_seq_commit(m, s, 5));
    const uint32_t second = tl_kv_seq_blocks(m, s)[1];
    TL_OK_(tl_kv_mgr_evict(m, &second, 1));
    tl_kv_seq t = must_allocate(m, a, 5, 2);
    TL_OK_(tl_kv_seq_free(m, t));
    TL_OK_(tl_kv_seq_free(m, s));
    KV_STATS(p, 7, 0, 1);
    const uint32_t far = 8;
    TL_STATUS(tl_kv_mgr_evict(m, &far, 1), TL_EINVAL);
    mgr_end(m, p);
}

TL_TEST(imported_blocks_are_found_once_their_tokens_are_known) {
    tl_kv_pool *p = kv_new(8, 2, 1, 1, 2), *q = kv_new(8, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0), *n = mgr_new(q, 0, 0);
    uint32_t a[6], wrong[5] = {1, 2, 3, 5, 5};
    fill_tokens(a, 6, 1);
    tl_kv_seq s = must_allocate(m, a, 5, 0);
    TL_OK_(tl_kv_seq_commit(m, s, 5));
    uint8_t buf[512];
    size_t size;
    TL_OK_(tl_kv_export(p, tl_kv_seq_blocks(m, s), 3, buf, sizeof buf, &size));
    uint32_t ids[8];
    TL_OK_(tl_kv_mgr_import(n, buf, size, ids));
    tl_kv_seq t = must_allocate(n, a, 5, 0); /* no proof, no hit */
    TL_OK_(tl_kv_seq_commit(n, t, 5));
    TL_EQ(stats_of(n).unproven, 2);
    TL_EQ(stats_of(n).collisions, 0);
    TL_OK_(tl_kv_seq_free(n, t));
    tl_kv_seq u = 9;
    KV_REFUSED(tl_kv_mgr_adopt(n, wrong, 5, 0, ids, &u), TL_EFORMAT);
    KV_REFUSED(tl_kv_mgr_adopt(n, a, 6, 0, ids, &u), TL_EFORMAT);
    TL_EQ(u, 9);
    const uint32_t twice[3] = {ids[0], ids[1], ids[0]}, nobody[3] = {ids[0], ids[1], 7};
    KV_REFUSED(tl_kv_mgr_adopt(n, a, 5, 0, nobody, &u), TL_EINVAL);
    KV_REFUSED(tl_kv_mgr_adopt(n, a, 5, 0, twice, &u), TL_EINVAL);
    TL_OK_(tl_kv_mgr_check(n));
    TL_OK_(tl_kv_mgr_adopt(n, a, 5, 0, ids, &u));
    must_allocate(n, a, 5, 4);
    TL_OK_(tl_kv_seq_free(n, u));
    mgr_end(m, p);
    mgr_end(n, q);
}

TL_TEST(evictions_behind_the_managers_back_are_noticed) {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[9], order[4];
    fill_tokens(a, 9, 1);
    tl_kv_seq s = must_allocate(m, a, 7, 0);
    TL_OK_(tl_kv_seq_commit(m, s, 7));
    TL_OK_(tl_kv_seq_free(m, s));
    const uint32_t n = kv_drain(p, order); /* somebody takes blocks from the pool itself */
    for (uint32_t i = 0; i < n; i++)
        TL_OK_(tl_kv_unref(p, order[i]));
    s = must_allocate(m, a, 7, 0);
    mgr_end(m, p);
}

TL_TEST(a_reference_from_elsewhere_forces_a_copy) {
    tl_kv_pool *p = kv_new(4, 4, 1, 1, 2);
    /* without the pool's extras: its own copy on write has to see the reference */
    tl_kv_mgr *m = NULL;
    TL_OK_(tl_kv_mgr_create(p, NULL, &m));
    uint32_t a[2] = {1, 2}, more = 3;
    tl_kv_seq s = must_allocate(m, a, 2, 0);
    const uint32_t tail = tl_kv_seq_blocks(m, s)[0];
    tl_kv_ref(p, tail); /* an export under way, say */
    tl_kv_copy copy;
    size_t n_copies;
    TL_OK_(tl_kv_seq_append(m, s, &more, 1, &copy, &n_copies));
    TL_EQ(n_copies, 1);
    TL_EQ(copy.src, tail);
    TL_CHECK(tl_kv_seq_blocks(m, s)[0] != tail);
    TL_OK_(tl_kv_unref(p, tail));
    mgr_end(m, p);
}

TL_TEST(a_refused_append_leaves_no_trace_even_with_references_from_elsewhere) {
    tl_kv_pool *p = kv_new(3, 4, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[2] = {1, 2}, c[4] = {9, 8, 7, 6}, more[3] = {3, 4, 5};
    tl_kv_seq seqs[3];
    seqs[0] = must_allocate(m, a, 2, 0);
    TL_OK_(tl_kv_seq_fork(m, seqs[0], &seqs[1]));
    seqs[2] = must_allocate(m, c, 4, 0);
    const uint32_t tail = tl_kv_seq_blocks(m, seqs[0])[0];
    tl_kv_ref(p,
              tail); /* so both forks have to copy, and with the new block that is one too many */
    kv_state before = kv_state_of(p);
    const tl_kv_mgr_stats stats = stats_of(m);
    tl_kv_copy copies[3];
    size_t n_copies = 7;
    KV_REFUSED(tl_kv_seq_append_batch(m, seqs, 3, more, copies, &n_copies), TL_EFULL);
    KV_REFUSED(tl_kv_seq_append(m, seqs[0], c, 4, copies, &n_copies), TL_EFULL);
    const char *changed = kv_state_changed(&before, p);
    if (changed)
        tl_test_fail(__FILE__, __LINE__, "after refused appends %s", changed);
    kv_state_free(&before);
    TL_EQ(stats_of(m).copies, stats.copies);
    TL_EQ(tl_kv_seq_blocks(m, seqs[0])[0], tail);
    TL_OK_(tl_kv_mgr_check(m));
    TL_OK_(tl_kv_seq_append(m, seqs[0], more, 1, copies, &n_copies));
    TL_EQ(n_copies, 1);
    TL_OK_(tl_kv_unref(p, tail));
    mgr_end(m, p);
}

TL_TEST(private_imports_have_no_names_until_they_are_adopted) {
    tl_kv_pool *p = kv_new(8, 2, 1, 1, 2), *q = kv_new(8, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0), *n = mgr_new(q, 0, 0);
    uint32_t a[6], ids[3], found;
    fill_tokens(a, 6, 1);
    tl_kv_seq s = must_allocate(m, a, 5, 0), t = 0;
    TL_OK_(tl_kv_seq_commit(m, s, 5));
    uint8_t buf[512];
    size_t size;
    TL_OK_(tl_kv_export(p, tl_kv_seq_blocks(m, s), 3, buf, sizeof buf, &size));
    const uint64_t name = tl_kv_hash(p, tl_kv_seq_blocks(m, s)[0]);
    TL_OK_(tl_kv_mgr_import_private(n, buf, size, ids));
    TL_EQ(tl_kv_lookup(q, name, &found), TL_ENOTFOUND);
    TL_OK_(tl_kv_check(q));
    for (int i = 0; i < 3; i++)
        TL_OK_(tl_kv_unref(q, ids[i]));
    KV_STATS(q, 8, 0, 0); /* nothing stays cached */
    buf[30] ^= 1;
    KV_REFUSED(tl_kv_mgr_import_private(n, buf, size, ids), TL_EFORMAT);
    buf[30] ^= 1;
    TL_OK_(tl_kv_mgr_import_private(n, buf, size, ids));
    TL_OK_(tl_kv_mgr_adopt(n, a, 5, 0, ids, &t));
    must_allocate(n, a, 5, 4);
    TL_STATUS(tl_kv_mgr_import_private(NULL, buf, size, ids), TL_EINVAL);
    n->opt.import_private = NULL;
    KV_REFUSED(tl_kv_mgr_import_private(n, buf, size, ids), TL_EUNSUPPORTED);
    mgr_end(n, q);
    mgr_end(m, p);
}

TL_TEST(a_name_without_proof_is_not_found_and_not_adopted_as_proven) {
    tl_kv_pool *p = kv_new(8, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[4];
    fill_tokens(a, 4, 1);
    tl_kv_seq s = must_allocate(m, a, 4, 0), t = 0;
    TL_OK_(tl_kv_seq_commit(m, s, 4));
    uint8_t buf[512];
    size_t size;
    TL_OK_(tl_kv_export(p, tl_kv_seq_blocks(m, s), 2, buf, sizeof buf, &size));
    const uint64_t names[3] = {tl_kv_hash(p, tl_kv_seq_blocks(m, s)[0]), 0,
                               tl_kv_hash(p, tl_kv_seq_blocks(m, s)[1])};
    int64_t found[3];
    TL_OK_(tl_kv_mgr_find(m, names, 3, 0, found));
    TL_EQ(found[0], tl_kv_seq_blocks(m, s)[0]);
    TL_EQ(found[1], -1);
    TL_EQ(found[2], tl_kv_seq_blocks(m, s)[1]);
    TL_EQ(tl_kv_refs(p, (uint32_t)found[0]), 1);
    TL_OK_(tl_kv_mgr_find(m, names, 3, 1, found));
    TL_EQ(tl_kv_refs(p, (uint32_t)found[0]), 2);
    TL_OK_(tl_kv_seq_free(m, s));
    const uint32_t ids[2] = {(uint32_t)found[0], (uint32_t)found[2]};
    const uint8_t proven[2] = {1, 1};
    TL_OK_(tl_kv_mgr_reset(m, NULL)); /* by its name alone it would still pass */
    TL_OK_(tl_kv_mgr_find(m, names, 3, 0, found));
    TL_EQ(found[0], -1);
    KV_REFUSED(tl_kv_mgr_adopt_proven(m, a, 4, 0, ids, proven, &t), TL_EFORMAT);
    TL_OK_(tl_kv_unref(p, ids[0]));
    TL_OK_(tl_kv_unref(p, ids[1]));
    /* imported under its names: there, but nothing proves what it is */
    uint32_t arrived[2];
    TL_OK_(tl_kv_evict(p, ids[0]));
    TL_OK_(tl_kv_evict(p, ids[1]));
    TL_OK_(tl_kv_mgr_import(m, buf, size, arrived));
    TL_OK_(tl_kv_mgr_find(m, names, 3, 1, found));
    TL_EQ(found[0], -1);
    KV_REFUSED(tl_kv_mgr_adopt_proven(m, a, 4, 0, arrived, proven, &t), TL_EFORMAT);
    TL_OK_(tl_kv_mgr_adopt(m, a, 4, 0, arrived, &t));
    TL_OK_(tl_kv_mgr_find(m, names, 3, 1, found));
    const uint32_t taken[2] = {(uint32_t)found[0], (uint32_t)found[2]};
    TL_OK_(tl_kv_mgr_adopt_proven(m, a, 4, 0, taken, proven, &s));
    TL_OK_(tl_kv_seq_free(m, s));
    TL_OK_(tl_kv_seq_free(m, t));
    TL_STATUS(tl_kv_mgr_find(NULL, names, 1, 0, found), TL_EINVAL);
    TL_STATUS(tl_kv_mgr_find(m, NULL, 1, 0, found), TL_EINVAL);
    TL_STATUS(tl_kv_mgr_find(m, names, 1, 0, NULL), TL_EINVAL);
    TL_OK_(tl_kv_mgr_find(m, NULL, 0, 0, NULL));
    TL_OK_(tl_kv_mgr_check(m));
    mgr_end(m, p);
}

TL_TEST(adopt_takes_only_what_the_caller_holds_and_what_was_computed_from_these_tokens) {
    tl_kv_pool *p = kv_new(6, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[5], ids[3];
    fill_tokens(a, 5, 1);
    tl_kv_seq s = must_allocate(m, a, 5, 0), t = 0;
    TL_OK_(tl_kv_seq_commit(m, s, 5));
    memcpy(ids, tl_kv_seq_blocks(m, s), sizeof ids);
    KV_REFUSED(tl_kv_mgr_adopt(m, a, 5, 0, ids, &t), TL_EINVAL); /* the sequence's references */
    for (int i = 0; i < 3; i++)
        tl_kv_ref(p, ids[i]);
    /* findable as another prefix: what a forged name leads to */
    m->records[ids[0]].proof.x[1] ^= 1;
    KV_REFUSED(tl_kv_mgr_adopt(m, a, 5, 0, ids, &t), TL_EFORMAT);
    m->records[ids[0]].proof.x[1] ^= 1;
    TL_OK_(tl_kv_mgr_adopt(m, a, 5, 0, ids, &t));
    TL_OK_(tl_kv_seq_free(m, s));
    TL_OK_(tl_kv_mgr_check(m));
    mgr_end(m, p);
}

TL_TEST(a_name_left_behind_without_proof_makes_room_and_questions_are_no_use) {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[3] = {1, 2, 3}, b[3] = {5, 6, 7};
    /* a cached block of the name of a's first, that nobody ever adopted */
    const uint32_t squatter = kv_cached(p, tl_kv_block_hash(0, a, 2));
    tl_kv_seq s = must_allocate(m, a, 3, 0);
    TL_OK_(tl_kv_seq_commit(m, s, 3));
    TL_OK_(tl_kv_seq_free(m, s));
    TL_EQ(stats_of(m).unproven, 0);
    must_allocate(m, a, 3, 2);
    /* a held one stays, and a refused adopt does not count as a use of it */
    const uint32_t other = kv_cached(p, 77);
    KV_STATS(p, 1, 2, 1);
    const uint32_t mine = kv_filled(p, 3, 2);
    kv_state before = kv_state_of(p);
    tl_kv_seq t;
    const uint32_t nobody[2] = {mine, other};
    KV_REFUSED(tl_kv_mgr_adopt(m, b, 3, 0, nobody, &t), TL_EINVAL);
    const char *changed = kv_state_changed(&before, p);
    if (changed)
        tl_test_fail(__FILE__, __LINE__, "after a refused adopt %s", changed);
    kv_state_free(&before);
    TL_OK_(tl_kv_unref(p, mine));
    (void)squatter;
    mgr_end(m, p);
}

TL_TEST(the_checker_changes_nothing_when_it_finds_something) {
    tl_kv_pool *p = kv_new(6, 2, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[5];
    fill_tokens(a, 5, 1);
    tl_kv_seq s = must_allocate(m, a, 5, 0), t;
    TL_OK_(tl_kv_seq_commit(m, s, 5));
    TL_OK_(tl_kv_seq_fork(m, s, &t));
    tl_record *r = &m->records[tl_kv_seq_blocks(m, s)[1]];
    r->holders = 1; /* two sequences hold it */
    TL_STATUS(tl_kv_mgr_check(m), TL_EINVAL);
    TL_EQ(r->holders, 1);
    r->holders = 2;
    TL_OK_(tl_kv_mgr_check(m));
    r->proof.x[0] ^= 1;
    TL_STATUS(tl_kv_mgr_check(m), TL_EINVAL);
    r->proof.x[0] ^= 1;
    TL_OK_(tl_kv_mgr_check(m));
    mgr_end(m, p);
}

TL_TEST(the_fill_of_a_cut_tail_follows_once_it_is_alone) {
    tl_kv_pool *p = kv_new(6, 4, 1, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[7], more = 50;
    fill_tokens(a, 7, 1);
    tl_kv_seq s = must_allocate(m, a, 7, 0), t;
    TL_OK_(tl_kv_seq_commit(m, s, 7));
    TL_OK_(tl_kv_seq_fork(m, s, &t));
    TL_OK_(tl_kv_seq_truncate(m, t, 5));
    TL_OK_(tl_kv_seq_free(m, s));
    TL_OK_(tl_kv_seq_append(m, t, &more, 1, NULL, NULL));
    TL_EQ(tl_kv_fill(p, tl_kv_seq_blocks(m, t)[1]), 1); /* 5 are computed, 4 of them elsewhere */
    mgr_end(m, p);
}

TL_TEST(tables_and_slots) {
    tl_kv_pool *p = kv_new(8, 4, 3, 1, 2);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    uint32_t a[6];
    fill_tokens(a, 6, 1);
    tl_kv_seq seqs[2] = {must_allocate(m, a, 6, 0), must_allocate(m, a, 1, 0)};
    int32_t table[6];
    TL_OK_(tl_kv_seq_block_tables(m, seqs, 2, 6, table, 3));
    const int32_t want[6] = {0, 6, -1, 12, -1, -1}; /* blocks 0 1 and 2, as pages of one layer */
    TL_MEM_EQ(table, want, sizeof want);
    TL_STATUS(tl_kv_seq_block_tables(m, seqs, 2, 1, table, 1), TL_EINVAL);
    TL_STATUS(tl_kv_seq_block_tables(m, seqs, 2, UINT32_MAX, table, 3), TL_EINVAL);
    int64_t slots[5];
    TL_OK_(tl_kv_seq_slot_mapping(m, seqs[0], 3, 5, -7, slots));
    const int64_t want_slots[5] = {3, 4, 5, -7, -7};
    TL_MEM_EQ(slots, want_slots, sizeof want_slots);
    mgr_end(m, p);
}

/* Prompts that differ in one block's last token alone come from whoever asks many questions behind
 * one system prompt, and on purpose from an attacker: they must not fill one corner of the index.
 */
TL_TEST(siblings_are_spread_over_the_index) {
    enum { N = 32768 };
    tl_kv_pool *p = kv_new(N, 2, 1, 1, 1);
    tl_kv_mgr *m = mgr_new(p, 0, 0);
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t toks[2] = {7, i};
        tl_kv_seq s;
        TL_OK_(tl_kv_seq_allocate(m, toks, 2, NULL, &s));
        TL_OK_(tl_kv_seq_commit(m, s, 2));
        TL_OK_(tl_kv_seq_free(m, s));
    }
    TL_EQ(stats_of(m).n_findable, N);
    /* 32768 keys thrown into 3641 groups of 15: about 170 do not fit where they belong, and a tag
     * is met 128 times. A clustering hash would make thousands of both. */
    uint32_t passed_by = 0, seen[256] = {0}, commonest = 0;
    for (size_t g = 0; g < m->index.n_groups; g++) {
        passed_by += m->index.groups[g].tags[TL_GROUP_OVER];
        for (uint32_t i = 0; i < TL_GROUP_SLOTS; i++) {
            const uint8_t tag = m->index.groups[g].tags[i];
            if (tag != 0) {
                seen[tag]++;
                commonest = seen[tag] > commonest ? seen[tag] : commonest;
            }
        }
    }
    TL_CHECK(passed_by <= 1000);
    TL_CHECK(commonest <= 400);
    for (uint32_t i = 0; i < 2 * N; i++) { /* each is found, and nothing that is not there */
        const uint32_t toks[3] = {7, i, 1};
        size_t n_cached, n_new;
        (void)tl_kv_seq_can_allocate(m, toks, 3, NULL, &n_cached, &n_new);
        TL_EQ(n_cached, i < N ? 2 : 0);
    }
    mgr_end(m, p);
}

TL_TEST(create_fails_cleanly) {
    tl_kv_pool *p = kv_new(4, 2, 1, 1, 2);
    tl_kv_mgr *m;
    for (uint32_t k = 1;; k++) {
        tl_count_fail_at(k);
        const tl_kv_mgr_options opt = {TL_KV_MGR_EVENTS,     0,          tl_kv_evict,
                                       tl_kv_find,           tl_kv_refs, tl_kv_prefetch,
                                       tl_kv_import_private, NULL};
        const tl_status status = tl_kv_mgr_create(p, &opt, &m);
        tl_count_fail_at(0);
        if (status == TL_OK)
            break;
        TL_STATUS(status, TL_ENOMEM);
        TL_PTR_EQ(m, NULL);
    }
    tl_kv_mgr_destroy(m);
    TL_STATUS(tl_kv_mgr_create(p, &(tl_kv_mgr_options){.flags = 8}, &m), TL_EINVAL);
    TL_STATUS(tl_kv_mgr_create(p, &(tl_kv_mgr_options){.watermark = 4}, &m), TL_EINVAL);
    tl_kv_pool_destroy(p);
}

/* ---- random runs --------------------------------------------------------------------------- */

enum { LIVE = 6, MAX_TOKENS = 40 };

typedef struct {
    tl_kv_seq seq;
    size_t n, n_computed;
    uint32_t toks[MAX_TOKENS];
} mirror;

/* What position `at` holds: a function of all tokens up to it. */
static uint16_t value_at(const mirror *s, size_t at, int is_v) {
    return (uint16_t)(tl_kv_block_hash(is_v != 0, s->toks, (uint32_t)at + 1) >> 48);
}

static uint16_t *position(tl_kv_pool *p, const tl_kv_mgr *m, const mirror *s, size_t at, int is_v) {
    const uint32_t B = kv_cfg(p).block_tokens;
    return (uint16_t *)tl_kv_block_ptr(p, tl_kv_seq_blocks(m, s->seq)[at / B], 0, is_v) + at % B;
}

/* "Computes" the positions from n_computed to n. */
static void compute(tl_kv_pool *p, tl_kv_mgr *m, mirror *s) {
    for (size_t at = s->n_computed; at < s->n; at++)
        for (int is_v = 0; is_v < 2; is_v++)
            *position(p, m, s, at, is_v) = value_at(s, at, is_v);
    s->n_computed = s->n;
}

static void expect_contents(tl_kv_pool *p, const tl_kv_mgr *m, const mirror *s) {
    tl_kv_seq_info info;
    TL_OK_(tl_kv_seq_info_get(m, s->seq, &info));
    TL_EQ(info.n_tokens, s->n);
    if (s->n > 0)
        TL_MEM_EQ(tl_kv_seq_tokens(m, s->seq), s->toks, s->n * sizeof *s->toks);
    for (size_t at = 0; at < s->n_computed; at++)
        for (int is_v = 0; is_v < 2; is_v++)
            TL_EQ(*position(p, m, s, at, is_v), value_at(s, at, is_v));
}

static void random_run(uint64_t seed) {
    uint64_t r = seed;
    const uint32_t B = 1 + (uint32_t)(tl_test_rand(&r) % 4);
    const uint32_t n_blocks = 4 + (uint32_t)(tl_test_rand(&r) % 20);
    tl_kv_pool *p = kv_new(n_blocks, B, 1, 1, 1);
    tl_kv_mgr *m =
        mgr_new(p, tl_test_rand(&r) % 2 ? TL_KV_MGR_EVENTS : 0, (uint32_t)(tl_test_rand(&r) % 2));
    mirror live[LIVE] = {{0}};
    for (int step = 0; step < 400; step++) {
        mirror *s = &live[tl_test_rand(&r) % LIVE], *other = &live[tl_test_rand(&r) % LIVE];
        const uint32_t what = (uint32_t)(tl_test_rand(&r) % 16);
        if (s->seq == 0) {
            mirror fresh = {.n = tl_test_rand(&r) % (MAX_TOKENS / 2)};
            for (size_t i = 0; i < fresh.n; i++)
                fresh.toks[i] = tl_test_rand(&r) % 8 == 0; /* mostly the same: prefixes meet */
            const tl_status status = tl_kv_seq_allocate(m, fresh.toks, fresh.n, NULL, &fresh.seq);
            if (status == TL_OK) {
                tl_kv_seq_info info;
                TL_OK_(tl_kv_seq_info_get(m, fresh.seq, &info));
                TL_CHECK(fresh.n == 0 || info.n_cached < fresh.n);
                fresh.n_computed = info.n_cached;
                *s = fresh;
            } else {
                TL_STATUS(status, TL_EFULL);
            }
        } else if (what < 5) {
            /* append to every live sequence, or to this one */
            tl_kv_seq seqs[LIVE];
            mirror *who[LIVE];
            uint32_t toks[LIVE];
            size_t n = 0;
            for (int i = 0; i < LIVE; i++) {
                if (live[i].seq != 0 && live[i].n < MAX_TOKENS && (what < 3 || &live[i] == s)) {
                    who[n] = &live[i];
                    seqs[n] = live[i].seq;
                    toks[n++] = tl_test_rand(&r) % 4 == 0;
                }
            }
            const tl_status status = tl_kv_seq_append_batch(m, seqs, n, toks, NULL, NULL);
            for (size_t i = 0; i < n && status == TL_OK; i++) {
                who[i]->toks[who[i]->n++] = toks[i];
                if (tl_test_rand(&r) % 4 != 0)
                    compute(p, m, who[i]);
            }
        } else if (what < 7 && s->n + 3 <= MAX_TOKENS) {
            const uint32_t toks[3] = {0, tl_test_rand(&r) % 4 == 0, 0};
            if (tl_kv_seq_append(m, s->seq, toks, 3, NULL, NULL) == TL_OK) {
                memcpy(s->toks + s->n, toks, sizeof toks);
                s->n += 3;
                compute(p, m, s);
            }
        } else if (what < 9) {
            TL_OK_(tl_kv_seq_commit(m, s->seq, s->n_computed));
        } else if (what < 11) {
            const size_t n = tl_test_rand(&r) % (s->n + 1);
            TL_OK_(tl_kv_seq_truncate(m, s->seq, n));
            s->n = n;
            s->n_computed = s->n_computed < n ? s->n_computed : n;
        } else if (what < 12 && other->seq == 0) {
            *other = *s;
            TL_OK_(tl_kv_seq_fork(m, s->seq, &other->seq));
        } else if (what < 15) {
            TL_OK_(tl_kv_seq_free(m, s->seq));
            *s = (mirror){0};
        } else if (tl_test_rand(&r) % 8 == 0) {
            TL_OK_(tl_kv_mgr_reset(m, NULL));
        } else if (s->n > 0) {
            TL_OK_(tl_kv_mgr_evict(m, tl_kv_seq_blocks(m, s->seq), 1));
        }
        TL_OK_(tl_kv_mgr_check(m));
        TL_OK_(tl_kv_check(p));
        for (int i = 0; i < LIVE; i++)
            if (live[i].seq != 0)
                expect_contents(p, m, &live[i]);
    }
    mgr_end(m, p);
}

TL_TEST(random_runs_keep_every_position_true_to_its_tokens) {
    uint64_t only;
    if (tl_test_seed(&only)) {
        random_run(only);
        return;
    }
    for (uint64_t seed = 1; seed <= 150; seed++) {
        tl_test_context("seed %llu", (unsigned long long)seed);
        random_run(seed);
    }
}
