/*
 * crc32c_armv8.h - the CRC instruction of ARMv8, for functions with the target attribute ARM_CRC.
 * <arm_acle.h> declares it only when the whole file is compiled for it; this does not ask.
 */
#ifndef TL_NUMERICS_CRC32C_ARMV8_H
#define TL_NUMERICS_CRC32C_ARMV8_H

#include <stdint.h>

#if defined(__clang__)
#define ARM_CRC           __attribute__((target("crc")))
#define ARM_CRC8(r, word) __builtin_arm_crc32cd((r), (word))
#define ARM_CRC4(r, word) __builtin_arm_crc32cw((r), (word))
#define ARM_CRC2(r, word) __builtin_arm_crc32ch((r), (word))
#define ARM_CRC1(r, byte) __builtin_arm_crc32cb((r), (byte))
#else
#define ARM_CRC           __attribute__((target("+crc")))
#define ARM_CRC8(r, word) __builtin_aarch64_crc32cx((r), (word))
#define ARM_CRC4(r, word) __builtin_aarch64_crc32cw((r), (word))
#define ARM_CRC2(r, word) __builtin_aarch64_crc32ch((r), (word))
#define ARM_CRC1(r, byte) __builtin_aarch64_crc32cb((r), (byte))
#endif

#endif /* TL_NUMERICS_CRC32C_ARMV8_H */
