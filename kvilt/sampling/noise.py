"""Counter-based Gumbel noise: a pure function of (seed, sample index, position, token id), with no generator state.

The same four numbers give the same noise in any batch, over any subset of ids, for a target and for its draft model.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood 2014), its constants as signed 64-bit integers, which wrap in torch as they must.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
# 52 bits and a half: (2**52 - 1) + 0.5 still fits a float64 exactly, so that a uniform is never rounded up to 1.
_BITS = 52


def fold_seed(seed: int) -> bytes:
    """Any Python integer as 16 bytes; different seeds give different bytes."""
    raw = seed.to_bytes(seed.bit_length() // 8 + 1, "little", signed=True)
    return hashlib.blake2b(raw, digest_size=16, person=b"kvilt seed").digest()


def row_key(folded_seed: bytes, sample_index: int, position: int) -> int:
    """The signed 64-bit key of the noise of one sample at one position."""
    message = folded_seed + struct.pack("<QQ", sample_index, position)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little", signed=True)


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise in float64 for int64 keys [rows] and int64 token ids [n] or [rows, n]."""
    bits = ((ids + 1) * _GAMMA) + keys[:, None]  # [rows, n]
    spare = torch.empty_like(bits)  # fresh pages for every step would cost more than the arithmetic
    _split_mix(bits, spare)
    uniform = _shift_right(bits, 64 - _BITS, spare).to(torch.float64).add_(0.5).mul_(2.0**-_BITS)  # in (0, 1)
    return uniform.log_().neg_().log_().neg_()


def _split_mix(state: Tensor, spare: Tensor) -> None:
    """The finalizer of SplitMix64, in place."""
    state.bitwise_xor_(_shift_right(state, 30, spare)).mul_(_MIX_1)
    state.bitwise_xor_(_shift_right(state, 27, spare)).mul_(_MIX_2)
    state.bitwise_xor_(_shift_right(state, 31, spare))


def _shift_right(bits: Tensor, count: int, out: Tensor) -> Tensor:
    """A logical shift into `out`: torch's own on int64 would drag the sign in."""
    return torch.bitwise_right_shift(bits, count, out=out).bitwise_and_((1 << (64 - count)) - 1)
