/*
 * test_attention.c - attention over block tables, compared with the plain formula in double
 * precision, and with itself: the same bits whatever is around.
 */
#include "tinyllm/attention.h"

#include "kernels/paged_attn.h"
#include "numerics/cpu.h"
#include "tinyllm/kv_pool_ext.h"
#include "tinyllm/numerics.h"
#include "tl_test.h"
#include "tl_test_kv.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- a sequence in blocks ------------------------------------------------------------------ */

typedef struct {
    tl_kv_pool *kv;
    int64_t B, H, Hkv, D, max_blocks;
    int32_t *tables, *ctx_lens;
    float *q, *out;
    uint64_t rng;
} batch;

static float between(uint64_t *rng, float a, float b) {
    return a + (b - a) * (float)(tl_test_rand(rng) >> 40) / (float)(1 << 24);
}

static uint32_t blocks_of(const batch *x, int64_t ctx_len) {
    const uint32_t bt = kv_cfg(x->kv).block_tokens;
    return (uint32_t)((ctx_len + bt - 1) / bt);
}

static uint16_t *values(const batch *x, int64_t b, int64_t pos, uint32_t layer, int is_v,
                        int64_t head) {
    const uint32_t bt = kv_cfg(x->kv).block_tokens;
    const int32_t id = x->tables[b * x->max_blocks + pos / bt];
    uint16_t *plane = tl_kv_block_ptr(x->kv, (uint32_t)id, layer, is_v);
    return plane + ((size_t)head * bt + (size_t)(pos % bt)) * (size_t)x->D;
}

/* Sequences of the given lengths in blocks of bt, ids shuffled; values by (seed, b, pos, ...), so
 * that two batches with another block size hold the same. NaN wherever no sequence wrote. */
static batch new_batch(uint64_t seed, uint32_t bt, uint32_t layers, int64_t B, int64_t H,
                       int64_t Hkv, int64_t D, const int32_t *ctx_lens) {
    batch x = {.B = B, .H = H, .Hkv = Hkv, .D = D, .rng = seed};
    uint32_t n_blocks = 0;
    for (int64_t b = 0; b < B; b++) {
        const uint32_t n = ((uint32_t)ctx_lens[b] + bt - 1) / bt;
        n_blocks += n;
        x.max_blocks = n > x.max_blocks ? n : x.max_blocks;
    }
    x.max_blocks += 1; /* and one that nobody looks at */
    x.kv = kv_new(n_blocks, bt, layers, (uint32_t)Hkv, (uint32_t)D);
    uint16_t *slab = tl_kv_block_ptr(x.kv, 0, 0, 0);
    const size_t n_values = (size_t)n_blocks * tl_kv_block_bytes(x.kv) / 2;
    for (size_t i = 0; i < n_values; i++)
        slab[i] = 0x7E00;
    uint32_t *ids = tl_alloc(n_blocks * sizeof *ids, 64);
    TL_OK_(tl_kv_alloc(x.kv, n_blocks, ids));
    for (uint32_t i = n_blocks; i > 1; i--) {
        const uint32_t j = tl_test_below(&x.rng, i), id = ids[i - 1];
        ids[i - 1] = ids[j];
        ids[j] = id;
    }
    x.tables = tl_alloc((size_t)(B * x.max_blocks) * sizeof *x.tables, 64);
    x.ctx_lens = tl_alloc((size_t)B * sizeof *x.ctx_lens, 64);
    x.q = tl_alloc((size_t)(B * H * D) * sizeof *x.q, 64);
    x.out = tl_alloc((size_t)(B * H * D) * sizeof *x.out, 64);
    uint32_t next = 0;
    for (int64_t b = 0; b < B; b++) {
        x.ctx_lens[b] = ctx_lens[b];
        for (int64_t i = 0; i < x.max_blocks; i++)
            x.tables[b * x.max_blocks + i] =
                i < blocks_of(&x, ctx_lens[b]) ? (int32_t)ids[next++] : -1;
        for (uint32_t layer = 0; layer < layers; layer++)
            for (int is_v = 0; is_v < 2; is_v++)
                for (int64_t h = 0; h < Hkv; h++)
                    for (int64_t pos = 0; pos < ctx_lens[b]; pos++) {
                        uint64_t rng = seed * 1000003 + (uint64_t)b * 77 + (uint64_t)pos * 131071 +
                                       (uint64_t)h * 5 + (uint64_t)is_v * 3 + layer * 7919;
                        uint16_t *v = values(&x, b, pos, layer, is_v, h);
                        for (int64_t d = 0; d < D; d++)
                            v[d] = tl_f32_to_f16(between(&rng, -1.5f, 1.5f));
                    }
    }
    uint64_t rng = seed ^ 0x9999;
    for (int64_t i = 0; i < B * H * D; i++)
        x.q[i] = between(&rng, -2, 2);
    tl_free(ids);
    return x;
}

