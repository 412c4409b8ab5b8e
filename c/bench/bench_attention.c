/*
 * bench_attention.c - how near paged attention comes to the speed of memory and of multiplication.
 *
 *   bench_attention [--json] [--threads N] [--quick]
 *
 * Three things are measured in turns, so that a neighbour who takes half of the machine takes it
 * from all of them; a row's figures are medians of the ratios of one turn:
 *
 *   read     a plain loop of vector loads over the slab, front to back, on the same threads
 *   blocks   the same loop, block after block as the tables name them
 *   decode   tl_paged_attn_decode_f32 over all of it, once: block ids in random order, B sequences
 *            of the row's length, or (alone) one sequence a call
 *   peak     what a decode must compute, from registers: for 16 (8) values of K or V one
 *            conversion from float16 and H / Hkv fused multiplications
 *
 * The slab is larger than the caches, so every call finds its keys in memory.
 */
#include "tinyllm.h"

#include "kernels/paged_attn.h"
#include "kernels/threads.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if !defined(__x86_64__)
int main(void) {
    puts("bench_attention: its loops are written for x86-64");
    return 0;
}
#else

#include <immintrin.h>

#define BLOCK_TOKENS 16
#define AVX2         __attribute__((target("avx2,fma,f16c")))
#define AVX512       __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")))

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); /* waiting for a busy processor is not counted */
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[n / 2];
}

/* ---- what it is compared with -------------------------------------------------------------- */

#define PIECE ((size_t)256 << 10)

typedef struct {
    const char *bytes;
    size_t n;
    const int32_t *ids; /* NULL: front to back */
    size_t block;
} reading;

AVX2 static double read_piece(const char *p, size_t n) {
    __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
    for (size_t i = 0; i + 128 <= n; i += 128) {
        a = _mm256_or_ps(a, _mm256_loadu_ps((const float *)(const void *)(p + i)));
        b = _mm256_or_ps(b, _mm256_loadu_ps((const float *)(const void *)(p + i + 32)));
        c = _mm256_or_ps(c, _mm256_loadu_ps((const float *)(const void *)(p + i + 64)));
        d = _mm256_or_ps(d, _mm256_loadu_ps((const float *)(const void *)(p + i + 96)));
    }
    float out[8];
    _mm256_storeu_ps(out, _mm256_or_ps(_mm256_or_ps(a, b), _mm256_or_ps(c, d)));
    return (double)out[0];
}

static volatile double sink;

static void read_one(void *arg, size_t i) {
    const reading *r = arg;
    if (r->ids != NULL) {
        sink = read_piece(r->bytes + (size_t)r->ids[i] * r->block, r->block);
        return;
    }
    const size_t n = r->n - i * PIECE < PIECE ? r->n - i * PIECE : PIECE;
    sink = read_piece(r->bytes + i * PIECE, n);
}

/* G multiplications for a conversion, as many in flight as registers allow. */
typedef struct {
    size_t conversions; /* for each task */
    int G;
} computing;

#define PEAK(name, target, vec, width, load, set1, fma)                                            \
    target static double name(size_t n, const int G) {                                             \
        static const uint16_t half[64];                                                            \
        vec sums[16], w = set1(0.5f);                                                              \
        for (int i = 0; i < 16; i++)                                                               \
            sums[i] = set1((float)i);                                                              \
        for (size_t k = 0; k < n; k += 4) {                                                        \
            vec x[4];                                                                              \
            const uint16_t *p = half;                                                              \
            __asm__ volatile("" : "+r"(p));                                                        \
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) x[i] = load(p + i * 8);            \
            _Pragma("GCC unroll 8") for (int g = 0; g < G; g++)                                    \
                _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) sums[(g % 2) * 4 + i] =        \
                    fma(w, x[i], sums[(g % 2) * 4 + i]);                                           \
        }                                                                                          \
        float out[width];                                                                          \
        memcpy(out, &sums[0], sizeof out);                                                         \
        for (int i = 1; i < 16; i++) {                                                             \
            float more[width];                                                                     \
            memcpy(more, &sums[i], sizeof more);                                                   \
            out[0] += more[0];                                                                     \
        }                                                                                          \
        return (double)out[0];                                                                     \
    }

