"""Keys brought to other positions, for every kind of rope: against a rotation from scratch, to float32 precision."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.blend.key_rotation import KeyRotation
from kvilt.executor.placement import rotations
from kvilt.models.rope import frequencies, magnitude
from kvilt.models.spec import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ModelSpec,
    NoRope,
    RopeSpec,
    YarnScaling,
)
from kvilt.ops.reference import ReferenceOps

LONG = LongScaling((1.0, 1.5, 2.0, 3.0), (2.0, 4.0, 6.0, 9.0), 64, 1.19)
ROPES = {
    "plain": RopeSpec(10000.0, 8),
    "interleaved": RopeSpec(10000.0, 8, "interleaved"),
    "linear": RopeSpec(5000.0, 8, scaling=LinearScaling(4.0)),
    "llama3": RopeSpec(500000.0, 8, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
    "yarn": RopeSpec(10000.0, 8, scaling=YarnScaling(4.0, 64, 1.1386)),
    "longrope": RopeSpec(10000.0, 8, scaling=LONG.at(256)),
    "longrope-short": RopeSpec(10000.0, 8, scaling=LONG.at(64)),
    "partial": RopeSpec(10000.0, 4),
    "partial-interleaved": RopeSpec(10000.0, 4, "interleaved"),
    "partial-yarn": RopeSpec(10000.0, 4, "interleaved", YarnScaling(4.0, 64, 1.1386)),
}

PLACE = st.integers(0, 400)


@pytest.fixture(params=ROPES.values(), ids=ROPES.keys())
def rope(request: pytest.FixtureRequest) -> RopeSpec:
    made: RopeSpec = request.param
    return made


def written_out(key: torch.Tensor, rope: RopeSpec, position: int) -> torch.Tensor:
    """The rotation of one key, pair by pair, in float64."""
    out = key.double().clone()
    pairs = rope.dims // 2
    for pair, radians in enumerate(frequencies(rope).tolist()):
        a, b = (pair, pair + pairs) if rope.pairing == "half" else (2 * pair, 2 * pair + 1)
        angle = torch.tensor(position * radians, dtype=torch.float64)
        x, y = key[..., a].double(), key[..., b].double()
        out[..., a] = (x * angle.cos() - y * angle.sin()) * magnitude(rope)
        out[..., b] = (y * angle.cos() + x * angle.sin()) * magnitude(rope)
    return out.float()


def keys(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 3, 8, generator=torch.Generator().manual_seed(tokens))


def test_placed_keys_are_rotated_as_the_model_rotates(rope: RopeSpec) -> None:
    plain, places = keys(5), [0, 1, 7, 63, 200]
    expected = torch.stack([written_out(key, rope, at) for key, at in zip(plain, places, strict=True)])
    torch.testing.assert_close(KeyRotation(rope).place(plain, torch.tensor(places)), expected, rtol=0, atol=2e-4)


@settings(max_examples=examples(30))
@given(
    st.sampled_from(sorted(ROPES)),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=6),
)
def test_moved_keys_are_those_placed_there(name: str, moves: list[tuple[int, int]]) -> None:
    """Also YaRN's and longrope's magnitude, which a key that is moved has already."""
    turn, plain = KeyRotation(ROPES[name]), keys(len(moves))
    original, places = (torch.tensor(column) for column in zip(*moves, strict=True))
    moved = turn.move(turn.place(plain, original), original, places)
    torch.testing.assert_close(moved, turn.place(plain, places), rtol=0, atol=2e-5)


def test_moving_nowhere_changes_nothing(rope: RopeSpec) -> None:
    placed = KeyRotation(rope).place(keys(4), torch.arange(4) * 50)
    assert torch.equal(KeyRotation(rope).move(placed, torch.arange(4) * 50, torch.arange(4) * 50), placed)


def test_only_the_last_dimensions_of_a_latent_key_turn() -> None:
    """Latent attention: one vector for keys and values, whose last dimensions are rotated."""
    rope, plain = RopeSpec(10000.0, 4), keys(3)
    placed = KeyRotation(rope, last=True).place(plain, torch.tensor([0, 9, 90]))
    assert torch.equal(placed[..., :4], plain[..., :4])
    assert torch.equal(placed[..., 4:], KeyRotation(rope).place(plain[..., 4:], torch.tensor([0, 9, 90])))


def test_layers_without_rope_leave_keys_alone() -> None:
    plain = keys(3)
    assert KeyRotation(NoRope()).place(plain, torch.arange(3)) is plain
    assert KeyRotation(NoRope()).move(plain, torch.arange(3), torch.arange(3) + 5) is plain


def test_tables_for_writing_are_per_layer() -> None:
    """Gemma's local and global layers rotate by different tables."""
    local, wide = RopeSpec(10000.0, 8), RopeSpec(1e6, 8)
    layers = tuple(
        LayerSpec(AttentionSpec(2, 1, 8, 1.0, one), FeedForwardSpec(8)) for one in (local, wide, NoRope(), local)
    )
    spec, ops = ModelSpec("x", 10, 8, 100, layers, 1e-5, True), ReferenceOps()
    places, plain = torch.tensor([3, 30]), keys(2)
    tables = rotations(spec, places, ops)
    assert set(tables) == {local, wide}
    for one in (local, wide):
        assert torch.equal(ops.rotate(plain, tables[one]), KeyRotation(one).place(plain, places))