static void end_batch(batch *x) {
    tl_kv_pool_destroy(x->kv);
    tl_free(x->tables);
    tl_free(x->ctx_lens);
    tl_free(x->q);
    tl_free(x->out);
}

static float scale_of(const batch *x) {
    return 1 / sqrtf((float)x->D);
}

static void decode(const batch *x, uint32_t layer, int64_t window, tl_pool *tp) {
    TL_OK_(tl_paged_attn_decode_f32(x->q, x->kv, layer, x->tables, x->max_blocks, x->ctx_lens,
                                    x->out, x->B, x->H, x->Hkv, x->D, scale_of(x), window, tp));
}

/* ---- the formula --------------------------------------------------------------------------- */

/* One head of one query at position pos of sequence b, in double; out[D]. Returns the largest
 * |value| that it averages. */
static double formula(const batch *x, const float *q, int64_t b, int64_t pos, int64_t h,
                      uint32_t layer, int64_t window, double *out) {
    const int64_t kv_head = h / (x->H / x->Hkv);
    const int64_t from = window > 0 && pos - window + 1 > 0 ? pos - window + 1 : 0;
    double *s = malloc((size_t)(pos + 1) * sizeof *s);
    double top = -INFINITY, total = 0, largest = 0;
    for (int64_t j = from; j <= pos; j++) {
        const uint16_t *k = values(x, b, j, layer, 0, kv_head);
        s[j] = 0;
        for (int64_t d = 0; d < x->D; d++)
            s[j] += (double)q[d] * (double)tl_f16_to_f32(k[d]);
        s[j] *= (double)scale_of(x);
        top = s[j] > top ? s[j] : top;
    }
    for (int64_t d = 0; d < x->D; d++)
        out[d] = 0;
    for (int64_t j = from; j <= pos; j++) {
        const double w = exp(s[j] - top);
        const uint16_t *v = values(x, b, j, layer, 1, kv_head);
        total += w;
        for (int64_t d = 0; d < x->D; d++) {
            const double value = (double)tl_f16_to_f32(v[d]);
            out[d] += w * value;
            largest = fabs(value) > largest ? fabs(value) : largest;
        }
    }
    for (int64_t d = 0; d < x->D; d++)
        out[d] /= total;
    free(s);
    return largest;
}

/* Scores are off by some 2^-24 of the sum of |q k|, which is below 10 here, and weights by as much
 * again: a mean of values up to `largest` by less than 2^-17 of it. */
static void near_formula(const batch *x, const float *q, const float *got, int64_t b, int64_t pos,
                         int64_t h, uint32_t layer, int64_t window) {
    double want[4096];
    const double largest = formula(x, q, b, pos, h, layer, window, want);
    for (int64_t d = 0; d < x->D; d++)
        if (!(fabs((double)got[d] - want[d]) <= 0x1p-17 * largest))
            tl_test_fail(__FILE__, __LINE__,
                         "sequence %d, position %d, head %d, dim %d: %.9g, not %.9g", (int)b,
                         (int)pos, (int)h, (int)d, (double)got[d], want[d]);
}

