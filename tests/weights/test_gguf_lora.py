"""Adapters in GGUF as they come: what is wrong with one is named, and nothing of it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora_files import write_gguf_lora as write
from tiny import HIDDEN, LAYERS, write_tiny

from kvilt.config import RunConfig
from kvilt.errors import KviltError, ModelNotFound, Unsupported, WeightError
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.weights.gguf_lora import open_gguf_lora

Q0 = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_executor(write_tiny(tmp_path_factory.mktemp("base")), RunConfig(kv_memory=1 << 20, threads=1))


def test_what_is_read(executor: Executor, tmp_path: Path) -> None:
    path = write(tmp_path / "one.gguf", **{"adapter.lora.task_name": "anything"})
    with open_gguf_lora(path) as opened:
        assert sorted(opened.modules) == [f"blk.{i}.attn_q" for i in range(LAYERS)]
        assert opened.config.scale_of("blk.0.attn_q") == 2.0
        assert opened.tensor(f"{Q0}.lora_a").shape == (4, HIDDEN)
    lora = executor.load_lora(path)
    info = executor.adapters.find("one")
    assert (info.rank, info.parts, info.invocation) == (4, ("q",), ())
    executor.unload_lora(lora)


def test_without_an_alpha_nothing_is_scaled(tmp_path: Path) -> None:
    with open_gguf_lora(write(tmp_path / "one.gguf", **{"adapter.lora.alpha": 0.0})) as opened:
        assert opened.config.scale_of("blk.0.attn_q") == 1.0


FIELDS: dict[str, tuple[dict[str, Any], type[KviltError], str]] = {
    "a model": ({"general.type": "model"}, Unsupported, "general.type"),
    "of no kind": ({"general.type": None}, Unsupported, "general.type"),
    "another method": ({"adapter.type": "control_vector"}, Unsupported, "adapter.type"),
    "no method": ({"adapter.type": None}, Unsupported, "adapter.type"),
    "no alpha": ({"adapter.lora.alpha": None}, WeightError, "adapter.lora.alpha"),
    "an alpha that is none": ({"adapter.lora.alpha": float("nan")}, WeightError, "adapter.lora.alpha"),
    "an alpha in words": ({"adapter.lora.alpha": "eight"}, WeightError, "adapter.lora.alpha"),
    "invocation by words": ({"adapter.alora.invocation_tokens": ["a"]}, WeightError, "invocation_tokens"),
    "invocation by what is no list": ({"adapter.alora.invocation_tokens": 3}, WeightError, "invocation_tokens"),
    "invocation by what is no token": ({"adapter.alora.invocation_tokens": [-3]}, WeightError, "invocation_tokens"),
    "a part of several": ({"split.count": 2}, KviltError, "split"),
    "another architecture": ({"architecture": "qwen2"}, WeightError, "general.architecture"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_metadata_that_is_not_computed_is_refused_by_name(case: str, executor: Executor, tmp_path: Path) -> None:
    changes, error, named = FIELDS[case]
    with pytest.raises(error, match=named):
        executor.load_lora(write(tmp_path / "bad.gguf", **changes))
    assert executor.lora_metrics_snapshot()["loaded"] == 0


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


TENSORS: dict[str, tuple[dict[str, Any], type[KviltError], str]] = {
    "a half": ({f"{Q0}.lora_b": None}, WeightError, "other half"),
    "the other half": ({f"{Q0}.lora_a": None}, WeightError, "other half"),
    "another rank": ({f"{Q0}.lora_a": zeros(5, HIDDEN)}, WeightError, "another model"),
    "another width": ({f"{Q0}.lora_a": zeros(4, HIDDEN + 1)}, WeightError, "another model"),
    "other outputs": ({f"{Q0}.lora_b": zeros(HIDDEN - 1, 4)}, WeightError, "another model"),
    "a rank too high": ({f"{Q0}.lora_a": zeros(5000, HIDDEN)}, WeightError, "lora_a"),
    "one dimension": ({f"{Q0}.lora_a": zeros(HIDDEN)}, WeightError, "lora_a"),
    "three dimensions": ({f"{Q0}.lora_a": zeros(2, 4, HIDDEN)}, WeightError, "lora_a"),
    "whole numbers": ({f"{Q0}.lora_a": zeros(4, HIDDEN, dtype=np.int32)}, WeightError, "floats"),
    "an infinity": ({f"{Q0}.lora_a": zeros(4, HIDDEN) + np.inf}, WeightError, "infinity"),
    "NaN": ({f"{Q0}.lora_b": zeros(HIDDEN, 4) + np.nan}, WeightError, "NaN"),
    "a stranger": ({"blk.0.attn_norm.weight": zeros(HIDDEN)}, Unsupported, "attn_norm"),
    "a map of nobody's": (
        {"blk.0.ffn_gate_exps.weight.lora_a": zeros(4, HIDDEN), "blk.0.ffn_gate_exps.weight.lora_b": zeros(HIDDEN, 4)},
        WeightError, "ffn_gate_exps",
    ),
    "a layer too many": (
        {"blk.3.attn_q.weight.lora_a": zeros(4, HIDDEN), "blk.3.attn_q.weight.lora_b": zeros(HIDDEN, 4)},
        WeightError, "blk.3",
    ),
    "an embedding": (
        {"token_embd.weight.lora_a": zeros(61, 4), "token_embd.weight.lora_b": zeros(HIDDEN, 4)},
        Unsupported, "token_embd",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(case: str, executor: Executor, tmp_path: Path) -> None:
    changes, error, named = TENSORS[case]
    with pytest.raises(error, match=named):
        executor.load_lora(write(tmp_path / "bad.gguf", changes))
    assert executor.lora_metrics_snapshot()["loaded"] == 0


def test_an_adapter_without_any_product_is_refused(tmp_path: Path) -> None:
    nothing = {f"blk.{i}.attn_q.weight.lora_{half}": None for i in range(LAYERS) for half in "ab"}
    with pytest.raises(KviltError):
        open_gguf_lora(write(tmp_path / "empty.gguf", nothing))


@pytest.mark.parametrize("cut", [0, 3, 40, 300, -1])
def test_files_cut_short_are_refused(executor: Executor, tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(WeightError):
        executor.load_lora(path)


def test_paths(executor: Executor, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    outside = write(tmp_path / "outside.gguf")
    (allowed / "linked.gguf").symlink_to(outside)
    open_gguf_lora(write(allowed / "inside.gguf"), allowed).close()
    for path in (outside, allowed / "linked.gguf", allowed / ".." / "outside.gguf"):
        with pytest.raises(WeightError, match="outside"):
            open_gguf_lora(path, allowed)
    with pytest.raises(ModelNotFound):
        executor.load_lora(tmp_path / "nowhere.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises((ModelNotFound, Unsupported)):
        executor.load_lora(tmp_path / "folder.gguf")


def test_content_decides_who_an_adapter_is(executor: Executor, tmp_path: Path) -> None:
    def content(name: str, tensors: Mapping[str, Any] | None = None, **fields: Any) -> str:
        lora = executor.load_lora(write(tmp_path / f"{name}.gguf", tensors, **fields))
        try:
            return executor.adapters.find(lora).content
        finally:
            executor.unload_lora(lora)

    assert content("a") == content("b", **{"general.name": "another name"})
    others = [
        content("c", **{"adapter.lora.alpha": 9.0}),
        content("d", {f"{Q0}.lora_a": zeros(4, HIDDEN)}),
        content("e", **{"adapter.alora.invocation_tokens": [1, 2]}),
    ]
    assert len({content("f"), *others}) == 4


def test_it_leaves_memory_and_comes_back(executor: Executor, tmp_path: Path) -> None:
    lora = executor.load_lora(write(tmp_path / "back.gguf"))
    with executor.create_kv_cache() as kv:
        before = executor.step([1, 2, 3], kv, lora)
    executor.adapters._evict(executor.adapters._loaded[lora])
    with executor.create_kv_cache() as kv:
        assert torch.equal(executor.step([1, 2, 3], kv, lora), before)
    executor.unload_lora(lora)
