/* proof.c - see proof.h. Arithmetic modulo M = 2^61 - 1: since 2^61 = 1 (mod M), the bits above the
 * 61st are added to those below. */
#include "runtime/proof.h"

#include "runtime/internal.h"

#define M (((uint64_t)1 << 61) - 1)

__extension__ typedef unsigned __int128 u128;

/* x mod M, for x below 2^124. */
static inline uint64_t reduce(u128 x) {
    uint64_t r = (uint64_t)(x & M) + (uint64_t)(x >> 61); /* below 2^61 + 2^63 */
    r = (r & M) + (r >> 61);                              /* at most M + 4 */
    return r >= M ? r - M : r;
}

static inline uint64_t mul(uint64_t a, uint64_t b) {
    return reduce((u128)a * b);
}

tl_status tl_proof_key_init(tl_proof_key *key, uint32_t block_tokens) {
    size_t n_bytes;
    key->block_tokens = block_tokens;
    key->powers =
        tl_mul_size(block_tokens, sizeof key->powers[0], &n_bytes) ? tl_alloc(n_bytes, 64) : NULL;
    if (key->powers == NULL) {
        return TL_ENOMEM;
    }
    if (!tl_secret(key->point, sizeof key->point)) {
        return TL_EIO;
    }
    for (int lane = 0; lane < 2; lane++) {
        uint64_t k = reduce(key->point[lane]);
        k = k < 2 ? k + 2 : k; /* 0 and 1 are no points to evaluate at */
        uint64_t power = k;    /* not 1: see proof.h */
        for (uint32_t j = block_tokens; j-- > 0;) {
            key->powers[j][lane] = power;
            power = mul(power, k);
        }
        key->point[lane] = k;
    }
    return TL_OK;
}

void tl_proof_key_free(tl_proof_key *key) {
    tl_free(key->powers);
    key->powers = NULL;
}

tl_proof tl_proof_start(const tl_proof_key *key, uint64_t root, uint32_t epoch) {
    const uint32_t head[3] = {(uint32_t)root, (uint32_t)(root >> 32), epoch};
    tl_proof p;
    for (int lane = 0; lane < 2; lane++) {
        uint64_t x = 1;
        for (int i = 0; i < 3; i++) {
            x = mul(x + head[i], key->point[lane]);
        }
        p.x[lane] = x;
    }
    return p;
}

/* A sum of n products of 32 by 61 bits stays below n * 2^93, and with the first product, of 62 by
 * 61 bits, below 2^124, for n up to 2^29 at a time: what reduce takes. */
#define SUM_MAX (1u << 29)

/* p k^B + t_0 k^B + t_1 k^(B-1) + ...: the first two share their multiplication. */
tl_proof tl_proof_step(const tl_proof_key *key, tl_proof p, const uint32_t *toks) {
    const uint32_t n = key->block_tokens;
    u128 s0 = (u128)(p.x[0] + toks[0]) * key->powers[0][0];
    u128 s1 = (u128)(p.x[1] + toks[0]) * key->powers[0][1];
    for (uint32_t j = 1; j < n;) {
        const uint32_t end = n - j > SUM_MAX ? j + SUM_MAX : n;
        for (; j < end; j++) {
            s0 += (u128)key->powers[j][0] * toks[j];
            s1 += (u128)key->powers[j][1] * toks[j];
        }
        if (TL_UNLIKELY(end < n)) {
            s0 = reduce(s0);
            s1 = reduce(s1);
        }
    }
    return (tl_proof){{reduce(s0), reduce(s1)}};
}
