"""The stated 64-bit hash: the same number on every machine, for feature hashing and for counter-based random numbers.

``mix64`` is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). With all
arithmetic modulo 2^64 and ``key = mix64(salt + 0x9E3779B97F4A7C15)``::

    hash(integer v) = mix64(key ^ v)                    v in two's complement, so int8 -1 and int64 -1 agree
    hash(bytes b)   = h after  h = mix64(key ^ ~len(b));  for each 8-byte little-endian word w of b, zero padded: h = mix64(h ^ w)
    cross(a, b)     = mix64(hash(a) ^ mix64(hash(b) + 0x9E3779B97F4A7C15))     both under the same salt; the order matters
    row             = hash % rows

Text is hashed as its UTF-8 bytes. The number 5 and the text "5" have different hashes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK = (1 << 64) - 1

U64 = NDArray[np.uint64]


def mix64_(x: U64) -> U64:
    """Mix ``x`` (uint64 array of any shape) in place and return it."""
    shifted = x >> _S30
    x ^= shifted
    x *= _M1
    np.right_shift(x, _S27, out=shifted)
    x ^= shifted
    x *= _M2
    np.right_shift(x, _S31, out=shifted)
    x ^= shifted
    return x


def mix64(x: int) -> int:
    """The same for one Python integer."""
    x = (x ^ (x & _MASK) >> 30) * int(_M1) & _MASK
    x = (x ^ x >> 27) * int(_M2) & _MASK
    return x ^ x >> 31


def key_of(salt: int) -> int:
    """The key that a salt (any integer) stands for."""
    return mix64((salt + int(GOLDEN)) & _MASK)


def salt_of(name: str) -> int:
    """The salt that a name stands for: the hash of its UTF-8 bytes under salt 0."""
    data = name.encode()
    h = mix64(key_of(0) ^ (~len(data) & _MASK))
    for i in range(0, len(data), 8):
        h = mix64(h ^ int.from_bytes(data[i : i + 8], "little"))
    return h


def hash_integers(values: NDArray[np.integer], salt: int) -> U64:
    """Hash integers of any width ``[n]`` to uint64 ``[n]``."""
    wide = values.astype(np.uint64) if values.dtype.kind == "u" else values.astype(np.int64).view(np.uint64)
    return mix64_(wide ^ np.uint64(key_of(salt)))


def hash_bytes(data: NDArray[np.uint8], offsets: NDArray[np.integer], salt: int) -> U64:
    """Hash n byte strings, ``data[offsets[i]:offsets[i + 1]]``, to uint64 ``[n]``; one vectorised pass for each 8 bytes of the longest."""
    starts = np.asarray(offsets[:-1], dtype=np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    h = mix64_(~lengths.astype(np.uint64) ^ np.uint64(key_of(salt)))
    if not lengths.size or not lengths.max():
        return h
    end = int(offsets[-1])
    padded = np.zeros(end + 8, dtype=np.uint8)
    padded[:end] = data[:end]
    word_at = np.ndarray((end + 1,), dtype="<u8", buffer=padded, strides=(1,))
    rows = np.flatnonzero(lengths)
    done = 0
    while rows.size:
        words = word_at[starts[rows] + done]
        left = lengths[rows] - done
        tail = left < 8
        words[tail] &= (np.uint64(1) << (left[tail].astype(np.uint64) * np.uint64(8))) - np.uint64(1)
        h[rows] = mix64_(h[rows] ^ words)
        done += 8
        rows = rows[left > 8]
    return h


def uniform(hashes: U64) -> NDArray[np.float64]:
    """Uniform in (0, 1)."""
    return ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def cross(a: U64, b: U64) -> U64:
    """Hash pairs of hashes ``[n]``."""
    return mix64_(a ^ mix64_(b + GOLDEN))


def to_rows(hashes: U64, rows: int) -> NDArray[np.int64]:
    """Table rows ``[n]`` in [0, rows)."""
    return (hashes % np.uint64(rows)).astype(np.int64)
