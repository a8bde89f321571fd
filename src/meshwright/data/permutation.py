"""A pseudo-random permutation of any length, of which any element can be computed directly."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8


def permute(index: NDArray[np.int64], n: int, key: str) -> NDArray[np.int64]:
    """Return the image of each index in [0, n) under a pseudo-random permutation selected by `key`.

    A Feistel network on pairs (left < a, right < b) with a * b just above n, with keyed additions
    modulo a and b, is a bijection of [0, a * b). A result outside [0, n) is passed through it again
    until it is inside (cycle walking), which makes it a bijection of [0, n). At most one pass in
    sqrt(n) is repeated. There is no state and no table, so any index costs the same.
    """
    a = max(1, math.isqrt(n - 1) + 1) if n > 0 else 1
    b = -(-n // a)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest(), "<u8")
    out = _pass(index.astype(np.uint64), a, b, keys)
    while (outside := out >= np.uint64(n)).any():
        out[outside] = _pass(out[outside], a, b, keys)
    return out.astype(np.int64)


def _pass(
    index: NDArray[np.uint64], a: int, b: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    sizes = (np.uint64(a), np.uint64(b))
    halves = [index // sizes[1], index % sizes[1]]
    for number in range(ROUNDS):
        side = number % 2
        # In a fresh array, since the arithmetic modulo 2**64 below is in place.
        mixed = _mix(halves[1 - side] ^ keys[number : number + 1])
        mixed %= sizes[side]
        mixed += halves[side]
        mixed %= sizes[side]
        halves[side] = mixed
    return halves[0] * sizes[1] + halves[1]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves every output."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
