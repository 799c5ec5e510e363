"""Adapters as they come: what is wrong with one is named, and nothing of it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import lora_tensors, write_lora
from safetensors.torch import save_file
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.errors import KviltError, ModelNotFound, Unsupported, WeightError
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.weights.peft import open_peft, read_config

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_executor(write_tiny(tmp_path_factory.mktemp("base")), RunConfig(kv_memory=1 << 20, threads=1))


REFUSED: dict[str, tuple[dict[str, Any], type[KviltError], str]] = {
    "DoRA that is no flag": ({"use_dora": "yes"}, WeightError, "use_dora"),
    "biases": ({"bias": "lora_only"}, Unsupported, "bias"),
    "biases of products": ({"lora_bias": True}, Unsupported, "lora_bias"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, Unsupported, "modules_to_save"),
    "another method": ({"peft_type": "IA3"}, Unsupported, "peft_type"),
    "no method": ({"peft_type": None}, Unsupported, "peft_type"),
    "a changed base": ({"init_lora_weights": "pissa"}, Unsupported, "init_lora_weights"),
    "QA-LoRA": ({"use_qalora": True}, Unsupported, "use_qalora"),
    "tokens": ({"trainable_token_indices": [1]}, Unsupported, "trainable_token_indices"),
    "replicated layers": ({"layer_replication": [[0, 2]]}, Unsupported, "layer_replication"),
    "what nobody knows yet": ({"use_something_new": 3}, Unsupported, "use_something_new"),
    "a rank of a million": ({"r": 10**6}, WeightError, "r:"),
    "a rank of nothing": ({"r": 0}, WeightError, "r:"),
    "a rank that is no number": ({"r": "8"}, WeightError, "r:"),
    "a rank that is true": ({"r": True}, WeightError, "r:"),
    "an alpha that is none": ({"lora_alpha": float("nan")}, WeightError, "lora_alpha"),
    "an endless alpha": ({"alpha_pattern": {"q_proj": float("inf")}}, WeightError, "alpha_pattern"),
    "a large pattern": ({"rank_pattern": {"q_proj": 10**9}}, WeightError, "rank_pattern"),
    "a pattern that looks ahead": ({"rank_pattern": {"(?=q)q_proj": 2}}, WeightError, "rank_pattern"),
    "a long pattern": ({"rank_pattern": {"q" * 300: 2}}, WeightError, "rank_pattern"),
    "a flood of patterns": ({"rank_pattern": {f"q{i}": 2 for i in range(5000)}}, WeightError, "rank_pattern"),
    "a pattern that ends nowhere": ({"rank_pattern": {"(q_proj": 2}}, WeightError, "rank_pattern"),
    "patterns in a list": ({"rank_pattern": ["q_proj"]}, WeightError, "rank_pattern"),
    "rslora that is no flag": ({"use_rslora": "yes"}, WeightError, "use_rslora"),
    "invocation that is no tokens": ({"alora_invocation_tokens": ["a"]}, WeightError, "alora"),
    "invocation by nothing": ({"alora_invocation_tokens": []}, WeightError, "alora"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_is_not_computed_is_refused_by_name(case: str) -> None:
    changes, error, named = REFUSED[case]
    with pytest.raises(error, match=named):
        read_config({**LORA, **changes})


def test_what_says_nothing_about_the_mathematics_is_read_over() -> None:
    fields = {"lora_dropout": 0.1, "inference_mode": True, "task_type": "CAUSAL_LM", "revision": None, "use_new": False}
    assert read_config({**LORA, **fields}) == read_config(LORA)


def test_patterns_are_matched_as_peft_does() -> None:
    config = read_config(
        {**LORA, "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 3}, "alpha_pattern": {"up_proj": 1}}
    )
    assert config.rank_of("model.layers.0.self_attn.q_proj") == 2
    assert config.rank_of("model.layers.0.self_attn.xq_proj") == 4
    assert config.rank_of("model.layers.1.mlp.up_proj") == 3
    assert config.rank_of("model.layers.11.mlp.up_proj") == 4
    assert config.scale_of("model.layers.1.mlp.up_proj") == 1 / 3


def test_patterns_take_no_time_on_long_names() -> None:
    """`re` needs seconds for the first and for ever for the others."""
    for pattern in ("(.|.)" * 24 + "x", "(a+)+x", "(a|aa)*x", "a*a*a*a*a*a*x"):
        config = read_config({**LORA, "rank_pattern": {pattern: 2}})
        assert config.rank_of("layers." + "a" * 300) == 4


TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], type[KviltError], str]] = {
    "a half": ({f"{Q0}.lora_B.weight": None}, WeightError, "other half"),
    "another rank": ({f"{Q0}.lora_A.weight": torch.zeros(5, 24)}, WeightError, "lora_A"),
    "another width": ({f"{Q0}.lora_A.weight": torch.zeros(4, 25)}, WeightError, "another model"),
    "other outputs": ({f"{Q0}.lora_B.weight": torch.zeros(23, 4)}, WeightError, "lora_B"),
    "three dimensions": ({f"{Q0}.lora_A.weight": torch.zeros(4, 24, 1)}, WeightError, "lora_A"),
    "an infinity": ({f"{Q0}.lora_A.weight": torch.full((4, 24), float("inf"))}, WeightError, "infinity"),
    "whole numbers": ({f"{Q0}.lora_A.weight": torch.zeros(4, 24, dtype=torch.int32)}, WeightError, "I32"),
    "a module of nobody's": (
        {"base_model.model.model.layers.0.mlp.router.lora_A.weight": torch.zeros(4, 24),
         "base_model.model.model.layers.0.mlp.router.lora_B.weight": torch.zeros(24, 4)},
        WeightError, "router",
    ),
    "a layer too many": (
        {"base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight": torch.zeros(4, 24),
         "base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight": torch.zeros(24, 4)},
        WeightError, "layers.3",
    ),
    "DoRA's vectors": ({f"{Q0}.lora_magnitude_vector": torch.zeros(24)}, WeightError, "use_dora is False"),
    "a vector alone": (
        {f"{Q0}.lora_magnitude_vector": torch.zeros(24), f"{Q0}.lora_A.weight": None, f"{Q0}.lora_B.weight": None},
        WeightError, "other half",
    ),
    "a bias": ({f"{Q0}.lora_B.bias": torch.zeros(24)}, Unsupported, "biases"),
    "a whole weight": ({f"{Q0}.base_layer.weight": torch.zeros(24, 24)}, Unsupported, "whole weights"),
    "a stranger": ({"base_model.model.model.norm.weight": torch.zeros(24)}, Unsupported, "norm"),
    "a name that climbs": ({"../../etc/lora_A.weight": torch.zeros(4, 24)}, KviltError, "etc"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(case: str, executor: Executor, tmp_path: Path) -> None:
    changes, error, named = TENSORS[case]
    tensors = {**lora_tensors(4), **changes}
    held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(error, match=named):
        executor.load_lora(write_lora(tmp_path / "bad", 4, tensors=held))
    assert executor.lora_metrics_snapshot()["loaded"] == 0


def dora_tensors(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """An adapter of q in every layer with magnitudes; `changes` go into the first layer, by the tensor's last name."""
    tensors: dict[str, torch.Tensor] = lora_tensors(4, ["self_attn.q_proj"])
    for layer in range(3):
        tensors[Q0.replace("layers.0", f"layers.{layer}") + ".lora_magnitude_vector"] = torch.rand(24) + 0.5
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[f"{Q0}.{name}"]
        else:
            tensors[f"{Q0}.{name}"] = tensor
    return tensors


