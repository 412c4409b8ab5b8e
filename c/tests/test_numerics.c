/*
 * test_numerics.c - FNV-1a 64 and float16 <-> float32. The reference for rounding goes through
 * double and nearbyint, another way than the library's: a float16 neighbour quotient is exact in
 * double, so rounding it to an integer is rounding the value itself.
 */
#include "tinyllm/numerics.h"
#include "tl_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint32_t bits_of(float x) {
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

static float float_of(uint32_t b) {
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

/* ---- float16 ------------------------------------------------------------------------------- */

static int is_nan16(uint16_t h) {
    return (h & 0x7C00) == 0x7C00 && (h & 0x03FF) != 0;
}

/* The value of a finite float16. */
static double value_of(uint16_t h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const double magnitude =
        exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return h & 0x8000 ? -magnitude : magnitude;
}

/* The nearest float16 of a float that is no NaN, ties to even. */
static uint16_t nearest(float x) {
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const double a = fabs((double)x);
    if (a >= 65520.0) /* the middle between the largest float16 and what would come next */
        return sign | 0x7C00;
    const int e = a < ldexp(1, -14) ? -14 : ilogb(a);
    const double units = nearbyint(ldexp(a, 10 - e)); /* of 2^(e - 10), 0..2048 */
    /* 1024..2047 is a normal number; 2048 is the next exponent's first; below: a subnormal. The
     * encodings are consecutive, so adding does the carrying. */
    return (uint16_t)(sign | ((e + 14) * 1024 + (int)units));
}

TL_TEST(all_float16_patterns_convert_both_ways) {
    for (uint32_t h = 0; h <= 0xFFFF; h++) {
        const float f = tl_f16_to_f32((uint16_t)h);
        tl_test_context("float16 0x%04x, float32 0x%08x", h, bits_of(f));
        if (is_nan16((uint16_t)h)) {
            const uint32_t want = (h & 0x8000) << 16 | 0x7FC00000u | (h & 0x3FF) << 13;
            TL_EQ(bits_of(f), want);
            TL_EQ(tl_f32_to_f16(f), h | 0x0200);
        } else if ((h & 0x7C00) == 0x7C00) {
            TL_EQ(bits_of(f), (h & 0x8000) << 16 | 0x7F800000u);
            TL_EQ(tl_f32_to_f16(f), h);
        } else {
            TL_EQ(bits_of(f), bits_of((float)value_of((uint16_t)h)));
            TL_EQ(tl_f32_to_f16(f), h);
            TL_EQ(nearest(f), h); /* the reference agrees with itself */
        }
    }
}

TL_TEST(exact_boundaries_round_to_even) {
    static const struct {
        float x;
        uint16_t h;
    } cases[] = {
        {0.0f, 0x0000},          {-0.0f, 0x8000},           {1.0f, 0x3C00},
        {-2.0f, 0xC000},         {65504.0f, 0x7BFF},        {65519.996f, 0x7BFF},
        {65520.0f, 0x7C00},      {-65520.0f, 0xFC00},       {65536.0f, 0x7C00},
        {3.4e38f, 0x7C00},       {0x1p-14f, 0x0400},        {0x1p-24f, 0x0001},
        {0x1p-25f, 0x0000},      {0x1.000002p-25f, 0x0001}, {-0x1p-25f, 0x8000},
        {0x1.8p-24f, 0x0002},    {0x1.8p-25f, 0x0001},      {0x1.ffcp-15f, 0x0400},
        {0x1.ff8p-15f, 0x03FF},  {0x1.ffap-15f, 0x03FF},    {0x1p-149f, 0x0000},
        {0x1.002p0f, 0x3C00},    {0x1.006p0f, 0x3C02},      {0x1.002002p0f, 0x3C01},
        {0x1.001ffep0f, 0x3C00},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tl_test_context("%a", (double)cases[i].x);
        TL_EQ(tl_f32_to_f16(cases[i].x), cases[i].h);
    }
    /* Around every midpoint of two neighbours, and around every float16 itself. */
    for (uint32_t h = 0; h < 0x7C00; h++) {
        const float mid = (float)((value_of((uint16_t)h) +
                                   (h == 0x7BFF ? 65536.0 : value_of((uint16_t)(h + 1)))) /
                                  2);
        const float here = (float)value_of((uint16_t)h);
        const float around[] = {mid,  nextafterf(mid, 0),  nextafterf(mid, INFINITY),
                                here, nextafterf(here, 0), nextafterf(here, INFINITY)};
        for (size_t i = 0; i < 6; i++) {
            tl_test_context("%a", (double)around[i]);
            TL_EQ(tl_f32_to_f16(around[i]), nearest(around[i]));
            TL_EQ(tl_f32_to_f16(-around[i]), nearest(-around[i]));
        }
        TL_EQ(tl_f32_to_f16(mid), h + (h & 1)); /* ties to even */
    }
}

TL_TEST(sixteen_million_floats_round_like_the_reference) {
    /* A stride that is odd visits every mantissa length and every exponent. */
    for (uint64_t b = 0; b <= UINT32_MAX; b += 257) {
        const float x = float_of((uint32_t)b);
        if (isnan(x))
            continue;
        if (tl_f32_to_f16(x) != nearest(x)) {
            tl_test_context("float32 0x%08x", (unsigned)b);
            TL_EQ(tl_f32_to_f16(x), nearest(x));
        }
    }
}

TL_TEST(nans_stay_nans_keep_sign_and_upper_payload_and_are_quiet) {
    uint64_t rng = 3;
    for (int i = 0; i < 1000000; i++) {
        const uint32_t sign = (uint32_t)i & 1, payload = 1 + tl_test_below(&rng, 0x7FFFFF);
        const uint32_t b = sign << 31 | 0x7F800000u | payload;
        TL_EQ(tl_f32_to_f16(float_of(b)), sign << 15 | 0x7E00u | payload >> 13);
    }
}

TL_TEST(arrays_convert_like_single_values) {
    enum { MAX = 100, GUARD = 4 };
    uint64_t rng = 4;
    for (int round = 0; round < 200; round++)
        for (size_t n = 0; n <= MAX; n++) {
            float src[MAX + GUARD], back[MAX + GUARD];
            uint16_t dst[MAX + GUARD];
            const size_t shift = tl_test_below(&rng, GUARD);
            for (size_t i = 0; i < n; i++) {
                /* Any bits at all, and float16 values with and without some disturbance. */
                const uint32_t r = (uint32_t)tl_test_rand(&rng);
                src[shift + i] = i % 3 == 0 ? float_of(r)
                                 : i % 3 == 1
                                     ? tl_f16_to_f32((uint16_t)r)
                                     : float_of(bits_of(tl_f16_to_f32((uint16_t)r)) ^ 0x1000);
            }
            memset(dst, 0xEE, sizeof dst);
            memset(back, 0xEE, sizeof back);
            tl_f32_to_f16_n(dst + shift, src + shift, n);
            for (size_t i = 0; i < n; i++)
                TL_EQ(dst[shift + i], tl_f32_to_f16(src[shift + i]));
            tl_f16_to_f32_n(back + shift, dst + shift, n);
            for (size_t i = 0; i < n; i++)
                TL_EQ(bits_of(back[shift + i]), bits_of(tl_f16_to_f32(dst[shift + i])));
            if (shift + n < MAX + GUARD) { /* nothing past the end */
                TL_EQ(dst[shift + n], 0xEEEE);
                TL_EQ(bits_of(back[shift + n]), 0xEEEEEEEEu);
            }
        }
    /* All patterns, NaNs included, in one array. */
    uint16_t *all = malloc(65536 * sizeof *all);
    float *wide = malloc(65536 * sizeof *wide);
    for (uint32_t h = 0; h <= 0xFFFF; h++)
        all[h] = (uint16_t)h;
    tl_f16_to_f32_n(wide, all, 65536);
    for (uint32_t h = 0; h <= 0xFFFF; h++)
        TL_EQ(bits_of(wide[h]), bits_of(tl_f16_to_f32((uint16_t)h)));
    tl_f32_to_f16_n(all, wide, 65536);
    for (uint32_t h = 0; h <= 0xFFFF; h++)
        TL_EQ(all[h], is_nan16((uint16_t)h) ? h | 0x0200 : h);
    free(all);
    free(wide);
    tl_f32_to_f16_n(NULL, NULL, 0);
    tl_f16_to_f32_n(NULL, NULL, 0);
}

/* ---- FNV-1a 64 ----------------------------------------------------------------------------- */

TL_TEST(fnv1a64_gives_the_published_values) {
    static const struct {
        const char *text;
        uint64_t hash;
    } vectors[] = {{"", 0xCBF29CE484222325u},
                   {"a", 0xAF63DC4C8601EC8Cu},
                   {"b", 0xAF63DF4C8601F1A5u},
                   {"foobar", 0x85944171F73967E8u}};
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++)
        TL_EQ(tl_fnv1a64(vectors[i].text, strlen(vectors[i].text), TL_FNV1A64_BASIS),
              vectors[i].hash);
    TL_EQ(tl_fnv1a64(NULL, 0, 42), 42);
    TL_EQ(TL_FNV1A64_BASIS, 0xCBF29CE484222325u);
    TL_EQ(TL_FNV1A64_PRIME, 0x100000001B3u);
}

TL_TEST(fnv1a64_is_the_bytewise_loop_and_continues) {
    uint8_t data[300];
    uint64_t rng = 5;
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)tl_test_rand(&rng);
    for (size_t n = 0; n <= sizeof data; n++) {
        const uint64_t start = tl_test_rand(&rng);
        uint64_t h = start;
        for (size_t i = 0; i < n; i++)
            h = (h ^ data[i]) * 0x100000001B3u;
        TL_EQ(tl_fnv1a64(data, n, start), h);
        const size_t cut = (size_t)(tl_test_rand(&rng) % (n + 1));
        TL_EQ(tl_fnv1a64(data + cut, n - cut, tl_fnv1a64(data, cut, start)), h);
    }
}