static void decode_is_near_formula(const batch *x, uint32_t layer, int64_t window) {
    for (int64_t b = 0; b < x->B; b++)
        for (int64_t h = 0; h < x->H; h++)
            near_formula(x, x->q + (b * x->H + h) * x->D, x->out + (b * x->H + h) * x->D, b,
                         x->ctx_lens[b] - 1, h, layer, window);
}

TL_TEST(decode_is_the_formula_for_every_shape) {
    static const struct {
        uint32_t bt, layers;
        int64_t H, Hkv, D;
    } shapes[] = {
        {16, 1, 1, 1, 64},  {16, 2, 9, 3, 64},  {16, 1, 4, 2, 128}, {16, 1, 8, 2, 80},
        {16, 1, 5, 1, 40},  {16, 1, 71, 1, 16}, {16, 1, 6, 6, 8},   {1, 1, 4, 1, 4},
        {7, 2, 3, 1, 20},   {300, 1, 2, 1, 24}, {16, 1, 2, 1, 1},   {3, 1, 7, 1, 13},
        {32, 1, 4, 1, 256}, {5, 1, 3, 3, 600},  {16, 1, 130, 2, 5}, {64, 1, 4, 4, 31},
    };
    static const int32_t ctx_lens[] = {1, 2, 7, 8, 9, 255, 256, 257, 600};
    static const int64_t windows[] = {0, 1, 5, 256, 300};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        batch x = new_batch(i, shapes[i].bt, shapes[i].layers, 9, shapes[i].H, shapes[i].Hkv,
                            shapes[i].D, ctx_lens);
        for (size_t w = 0; w < sizeof windows / sizeof windows[0]; w++) {
            tl_test_context("shape %zu, window %d, variant %s", i, (int)windows[w],
                            tl_attn_selected());
            decode(&x, shapes[i].layers - 1, windows[w], NULL);
            decode_is_near_formula(&x, shapes[i].layers - 1, windows[w]);
        }
        end_batch(&x);
    }
}

/* ---- the same bits ------------------------------------------------------------------------- */

enum { MANY = 37 };

static void many_lengths(uint64_t seed, int32_t *ctx_lens) {
    for (int i = 0; i < MANY; i++)
        ctx_lens[i] = 1 + (int32_t)tl_test_below(&seed, i % 5 == 0 ? 2500 : 300);
}

TL_TEST(a_row_does_not_depend_on_its_batch) {
    int32_t ctx_lens[MANY];
    many_lengths(1, ctx_lens);
    batch x = new_batch(1, 16, 1, MANY, 6, 2, 64, ctx_lens);
    const size_t row = (size_t)(x.H * x.D);
    for (int64_t window = 0; window <= 100; window += 100) {
        decode(&x, 0, window, NULL);
        for (int64_t b = 0; b < MANY; b++) {
            batch one = x;
            float out[6 * 64];
            one.B = 1;
            one.tables += b * x.max_blocks;
            one.ctx_lens += b;
            one.q += (size_t)b * row;
            one.out = out;
            decode(&one, 0, window, NULL);
            tl_test_context("sequence %d", (int)b);
            TL_MEM_EQ(out, x.out + (size_t)b * row, sizeof out);
        }
    }
    end_batch(&x);
}

