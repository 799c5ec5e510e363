"""Noise is a pure function of (seed, sample index, position, id), and what it says on the label: Gumbel."""

from __future__ import annotations

import math

import pytest
import torch

from kvilt.sampling.noise import fold_seed, gumbel, row_key

MASK = (1 << 64) - 1
SEEDS = [0, 1, -1, 255, 256, -128, 2**63, 2**64, 2**70, -(2**70), 10**1000]


def split_mix_64(key: int, token: int) -> float:
    """The same noise in plain Python integers."""
    z = (key + (token + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    z ^= z >> 31
    uniform = ((z >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def test_the_tensor_arithmetic_equals_plain_integers() -> None:
    keys = [row_key(fold_seed(seed), 0, 3) for seed in SEEDS]
    ids = torch.tensor([0, 1, 2, 49_151, 262_143, 2**31 - 1])
    ours = gumbel(torch.tensor(keys), ids)
    theirs = torch.tensor([[split_mix_64(key, token) for token in ids.tolist()] for key in keys], dtype=torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_mixer_gives_the_published_outputs_of_split_mix_64() -> None:
    """The first outputs for seed 1234567, as printed beside many implementations."""
    z = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    uniform = torch.tensor([(value >> 12) + 0.5 for value in z], dtype=torch.float64) / 2**52
    expected = -torch.log(-torch.log(uniform))
    torch.testing.assert_close(gumbel(torch.tensor([1234567]), torch.arange(3))[0], expected, rtol=1e-12, atol=1e-12)


def test_a_subset_of_ids_gets_the_noise_it_has_in_the_whole_vocabulary() -> None:
    keys = torch.tensor([row_key(fold_seed(7), 0, position) for position in range(4)])
    whole = gumbel(keys, torch.arange(50_000))
    ids = torch.tensor([[5, 17, 40_000], [0, 1, 2], [49_999, 3, 3], [8, 9, 10]])
    assert torch.equal(gumbel(keys, ids), whole.gather(1, ids))
    assert torch.equal(gumbel(keys[2:3], torch.arange(50_000)), whole[2:3])


def test_noise_is_always_finite_at_the_ends_of_the_uniform() -> None:
    for bits in (0, 2**52 - 1):
        uniform = torch.tensor([bits], dtype=torch.float64).add(0.5).mul(2.0**-52)
        assert 0.0 < float(uniform) < 1.0
        assert (-(-uniform.log()).log()).isfinite().all()


def test_every_part_of_the_key_matters() -> None:
    keys = {row_key(fold_seed(seed), index, position) for seed in SEEDS for index in range(8) for position in range(50)}
    assert len(keys) == len(SEEDS) * 8 * 50
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_the_key_is_the_same_today_and_tomorrow() -> None:
    """A seed in a user's notebook must give the same tokens in the next release."""
    assert row_key(fold_seed(0), 0, 0) == -5424532559416244978
    assert row_key(fold_seed(2**70), 3, 12_345) == -1882477365953043377


@pytest.mark.parametrize("seed", [0, -1])
def test_noise_follows_the_gumbel_distribution(seed: int) -> None:
    """Kolmogorov-Smirnov over 200,000 values; the seeds are fixed, so this cannot flake."""
    keys = torch.tensor([row_key(fold_seed(seed), 0, position) for position in range(100)])
    noise = gumbel(keys, torch.arange(2_000)).flatten().sort().values
    cdf = (-(-noise).exp()).exp()
    ranks = torch.arange(1, len(noise) + 1, dtype=torch.float64) / len(noise)
    assert float((cdf - ranks).abs().max()) < 1.63 / math.sqrt(len(noise)), "1 % critical value"


@pytest.mark.parametrize("step", ["position", "sample_index", "token"])
def test_neighbouring_counters_are_uncorrelated(step: str) -> None:
    folded = fold_seed(11)
    keys = [row_key(folded, 0, p) for p in range(200)]
    if step == "position":
        keys_next = [row_key(folded, 0, p + 1) for p in range(200)]
    else:
        keys_next = [row_key(folded, int(step == "sample_index"), p) for p in range(200)]
    ids = torch.arange(500)
    first = gumbel(torch.tensor(keys), ids).flatten()
    second = gumbel(torch.tensor(keys_next), ids + int(step == "token")).flatten()
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
    assert abs(float(correlation)) < 3.3 / math.sqrt(len(first))
