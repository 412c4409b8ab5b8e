/*
 * crc32c_powers.h - the constants of the folding variants: TL_X<e> is x^e mod P, bit i standing for
 * x^(31 - i). TL_CRC32C_POWERS lists them for the test that computes each one again.
 */
#ifndef TL_NUMERICS_CRC32C_POWERS_H
#define TL_NUMERICS_CRC32C_POWERS_H

#define TL_X127  0x3171D430u
#define TL_X191  0x3743F7BDu
#define TL_X255  0xA2158B34u
#define TL_X319  0x33CCBBBCu
#define TL_X383  0x6051243Fu
#define TL_X447  0xA46EF4AAu
#define TL_X511  0x75BBA45Bu
#define TL_X575  0x1C19243Bu
#define TL_X1023 0x7417153Fu
#define TL_X1055 0x6992CEA2u
#define TL_X1087 0x6577B245u
#define TL_X2047 0x1426A815u
#define TL_X2079 0xDCB17AA4u
#define TL_X2111 0xE9A5D8BEu
#define TL_X3583 0xCB65CF95u
#define TL_X3647 0x06D53151u
#define TL_X4095 0xE986C148u
#define TL_X4159 0x75BDA454u
#define TL_X5119 0x6D3E926Fu
#define TL_X5183 0x6B1CAEDBu

/* clang-format off */
#define TL_CRC32C_POWERS(F) \
    F(127, TL_X127) F(191, TL_X191) F(255, TL_X255) F(319, TL_X319) F(383, TL_X383) \
    F(447, TL_X447) F(511, TL_X511) F(575, TL_X575) F(1023, TL_X1023) F(1055, TL_X1055) \
    F(1087, TL_X1087) F(2047, TL_X2047) F(2079, TL_X2079) F(2111, TL_X2111) F(3583, TL_X3583) \
    F(3647, TL_X3647) F(4095, TL_X4095) F(4159, TL_X4159) F(5119, TL_X5119) F(5183, TL_X5183)
/* clang-format on */

#endif /* TL_NUMERICS_CRC32C_POWERS_H */
