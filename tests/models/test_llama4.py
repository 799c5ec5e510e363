"""Llama 4 beside what the one runner of families shows: bits, what chunked layers keep, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import random_model, write_checkpoint
from test_checkpoints import edit_config

from kvilt.config import RunConfig
from kvilt.errors import WeightError
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.kv.layout import Full, Window
from kvilt.models.assemble import read_spec
from kvilt.models.spec import ExpertsSpec, NoRope
from kvilt.weights.source import open_checkpoint

IDS = [int(i) for i in torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(7))]


def load(path: Path, **config: object) -> Executor:
    return load_executor(path, RunConfig(kv_memory=1 << 24, backend="native", **config))  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "k8v4"])
@pytest.mark.parametrize("name", ["llama4", "llama4-top-2"])
def test_chunks_and_batches_change_no_bit_on_native(tmp_path: Path, name: str, kv_dtype: str) -> None:
    executor = load(write_checkpoint(random_model(name), tmp_path), kv_dtype=kv_dtype, threads=2)
    with executor.create_kv_cache() as kv:
        whole = executor.step(IDS, kv)[0].clone()
    for cut in (1, 9, 33):
        with executor.create_kv_cache(batch_size=2) as kv:
            for start in range(0, len(IDS) - 1, cut):
                part = IDS[start : min(start + cut, len(IDS) - 1)]
                executor.prefill([part, part[:3]], kv)
            assert torch.equal(executor.step([[IDS[-1]], [4]], kv)[0], whole)


def test_the_layers_are_of_four_kinds(tmp_path: Path) -> None:
    """Chunked with rope and full without, dense and with experts."""
    spec = read_spec(open_checkpoint(write_checkpoint(random_model("llama4"), tmp_path)))
    found = [(one.attention.reach, one.attention.chunked, one.attention.temperature is not None) for one in spec.layers]
    local, full = (Window(9), True, False), (Full(), False, True)
    assert found == [local, local, full, local]
    assert [isinstance(one.attention.rope, NoRope) for one in spec.layers] == [False, False, True, False]
    assert [isinstance(one.feed_forward, ExpertsSpec) for one in spec.layers] == [False, True, False, True]


def test_chunked_layers_give_old_pages_back(tmp_path: Path) -> None:
    executor = load(write_checkpoint(random_model("llama4"), tmp_path))
    with executor.create_kv_cache() as kv:
        executor.prefill(IDS * 3, kv)
        assert kv.row(0).floor > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["chunked_attention"]),
        ("layer_types", ["sliding_attention"] * 4),
        ("no_rope_layers", [1, 2, 0, 1]),
        ("no_rope_layers", [1]),
        ("moe_layers", [4]),
        ("attention_chunk_size", None),
    ],
)
def test_what_is_not_possible_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    folder = write_checkpoint(random_model("llama4"), tmp_path)
    edit_config(folder, lambda config: config.update({field: value}))
    with pytest.raises(WeightError, match=field):
        read_spec(open_checkpoint(folder))
