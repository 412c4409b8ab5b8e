/* cpu.c - see cpu.h. */
#include "numerics/cpu.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define KNOWN (1u << 31)

static unsigned detect(void) {
    unsigned f = 0;
#if defined(__x86_64__) || defined(__i386__)
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) {
        return 0;
    }
    f |= (c & (1u << 20)) ? TL_CPU_SSE42 : 0;
    f |= (c & (1u << 1)) ? TL_CPU_PCLMUL : 0;
    const int osxsave = (c & (1u << 27)) && (c & (1u << 28));
    const int f16c = (c & (1u << 29)) != 0, fma = (c & (1u << 12)) != 0;
    if (!osxsave) {
        return f;
    }
    unsigned xcr0, hi;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(hi) : "c"(0));
    if ((xcr0 & 0x6u) != 0x6u) { /* XMM and YMM state is saved */
        return f;
    }
    f |= f16c ? TL_CPU_F16C : 0;
    f |= fma ? TL_CPU_FMA : 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        f |= (b & (1u << 5)) ? TL_CPU_AVX2 : 0;
        f |= (c & (1u << 10)) ? TL_CPU_VPCLMUL : 0;
        const unsigned wide = (1u << 16) | (1u << 30) | (1u << 31);
        if ((b & wide) == wide && (xcr0 & 0xE0u) == 0xE0u) { /* opmask and ZMM state too */
            f |= TL_CPU_AVX512;
        }
    }
#elif defined(__aarch64__) && defined(__linux__)
    f |= (getauxval(AT_HWCAP) & (1u << 7)) ? TL_CPU_ARMCRC : 0;
    f |= (getauxval(AT_HWCAP) & (1u << 4)) ? TL_CPU_PMULL : 0;
#endif
    return f;
}

static unsigned disabled(void) {
    static const struct {
        const char *name;
        unsigned bit;
    } names[] = {{"sse42", TL_CPU_SSE42},     {"pclmul", TL_CPU_PCLMUL}, {"avx2", TL_CPU_AVX2},
                 {"vpclmul", TL_CPU_VPCLMUL}, {"avx512", TL_CPU_AVX512}, {"f16c", TL_CPU_F16C},
                 {"armcrc", TL_CPU_ARMCRC},   {"pmull", TL_CPU_PMULL},   {"fma", TL_CPU_FMA}};
    const char *s = getenv("TL_CPU_DISABLE");
    unsigned off = 0;
    while (s != NULL && *s != '\0') {
        const size_t n = strcspn(s, ",");
        for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
            if (strlen(names[i].name) == n && memcmp(names[i].name, s, n) == 0) {
                off |= names[i].bit;
            }
        }
        s += n;
        s += *s == ',';
    }
    return off;
}

unsigned tl_cpu_features(void) {
    static _Atomic unsigned cached;
    unsigned f = atomic_load_explicit(&cached, memory_order_relaxed);
    if (f == 0) {
        f = (detect() & ~disabled()) | KNOWN; /* racing threads compute the same */
        atomic_store_explicit(&cached, f, memory_order_relaxed);
    }
    return f & ~KNOWN;
}