DORA: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no vector": ({"lora_magnitude_vector": None}, "no lora_magnitude_vector"),
    "a short vector": ({"lora_magnitude_vector": torch.ones(23)}, "lora_magnitude_vector"),
    "a matrix": ({"lora_magnitude_vector": torch.ones(24, 1)}, "lora_magnitude_vector"),
    "no numbers": ({"lora_magnitude_vector": torch.full((24,), float("nan"))}, "NaN"),
    "whole numbers": ({"lora_magnitude_vector": torch.ones(24, dtype=torch.int64)}, "I64"),
}


@pytest.mark.parametrize("case", DORA)
def test_magnitudes_that_do_not_fit_are_refused_by_name(case: str, executor: Executor, tmp_path: Path) -> None:
    changes, named = DORA[case]
    with pytest.raises(WeightError, match=named):
        executor.load_lora(write_lora(tmp_path / "bad", 4, tensors=dora_tensors(**changes), use_dora=True))
    assert executor.lora_metrics_snapshot()["loaded"] == 0


def test_dora_of_an_embedding_is_refused(executor: Executor, tmp_path: Path) -> None:
    tensors = lora_tensors(4, ["embed_tokens"])
    tensors["base_model.model.model.embed_tokens.lora_magnitude_vector"] = torch.ones(24)
    with pytest.raises(Unsupported, match="DoRA of an embedding"):
        executor.load_lora(write_lora(tmp_path / "bad", 4, tensors=tensors, use_dora=True))


