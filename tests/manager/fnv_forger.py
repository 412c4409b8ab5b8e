"""Second preimages of the format's block hash: what an attacker who chooses the prompt can do.

FNV-1a takes one byte b a step: h' = (h ^ b) * p modulo 2^64. Only the low byte l of h meets b, so
with y = l ^ b and d = y - l

    h ^ b = h + d        and after m steps        h_m = h_0 * p^m + sum of d_k * p^(m - k)

which is linear in the d. A zero byte has d = 0. Token ids below 65,536 are two free bytes and two
zero bytes; the last seven tokens of a block give n = 14 numbers d, each within -l .. 255 - l, for
one equation modulo 2^64. The vectors d with sum 0 are a lattice of determinant 2^64 in 14
dimensions, so its shortest vectors have entries of about 2^(64/14) = 24: well inside the range of a
byte. LLL finds such a basis, once and for all blocks, since it depends on the positions only.

To forge: choose the leading tokens freely, take any solution d of the equation for the wanted hash,
shorten it with the basis (Babai's nearest plane), and add a few random short vectors until every
byte fits when they are put in from left to right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

P = 0x100000001B3
BASIS = 0xCBF29CE484222325
MASK = (1 << 64) - 1
N_FREE_TOKENS = 7

Vector = list[int]


def fnv1a64(data: bytes, h: int = BASIS) -> int:
    for b in data:
        h = (h ^ b) * P & MASK
    return h


def block_hash(parent: int, tokens: Sequence[int]) -> int:
    """The format's rule, written down once more."""
    data = parent.to_bytes(8, "little") + b"".join(t.to_bytes(4, "little") for t in tokens)
    return fnv1a64(data) or 1


def lll(basis: list[Vector]) -> list[Vector]:
    """A reduced basis of the same lattice: the integral algorithm, so nothing is ever rounded.

    dets[i] is the determinant of the first i vectors' Gram matrix, and lam[i][j] = dets[j + 1] *
    mu[i][j]; all are integers (Cohen, A Course in Computational Algebraic Number Theory, 2.6.7).
    """
    b = [list(row) for row in basis]
    n = len(b)
    dets = [1] + [0] * n
    lam = [[0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            u = sum(x * y for x, y in zip(b[i], b[j], strict=True))
            for k in range(j):
                u = (dets[k + 1] * u - lam[i][k] * lam[j][k]) // dets[k]
            if j < i:
                lam[i][j] = u
            else:
                dets[i + 1] = u

    def reduce(k: int, j: int) -> None:
        d = dets[j + 1]
        q = (2 * lam[k][j] + d) // (2 * d)
        if q:
            b[k] = [x - q * y for x, y in zip(b[k], b[j], strict=True)]
            for i in range(j):
                lam[k][i] -= q * lam[j][i]
            lam[k][j] -= q * d

    k = 1
    while k < n:
        reduce(k, k - 1)
        # Lovasz' condition with 3/4, multiplied out
        if 4 * (dets[k + 1] * dets[k - 1] + lam[k][k - 1] ** 2) >= 3 * dets[k] ** 2:
            for j in range(k - 2, -1, -1):
                reduce(k, j)
            k += 1
            continue
        b[k - 1], b[k] = b[k], b[k - 1]
        for j in range(k - 1):
            lam[k - 1][j], lam[k][j] = lam[k][j], lam[k - 1][j]
        m = lam[k][k - 1]
        new = (dets[k - 1] * dets[k + 1] + m * m) // dets[k]
        for i in range(k + 1, n):
            t = lam[i][k]
            lam[i][k] = (dets[k + 1] * lam[i][k - 1] - m * t) // dets[k]
            lam[i][k - 1] = (new * t + m * lam[i][k]) // dets[k + 1]
        dets[k] = new
        k = max(1, k - 1)
    return b


def coefficients() -> Vector:
    """p^(steps from a free byte to the end), for the two low bytes of the last seven tokens."""
    m = 4 * N_FREE_TOKENS
    return [pow(P, m - (4 * t + b), 1 << 64) for t in range(N_FREE_TOKENS) for b in (0, 1)]


@cache
def short_basis() -> tuple[list[Vector], list[list[Fraction]]]:
    """Short vectors d with sum of d_k * c_k = 0 modulo 2^64, and their Gram-Schmidt vectors."""
    c = coefficients()
    inverse = pow(c[-1], -1, 1 << 64)
    rows = []
    for k in range(len(c) - 1):
        row = [0] * len(c)
        row[k], row[-1] = 1, -c[k] * inverse % (1 << 64)
        rows.append(row)
    rows.append([0] * (len(c) - 1) + [1 << 64])
    reduced = lll(rows)
    orthogonal: list[list[Fraction]] = []
    for v in reduced:
        w = [Fraction(x) for x in v]
        for u in orthogonal:
            mu = sum(x * y for x, y in zip(v, u, strict=True)) / sum(x * x for x in u)
            w = [x - mu * y for x, y in zip(w, u, strict=True)]
        orthogonal.append(w)
    return reduced, orthogonal


def nearest_plane(d: Vector) -> Vector:
    basis, orthogonal = short_basis()
    for v, u in zip(reversed(basis), reversed(orthogonal), strict=True):
        q = round(sum(x * y for x, y in zip(d, u, strict=True)) / sum(x * x for x in u))
        d = [x - q * y for x, y in zip(d, v, strict=True)]
    return d


def fill_in(h: int, d: Vector, vocabulary: int) -> list[int] | None:
    """The tokens whose bytes have these d from state h on, if all of them are legal."""
    tokens = []
    for t in range(N_FREE_TOKENS):
        token = 0
        for b in (0, 1):
            low = h & 0xFF
            y = low + d[2 * t + b]
            if not 0 <= y <= 0xFF:
                return None
            token |= (y ^ low) << (8 * b)
            h = (h ^ y ^ low) * P & MASK
        if token >= vocabulary:
            return None
        tokens.append(token)
        h = h * P * P & MASK  # the two zero bytes
    return tokens


def forge(
    wanted: int, parent: int, rng: random.Random, n_tokens: int = 16, vocabulary: int = 50_000
) -> list[int]:
    """A block of tokens below `vocabulary`, behind `parent`, whose hash is `wanted`."""
    c = coefficients()
    basis, _ = short_basis()
    while True:
        head = [rng.randrange(vocabulary) for _ in range(n_tokens - N_FREE_TOKENS)]
        h = fnv1a64(parent.to_bytes(8, "little") + b"".join(t.to_bytes(4, "little") for t in head))
        missing = (wanted - h * pow(P, 4 * N_FREE_TOKENS, 1 << 64)) % (1 << 64)
        start = nearest_plane([0] * (len(c) - 1) + [missing * pow(c[-1], -1, 1 << 64) % (1 << 64)])
        for _ in range(200):
            d = start
            for v in rng.sample(basis, 3):
                sign = rng.choice((-1, 0, 1))
                d = [x + sign * y for x, y in zip(d, v, strict=True)]
            tail = fill_in(h, d, vocabulary)
            if tail is not None:
                return head + tail
