/*
 * test_kv_pool_slab.c - pools over memory that is not theirs: a slab of the caller's, and a pool of
 * ids, whose values somebody else keeps. Both must behave as a pool with a slab of its own does,
 * which the random runs compare call by call.
 */
#include "tinyllm/kv_pool_ext.h"
#include "tinyllm/kv_seq.h"
#include "tl_count_alloc.h"
#include "tl_test.h"
#include "tl_test_kv.h"
#include "tl_test_state.h"

#include <stdlib.h>

static const tl_kv_cfg shape = {8, 2, 2, 1, 2, TL_F16, TL_KV_FORMAT_V1}; /* P = 32 */
enum { N = 8, B = 2, P = 32 };

static tl_kv_pool *create(const tl_kv_options *opt) {
    tl_kv_pool *p = NULL;
    TL_OK_(tl_kv_pool_create_opt(&shape, opt, &p));
    return p;
}

/* ---- a slab of the caller's ---------------------------------------------------------------- */

TL_TEST(a_slab_of_the_callers_is_used_in_place_and_left_alone) {
    uint8_t *memory = malloc((N + 1) * P); /* plain malloc: the hook must not see it */
    memset(memory, 0x5A, (N + 1) * P);
    tl_kv_pool *p = create(&(tl_kv_options){.slab = memory, .slab_bytes = (N + 1) * P});
    TL_EQ(tl_kv_meta_bytes(p), tl_count_live_bytes());
    TL_EQ(memory[0], 0x5A); /* create writes nothing into it */
    for (uint32_t id = 0; id < N; id++)
        TL_PTR_EQ(tl_kv_block_ptr(p, id, 1, 1), memory + id * P + 3 * P / 4);

    tl_kv_pool *twin = create(NULL);
    uint8_t a[400], b[400];
    uint32_t ids[N];
    size_t na, nb;
    for (int i = 0; i < 2; i++) {
        tl_kv_pool *pool = i ? twin : p;
        ids[0] = kv_registered(pool, 0x77);
        ids[1] = kv_filled(pool, 5, 1);
        tl_kv_ref(pool, ids[1]);
        TL_OK_(tl_kv_cow(pool, ids[1], &ids[2]));
        TL_OK_(tl_kv_export(pool, ids, 3, i ? b : a, 400, i ? &nb : &na));
    }
    TL_EQ(na, nb);
    TL_MEM_EQ(a, b, na);
    TL_OK_(tl_kv_import(p, b, nb, ids));
    kv_expect(p, ids[2], 5, 1);
    TL_OK_(tl_kv_check(p));
    tl_kv_pool_destroy(twin);
    tl_kv_pool_destroy(p);
    TL_EQ(memory[N * P], 0x5A); /* what is behind the blocks was never touched */
    memory[0] = 1;              /* and all of it is still the caller's */
    free(memory);
}

static void no_copy(void *user, uint32_t src, uint32_t dst) {
    (void)user, (void)src, (void)dst;
}