TL_TEST(a_row_does_not_depend_on_threads) {
    int32_t ctx_lens[MANY];
    many_lengths(2, ctx_lens);
    /* Many sequences; few long ones, which are cut into their tiles; and one whose tiles' results
     * do not fit the pool's memory at once: 26 of 40 KB. */
    static const struct {
        int64_t B, H, Hkv, D;
        int32_t ctx_len;
    } shapes[] = {
        {MANY, 8, 2, 64, 0}, {1, 4, 2, 64, 3000}, {1, 9, 3, 64, 700}, {1, 64, 1, 152, 6500}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        for (int64_t b = 0; shapes[i].ctx_len && b < shapes[i].B; b++)
            ctx_lens[b] = shapes[i].ctx_len + 77 * (int32_t)b;
        batch x =
            new_batch(2, 16, 1, shapes[i].B, shapes[i].H, shapes[i].Hkv, shapes[i].D, ctx_lens);
        const size_t size = (size_t)(x.B * x.H * x.D) * sizeof(float);
        float *serial = tl_alloc(size, 64);
        decode(&x, 0, 0, NULL);
        memcpy(serial, x.out, size);
        for (uint32_t n = 1; n <= 4; n *= 2) {
            tl_pool *tp;
            TL_OK_(tl_pool_create(n, &tp));
            TL_EQ(tl_pool_threads(tp), n);
            for (int again = 0; again < 2; again++) {
                memset(x.out, 0xAA, size);
                decode(&x, 0, 0, tp);
                tl_test_context("shape %zu, %u threads", i, n);
                TL_MEM_EQ(x.out, serial, size);
            }
            tl_pool_destroy(tp);
        }
        tl_free(serial);
        end_batch(&x);
    }
}

TL_TEST(a_row_does_not_depend_on_blocks) {
    static const uint32_t sizes[] = {16, 1, 3, 8, 17, 256, 1000};
    const int32_t ctx_lens[] = {700, 40};
    float first[2 * 4 * 64];
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        batch x = new_batch(3, sizes[i], 1, 2, 4, 1, 64, ctx_lens);
        decode(&x, 0, 200, NULL);
        if (i == 0)
            memcpy(first, x.out, sizeof first);
        tl_test_context("blocks of %u", sizes[i]);
        TL_MEM_EQ(x.out, first, sizeof first);
        end_batch(&x);
    }
}

TL_TEST(a_row_of_a_prefill_is_the_row_of_a_decode) {
    static const struct {
        uint32_t bt;
        int64_t H, Hkv, D, window;
        int32_t ctx_len, T;
    } shapes[] = {
        {16, 9, 3, 64, 0, 530, 530}, {16, 4, 4, 32, 0, 300, 300},   {16, 4, 1, 64, 40, 600, 600},
        {5, 6, 2, 24, 0, 270, 30},   {16, 71, 1, 16, 7, 300, 40},   {16, 8, 1, 128, 0, 1200, 3},
        {16, 2, 2, 600, 3, 50, 50},  {16, 7, 1, 13, 256, 700, 300},
    };
    tl_pool *tp;
    TL_OK_(tl_pool_create(3, &tp));
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const int64_t T = shapes[i].T, H = shapes[i].H, D = shapes[i].D;
        batch x = new_batch(40 + i, shapes[i].bt, 1, 1, H, shapes[i].Hkv, D, &shapes[i].ctx_len);
        const size_t size = (size_t)(T * H * D) * sizeof(float);
        float *q = tl_alloc(size, 64), *out = tl_alloc(size, 64), *threaded = tl_alloc(size, 64);
        for (int64_t j = 0; j < T * H * D; j++)
            q[j] = between(&x.rng, -2, 2);
        TL_OK_(tl_paged_attn_prefill_f32(q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens[0], out, T,
                                         H, x.Hkv, D, scale_of(&x), shapes[i].window, NULL));
        TL_OK_(tl_paged_attn_prefill_f32(q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens[0],
                                         threaded, T, H, x.Hkv, D, scale_of(&x), shapes[i].window,
                                         tp));
        TL_MEM_EQ(threaded, out, size);
        for (int64_t t = 0; t < T; t++) {
            batch row = x;
            int32_t length = shapes[i].ctx_len - shapes[i].T + (int32_t)t + 1;
            row.ctx_lens = &length;
            row.q = q + t * H * D;
            decode(&row, 0, shapes[i].window, NULL);
            tl_test_context("shape %zu, row %d", i, (int)t);
            TL_MEM_EQ(out + t * H * D, row.out, (size_t)(H * D) * sizeof(float));
            if (t % 97 == 0 || t + 1 == T)
                near_formula(&x, row.q, row.out, 0, length - 1, 0, 0, shapes[i].window);
        }
        tl_free(q);
        tl_free(out);
        tl_free(threaded);
        end_batch(&x);
    }
    tl_pool_destroy(tp);
}

