"""What other backends and several ranks need of the model: dtypes, devices, experts, and sums across ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import random_model, write_checkpoint
from tiny import write_tiny
from torch import Tensor

from kvilt import Executor
from kvilt.config import RunConfig
from kvilt.errors import Unsupported, WeightError
from kvilt.executor.load import load_executor
from kvilt.models.decoder import Decoder
from kvilt.models.experts import Experts
from kvilt.models.layers import LayerContext, Linear, linears_in
from kvilt.models.spec import ExpertsSpec, FeedForwardSpec
from kvilt.ops import select as registry
from kvilt.ops.reference import ReferenceOps

PROMPT = [1, 5, 9, 2, 7, 3]


def load(folder: Path, backend: str) -> Executor:
    return load_executor(folder, RunConfig(kv_memory=1 << 22, backend=backend, threads=1))


# Dtype and device.


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> str:
    """The reference with activations and weights in bfloat16."""
    monkeypatch.setattr(registry, "_NAMED", dict(registry._NAMED))
    registry.register("bfloat16", lambda device, _threads: ReferenceOps(device, torch.bfloat16))
    return "bfloat16"


@pytest.mark.parametrize("family", ["llama-biases", "gemma2", "qwen3-moe", "qwen2", "phi3-partial"])
def test_activations_have_the_dtype_of_the_backend(family: str, half: str, tmp_path: Path) -> None:
    folder = write_checkpoint(random_model(family), tmp_path)
    narrow, wide = load(folder, half), load(folder, "reference")
    seen = watch(narrow)
    with narrow.create_kv_cache() as kv, wide.create_kv_cache() as other:
        found, expected = narrow.step(PROMPT, kv), wide.step(PROMPT, other)
    assert seen == {torch.bfloat16}
    assert found.dtype == torch.float32  # logits always
    assert (found - expected).norm() < 0.2 * expected.norm()


def watch(executor: Executor) -> set[torch.dtype]:
    """The dtypes of all that linear maps take from here on."""
    seen: set[torch.dtype] = set()
    ops: Any = executor.pool.ops
    honest = ops.linear

    def linear(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        seen.add(x.dtype)
        return honest(x, *rest, **named)

    ops.linear = linear
    return seen


def test_a_backend_that_does_not_run_on_a_device_declines() -> None:
    meta = torch.device("meta")
    with pytest.raises(Unsupported, match="run on the CPU, not on meta"):
        registry.select("native", device=meta)
    ops = registry.select("auto", device=meta)
    assert (ops.name, ops.device) == ("reference", meta)
    assert isinstance(weight := ops.prepare(torch.ones(2, 2)), Tensor) and weight.device == meta


# Experts.


def test_experts_are_found_by_walking_the_modules(tmp_path: Path) -> None:
    executor = load(write_checkpoint(random_model("qwen3-moe"), tmp_path), "reference")
    decoder: Decoder = executor._decoder
    block = decoder.layers[0].feed_forward
    assert isinstance(block, Experts)
    names = [linear.name for linear in linears_in(decoder.layers[0])]
    assert names[:6] == ["0.q", "0.k", "0.v", "0.out", "0.router", "0.experts.0.gate"]
    assert len(names) == len(set(names)) == 4 + 1 + 3 * block.spec.experts
    every = sum(linear.weight.nbytes for linear in linears_in(decoder.layers)) + decoder.head.weight.nbytes
    of_experts = sum(
        linear.weight.nbytes for layer in decoder.layers for linear in linears_in(layer.feed_forward.experts)
    )
    idle = 1 - block.spec.top_k / block.spec.experts
    assert executor.weight_bytes == pytest.approx(every - idle * of_experts)


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-moe-some-dense"])
def test_a_token_does_not_see_what_others_chose(name: str, tmp_path: Path) -> None:
    executor = load(write_checkpoint(random_model(name), tmp_path), "native")
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7]]
    with executor.create_kv_cache(len(prompts)) as kv:
        together = executor.step(prompts, kv)
    for row, prompt in enumerate(prompts):
        with executor.create_kv_cache() as kv:
            executor.prefill(prompt[:1], kv)
            assert torch.equal(executor.step(prompt[1:], kv)[0], together[row])


@pytest.mark.parametrize("top_k", [0, 6])
def test_more_experts_for_a_token_than_there_are_are_refused(top_k: int) -> None:
    with pytest.raises(WeightError, match=f"1 to 5, not {top_k}"):
        ExpertsSpec(5, top_k, FeedForwardSpec(8))


@pytest.mark.parametrize("named", [[9], ["1"], 3, [True]])
def test_layers_that_do_not_exist_cannot_be_without_experts(named: object, tmp_path: Path) -> None:
    folder = write_checkpoint(random_model("qwen3-moe"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mlp_only_layers": named}))
    with pytest.raises(WeightError, match="mlp_only_layers"):
        load(folder, "reference")


# Sums across ranks.


def test_a_map_shared_out_by_inputs_is_summed_before_its_residual() -> None:
    random = torch.Generator().manual_seed(3)
    x, weight = torch.randn(4, 6, generator=random), torch.randn(5, 6, generator=random)
    bias, residual = torch.randn(5, generator=random), torch.randn(4, 5, generator=random)
    ops = ReferenceOps()
    context = LayerContext(ops, (), (), {})
    other = ops.linear(x[:, 4:], weight[:, 4:])  # what the second rank computes
    seen: list[Tensor] = []

    def all_reduce(part: Tensor) -> Tensor:
        seen.append(part)
        return part + other

    own = Linear(weight[:, :4].contiguous(), bias, "0.down", all_reduce)
    whole = Linear(weight, bias, "0.down")
    torch.testing.assert_close(context.linear(x[:, :4], own, residual), context.linear(x, whole, residual))
    torch.testing.assert_close(context.linear(x[:, :4], own), context.linear(x, whole))
    torch.testing.assert_close(seen[0], ops.linear(x[:, :4], weight[:, :4], bias))  # without the residual


def test_a_model_whose_maps_are_summed_over_one_rank_is_the_same_model(tmp_path: Path) -> None:
    executor = load(write_tiny(tmp_path), "native")
    with executor.create_kv_cache() as kv:
        expected = executor.step(PROMPT, kv)
    calls: list[tuple[int, ...]] = []

    def all_reduce(part: Tensor) -> Tensor:
        calls.append(tuple(part.shape))
        return part

    decoder: Decoder = executor._decoder
    executor._decoder = replace(
        decoder,
        layers=tuple(
            replace(
                layer,
                attention=replace(layer.attention, out=replace(layer.attention.out, all_reduce=all_reduce)),
                feed_forward=replace(layer.feed_forward, down=replace(layer.feed_forward.down, all_reduce=all_reduce)),
            )
            for layer in decoder.layers
        ),
    )
    with executor.create_kv_cache() as kv:
        torch.testing.assert_close(executor.step(PROMPT, kv), expected)
    tokens = [len(PROMPT)] * (len(decoder.layers) - 1) + [1]  # one token comes out of the last layer
    assert calls == [(count, decoder.spec.hidden_size) for count in tokens for _ in range(2)]
