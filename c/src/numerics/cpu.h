/*
 * cpu.h - which instruction sets this process may use.
 *
 * Read once, by CPUID and the system's word that it saves the wide registers. The environment
 * variable TL_CPU_DISABLE (comma-separated names, read at the first call) switches features off, so
 * that tests reach every variant on one machine: TL_CPU_DISABLE=sse42,f16c.
 */
#ifndef TL_NUMERICS_CPU_H
#define TL_NUMERICS_CPU_H

#define TL_CPU_SSE42   (1u << 0) /* sse42: the crc32 instruction */
#define TL_CPU_PCLMUL  (1u << 1) /* pclmul: 128-bit carry-less multiplication */
#define TL_CPU_AVX2    (1u << 2) /* avx2 */
#define TL_CPU_VPCLMUL (1u << 3) /* vpclmul: the same on 256 bits and more */
#define TL_CPU_AVX512  (1u << 4) /* avx512: F, BW and VL */
#define TL_CPU_F16C    (1u << 5) /* f16c: float16 conversions, 8 at a time */
#define TL_CPU_ARMCRC  (1u << 6) /* armcrc: ARMv8 CRC32 */
#define TL_CPU_PMULL   (1u << 7) /* pmull: ARMv8 64-bit carry-less multiplication */
#define TL_CPU_FMA     (1u << 8) /* fma: a * b + c with one rounding */

/* Safe from many threads, the first call included. */
unsigned tl_cpu_features(void);

#endif /* TL_NUMERICS_CPU_H */