/* ---- values that are not numbers ----------------------------------------------------------- */

TL_TEST(infinite_and_huge_values_give_what_the_formula_gives) {
    const int32_t ctx_len = 520;
    batch x = new_batch(5, 16, 1, 1, 2, 1, 16, &ctx_len);
    /* Scores of some thousands: one key has all the weight, in a tile of its own. */
    for (int64_t pos = 0; pos < ctx_len; pos++)
        for (int64_t d = 0; d < 16; d++)
            values(&x, 0, pos, 0, 0, 0)[d] = tl_f32_to_f16(pos == 300 ? 1000.0f : -1000.0f);
    for (int64_t d = 0; d < 32; d++)
        x.q[d] = d < 16 ? 100.0f : -100.0f;
    decode(&x, 0, 0, NULL);
    for (int64_t d = 0; d < 16; d++)
        TL_CHECK(x.out[d] == tl_f16_to_f32(values(&x, 0, 300, 0, 1, 0)[d]));
    decode_is_near_formula(&x, 0, 0);

    /* A tile whose scores are all -infinity weighs nothing. */
    for (int64_t pos = 0; pos < 256; pos++)
        values(&x, 0, pos, 0, 0, 0)[3] = 0xFC00;
    decode(&x, 0, 0, NULL);
    near_formula(&x, x.q, x.out, 0, ctx_len - 1, 0, 0, 0);

    /* An infinite V that has weight is infinite, in its dimension alone. */
    values(&x, 0, 300, 0, 1, 0)[2] = 0x7C00;
    decode(&x, 0, 0, NULL);
    TL_CHECK(isinf(x.out[2]) && !isinf(x.out[1]) && !isnan(x.out[1]));

    /* A NaN among the keys that are seen is a NaN; one that is not seen is nothing. */
    values(&x, 0, 10, 0, 0, 0)[0] = 0x7E00;
    decode(&x, 0, 0, NULL);
    TL_CHECK(isnan(x.out[0]) && isnan(x.out[15]));
    decode(&x, 0, 100, NULL);
    decode_is_near_formula(&x, 0, 100);

    /* All scores -infinity: 0 / 0. */
    for (int64_t pos = 0; pos < ctx_len; pos++)
        values(&x, 0, pos, 0, 0, 0)[3] = 0xFC00;
    values(&x, 0, 10, 0, 0, 0)[0] = 0;
    decode(&x, 0, 0, NULL);
    TL_CHECK(isnan(x.out[0]));
    end_batch(&x);
}

TL_TEST(tiles_without_weight_are_joined_without_weight) {
    const int32_t ctx_len = 600;
    batch x = new_batch(10, 16, 1, 1, 1, 1, 8, &ctx_len);
    for (int64_t pos = 0; pos < 512; pos++) /* two tiles whose scores are all -infinity */
        values(&x, 0, pos, 0, 0, 0)[0] = x.q[0] > 0 ? 0xFC00 : 0x7C00;
    decode(&x, 0, 0, NULL);
    near_formula(&x, x.q, x.out, 0, ctx_len - 1, 0, 0, 0);
    end_batch(&x);
}

/* A pool of one block with one position: nothing around it can be read. Under AddressSanitizer. */
TL_TEST(nothing_around_the_blocks_is_read) {
    for (int64_t D = 1; D <= 40; D++) {
        const int32_t ctx_len = 1;
        batch x = new_batch((uint64_t)D, 1, 1, 1, 5, 1, D, &ctx_len);
        x.max_blocks = 1;
        decode(&x, 0, 0, NULL);
        decode_is_near_formula(&x, 0, 0);
        end_batch(&x);
    }
}

