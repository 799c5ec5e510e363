"""Residual streams and sparse activations on every backend, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvilt.ops.contract import Ops

SIZES = [(1, 4, 32), (5, 3, 37), (2, 2, 5)]  # tokens, streams, numbers


@pytest.mark.parametrize("sizes", SIZES)
def test_streams_are_mixed_by_weights_of_each_token(
    ops: Ops, near: Any, random_of: Any, sizes: tuple[int, int, int]
) -> None:
    tokens, streams, _ = sizes
    x, weights = random_of(*sizes), random_of(tokens, streams * streams)
    own = weights.double().cpu().view(tokens, streams, streams)
    near(ops.streams.mix(x, weights), own @ x.double().cpu())


@pytest.mark.parametrize("sizes", SIZES)
def test_each_stream_takes_its_share(ops: Ops, near: Any, random_of: Any, sizes: tuple[int, int, int]) -> None:
    tokens, streams, numbers = sizes
    x, y, weights = random_of(*sizes), random_of(tokens, numbers), random_of(tokens, streams)
    share = weights.double().cpu()[:, :, None] * y.double().cpu()[:, None]
    near(ops.streams.add(x, y, weights), x.double().cpu() + share)


@pytest.mark.parametrize("shape", [(1, 32), (4, 37), (3, 1)])
def test_rows_are_brought_to_the_size_of_others(ops: Ops, near: Any, random_of: Any, shape: tuple[int, int]) -> None:
    x, like = random_of(*shape), random_of(*shape)
    x[0] *= 1e-4  # too small to be divided by its own size
    wide, other = x.double().cpu(), like.double().cpu()
    size = wide.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
    near(ops.streams.match_rms(x, like), wide * other.square().mean(-1, keepdim=True).sqrt() / size)


@pytest.mark.parametrize("cut", [1.6448533535003662, 0.0, -0.3])
@pytest.mark.parametrize("shape", [(1, 64), (5, 37)])
def test_only_what_is_far_above_the_mean_passes(
    ops: Ops, near: Any, random_of: Any, shape: tuple[int, int], cut: float
) -> None:
    x = random_of(*shape)
    wide = x.double().cpu()
    mean, deviation = wide.mean(-1, keepdim=True), wide.std(-1, keepdim=True, unbiased=False)
    near(ops.streams.gaussian_relu(x, cut), torch.relu(wide - (mean + deviation * cut)))


def test_a_row_has_the_same_bits_beside_others(ops: Ops, random_of: Any) -> None:
    x, y, weights = random_of(6, 3, 37), random_of(6, 37), random_of(6, 9)

    def parts(rows: slice) -> list[Tensor]:
        streams, own = ops.streams, y[rows]
        return [
            streams.mix(x[rows], weights[rows]),
            streams.add(x[rows], own, weights[rows, :3].contiguous()),
            streams.match_rms(own, x[rows, 0].contiguous()),
            streams.gaussian_relu(own, 0.4),
        ]

    whole = [part.clone() for part in parts(slice(0, 6))]
    for row in range(6):
        alone = parts(slice(row, row + 1))
        assert all(torch.equal(one, part[row : row + 1]) for one, part in zip(alone, whole, strict=True))
