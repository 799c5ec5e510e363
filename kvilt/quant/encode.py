"""Floats into the blocks of GGML's formats: the other direction of `ggml_blocks`.

Columns may have an importance: how much an error there costs, such as the mean square of the inputs it is multiplied
with. Without one, large numbers count for more than small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ..errors import Unsupported
from .fit import Fit, error_of, fit_affine, fit_symmetric, inverse_of, solve_affine
from .formats import FORMATS

_SLAB_ELEMENTS = 1 << 20
_ROUNDS = 3  # of codes and scales in turn

# Numbers [blocks, elements] and weights of the same shape to bytes [blocks, block_bytes].
Encoder = Callable[[Tensor, Tensor], Tensor]


def quantize(x: Tensor, format_name: str, importance: Tensor | None = None) -> Tensor:
    """Rows [rows, columns] as blocks, uint8 [rows, row_bytes]. `importance`: [columns], or as many rows as `x` has."""
    encoder, format_ = ENCODERS.get(format_name), FORMATS[format_name]
    if encoder is None:
        raise Unsupported(f"no weights can be written in {format_name}; choose one of {', '.join(ENCODERS)}")
    rows, columns = x.shape
    size = format_.block_elements
    if columns % size:
        raise Unsupported(f"rows of {columns} numbers do not fill blocks of {size}, which {format_name} has")
    if not bool(torch.isfinite(x).all()):
        raise Unsupported("the weight has numbers that are not finite")
    out = torch.empty((rows, format_.row_bytes(columns)), dtype=torch.uint8)
    step = max(1, _SLAB_ELEMENTS // columns)
    for start in range(0, rows, step):
        part = x[start : start + step].float()
        own = None if importance is None else importance if importance.dim() == 1 else importance[start : start + step]
        blocks = encoder(part.reshape(-1, size), _weights(part, own).reshape(-1, size))
        out[start : start + step] = blocks.view(len(part), -1)
    return out


def _weights(x: Tensor, importance: Tensor | None) -> Tensor:
    """What an error of each number costs."""
    typical = x.square().mean(1, keepdim=True)
    if importance is None:
        return typical.sqrt() + x.abs() + 1e-30
    known = importance.float()
    return (known + 1e-6 * known.mean() + 1e-30) * (typical + x.square()).sqrt() + 1e-30


# Blocks of 32 with one scale of 16 bits, or a scale and a minimum.


def _halves(*numbers: Tensor) -> Tensor:
    """Float16 numbers of each block as bytes [blocks, 2 * len(numbers)]."""
    return torch.stack(numbers, 1).half().view(torch.uint8)


def _rounded(x: Tensor) -> Tensor:
    return x.half().float()


def nibble_pairs(codes: Tensor) -> Tensor:
    """[..., 2n] codes: the first half in the low halves of n bytes, the second in the high ones."""
    width = codes.shape[-1] // 2
    return codes[..., :width] | (codes[..., width:] << 4)


def _fifth_bits(codes: Tensor) -> Tensor:
    """Bit 4 of 32 codes, lowest first, in 4 bytes."""
    bits = ((codes >> 4) & 1).view(-1, 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _final_symmetric(x: Tensor, weights: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Codes from 0, and the scale as it is stored."""
    scale = _rounded(fit_symmetric(x, weights, half).scale)
    return ((x * inverse_of(scale)[:, None]).round_().clamp_(-half, half - 1) + half).to(torch.uint8), scale