/* One key has all the weight, so that the result is its V: all 63,488 finite values there are. */
TL_TEST(every_float16_is_read_as_it_is) {
    const int32_t ctx_len = 1;
    batch x = new_batch(9, 1, 1, 1, 1, 1, 512, &ctx_len);
    for (uint32_t first = 0; first < 0x10000; first += 512) {
        uint16_t *v = values(&x, 0, 0, 0, 1, 0);
        for (uint32_t d = 0; d < 512; d++)
            v[d] = (uint16_t)(first + d);
        decode(&x, 0, 0, NULL);
        for (uint32_t d = 0; d < 512; d++) {
            const float want = tl_f16_to_f32((uint16_t)(first + d));
            tl_test_context("float16 0x%04x", first + d);
            TL_CHECK(x.out[d] == want || (isnan(x.out[d]) && isnan(want)));
        }
    }
    end_batch(&x);
}

TL_TEST(the_exponential_is_off_by_one_unit_at_most) {
    double worst = 0;
    for (uint32_t i = 0; i < 4000000; i++) {
        const float x = -126.0f * (float)i / 4000000.0f;
        const double want = exp2((double)x), off = fabs((double)tl_attn_exp2(x) - want) / want;
        worst = off > worst ? off : worst;
    }
    tl_test_context("worst relative error %.3g", worst);
    TL_CHECK(worst < 0x1p-23);
    TL_CHECK(tl_attn_exp2(0) == 1 && tl_attn_exp2(-1) == 0.5f && tl_attn_exp2(-126) == 0x1p-126f);
    TL_CHECK(tl_attn_exp2(-126.5f) == 0 && tl_attn_exp2(-1e30f) == 0 &&
             tl_attn_exp2(-INFINITY) == 0);
    TL_CHECK(isnan(tl_attn_exp2(NAN)));
}

/* ---- errors -------------------------------------------------------------------------------- */

TL_TEST(wrong_arguments_are_refused_and_nothing_is_written) {
    const int32_t ctx_lens[] = {20, 33};
    batch x = new_batch(6, 16, 2, 2, 4, 2, 8, ctx_lens);
    const size_t size = (size_t)(x.B * x.H * x.D) * sizeof(float);
    float *before = tl_alloc(size, 64);
    memset(x.out, 0x55, size);
    memcpy(before, x.out, size);
#define DECODE(st, q, kv, layer, tables, max_blocks, lens, out, B, H, Hkv, D, scale)               \
    TL_STATUS(tl_paged_attn_decode_f32(q, kv, layer, tables, max_blocks, lens, out, B, H, Hkv, D,  \
                                       scale, 0, NULL),                                            \
              st)
    DECODE(TL_EINVAL, NULL, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 8, 1);
    DECODE(TL_EINVAL, x.q, NULL, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 8, 1);
    DECODE(TL_EINVAL, x.q, x.kv, 0, NULL, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 8, 1);
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, NULL, x.out, 2, 4, 2, 8, 1);
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, NULL, 2, 4, 2, 8, 1);
    DECODE(TL_EINVAL, x.q, x.kv, 2, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 8, 1);
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, -1, x.ctx_lens, x.out, 2, 4, 2, 8, 1);
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, -1, 4, 2, 8, 1);
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 0, 2, 8, 1);
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 8, NAN);
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 8, -3e38f);
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.q + 5, 2, 4, 2, 8, 1);
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, INT64_MAX, 4, 2, 8,
           1);
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, INT64_MAX - 1, 2,
           8, 1);
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, 2, x.ctx_lens, x.out, 2, 4, 2, 8,
           1); /* 33: 3 blocks */
    DECODE(TL_ESHAPE, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 1, 8, 1);
    DECODE(TL_ESHAPE, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 0, 8, 1);
    DECODE(TL_ESHAPE, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 9, 1);
    DECODE(TL_ESHAPE, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 5, 2, 8, 1);
    for (int32_t bad = -1; bad <= 1000; bad += 1001) { /* the last block of the last sequence */
        const int32_t id = x.tables[x.max_blocks + 2];
        x.tables[x.max_blocks + 2] = bad;
        DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 8, 1);
        x.tables[x.max_blocks + 2] = (int32_t)kv_cfg(x.kv).n_blocks;
        DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 8, 1);
        x.tables[x.max_blocks + 2] = id;
    }
    for (int32_t bad = -5; bad <= 0; bad += 5) {
        x.ctx_lens[1] = bad;
        DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 8, 1);
    }
    x.ctx_lens[1] = INT32_MAX;
    DECODE(TL_EINVAL, x.q, x.kv, 0, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 8, 1);
    x.ctx_lens[1] = 33;

