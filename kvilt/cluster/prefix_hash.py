"""Keys of token prefixes for a router: one for each whole block, all of a prompt at once with a few vector operations.

A key is a polynomial in a secret odd base over the blocks' products with secret numbers, modulo 2**60. It is not
cryptographic: a collision sends a request to a replica that then computes its prompt, no more.
The secrets are new in each process, so that no client can prepare collisions.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Tokens = Sequence[int] | npt.NDArray[np.uint32]
_WORD = (1 << 64) - 1
# A Python integer of 60 bits takes 32 bytes, one of 64 bits 48. Sums and products modulo 2**64 are right modulo 2**60.
_KEY = np.uint64((1 << 60) - 1)


class PrefixHasher:
    """Makes keys for blocks of `block_tokens` tokens."""

    def __init__(self, block_tokens: int, most_tokens: int = 1 << 17) -> None:
        """Tokens after the first `most_tokens` of a prompt get no keys."""
        self.block_tokens = block_tokens
        self._most = most_tokens // block_tokens
        self._secret = secrets.token_bytes(32)
        self._weights: Words = np.frombuffer(secrets.token_bytes(8 * block_tokens), np.uint64) | np.uint64(1)
        base = secrets.randbits(64) | 5  # odd, and with an inverse modulo 2**64
        self._powers = _powers(base, self._most + 1)
        self._inverses = _powers(pow(base, -1, 1 << 64), self._most + 1)
        self.scope = lru_cache(maxsize=1 << 16)(self._scope)

    def _scope(self, adapter: str | None, salt: str) -> int:
        """What an adapter and a tenant add to every block."""
        text = f"{'' if adapter is None else len(adapter)} {adapter} {salt}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=self._secret).digest(), "little")

    def keys(self, tokens: Tokens, scope: int) -> list[int]:
        """The keys of all whole blocks of a prompt."""
        return self.following(0, tokens, scope)

    def following(self, parent: int, tokens: Tokens, scope: int) -> list[int]:
        """The keys of blocks after the block with the key `parent`; 0 is before the first.

        With powers p of the base, key n is p**n * (parent + sum over i of block i / p**i).
        """
        blocks = self._blocks(tokens)
        blocks += np.uint64(scope)
        count = len(blocks)
        blocks *= self._inverses[1 : count + 1]
        np.cumsum(blocks, out=blocks)
        blocks += np.uint64(parent)
        blocks *= self._powers[1 : count + 1]
        blocks &= _KEY
        keys: list[int] = blocks.tolist()
        return keys

    def _blocks(self, tokens: Tokens) -> Words:
        """One number for each whole block."""
        count = min(len(tokens) // self.block_tokens, self._most)
        # A list of Python integers is read faster into an array than by NumPy.
        whole = tokens if isinstance(tokens, np.ndarray) else np.frombuffer(array("I", tokens), np.uint32)
        ids = whole[: count * self.block_tokens].astype(np.uint64)
        blocks: Words = ids.reshape(count, self.block_tokens) @ self._weights
        return blocks


def _powers(base: int, count: int) -> Words:
    made, power = [], 1
    for _ in range(count):
        made.append(power)
        power = power * base & _WORD
    return np.array(made, np.uint64)
