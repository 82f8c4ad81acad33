"""Keyed permutations that are the same on every platform and Python version, and of which any element costs
little.

`Permutation` is a generalised Feistel network (Black and Rogaway's second construction, with more rounds)
over a rectangle that is hardly larger than the domain; what falls outside is walked on until it falls
inside. The round functions are tables of about the square root of the size, so that one element costs a few
look-ups, and going to any place costs the tables only. numpy, `random` and hash seeds have no part in it.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt

ROUNDS = 6
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def derive_key(*parts: object) -> int:
    """64 bits that depend on every part and on where one part ends and the next begins."""
    text = "".join(f"{len(word)}:{word}," for word in (str(part) for part in parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=b"stager-order").digest(), "little")


def mix(key: int, index: int) -> int:
    """Number ``index`` of the 64-bit stream that ``key`` names (splitmix64)."""
    state = (key + (index + 1) * _GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def shuffled_indices(size: int, key: int) -> list[int]:
    """0 to ``size - 1``, sorted by their numbers in the stream of ``key``: a whole permutation at once."""
    ranks: list[int] = []
    append, state = ranks.append, key
    for _ in range(size):
        # `mix`, written out: a million shards are sorted for every epoch.
        state = (state + _GAMMA) & _MASK
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        append(word ^ (word >> 31))
    return sorted(range(size), key=ranks.__getitem__)


class Permutation:
    """A permutation of 0 to ``size - 1`` fixed by ``key``: ``permutation[i]`` for any ``i``, in constant
    time.

    Memory and set-up are of the order of the square root of ``size``.
    """

    __slots__ = ("_height", "_tables", "_width", "size")

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._width = isqrt(max(size - 1, 0)) + 1
        self._height = -(-size // self._width) or 1
        self._tables = [
            self._table(derive_key(key, number), of_rows=number % 2 == 0) for number in range(ROUNDS)
        ]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        width, height = self._width, self._height
        first, second, third, fourth, fifth, sixth = self._tables
        while True:
            row, column = divmod(index, width)
            column = (column + first[row]) % width
            row = (row + second[column]) % height
            column = (column + third[row]) % width
            row = (row + fourth[column]) % height
            column = (column + fifth[row]) % width
            row = (row + sixth[column]) % height
            index = row * width + column
            if index < self.size:
                return index

    def _table(self, key: int, *, of_rows: bool) -> list[int]:
        entries, modulus = (self._height, self._width) if of_rows else (self._width, self._height)
        return [mix(key, index) % modulus for index in range(entries)]
