/*
 * proof.h - a keyed hash of a whole prefix, one step a block.
 *
 * The tokens of a prefix t0 t1 ... t(n-1) are the coefficients of a polynomial, evaluated at a
 * secret point k of the field of 2^61 - 1 elements, twice, at two independent points:
 *
 *     proof(t0 .. t(n-1)) = start * k^n + t0 * k^n + t1 * k^(n-1) + ... + t(n-1) * k
 *     start = (1 + low half of root) * k^3 + high half * k^2 + epoch * k           mod 2^61 - 1
 *
 * Two different prefixes of n tokens at most have equal proofs at one point only if that point is a
 * root of their difference, a polynomial of degree n + 3 at most, without a constant term: with
 * probability at most (n + 2) / (2^61 - 3) over the choice of k, so the square of that for both.
 * For prefixes of a million tokens that is 2^-82. It holds for any two prefixes, chosen by whoever
 * likes, as long as the points are unknown; and the proofs never leave the process, nor anything
 * computed from them but hit or miss.
 *
 * The last power is k, not 1: prefixes that differ in their last token alone must not have
 * neighbouring proofs. The index is addressed by a proof's upper bits, and whoever sent a thousand
 * prompts with another last token each would fill one corner of it with all of them.
 *
 * A step takes one block of B tokens: p' = (p + t0) * k^B + sum of t_j * k^(B-j) for j from 1. The
 * powers are in a table, the products of the sum are independent of each other (32 x 61 bits, added
 * up in 128), and only one multiplication waits for the block before. So a step costs some 10 ns,
 * whatever the token ids, against 50 for the FNV-1a name of the same block, which is a chain of
 * multiplications.
 */
#ifndef TL_RUNTIME_PROOF_H
#define TL_RUNTIME_PROOF_H

#include "tinyllm/abi.h"

#if !defined(__SIZEOF_INT128__)
#error "proof.c needs a 128-bit integer type: a 64-bit target of gcc or clang"
#endif

typedef struct {
    uint64_t x[2]; /* below 2^61 - 1 each */
} tl_proof;

typedef struct {
    uint32_t block_tokens;
    uint64_t point[2];     /* the secret k */
    uint64_t (*powers)[2]; /* powers[j] = k^(B-j), B of them */
} tl_proof_key;

/* Draws a key. TL_ENOMEM: no memory for the table (16 bytes a token of a block). TL_EIO: the system
 * gives no secret. Either way the key can be freed. */
tl_status tl_proof_key_init(tl_proof_key *key, uint32_t block_tokens);
void tl_proof_key_free(tl_proof_key *key);

/* Where the chain of a namespace begins: root and epoch as three tokens before the first. */
tl_proof tl_proof_start(const tl_proof_key *key, uint64_t root, uint32_t epoch);

/* One block further. */
tl_proof tl_proof_step(const tl_proof_key *key, tl_proof p, const uint32_t *toks);

static inline int tl_proof_equal(tl_proof a, tl_proof b) {
    return ((a.x[0] ^ b.x[0]) | (a.x[1] ^ b.x[1])) == 0;
}

#endif /* TL_RUNTIME_PROOF_H */