AVX2 static inline __m256 load8(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
AVX512 static inline __m512 load16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
PEAK(peak_8, AVX2, __m256, 8, load8, _mm256_set1_ps, _mm256_fmadd_ps)
PEAK(peak_16, AVX512, __m512, 16, load16, _mm512_set1_ps, _mm512_fmadd_ps)

static void compute_one(void *arg, size_t i) {
    const computing *c = arg;
    (void)i;
    const int wide = strcmp(tl_attn_selected(), "avx512") == 0;
    switch (c->G) { /* constants, so that the loop is unrolled */
    case 1:
        sink = wide ? peak_16(c->conversions, 1) : peak_8(c->conversions, 1);
        break;
    case 2:
        sink = wide ? peak_16(c->conversions, 2) : peak_8(c->conversions, 2);
        break;
    case 4:
        sink = wide ? peak_16(c->conversions, 4) : peak_8(c->conversions, 4);
        break;
    default:
        sink = wide ? peak_16(c->conversions, 8) : peak_8(c->conversions, 8);
    }
}

static void run(tl_pool *tp, size_t n, tl_pool_fn *fn, void *arg) {
    if (!tl_pool_enter(tp)) {
        for (size_t i = 0; i < n; i++)
            fn(arg, i);
        return;
    }
    tl_pool_run(tp, n, fn, arg);
    tl_pool_leave(tp);
}

/* ---- one row ------------------------------------------------------------------------------- */

typedef struct {
    int64_t ctx, Hkv, G, D;
    int alone;    /* one sequence a call */
    int in_order; /* block ids as a new pool gives them */
} shape;

static void *must(void *p) {
    if (p == NULL) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return p;
}

static void row(shape s, size_t bytes, int turns, uint32_t n_threads, tl_pool *tp, int json) {
    const int64_t per_seq = (s.ctx + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    const int64_t block_bytes = 2 * s.Hkv * BLOCK_TOKENS * s.D * 2;
    int64_t B = (int64_t)bytes / (per_seq * block_bytes);
    B = B < 1 ? 1 : B;
    const tl_kv_cfg cfg = {(uint32_t)(B * per_seq), BLOCK_TOKENS,  1,
                           (uint32_t)s.Hkv,         (uint32_t)s.D, TL_F16,
                           TL_KV_FORMAT_V1};
    tl_kv_pool *kv;
    if (tl_kv_pool_create(&cfg, &kv) != TL_OK) {
        fprintf(stderr, "%s\n", tl_last_error());
        exit(1);
    }
    uint16_t *slab = tl_kv_block_ptr(kv, 0, 0, 0);
    const size_t slab_bytes = (size_t)cfg.n_blocks * tl_kv_block_bytes(kv);
    uint64_t rng = 1;
    for (size_t i = 0; i < slab_bytes / 2; i++) {
        rng = rng * 6364136223846793005u + 1;
        slab[i] = (uint16_t)(0x2C00 + ((rng >> 40) & 0x0FFF) + ((rng >> 20) & 0x8000));
    }
    int32_t *tables = must(malloc(cfg.n_blocks * sizeof *tables));
    for (uint32_t i = 0; i < cfg.n_blocks; i++)
        tables[i] = (int32_t)i;
    for (uint32_t i = s.in_order ? 0 : cfg.n_blocks; i > 1; i--) {
        rng = rng * 6364136223846793005u + 1;
        const uint32_t j = (uint32_t)((rng >> 33) % i);
        const int32_t id = tables[i - 1];
        tables[i - 1] = tables[j];
        tables[j] = id;
    }
    int32_t *lens = must(malloc((size_t)B * sizeof *lens));
    for (int64_t b = 0; b < B; b++)
        lens[b] = (int32_t)s.ctx;
    const int64_t H = s.Hkv * s.G;
    float *q = must(malloc((size_t)(B * H * s.D) * sizeof *q));
    float *out = must(malloc((size_t)(B * H * s.D) * sizeof *out));
    for (int64_t i = 0; i < B * H * s.D; i++) {
        rng = rng * 6364136223846793005u + 1;
        q[i] = (float)(rng >> 40) / (float)(1 << 23) - 1;
    }

    reading r = {.bytes = (const char *)slab, .n = slab_bytes};
    reading by_block = {(const char *)slab, slab_bytes, tables, tl_kv_block_bytes(kv)};
    const int width = strcmp(tl_attn_selected(), "avx512") == 0 ? 16 : 8;
    const size_t conversions = (size_t)(B * s.ctx * s.Hkv * s.D * 2) / (size_t)width;
    computing c = {.conversions = conversions / 8 / n_threads / 4, .G = (int)s.G};
    double to_read[32], to_peak[32], gb[32], read_gb[32], blocks_gb[32];
    for (int turn = -1; turn < turns; turn++) {
        double t0 = now();
        run(tp, (slab_bytes + PIECE - 1) / PIECE, read_one, &r);
        double t1 = now();
        const int64_t per_call = s.alone ? 1 : B;
        for (int64_t b = 0; b < B; b += per_call)
            if (tl_paged_attn_decode_f32(q + b * H * s.D, kv, 0, tables + b * per_seq, per_seq,
                                         lens + b, out + b * H * s.D, per_call, H, s.Hkv, s.D,
                                         1 / sqrtf((float)s.D), 0, tp) != TL_OK) {
                fprintf(stderr, "%s\n", tl_last_error());
                exit(1);
            }
        double t2 = now();
        run(tp, (size_t)n_threads * 4, compute_one, &c); /* an eighth of the work */
        double t3 = now();
        run(tp, cfg.n_blocks, read_one, &by_block);
        double t4 = now();
        if (turn >= 0) {
            const double n = n_threads;
            const double read = (t1 - t0) / n, decode = (t2 - t1) / n, peak = (t3 - t2) * 8 / n;
            to_read[turn] = read / decode;
            to_peak[turn] = peak / decode;
            gb[turn] = (double)slab_bytes / decode / 1e9;
            read_gb[turn] = (double)slab_bytes / read / 1e9;
            blocks_gb[turn] = (double)slab_bytes / ((t4 - t3) / n) / 1e9;
        }
    }
    const double a = median(read_gb, turns), b = median(gb, turns), ratio = median(to_read, turns),
                 peak = median(to_peak, turns), in_blocks = median(blocks_gb, turns);
    if (json)
        printf("  {\"variant\": \"%s\", \"threads\": %u, \"context\": %d, \"batch\": %d, "
               "\"kv_heads\": %d, \"group\": %d, \"head_dim\": %d, \"ids\": \"%s\", "
               "\"read_gb_s\": %.2f, \"read_blocks_gb_s\": %.2f, \"decode_gb_s\": %.2f, "
               "\"of_read\": %.3f, \"of_peak\": %.3f}",
               tl_attn_selected(), n_threads, (int)s.ctx, s.alone ? 1 : (int)B, (int)s.Hkv,
               (int)s.G, (int)s.D, s.in_order ? "in order" : "random", a, in_blocks, b, ratio,
               peak);
    else
        printf("%-8s %u  %6d %6d %4d %4d %4d %-8s %6.2f %6.2f %6.2f   %5.0f%% %5.0f%%\n",
               tl_attn_selected(), n_threads, (int)s.ctx, s.alone ? 1 : (int)B, (int)s.Hkv,
               (int)s.G, (int)s.D, s.in_order ? "in order" : "random", a, in_blocks, b, 100 * ratio,
               100 * peak);
    fflush(stdout);
    free(tables);
    free(lens);
    free(q);
    free(out);
    tl_kv_pool_destroy(kv);
}

int main(int argc, char **argv) {
    int json = 0, quick = 0;
    size_t mib = 256, n_printed = 0;
    uint32_t n_threads = 0;
    for (int i = 1; i < argc; i++) {
        json |= strcmp(argv[i], "--json") == 0;
        quick |= strcmp(argv[i], "--quick") == 0;
        if (strcmp(argv[i], "--mib") == 0 && i + 1 < argc)
            mib = (size_t)atoi(argv[++i]);
        if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc)
            n_threads = (uint32_t)atoi(argv[++i]);
    }
    static const shape shapes[] = {
        /* context, Hkv, H / Hkv, D */
        {512, 4, 1, 64, 0, 0},    {512, 8, 4, 128, 0, 0},  {2048, 8, 2, 128, 0, 0},
        {2048, 4, 4, 64, 0, 0},   {8192, 8, 1, 128, 0, 0}, {8192, 8, 4, 128, 0, 0},
        {8192, 8, 4, 128, 0, 1},  {32768, 4, 4, 64, 0, 0}, {32768, 8, 1, 128, 1, 0},
        {32768, 8, 4, 128, 1, 0}, {512, 8, 4, 128, 1, 0},  {4096, 8, 4, 128, 1, 0},
        {4096, 4, 8, 64, 0, 0},   {4096, 4, 8, 128, 0, 0},
    };
    if (json)
        puts("[");
    else
        puts("variant thr context batch  Hkv H/Hkv  D  ids        read blocks decode, GB/s  of "
             "read, of peak");
    const size_t n = sizeof shapes / sizeof shapes[0];
    const uint32_t counts[2] = {1, n_threads};
    for (int k = n_threads == 0 ? 0 : 1; k < 2; k++) {
        tl_pool *tp;
        if (tl_pool_create(counts[k], &tp) != TL_OK) {
            fprintf(stderr, "%s\n", tl_last_error());
            return 1;
        }
        for (size_t i = 0; i < n; i++) {
            if (json && n_printed++ > 0)
                puts(",");
            row(shapes[i], mib << 20, quick ? 5 : 9, tl_pool_threads(tp), tp, json);
        }
        tl_pool_destroy(tp);
    }
    if (json)
        puts("\n]");
    return 0;
}
#endif