#define PREFILL(st, q, table, n_blocks, ctx_len, out, T)                                           \
    TL_STATUS(tl_paged_attn_prefill_f32(q, x.kv, 0, table, n_blocks, ctx_len, out, T, 4, 2, 8, 1,  \
                                        0, NULL),                                                  \
              st)
    PREFILL(TL_EINVAL, NULL, x.tables, 2, 20, x.out, 2);
    PREFILL(TL_EINVAL, x.q, NULL, 2, 20, x.out, 2);
    PREFILL(TL_EINVAL, x.q, x.tables, 2, 20, NULL, 2);
    PREFILL(TL_EINVAL, x.q, x.tables, 1, 20, x.out, 2);
    PREFILL(TL_EINVAL, x.q, x.tables, 2, 1, x.out, 2);
    PREFILL(TL_EINVAL, x.q, x.tables, 2, 20, x.out, -1);
    PREFILL(TL_EINVAL, x.q, x.tables, 2, INT64_MAX, x.out, 2);
    TL_MEM_EQ(x.out, before, size);

    DECODE(TL_OK, NULL, x.kv, 0, NULL, 0, NULL, NULL, 0, 4, 2, 8, 1);
    PREFILL(TL_OK, NULL, NULL, 0, 0, NULL, 0);
    TL_MEM_EQ(x.out, before, size);
    DECODE(TL_OK, x.q, x.kv, 1, x.tables, x.max_blocks, x.ctx_lens, x.out, 2, 4, 2, 8, 1);
    tl_free(before);
    end_batch(&x);
}

static void copy_nothing(void *user, uint32_t src, uint32_t dst) {
    (void)user, (void)src, (void)dst;
}

TL_TEST(a_pool_of_ids_has_nothing_to_read) {
    const tl_kv_cfg cfg = {2, 16, 1, 1, 8, TL_F16, TL_KV_FORMAT_V1};
    const tl_kv_options opt = {.copy = copy_nothing};
    tl_kv_pool *kv;
    TL_OK_(tl_kv_pool_create_opt(&cfg, &opt, &kv));
    float q[8] = {0}, out[8];
    const int32_t table = 0, ctx_len = 1;
    TL_STATUS(tl_paged_attn_decode_f32(q, kv, 0, &table, 1, &ctx_len, out, 1, 1, 1, 8, 1, 0, NULL),
              TL_EUNSUPPORTED);
    tl_kv_pool_destroy(kv);
}

TL_TEST(a_slab_of_the_callers_is_read_where_it_lies) {
    const int32_t ctx_len = 30;
    batch x = new_batch(11, 16, 1, 1, 3, 1, 24, &ctx_len);
    decode(&x, 0, 0, NULL);
    const tl_kv_cfg cfg = kv_cfg(x.kv);
    const size_t size = cfg.n_blocks * tl_kv_block_bytes(x.kv);
    uint16_t *memory = tl_alloc(size + 2, 64); /* aligned to 2 and to nothing more */
    memcpy(memory + 1, tl_kv_block_ptr(x.kv, 0, 0, 0), size);
    const tl_kv_options opt = {.slab = memory + 1, .slab_bytes = size};
    batch y = x;
    float out[3 * 24];
    y.out = out;
    TL_OK_(tl_kv_pool_create_opt(&cfg, &opt, &y.kv));
    decode(&y, 0, 0, NULL);
    TL_MEM_EQ(out, x.out, sizeof out);
    tl_kv_pool_destroy(y.kv);
    tl_free(memory);
    end_batch(&x);
}

