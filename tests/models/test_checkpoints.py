"""Checkpoints as people have them: sharded, in older spellings, damaged, of the wrong kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LLAMA3_ROPE, random_model, write_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvilt.config import RunConfig
from kvilt.errors import KviltError, Unsupported, WeightError
from kvilt.executor.load import load_executor
from kvilt.kv.layout import Full, Window
from kvilt.models.assemble import read_spec
from kvilt.models.spec import RopeSpec
from kvilt.weights.source import open_checkpoint

TINY_POOL = RunConfig(kv_memory=1 << 22, kv_dtype="float32")


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def test_shards_give_the_same_logits_as_one_file(tmp_path: Path) -> None:
    model = random_model("llama")
    one = load_executor(write_checkpoint(model, tmp_path / "one"), TINY_POOL)
    folder = write_checkpoint(model, tmp_path / "many", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    many = load_executor(folder, TINY_POOL)
    with one.create_kv_cache() as a, many.create_kv_cache() as b:
        assert torch.equal(one.step([1, 2, 3], a), many.step([1, 2, 3], b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_compute_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = random_model("llama").to(dtype)
    folder = write_checkpoint(model, tmp_path)
    oracle = type(model).from_pretrained(folder, dtype=torch.float32)
    executor = load_executor(folder, TINY_POOL)
    with executor.create_kv_cache() as kv, torch.no_grad():
        theirs = oracle(torch.tensor([[1, 2, 3]])).logits[0, -1]
        torch.testing.assert_close(executor.step([1, 2, 3], kv)[0], theirs, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["qwen3.5-moe", "qwen3.5-moe-images"])
def test_experts_in_one_tensor_of_each_layer(tmp_path: Path, name: str) -> None:
    """As Qwen 3.5 with experts is published; transformers writes each expert by itself."""
    model = random_model(name)
    path = write_checkpoint(model, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    apart = load_executor(tmp_path, TINY_POOL)
    for first in [key for key in tensors if ".experts.0.gate_proj" in key]:
        at = first.partition(".experts.")[0]
        maps = {
            part: torch.stack([tensors.pop(f"{at}.experts.{e}.{part}_proj.weight") for e in range(5)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{at}.experts.gate_up_proj"] = torch.cat((maps["gate"], maps["up"]), dim=1)
        tensors[f"{at}.experts.down_proj"] = maps["down"]
    save_file(tensors, path, {"format": "pt"})
    together = load_executor(tmp_path, TINY_POOL)
    with apart.create_kv_cache() as a, together.create_kv_cache() as b:
        assert torch.equal(apart.step([1, 2, 3], a), together.step([1, 2, 3], b))


def older_llama(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope


def older_gemma(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config["rope_scaling"] = None
    config.pop("layer_types")
    config["sliding_window_pattern"] = 3


@pytest.mark.parametrize(
    ("name", "older"),
    [("llama", older_llama), ("llama3-rope", older_llama), ("linear-rope", older_llama), ("gemma3", older_gemma)],
)
def test_the_older_spelling_of_a_config_means_the_same(
    tmp_path: Path, name: str, older: Callable[[dict[str, Any]], None]
) -> None:
    folder = write_checkpoint(random_model(name), tmp_path)
    spec = read_spec(open_checkpoint(folder))
    edit_config(folder, older)
    assert read_spec(open_checkpoint(folder)) == spec


@pytest.mark.parametrize(
    ("field", "value", "error", "says"),
    [
        ("architectures", ["BertForMaskedLM"], Unsupported, "BertForMaskedLM"),
        ("architectures", [], WeightError, "architectures"),
        ("num_attention_heads", 0, WeightError, "num_attention_heads"),
        ("num_attention_heads", 3, WeightError, "head_count_kv"),
        ("num_hidden_layers", -1, WeightError, "num_hidden_layers"),
        ("num_hidden_layers", 10**9, WeightError, "num_hidden_layers"),
        ("hidden_size", "32", WeightError, "hidden_size"),
        ("rms_norm_eps", float("nan"), WeightError, "rms_norm_eps"),
        ("rms_norm_eps", None, WeightError, "rms_norm_eps"),
        ("hidden_act", "relu6", Unsupported, "relu6"),
        ("attention_bias", True, WeightError, "missing"),
        ("vocab_size", 96, WeightError, "embed_tokens"),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4}, Unsupported, "dynamic"),
        ("rope_parameters", {"rope_theta": 10**400}, WeightError, "rope_theta"),
        ("rope_parameters", LLAMA3_ROPE | {"high_freq_factor": 1.0}, WeightError, "high_freq_factor"),
        ("hidden_act", ["silu"], Unsupported, "hidden_act"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_name(
    tmp_path: Path, field: str, value: object, error: type[KviltError], says: str
) -> None:
    folder = write_checkpoint(random_model("llama"), tmp_path)
    edit_config(folder, lambda config: config.update({field: value}))
    with pytest.raises(error, match=says):
        load_executor(folder, TINY_POOL)


@pytest.mark.parametrize(
    ("unknown", "nearest", "family"),
    [
        ("Qwen9ForCausalLM", "Qwen[23]ForCausalLM", "qwen[23]"),
        ("Olmo4ForCausalLM", "Olmo[23]ForCausalLM", "olmo2"),
        ("GPT2DoubleHeadsModel", "GPT2LMHeadModel", "gpt2"),
    ],
)
def test_an_unknown_architecture_fails_in_one_sentence(tmp_path: Path, unknown: str, nearest: str, family: str) -> None:
    folder = write_checkpoint(random_model("llama"), tmp_path)
    edit_config(folder, lambda config: config.update(architectures=[unknown]))
    says = rf"^the architecture '{unknown}' .* {nearest} \(family {family}\), and docs/adding_a_family.md [^.]*$"
    with pytest.raises(Unsupported, match=says):
        load_executor(folder, TINY_POOL)
    assert (Path(__file__).parents[2] / "docs" / "adding_a_family.md").exists()


def test_a_theta_beside_the_rope_table_counts(tmp_path: Path) -> None:
    folder = write_checkpoint(random_model("llama"), tmp_path)
    edit_config(folder, lambda config: config.update(rope_parameters={"rope_type": "default"}, rope_theta=5e5))
    rope = read_spec(open_checkpoint(folder)).layers[0].attention.rope
    assert isinstance(rope, RopeSpec)
    assert rope.theta == type(random_model("llama")).from_pretrained(folder).config.rope_parameters["rope_theta"] == 5e5


def test_a_llama_has_no_window_whatever_its_config_carries(tmp_path: Path) -> None:
    folder = write_checkpoint(random_model("llama"), tmp_path)
    edit_config(folder, lambda config: config.update(sliding_window=4))
    assert read_spec(open_checkpoint(folder)).layers[0].attention.reach == Full()


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        for name in names:
            config.pop(name, None)

    return edit


def reaches(folder: Path) -> list[int | None]:
    """The window of each layer as kvilt reads it."""
    found = [layer.attention.reach for layer in read_spec(open_checkpoint(folder)).layers]
    return [reach.tokens if isinstance(reach, Window) else None for reach in found]


def test_a_mistral_without_the_field_has_the_window_of_transformers(tmp_path: Path) -> None:
    folder = write_checkpoint(random_model("mistral-window"), tmp_path)
    assert set(reaches(folder)) == {9}
    edit_config(folder, without("sliding_window"))
    assert set(reaches(folder)) == {AutoConfig.from_pretrained(folder).sliding_window} == {4096}
    edit_config(folder, lambda config: config.update(sliding_window=None))
    assert set(reaches(folder)) == {AutoConfig.from_pretrained(folder).sliding_window} == {None}


def test_a_smollm3_without_theta_and_tie_has_those_of_transformers(tmp_path: Path) -> None:
    folder = write_checkpoint(random_model("smollm3"), tmp_path)
    edit_config(folder, without("rope_parameters", "rope_theta", "tie_word_embeddings"))
    spec, theirs = read_spec(open_checkpoint(folder)), AutoConfig.from_pretrained(folder)
    rope = spec.layers[0].attention.rope
    assert isinstance(rope, RopeSpec)
    assert rope.theta == theirs.rope_parameters["rope_theta"] == 2000000.0
    assert spec.tied_head == theirs.tie_word_embeddings


@pytest.mark.parametrize("name", ["qwen2-windows", "qwen3"])
@pytest.mark.parametrize(
    "fields",
    [
        {"max_window_layers": 1, "layer_types": ["sliding_attention", "full_attention"]},
        {"max_window_layers": 1, "layer_types": None},
        {"max_window_layers": 1, "sliding_window": ...},
        {"max_window_layers": ...},
        {"sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": False, "max_window_layers": 0},
    ],
)
def test_windows_of_qwen_stand_where_transformers_puts_them(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    folder = write_checkpoint(random_model(name), tmp_path)

    def edit(config: dict[str, Any]) -> None:
        layers = config["num_hidden_layers"]
        config.update({"use_sliding_window": True, "sliding_window": 7, "layer_types": None} | fields)
        if config["layer_types"]:
            config["layer_types"] = (config["layer_types"] * layers)[:layers]
        for absent in [field for field, value in fields.items() if value is ...]:
            del config[absent]

    edit_config(folder, edit)
    theirs = AutoConfig.from_pretrained(folder)
    kinds = theirs.layer_types
    assert reaches(folder) == [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]


@pytest.mark.parametrize("kinds", ["full_attention", ["full_attention"], ["round_attention"] * 3, [["x"]] * 3])
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_bad_kinds_of_layers_are_named(tmp_path: Path, name: str, kinds: object) -> None:
    folder = write_checkpoint(random_model(name), tmp_path)
    edit_config(folder, lambda config: config.update(layer_types=kinds))
    with pytest.raises(WeightError, match="layer_types"):
        read_spec(open_checkpoint(folder))


def test_windows_that_are_named_and_turned_off_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(random_model("qwen2-windows"), tmp_path)
    edit_config(folder, lambda config: config.update(use_sliding_window=False))
    assert "sliding_attention" in json.loads((folder / "config.json").read_text())["layer_types"]
    with pytest.raises(WeightError, match="layer_types"):
        read_spec(open_checkpoint(folder))


def longrope(short: int = 4, long: int = 4, original: int = 32) -> dict[str, Any]:
    """Of a model whose heads have 8 dimensions."""
    factors = {"short_factor": [1.0] * short, "long_factor": [2.0] * long}
    return {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original, **factors}


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        (longrope(short=3), "short_factor"),
        (longrope(long=5), "long_factor"),
        (longrope(long=0), "long_factor"),
        (longrope() | {"partial_rotary_factor": 0.5}, "short_factor"),
        (longrope(original=1), "original_max_position_embeddings"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 0.5}, "rope_theta"),
    ],
)
def test_a_rope_that_cannot_be_is_refused_by_name(tmp_path: Path, rope: dict[str, Any], field: str) -> None:
    folder = write_checkpoint(random_model("phi3"), tmp_path)
    edit_config(folder, lambda config: config.update(rope_parameters=longrope()))
    read_spec(open_checkpoint(folder))
    edit_config(folder, lambda config: config.update(rope_parameters=rope))
    with pytest.raises(WeightError, match=f"^{field}: must"):
        read_spec(open_checkpoint(folder))


@pytest.mark.parametrize("value", ["2", -1, True])
def test_a_bad_number_of_layers_below_the_windows_is_named(tmp_path: Path, value: object) -> None:
    folder = write_checkpoint(random_model("qwen2-windows"), tmp_path)
    edit_config(folder, lambda config: config.update(max_window_layers=value, layer_types=None))
    with pytest.raises(WeightError, match="max_window_layers"):
        read_spec(open_checkpoint(folder))
    edit_config(folder, lambda config: config.update(max_window_layers=None))
    assert read_spec(open_checkpoint(folder)).layers[-1].attention.reach == Full()


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_progress_ends_at_its_total(tmp_path: Path, name: str) -> None:
    seen: list[tuple[int, int]] = []
    load_executor(write_checkpoint(random_model(name), tmp_path), TINY_POOL, lambda *now: seen.append(now))
    assert max(done for done, _ in seen) == seen[-1][0] == seen[-1][1]


def test_missing_and_unexpected_tensors_are_reported_together(tmp_path: Path) -> None:
    folder = write_checkpoint(random_model("qwen2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.7.stray.weight"] = tensors.pop("model.layers.1.self_attn.k_proj.bias")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=r"1 missing \(.*k_proj.bias\); 1 unexpected \(.*stray"):
        load_executor(folder, TINY_POOL)
