"""Positions with several axes: each pair of dimensions turns by its own, as Hugging Face does it for Qwen2-VL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import HEADS, HIDDEN, write_tiny
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

from kvilt import Executor
from kvilt.batch import Batch, Ids, Last, Row
from kvilt.config import RunConfig
from kvilt.errors import InputError, WeightError
from kvilt.executor.load import load_executor
from kvilt.models.rope import frequencies, rotation
from kvilt.models.spec import AttentionSpec, NoScaling, RopeSpec, each_attention
from kvilt.ops.reference import ReferenceOps

SPEC = RopeSpec(10000.0, 16, sections=(2, 3, 3))
AT = torch.tensor([[0, 1, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2], [0, 1, 2, 1, 2, 2]])


def test_rotation_is_that_of_qwen2_vl() -> None:
    x = torch.randn(AT.shape[1], 4, 16, generator=torch.Generator().manual_seed(0))
    ops, inv_freq = ReferenceOps(), frequencies(SPEC)
    ours = ops.rotate(x, rotation(SPEC, inv_freq, AT, ops))
    parameters = {"rope_type": "default", "rope_theta": SPEC.theta, "mrope_section": list(SPEC.sections)}
    config = SimpleNamespace(rope_parameters=parameters, max_position_embeddings=64, head_dim=SPEC.dims)
    q = x.transpose(0, 1)[None]  # [1, heads, tokens, dim]
    theirs, _ = qwen2_vl.apply_rotary_pos_emb(q, q, *qwen2_vl.Qwen2VLRotaryEmbedding(config)(x, AT[:, None]))
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1))


def test_sections_share_out_all_pairs() -> None:
    with pytest.raises(WeightError, match="must share out 8 pairs, not 7"):
        RopeSpec(10000.0, 16, sections=(2, 3, 2))


def test_a_rope_with_one_axis_shows_itself_as_it_always_did() -> None:
    """The identity of saved KV is made of it."""
    assert repr(RopeSpec(5.0, 8)) == f"RopeSpec(theta=5.0, dims=8, pairing='half', scaling={NoScaling()!r})"
    assert "sections=(2, 3, 3)" in repr(SPEC)


@pytest.fixture(scope="module", params=["reference", "native"])
def axial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    """A tiny model whose heads turn by two axes."""
    config = RunConfig(kv_memory=1 << 22, backend=request.param, threads=1)
    executor = load_executor(write_tiny(tmp_path_factory.mktemp("axes")), config)
    pairs = HIDDEN // HEADS // 2

    def by_two(_layer: int, attention: AttentionSpec) -> AttentionSpec:
        assert isinstance(attention.rope, RopeSpec)
        return replace(attention, rope=replace(attention.rope, sections=(1, pairs - 1)))

    decoder = executor._decoder
    spec = each_attention(decoder.spec, by_two)
    layers = tuple(
        replace(layer, attention=replace(layer.attention, spec=own.attention))
        for layer, own in zip(decoder.layers, spec.layers, strict=True)
    )
    ropes = {layer.attention.rope: frequencies(layer.attention.rope) for layer in spec.layers}
    executor._decoder = replace(decoder, spec=spec, layers=layers, frequencies=ropes)
    executor._axes = 2
    executor._replay._decoder = executor._decoder
    return executor


def logits(executor: Executor, axes: list[list[int]]) -> torch.Tensor:
    with executor.create_kv_cache() as kv:
        kv.reserve(4)
        return executor.run(Batch.of([Row(Ids([1, 2, 3, 4]), range(4), kv, want=Last(4), rope_positions=axes)])).values


def test_equal_axes_are_a_plain_position(axial: Executor) -> None:
    assert torch.equal(logits(axial, [[0, 1, 2, 3]] * 2), logits(axial, []))
    assert not torch.equal(logits(axial, [[0, 1, 2, 3], [0, 0, 0, 0]]), logits(axial, []))


def test_rows_with_and_without_axes_share_a_step(axial: Executor) -> None:
    axes = [[0, 1, 1, 2], [0, 1, 2, 2]]
    alone = torch.cat([logits(axial, axes), logits(axial, [])])
    with axial.create_kv_cache(2) as kv:
        kv.reserve([4, 4])
        rows = [
            Row(Ids([1, 2, 3, 4]), range(4), kv, 0, want=Last(4), rope_positions=axes),
            Row(Ids([1, 2, 3, 4]), range(4), kv, 1, want=Last(4)),
        ]
        together = axial.run(Batch.of(rows)).values
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    if axial.pool.ops.name == "native":
        assert torch.equal(together, alone)


def test_axes_that_the_model_does_not_have_are_refused(axial: Executor, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rotates by 2 axes of a position, not by 3"):
        logits(axial, [[0, 1, 2, 3]] * 3)
    with pytest.raises(InputError, match="as many positions on each axis"):
        logits(axial, [[0, 1, 2, 3], [0, 1]])
    plain = load_executor(write_tiny(tmp_path), RunConfig(kv_memory=1 << 22, backend="reference"))
    with pytest.raises(InputError, match="rotates by 1 axes of a position, not by 2"):
        logits(plain, [[0, 1, 2, 3]] * 2)