def test_magnitudes_are_part_of_who_an_adapter_is(executor: Executor, tmp_path: Path) -> None:
    contents = set()
    for name, factor in (("one", 1.0), ("two", 1.01)):
        tensors = dora_tensors()
        for key in tensors:
            if "magnitude" in key:
                tensors[key] = torch.full((24,), factor)
        lora = executor.load_lora(write_lora(tmp_path / name, 4, tensors=tensors, use_dora=True))
        contents.add(executor.adapters.find(lora).content)
        executor.unload_lora(lora)
    assert len(contents) == 2


def test_files_that_are_no_adapter_are_refused(executor: Executor, tmp_path: Path) -> None:
    good = write_lora(tmp_path / "good")
    (tmp_path / "adapter.gguf").write_bytes(b"GGUF")
    with pytest.raises(Unsupported, match="GGUF"):
        open_peft(tmp_path / "adapter.gguf")
    for path in (good / "adapter_config.json", tmp_path / "nowhere", tmp_path):
        with pytest.raises(ModelNotFound):
            executor.load_lora(path)
    (good / "adapter_model.safetensors").rename(good / "adapter_model.bin")
    with pytest.raises(WeightError, match="pickles"):
        executor.load_lora(good)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_files_cut_short_are_refused(executor: Executor, tmp_path: Path, cut: int) -> None:
    file = write_lora(tmp_path / "cut") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(WeightError):
        executor.load_lora(tmp_path / "cut")


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"r": 4}', '{"peft_type": "LORA", "r": 1, "r": 2}'])
def test_broken_configurations_are_refused(executor: Executor, tmp_path: Path, text: str) -> None:
    (write_lora(tmp_path / "broken") / "adapter_config.json").write_text(text)
    with pytest.raises(KviltError):
        executor.load_lora(tmp_path / "broken")


def test_an_adapter_without_any_product_is_refused(executor: Executor, tmp_path: Path) -> None:
    folder = write_lora(tmp_path / "empty")
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(WeightError, match="no LoRA tensor"):
        executor.load_lora(folder)


def test_links_may_not_leave_the_folder_that_adapters_are_loaded_from(tmp_path: Path) -> None:
    outside, allowed = write_lora(tmp_path / "outside"), tmp_path / "allowed"
    inside = write_lora(allowed / "inside")
    open_peft(inside, allowed).close()
    (allowed / "linked").symlink_to(outside)
    (inside / "adapter_model.safetensors").unlink()
    (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for path in (allowed / "linked", inside, allowed / ".." / "outside", outside):
        with pytest.raises(WeightError, match="outside"):
            open_peft(path, allowed)
    open_peft(inside).close()  # whoever names a path of their own may have links, as the hub's cache has


def test_content_decides_who_an_adapter_is(executor: Executor, tmp_path: Path) -> None:
    def content(name: str, **changes: Any) -> str:
        lora = executor.load_lora(write_lora(tmp_path / name, **changes))
        try:
            return executor.adapters.find(lora).content
        finally:
            executor.unload_lora(lora)

    same = {content("a"), content("b"), content("c", lora_dropout=0.5, base_model_name_or_path="elsewhere")}
    assert len(same) == 1
    others = [
        content("d", seed=1), content("e", lora_alpha=9), content("f", use_rslora=True),
        content("g", dtype=torch.bfloat16), content("h", alpha_pattern={"q_proj": 1}),
        content("i", alora_invocation_tokens=[1]),
        content("j", rank=5),
    ]  # fmt: skip
    assert len(same.union(others)) == 8


def test_unused_json_is_bounded(executor: Executor, tmp_path: Path) -> None:
    folder = write_lora(tmp_path / "deep")
    (folder / "adapter_config.json").write_text(json.dumps(LORA)[:-1] + ', "auto_mapping": ' + "[" * 100000 + "}")
    with pytest.raises(WeightError):
        executor.load_lora(folder)
