"""Mutators that know no format: bytes, lengths, words of a dictionary, halves of two inputs, deep nesting.

Every choice comes from the given generator, so a seed gives the same inputs again.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

_EDGES = (0, 1, 2, 7, 8, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 1 << 20)
_HIGH = (1 << 31, (1 << 31) - 1, (1 << 32) - 1, (1 << 53), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 8)
_NUMBERS = (b"-1", b"0", b"1e999", b"-0.0", b"1e-400", b"9" * 19, b"9" * 30, b"NaN", b"Infinity", b"null", b"true")


def mutated(data: bytes, others: Sequence[bytes], words: Sequence[bytes], dice: random.Random, most: int) -> bytes:
    """`data` after one to five changes, at most `most` bytes long."""
    made = bytearray(data)
    for _ in range(1 + min(4, int(dice.expovariate(1.0)))):
        dice.choice(_MUTATORS)(made, others, words, dice)
    return bytes(made[:most])


def _at(made: bytearray, dice: random.Random) -> int:
    return dice.randrange(len(made) + 1)


def _flip(made: bytearray, _others: Sequence[bytes], _words: Sequence[bytes], dice: random.Random) -> None:
    if made:
        made[dice.randrange(len(made))] ^= 1 << dice.randrange(8)


def _byte(made: bytearray, _others: Sequence[bytes], _words: Sequence[bytes], dice: random.Random) -> None:
    if made:
        made[dice.randrange(len(made))] = dice.randrange(256)


def _integer(made: bytearray, _others: Sequence[bytes], _words: Sequence[bytes], dice: random.Random) -> None:
    """A little-endian number at an edge over what stood there."""
    width, code = dice.choice([(2, "<H"), (4, "<I"), (8, "<Q")])
    value = dice.choice(_EDGES + _HIGH) & ((1 << 8 * width) - 1)
    at = _at(made, dice)
    made[at : at + width] = struct.pack(code, value)


def _step(made: bytearray, _others: Sequence[bytes], _words: Sequence[bytes], dice: random.Random) -> None:
    """One more or less of a little-endian number."""
    if len(made) >= 8:
        at = dice.randrange(len(made) - 7)
        (value,) = struct.unpack_from("<Q", made, at)
        struct.pack_into("<Q", made, at, (value + dice.choice([-8, -1, 1, 8, 32])) & ((1 << 64) - 1))


def _cut(made: bytearray, _others: Sequence[bytes], _words: Sequence[bytes], dice: random.Random) -> None:
    at = _at(made, dice)
    del made[at : at + 1 + int(dice.expovariate(0.1))]


def _truncate(made: bytearray, _others: Sequence[bytes], _words: Sequence[bytes], dice: random.Random) -> None:
    del made[_at(made, dice) :]


def _double(made: bytearray, _others: Sequence[bytes], _words: Sequence[bytes], dice: random.Random) -> None:
    """A piece again, one to many times."""
    at = _at(made, dice)
    piece = bytes(made[at : at + 1 + int(dice.expovariate(0.05))])
    made[at:at] = piece * dice.choice([1, 1, 1, 2, 16, 300])


def _splice(made: bytearray, others: Sequence[bytes], _words: Sequence[bytes], dice: random.Random) -> None:
    """A piece of another input."""
    if others:
        other = dice.choice(others)
        start = dice.randrange(len(other) + 1)
        at = _at(made, dice)
        width = int(dice.expovariate(0.03))
        made[at : at + dice.choice([0, width])] = other[start : start + width]


def _word(made: bytearray, _others: Sequence[bytes], words: Sequence[bytes], dice: random.Random) -> None:
    at = _at(made, dice)
    word = dice.choice([*words, *_NUMBERS])
    made[at : at + dice.choice([0, 0, len(word), 1])] = word


def _number(made: bytearray, _others: Sequence[bytes], _words: Sequence[bytes], dice: random.Random) -> None:
    """Another number where digits stand."""
    places = [i for i, byte in enumerate(made[:4096]) if 48 <= byte <= 57]
    if places:
        at = stop = dice.choice(places)
        while stop < len(made) and 48 <= made[stop] <= 57:
            stop += 1
        made[at:stop] = dice.choice([*_NUMBERS, str(dice.choice(_EDGES + _HIGH)).encode()])


def _nest(made: bytearray, _others: Sequence[bytes], _words: Sequence[bytes], dice: random.Random) -> None:
    """Brackets, as deep as readers go and deeper."""
    depth = dice.choice([3, 30, 63, 64, 65, 200, dice.randrange(900, 1000), 3000])
    opening, closing = dice.choice([(b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"{", b"}")])
    at = _at(made, dice)
    inner = bytes(made[at : at + dice.choice([0, 1, 8])])
    made[at : at + len(inner)] = opening * depth + (inner or b"1") + closing * depth


_Mutator = Callable[[bytearray, Sequence[bytes], Sequence[bytes], random.Random], None]
_MUTATORS: tuple[_Mutator, ...] = (
    _flip,
    _byte,
    _integer,
    _step,
    _cut,
    _truncate,
    _double,
    _splice,
    _splice,
    _word,
    _word,
    _number,
    _nest,
)