/* ---- the pool of threads ------------------------------------------------------------------- */

TL_TEST(a_pool_of_threads_has_limits) {
    tl_pool *tp = (tl_pool *)(uintptr_t)1;
    TL_STATUS(tl_pool_create(2, NULL), TL_EINVAL);
    TL_STATUS(tl_pool_create(TL_POOL_MAX_THREADS + 1, &tp), TL_EINVAL);
    TL_PTR_EQ(tp, NULL);
    TL_EQ(tl_pool_threads(NULL), 1);
    tl_pool_destroy(NULL);
    TL_OK_(tl_pool_create(0, &tp));
    TL_CHECK(tl_pool_threads(tp) >= 1);
    tl_pool_destroy(tp);
}

typedef struct {
    const batch *x;
    tl_pool *tp;
    const float *want;
    size_t size;
    const char *problem;
} caller;

static void *call_often(void *arg) {
    caller *c = arg;
    batch mine = *c->x;
    mine.out = malloc(c->size);
    for (int i = 0; i < 20 && !c->problem; i++) {
        if (tl_paged_attn_decode_f32(mine.q, mine.kv, 0, mine.tables, mine.max_blocks,
                                     mine.ctx_lens, mine.out, mine.B, mine.H, mine.Hkv, mine.D,
                                     scale_of(&mine), 0, c->tp) != TL_OK)
            c->problem = "a call failed";
        else if (memcmp(mine.out, c->want, c->size) != 0)
            c->problem = "a result differs";
    }
    free(mine.out);
    return NULL;
}

TL_TEST(many_callers_share_a_pool_of_threads) {
    const int32_t ctx_lens[] = {1500, 900, 30};
    batch x = new_batch(7, 16, 1, 3, 4, 1, 64, ctx_lens);
    const size_t size = (size_t)(x.B * x.H * x.D) * sizeof(float);
    tl_pool *tp;
    TL_OK_(tl_pool_create(3, &tp));
    decode(&x, 0, 0, NULL);
    caller c[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        c[i] = (caller){&x, tp, x.out, size, NULL};
        TL_EQ(pthread_create(&threads[i], NULL, call_often, &c[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        TL_EQ(pthread_join(threads[i], NULL), 0);
        if (c[i].problem)
            tl_test_fail(__FILE__, __LINE__, "caller %d: %s", i, c[i].problem);
    }
    tl_pool_destroy(tp);
    end_batch(&x);
}

#if !TL_TEST_SANITIZED
TL_TEST(a_child_of_fork_works_alone) {
    const int32_t ctx_lens[] = {1500, 900};
    batch x = new_batch(8, 16, 1, 2, 4, 1, 64, ctx_lens);
    const size_t size = (size_t)(x.B * x.H * x.D) * sizeof(float);
    tl_pool *tp;
    TL_OK_(tl_pool_create(3, &tp));
    decode(&x, 0, 0, tp);
    float *want = tl_alloc(size, 64);
    memcpy(want, x.out, size);
    const pid_t child = fork();
    TL_CHECK(child >= 0);
    if (child == 0) {
        memset(x.out, 0, size);
        alarm(60);
        decode(&x, 0, 0, tp);
        const int same = memcmp(x.out, want, size) == 0;
        tl_pool_destroy(tp);
        _exit(same ? 0 : 1);
    }
    int status;
    TL_EQ(waitpid(child, &status, 0), child);
    TL_EQ(status, 0);
    decode(&x, 0, 0, tp); /* the parent's threads are still there */
    TL_MEM_EQ(x.out, want, size);
    tl_free(want);
    tl_pool_destroy(tp);
    end_batch(&x);
}
#endif

TL_TEST(the_last_variant_that_can_run_is_selected) {
    const char *want = NULL;
    for (const tl_attn_variant *v = tl_attn_variants; v->name; v++)
        if ((v->need & ~tl_cpu_features()) == 0)
            want = v->name;
    TL_STR_EQ(tl_attn_selected(), want);
}