def _final_affine(x: Tensor, weights: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    fit = fit_affine(x, weights, levels)
    scale, minimum = _rounded(fit.scale), _rounded(fit.minimum)
    return _codes_for(x, scale, minimum, levels).to(torch.uint8), scale, -minimum


def _q4_0(x: Tensor, weights: Tensor) -> Tensor:
    codes, scale = _final_symmetric(x, weights, 8)
    return torch.cat((_halves(scale), nibble_pairs(codes)), 1)


def _q5_0(x: Tensor, weights: Tensor) -> Tensor:
    codes, scale = _final_symmetric(x, weights, 16)
    return torch.cat((_halves(scale), _fifth_bits(codes), nibble_pairs(codes & 15)), 1)


def _q4_1(x: Tensor, weights: Tensor) -> Tensor:
    codes, scale, offset = _final_affine(x, weights, 15)
    return torch.cat((_halves(scale, offset), nibble_pairs(codes)), 1)


def _q5_1(x: Tensor, weights: Tensor) -> Tensor:
    codes, scale, offset = _final_affine(x, weights, 31)
    return torch.cat((_halves(scale, offset), _fifth_bits(codes), nibble_pairs(codes & 15)), 1)


def _q8_0(x: Tensor, _weights: Tensor) -> Tensor:
    scale = x.abs().amax(1) / 127
    codes = (x * inverse_of(scale)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((_halves(scale), codes.view(torch.uint8)), 1)


# Blocks of 256: parts with whole scales, which are counted in one or two numbers of 16 bits.


def _whole_scales(scales: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scales [blocks, parts] as whole numbers up to `most` times a unit [blocks]."""
    unit = _rounded(scales.amax(1) / most)
    return (scales * inverse_of(unit)[:, None]).round_().clamp_(0, most), unit


def _codes_for(x: Tensor, scale: Tensor, minimum: Tensor, levels: int) -> Tensor:
    return ((x + minimum[:, None]) * inverse_of(scale)[:, None]).round_().clamp_(0, levels)


def _affine_parts(x: Tensor, weights: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes [blocks * 8, 32], whole scales and minimums [blocks, 8], and their units [blocks]."""
    parts, costs = x.reshape(-1, 32), weights.reshape(-1, 32)
    fit = fit_affine(parts, costs, levels)
    best, found = None, None
    for _ in range(_ROUNDS):
        scales, unit = _whole_scales(fit.scale.view(-1, 8), 63)
        minimums, shift = _whole_scales(fit.minimum.view(-1, 8), 63)
        codes = _codes_for(parts, (scales * unit[:, None]).flatten(), (minimums * shift[:, None]).flatten(), levels)
        unit, shift = _best_units(x, weights, codes, scales, minimums, unit, shift)
        scale, minimum = (scales * unit[:, None]).flatten(), (minimums * shift[:, None]).flatten()
        codes = _codes_for(parts, scale, minimum, levels)
        error = error_of(parts, costs, codes, scale, minimum).view(-1, 8).sum(1)
        now = (codes, scales, minimums, unit, shift)
        found, best = (now, error) if found is None or best is None else _chosen(found, best, now, error)
        fit = Fit(codes, *solve_affine(parts, costs, codes), error)
    assert found is not None
    return found


_Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _chosen(old: _Parts, best: Tensor, new: _Parts, error: Tensor) -> tuple[_Parts, Tensor]:
    """Block by block what has the smaller error."""
    better = error < best
    each = [
        torch.where(better.repeat_interleave(len(b) // len(better)).view(-1, *[1] * (b.dim() - 1)), b, a)
        for a, b in zip(old, new, strict=True)
    ]
    return (each[0], each[1], each[2], each[3], each[4]), torch.where(better, error, best)


def _best_units(
    x: Tensor, weights: Tensor, codes: Tensor, scales: Tensor, minimums: Tensor, unit: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """The two units of a block that serve its codes and whole scales best, as they are stored."""
    a = (codes.view(-1, 8, 32) * scales[..., None]).flatten(1)
    b = minimums[..., None].expand(-1, 8, 32).flatten(1)
    aa, bb, ab = (weights * a * a).sum(1), (weights * b * b).sum(1), (weights * a * b).sum(1)
    ax, bx = (weights * a * x).sum(1), (weights * b * x).sum(1)
    determinant = aa * bb - ab * ab
    solvable = determinant > 1e-12 * aa * bb
    safe = torch.where(solvable, determinant, 1.0)
    new_unit, new_shift = (ax * bb - ab * bx) / safe, (ab * ax - aa * bx) / safe
    usable = solvable & (new_unit > 0) & (new_shift >= 0)
    return _rounded(torch.where(usable, new_unit, unit)), _rounded(torch.where(usable, new_shift, shift))


def _six_bit_header(scales: Tensor, minimums: Tensor) -> Tensor:
    """Eight scales and eight minimums of 6 bits in 12 bytes; see `ggml_blocks`."""
    s, m = scales.to(torch.uint8), minimums.to(torch.uint8)
    first = s[:, :4] | ((s[:, 4:] >> 4) << 6)
    second = m[:, :4] | ((m[:, 4:] >> 4) << 6)
    return torch.cat((first, second, (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)), 1)


def _q4_k(x: Tensor, weights: Tensor) -> Tensor:
    codes, scales, minimums, unit, shift = _affine_parts(x, weights, 15)
    packed = nibble_pairs(codes.to(torch.uint8).view(-1, 4, 64)).flatten(1)
    return torch.cat((_halves(unit, shift), _six_bit_header(scales, minimums), packed), 1)


def _q5_k(x: Tensor, weights: Tensor) -> Tensor:
    codes, scales, minimums, unit, shift = _affine_parts(x, weights, 31)
    whole = codes.to(torch.uint8)
    packed = nibble_pairs((whole & 15).view(-1, 4, 64)).flatten(1)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((whole >> 4).view(-1, 8, 32) << shifts).sum(1, dtype=torch.uint8)
    return torch.cat((_halves(unit, shift), _six_bit_header(scales, minimums), high, packed), 1)


def _q6_k(x: Tensor, weights: Tensor) -> Tensor:
    codes, scales, unit = _symmetric_parts(x, weights)
    whole = (codes + 32).to(torch.uint8).view(-1, 2, 128)
    low = nibble_pairs(whole & 15).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((whole >> 4).view(-1, 2, 4, 32) << shifts).sum(2, dtype=torch.uint8).flatten(1)
    return torch.cat((low, high, scales.to(torch.int8).view(torch.uint8), _halves(unit)), 1)


def _symmetric_parts(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [blocks, 256] from -32 to 31, whole scales [blocks, 16] from -128 to 127, and their unit [blocks]."""
    fit = fit_symmetric(x.reshape(-1, 16), weights.reshape(-1, 16), 32)
    wanted = fit.scale.view(-1, 16)
    largest = wanted.gather(1, wanted.abs().argmax(1, keepdim=True))[:, 0]
    unit = _rounded(largest / -128)
    scales = (wanted * inverse_of(unit)[:, None]).round_().clamp_(-128, 127)
    codes = x
    for _ in range(_ROUNDS):
        step = (scales * unit[:, None]).repeat_interleave(16, 1)
        codes = (x * inverse_of(step)).round_().clamp_(-32, 31)
        a = codes * scales.repeat_interleave(16, 1)
        norm = (weights * a * a).sum(1)
        solved = (weights * a * x).sum(1) / torch.where(norm > 0, norm, 1.0)
        unit = torch.where(norm > 0, _rounded(solved), unit)
    step = (scales * unit[:, None]).repeat_interleave(16, 1)
    return (x * inverse_of(step)).round_().clamp_(-32, 31), scales, unit


ENCODERS: Mapping[str, Encoder] = MappingProxyType(
    {
        "Q8_0": _q8_0,
        "Q6_K": _q6_k,
        "Q5_K": _q5_k,
        "Q5_1": _q5_1,
        "Q5_0": _q5_0,
        "Q4_K": _q4_k,
        "Q4_1": _q4_1,
        "Q4_0": _q4_0,
    }
)
