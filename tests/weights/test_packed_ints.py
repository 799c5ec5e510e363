"""GPTQ, AWQ and compressed-tensors beside their public definitions, as whole models, and damaged in every part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvilt.config import RunConfig
from kvilt.errors import KviltError, Unsupported, WeightError
from kvilt.executor.load import load_executor
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import to_float
from kvilt.weights.source import open_checkpoint

OUT, IN, GROUP = 64, 128, 32
Tensors = dict[str, Tensor]


def numbers(bits: int, centred: bool, outputs: int = OUT, inputs: int = IN, seed: int = 0) -> tuple[Tensor, ...]:
    """Codes [outputs, inputs], scales and zeros [outputs, groups]."""
    random, groups = torch.Generator().manual_seed(seed), inputs // GROUP
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=random)
    scales = (torch.rand(outputs, groups, generator=random) * 0.02 + 0.002).half()
    middle = torch.full((outputs, groups), 1 << (bits - 1))
    return codes, scales, middle if centred else torch.randint(1, 1 << bits, (outputs, groups), generator=random)


def packed(values: Tensor, bits: int) -> Tensor:
    """Along the last dimension, lowest first."""
    each = 32 // bits
    words = (values.long().view(*values.shape[:-1], -1, each) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def gptq(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int = 4, shift: int = 1) -> Tensors:
    group_of = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    return {
        "qweight": packed(codes, bits).T.contiguous(), "qzeros": packed(zeros.T - shift, bits),
        "scales": scales.T.contiguous(), "g_idx": group_of.int(),
    }  # fmt: skip


def awq(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensors:
    def columns(values: Tensor) -> Tensor:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return packed(values.view(len(values), -1, 8)[:, :, order].flatten(1), 4)

    return {
        "qweight": columns(codes.T.contiguous()),
        "qzeros": columns(zeros.T.contiguous()),
        "scales": scales.T.contiguous(),
    }


def compressed(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int = 4) -> Tensors:
    found = {"weight_packed": packed(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
    if not bool((zeros == 1 << (bits - 1)).all()):
        found["weight_zero_point"] = packed(zeros.T.contiguous(), bits).T.contiguous()
    return found


def weights_of(bits: int = 4) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"weights": {"num_bits": bits, "group_size": GROUP, "type": "int"}}}}


METHODS: dict[str, tuple[Callable[..., Tensors], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "compressed": (compressed, {"quant_method": "compressed-tensors", "format": "pack-quantized", **weights_of()}),
}


def write(folder: Path, tensors: Tensors, config: dict[str, Any] | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    return folder


def read(folder: Path) -> Any:
    return open_checkpoint(folder).tensors.tensor("m.weight")


def named(parts: Tensors, module: str = "m") -> Tensors:
    return {f"{module}.{name}": one for name, one in parts.items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("centred", [True, False], ids=["centred", "zeros"])
def test_a_weight_is_what_its_definition_says(method: str, centred: bool, tmp_path: Path) -> None:
    pack, config = METHODS[method]
    codes, scales, zeros = numbers(4, centred)
    found = read(write(tmp_path, named(pack(codes, scales, zeros)), config))
    assert isinstance(found, QuantTensor)
    assert found.format.name == ("Q4_0" if centred else "Q4_1")
    wide = scales.float().repeat_interleave(GROUP, 1)
    truth = wide * (codes - zeros.repeat_interleave(GROUP, 1))
    if centred:
        assert torch.equal(to_float(found), truth)
    else:  # the minimum, up to 15 steps, has the 11 digits of a float16
        assert ((to_float(found) - truth).abs() <= 8e-3 * wide).all()
    source = open_checkpoint(tmp_path).tensors
    assert source.names() == ("m.weight",)
    assert source.shape("m.weight") == (OUT, IN)
    assert source.storage("m.weight").format == found.format.name


def test_eight_bits_act_order_and_the_second_format_of_gptq(tmp_path: Path) -> None:
    codes, scales, zeros = numbers(8, True)
    config = {**METHODS["gptq"][1], "bits": 8}
    found = read(write(tmp_path / "eight", named(gptq(codes, scales, zeros, 8)), config))
    assert found.format.name == "Q8_0"
    assert torch.equal(to_float(found), scales.float().repeat_interleave(GROUP, 1) * (codes - 128))
    codes, scales, zeros = numbers(4, False)
    second = {**METHODS["gptq"][1], "checkpoint_format": "gptq_v2"}
    found = read(write(tmp_path / "v2", named(gptq(codes, scales, zeros, shift=0)), second))
    plain = read(write(tmp_path / "v1", named(gptq(codes, scales, zeros)), METHODS["gptq"][1]))
    assert torch.equal(to_float(found), to_float(plain))
    order = torch.randperm(IN, generator=torch.Generator().manual_seed(2)) // GROUP
    parts = {**gptq(codes, scales, zeros), "g_idx": order.int()}
    found = read(write(tmp_path / "order", named(parts), METHODS["gptq"][1]))
    truth = scales.float()[:, order] * (codes - zeros[:, order])
    assert torch.equal(found, truth.half())


def test_groups_that_fit_no_blocks_become_floats(tmp_path: Path) -> None:
    codes, scales, zeros = numbers(4, True)
    config = {**METHODS["awq"][1], "group_size": 16}
    fine = scales.repeat_interleave(2, 1)
    found = read(write(tmp_path, named(awq(codes, fine, zeros.repeat_interleave(2, 1))), config))
    assert torch.equal(found, (scales.float().repeat_interleave(GROUP, 1) * (codes - 8)).half())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_whole_models_have_the_logits_of_their_weights(method: str, family: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    sizes: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes)) if family == "llama" else Qwen2ForCausalLM(Qwen2Config(**sizes))
    for name, one in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(one)
    model.save_pretrained(tmp_path / "plain")
    pack, config = METHODS[method]
    tensors, parts = load_file(tmp_path / "plain" / "model.safetensors"), {}
    for seed, name in enumerate(sorted(name for name in tensors if name.endswith("_proj.weight"))):
        codes, scales, zeros = numbers(4, True, *tensors[name].shape, seed=seed)
        module = name.removesuffix(".weight")
        parts |= named(pack(codes, scales, zeros), module)
        if method == "gptq" and f"{module}.bias" not in tensors:
            parts[f"{module}.bias"] = torch.zeros(len(codes))
        tensors[name] = scales.float().repeat_interleave(GROUP, 1) * (codes - 8)
    original = json.loads((tmp_path / "plain" / "config.json").read_text())
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not name.endswith("_proj.weight")}
    write(tmp_path / "packed", {**kept, **parts}, None)
    (tmp_path / "packed" / "config.json").write_text(json.dumps({**original, "quantization_config": config}))
    found, truth = (logits(tmp_path / name, "reference") for name in ("packed", "plain"))
    assert torch.equal(found, truth)
    native = logits(tmp_path / "packed", "native")
    assert float((native - truth).norm() / truth.norm()) < 2e-2


def logits(folder: Path, backend: str) -> Tensor:
    executor = load_executor(folder, RunConfig(kv_memory=1 << 22, backend=backend, device="cpu", threads=1))
    with executor.create_kv_cache() as kv:
        made = executor.step([5, 6, 7, 8, 9, 10], kv).clone()
    executor.close()
    return made


def changed(parts: Tensors, **new: Tensor | None) -> Tensors:
    return named({name: one for name, one in {**parts, **new}.items() if one is not None})


def broken(parts: Tensors) -> dict[str, Tensors]:
    scales, index = parts["scales"], parts["g_idx"]
    bad_scale, bad_index = scales.clone(), index.clone()
    bad_index[3] = 99
    found = {"scales that are no numbers": changed(parts, scales=torch.full_like(scales, float("nan")))}
    bad_scale[1, 1] = 0
    return found | {
        "a scale of zero": changed(parts, scales=bad_scale),
        "an endless scale": changed(parts, scales=torch.full_like(scales, float("inf"))),
        "too few scales": changed(parts, scales=scales[:-1]),
        "too few zeros": changed(parts, qzeros=parts["qzeros"][:, :-1]),
        "no zeros": changed(parts, qzeros=None),
        "an index outside": changed(parts, g_idx=bad_index),
        "a negative index": changed(parts, g_idx=index - 1),
        "too few indices": changed(parts, g_idx=index[:-1]),
        "words of floats": changed(parts, qweight=parts["qweight"].float()),
        "words in a row": changed(parts, qweight=parts["qweight"].flatten()),
    }


def broken_others(method: str) -> dict[str, Tensors]:
    """What AWQ and compressed-tensors have of the same damages."""
    parts, zeros = METHODS[method][0](*numbers(4, False)), "qzeros" if method == "awq" else "weight_zero_point"
    name, words = ("scales", "qweight") if method == "awq" else ("weight_scale", "weight_packed")
    found = {}
    for bad in (0.0, float("nan"), float("inf")):
        scales = parts[name].clone()
        scales[1, 1] = bad
        found[f"a scale of {bad}"] = changed(parts, **{name: scales})
    return found | {
        "too few scales": changed(parts, **{name: parts[name][:-1]}),
        "too few zeros": changed(parts, **{zeros: parts[zeros][:, :-1]}),
        "words of floats": changed(parts, **{words: parts[words].float()}),
        "too few words": changed(parts, **{words: parts[words][:-1]}),
    }


@pytest.mark.parametrize("method", ["awq", "compressed"])
def test_damaged_parts_of_other_methods_are_refused_by_name(method: str, tmp_path: Path) -> None:
    for what, parts in broken_others(method).items():
        folder = write(tmp_path / what, parts, METHODS[method][1])
        with pytest.raises(WeightError, match=r"^m"):
            read(folder)


@pytest.mark.parametrize("method", METHODS)
def test_groups_that_do_not_divide_the_inputs_are_refused_by_name(method: str, tmp_path: Path) -> None:
    pack, config = METHODS[method]
    config = json.loads(json.dumps(config).replace(f'"group_size": {GROUP}', '"group_size": 48'))
    with pytest.raises(WeightError, match=r"^m.*groups of 48 do not divide its 128 inputs"):
        read(write(tmp_path, named(pack(*numbers(4, False))), config))


@pytest.mark.parametrize("what", broken(gptq(*numbers(4, True))))
def test_damaged_parts_are_refused_by_name(what: str, tmp_path: Path) -> None:
    folder = write(tmp_path, broken(gptq(*numbers(4, True)))[what], METHODS["gptq"][1])
    with pytest.raises(WeightError, match=r"m\."):
        read(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 3, "group_size": 32},
        {"quant_method": "gptq", "bits": "4", "group_size": 32},
        {"quant_method": "gptq", "bits": 4, "group_size": 0},
        {"quant_method": "gptq", "bits": 4, "group_size": 48},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "hqq"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    ],
    ids=str,
)
def test_configurations_that_are_not_read_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, named(gptq(*numbers(4, True))), config)
    with pytest.raises((Unsupported, WeightError)) as refused:
        read(folder)
    assert isinstance(refused.value, KviltError)


def test_a_shape_that_disagrees_with_the_words_is_refused(tmp_path: Path) -> None:
    parts = compressed(*numbers(4, True))
    for bad in ([OUT, IN + 64], [OUT - 1, IN], [-1, IN]):
        folder = write(tmp_path, named({**parts, "weight_shape": torch.tensor(bad)}), METHODS["compressed"][1])
        with pytest.raises(WeightError, match="weight_shape"):
            read(folder)