TL_TEST(options_that_contradict_each_other_are_refused) {
    static _Alignas(64) uint8_t memory[N * P + 1];
    const struct {
        tl_kv_options opt;
        const char *says;
    } bad[] = {
        {{.slab = memory, .slab_bytes = N * P - 1}, "less than n_blocks * P"},
        {{.slab = memory}, "less than n_blocks * P"},
        {{.slab_bytes = N * P}, "slab_bytes without a slab"},
        {{.slab = memory + 1, .slab_bytes = N * P}, "aligned to 2"},
        {{.slab = memory, .slab_bytes = N * P, .copy = no_copy}, "slab and copy"},
        {{.slab = memory, .slab_bytes = N * P, .flags = TL_KV_TOUCH}, "TL_KV_TOUCH"},
        {{.copy = no_copy, .flags = TL_KV_TOUCH}, "TL_KV_TOUCH"},
        {{.copy = no_copy, .slab_bytes = 1}, "slab_bytes without a slab"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tl_kv_pool *p = (tl_kv_pool *)(uintptr_t)64;
        KV_REFUSED(tl_kv_pool_create_opt(&shape, &bad[i].opt, &p), TL_EINVAL);
        TL_PTR_EQ(p, NULL);
        TL_CHECK(strstr(tl_last_error(), bad[i].says) != NULL);
    }
    tl_kv_pool_destroy(create(&(tl_kv_options){.slab = memory, .slab_bytes = N * P + 1}));
    tl_kv_pool_destroy(create(&(tl_kv_options){.copy = no_copy, .flags = TL_KV_NO_HUGE}));
}

/* ---- a pool of ids ------------------------------------------------------------------------- */

/* Values kept outside, and what the hook saw. */
typedef struct {
    tl_kv_pool *pool;
    uint8_t values[N * P];
    uint32_t n_copies, src, dst;
} keeper;

static void keep(void *user, uint32_t src, uint32_t dst) {
    keeper *k = user;
    TL_CHECK(src < N && dst < N && src != dst);
    TL_CHECK(tl_kv_refs(k->pool, src) >= 1); /* both are held while it runs ... */
    TL_EQ(tl_kv_refs(k->pool, dst), 1);      /* ... and dst by nobody else */
    memcpy(k->values + dst * P, k->values + src * P, P);
    k->n_copies++;
    k->src = src;
    k->dst = dst;
}

static tl_kv_pool *create_ids(keeper *k) {
    *k = (keeper){0};
    return k->pool = create(&(tl_kv_options){.copy = keep, .user = k});
}

TL_TEST(cow_in_a_pool_of_ids_moves_the_reference_and_the_fill_and_calls_copy) {
    keeper k;
    tl_kv_pool *p = create_ids(&k);
    TL_EQ(tl_kv_meta_bytes(p), tl_count_live_bytes()); /* no slab */
    TL_EQ(tl_kv_block_bytes(p), P);
    uint32_t id = kv_alloc1(p), out;
    TL_OK_(tl_kv_set_fill(p, id, 1));
    k.values[id * P] = 42;
    TL_OK_(tl_kv_cow(p, id, &out));
    TL_EQ(out, id);
    TL_EQ(k.n_copies, 0); /* the only holder writes in place */
    tl_kv_ref(p, id);
    TL_OK_(tl_kv_cow(p, id, &out));
    TL_EQ(k.n_copies, 1);
    TL_EQ(k.src, id);
    TL_EQ(k.dst, out);
    TL_EQ(k.values[out * P], 42);
    TL_EQ(tl_kv_fill(p, out), 1);
    TL_EQ(tl_kv_refs(p, id), 1);
    TL_EQ(tl_kv_refs(p, out), 1);
    tl_kv_ref(p, id); /* a copy that finds no room calls nothing */
    uint32_t rest[N];
    TL_OK_(tl_kv_alloc(p, N - 2, rest));
    KV_REFUSED(tl_kv_cow(p, id, &out), TL_EFULL);
    TL_EQ(k.n_copies, 1);
    TL_OK_(tl_kv_check(p));
    tl_kv_pool_destroy(p);
}

TL_TEST(a_pool_of_ids_has_no_bytes_to_give_or_to_take) {
    keeper k;
    tl_kv_pool *p = create_ids(&k);
    uint32_t id = kv_alloc1(p), ids_out[N];
    TL_OK_(tl_kv_set_fill(p, id, B));
    TL_OK_(tl_kv_register(p, id, 7));

    tl_kv_pool *other = create(NULL);
    uint8_t envelope[400], buf[400];
    size_t size, written = 99, n_pieces = 99;
    const uint32_t theirs = kv_registered(other, 9);
    TL_OK_(tl_kv_export(other, &theirs, 1, envelope, 400, &size));
    tl_kv_pool_destroy(other);

    const tl_kv_stats before = kv_stats(p);
    tl_set_last_error(NULL);
    TL_PTR_EQ(tl_kv_block_ptr(p, id, 0, 0), NULL);
    TL_CHECK(strstr(tl_last_error(), "pool of ids") != NULL);
    memset(buf, 0x11, sizeof buf);
    KV_REFUSED(tl_kv_export(p, &id, 1, buf, 400, &written), TL_EUNSUPPORTED);
    TL_EQ(written, 0);
    KV_REFUSED(tl_kv_export(p, NULL, 0, NULL, 0, &written), TL_EUNSUPPORTED);
    uint32_t crc = 0;
    written = 99;
    KV_REFUSED(tl_kv_export_part(p, &id, 1, 0, 1, buf, 400, &written, &crc), TL_EUNSUPPORTED);
    TL_EQ(written, 0);
    tl_kv_piece pieces[3];
    KV_REFUSED(tl_kv_export_pieces(p, &id, 1, buf, 400, pieces, 3, &written, &n_pieces),
               TL_EUNSUPPORTED);
    TL_EQ(written, 0);
    TL_EQ(n_pieces, 0);
    for (size_t i = 0; i < sizeof buf; i++)
        TL_EQ(buf[i], 0x11);
    KV_REFUSED(tl_kv_import(p, envelope, size, ids_out), TL_EUNSUPPORTED);
    KV_REFUSED(tl_kv_import(p, envelope, 3, ids_out), TL_EUNSUPPORTED); /* whatever the bytes */
    TL_EQ(tl_kv_export_bytes(p, 1), size);
    KV_SAME_STATS(p, before);
    TL_EQ(tl_kv_hash(p, id), 7);
    TL_OK_(tl_kv_check(p));
    tl_kv_pool_destroy(p);
}

TL_TEST(copy_block_copies_in_the_slab_or_calls_copy) {
    keeper k;
    tl_kv_pool *ids = create_ids(&k), *own = create(NULL);
    uint32_t a[2], b[2];
    TL_OK_(tl_kv_alloc(ids, 2, a));
    TL_OK_(tl_kv_alloc(own, 2, b));
    kv_write(own, b[0], 3);
    tl_kv_copy_block(own, b[0], b[1]);
    kv_expect(own, b[1], 3, B);
    tl_kv_copy_block(ids, a[0], a[1]);
    TL_EQ(k.n_copies, 1);
    tl_kv_copy_block(ids, a[0], a[0]); /* nothing to do */
    static const uint32_t bad[][2] = {{N, 0}, {0, N}, {UINT32_MAX, 1}};
    for (int i = 0; i < 3; i++) {
        tl_set_last_error(NULL);
        tl_kv_copy_block(ids, bad[i][0], bad[i][1]);
        TL_CHECK(strncmp(tl_last_error(), "tl_kv_copy_block:", 17) == 0);
    }
    TL_EQ(k.n_copies, 1);
    tl_kv_pool_destroy(ids);
    tl_kv_pool_destroy(own);
}

/*
 * A pool of ids and a pool with a slab through the same random calls: the same answers, and the
 * values outside are those of the slab.
 */
static void twin_lives(uint64_t seed) {
    keeper k;
    tl_kv_pool *ids = create_ids(&k), *own = create(NULL);
    uint64_t rand = seed, next_name = 1;
    for (int step = 0; step < 400; step++) {
        const uint32_t id = (uint32_t)(tl_test_rand(&rand) % N);
        uint32_t x = 99, y = 99;
        switch (tl_test_rand(&rand) % 7) {
        case 0:
        case 1:
            TL_EQ(tl_kv_alloc(ids, 1, &x), tl_kv_alloc(own, 1, &y));
            if (x < N) { /* its values: what its holder writes */
                memset(k.values + x * P, step & 255, P);
                memset(tl_kv_block_ptr(own, y, 0, 0), step & 255, P);
            }
            break;
        case 2:
            tl_kv_ref(ids, id);
            tl_kv_ref(own, id);
            break;
        case 3:
            TL_EQ(tl_kv_unref(ids, id), tl_kv_unref(own, id));
            break;
        case 4:
            TL_EQ(tl_kv_cow(ids, id, &x), tl_kv_cow(own, id, &y));
            break;
        case 5:
            TL_EQ(tl_kv_set_fill(ids, id, B), tl_kv_set_fill(own, id, B));
            TL_EQ(tl_kv_register(ids, id, next_name), tl_kv_register(own, id, next_name));
            next_name++;
            break;
        default: {
            const uint64_t name = 1 + tl_test_rand(&rand) % next_name;
            TL_EQ(tl_kv_lookup(ids, name, &x), tl_kv_lookup(own, name, &y));
        }
        }
        TL_EQ(x, y);
        for (uint32_t i = 0; i < N; i++) {
            TL_EQ(tl_kv_refs(ids, i), tl_kv_refs(own, i));
            TL_EQ(tl_kv_fill(ids, i), tl_kv_fill(own, i));
            TL_EQ(tl_kv_hash(ids, i), tl_kv_hash(own, i));
            if (tl_kv_refs(own, i) > 0 || tl_kv_hash(own, i) != 0)
                TL_MEM_EQ(k.values + i * P, tl_kv_block_ptr(own, i, 0, 0), P);
        }
    }
    TL_OK_(tl_kv_check(ids));
    tl_kv_pool_destroy(ids);
    tl_kv_pool_destroy(own);
}

TL_TEST(a_pool_of_ids_lives_the_life_of_a_pool_with_a_slab) {
    uint64_t seed;
    if (tl_test_seed(&seed)) {
        twin_lives(seed);
        return;
    }
    for (seed = 1; seed <= 40; seed++)
        twin_lives(seed);
}

/* ---- a manager over a pool of ids ---------------------------------------------------------- */

TL_TEST(a_manager_over_a_pool_of_ids_needs_copy) {
    keeper k;
    tl_kv_pool *p = create_ids(&k);
    tl_kv_mgr *m = (tl_kv_mgr *)(uintptr_t)64;
    KV_REFUSED(tl_kv_mgr_create(p, NULL, &m), TL_EUNSUPPORTED);
    TL_PTR_EQ(m, NULL);
    KV_REFUSED(tl_kv_mgr_create(p, &(tl_kv_mgr_options){.refs = tl_kv_refs}, &m), TL_EUNSUPPORTED);
    TL_OK_(tl_kv_mgr_create(p, &(tl_kv_mgr_options){.copy = tl_kv_copy_block}, &m));
    tl_kv_mgr_destroy(m);
    tl_kv_pool_destroy(p);
}

/* The byte that token t has as its value, at its position of its block. */
static uint8_t *value_of(const tl_kv_mgr *m, keeper *k, tl_kv_seq s, size_t i) {
    return k->values + tl_kv_seq_blocks(m, s)[i / B] * P + i % B;
}

TL_TEST(forks_of_a_managed_pool_of_ids_are_copied_by_copy) {
    for (int with_refs = 0; with_refs < 2; with_refs++) {
        keeper k;
        tl_kv_pool *p = create_ids(&k);
        tl_kv_mgr *m;
        const tl_kv_mgr_options opt = {.evict = tl_kv_evict,
                                       .find = tl_kv_find,
                                       .refs = with_refs ? tl_kv_refs : NULL,
                                       .copy = tl_kv_copy_block};
        TL_OK_(tl_kv_mgr_create(p, &opt, &m));
        static const uint32_t toks[] = {10, 11, 12};
        tl_kv_seq s[3];
        TL_OK_(tl_kv_seq_allocate(m, toks, 3, NULL, &s[0]));
        for (size_t i = 0; i < 3; i++)
            *value_of(m, &k, s[0], i) = (uint8_t)toks[i];
        TL_OK_(tl_kv_seq_commit(m, s[0], 3));
        TL_OK_(tl_kv_seq_fork(m, s[0], &s[1]));
        TL_OK_(tl_kv_seq_fork(m, s[0], &s[2]));
        tl_kv_copy copies[3];
        size_t n_copies = 99;
        static const uint32_t next[] = {20, 21, 22};
        TL_OK_(tl_kv_seq_append_batch(m, s, 3, next, copies, &n_copies));
        TL_EQ(n_copies, 2); /* the third keeps the block */
        TL_EQ(k.n_copies, 2);
        TL_EQ(copies[1].src, k.src);
        TL_EQ(copies[1].dst, k.dst);
        for (int i = 0; i < 3; i++)
            *value_of(m, &k, s[i], 3) = (uint8_t)next[i];
        for (int i = 0; i < 3; i++) {
            TL_EQ(*value_of(m, &k, s[i], 2), 12);
            TL_EQ(*value_of(m, &k, s[i], 3), next[i]);
        }
        /* a cut into a registered block: the one that goes on gets a copy, then one for itself */
        TL_OK_(tl_kv_seq_commit(m, s[0], 4));
        TL_OK_(tl_kv_seq_truncate(m, s[0], 3));
        TL_OK_(tl_kv_seq_append(m, s[0], next + 2, 1, copies, &n_copies));
        TL_EQ(n_copies, 1);
        TL_EQ(k.n_copies, 3);
        TL_EQ(k.dst, tl_kv_seq_blocks(m, s[0])[1]);
        TL_EQ(*value_of(m, &k, s[0], 2), 12);
        uint32_t ids_out[N];
        KV_REFUSED(tl_kv_mgr_import(m, "TLKV", 4, ids_out), TL_EUNSUPPORTED);
        TL_OK_(tl_kv_mgr_check(m));
        tl_kv_mgr_destroy(m);
        TL_EQ(kv_stats(p).used, 0);
        TL_OK_(tl_kv_check(p));
        tl_kv_pool_destroy(p);
    }
}
