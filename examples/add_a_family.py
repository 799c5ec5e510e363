"""Adds a family from outside the package: EXAONE 4, compared with Hugging Face transformers on random weights.

EXAONE 4 is Llama with norms after the blocks instead of before them, a norm on every query and key head, and windows;
the layers without a window have no rope. In the package this file would be `kvilt/models/families/exaone4.py`, with
one more entry in `registry.py`.

    python examples/add_a_family.py
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from kvilt.config import RunConfig
from kvilt.errors import WeightError
from kvilt.executor.load import load_executor
from kvilt.kv.layout import Window
from kvilt.models.families import registry
from kvilt.models.families.family import CheckpointDialect, Family
from kvilt.models.families.fields import DEFAULT_WINDOW, Fields, layer_kinds
from kvilt.models.families.plain import HF_IGNORED, HF_NAMES, hf_spec
from kvilt.models.spec import LayerSpec, ModelSpec, NoRope, each_layer
from kvilt.weights.source import Checkpoint

# What the checkpoint calls its tensors, where that is not what Llama calls them.
NAMES = {
    **HF_NAMES,
    "post_attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "post_feed_forward_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    """The architecture, from config.json."""
    spec, config = hf_spec(checkpoint, "exaone4"), Fields(checkpoint.config)
    kinds = layer_kinds(config, len(spec.layers))
    if kinds is None:
        raise WeightError("layer_types", "must name the kind of each layer")
    windows = not config.says_none("sliding_window")
    window = Window(config.integer("sliding_window", DEFAULT_WINDOW))

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        attention = replace(layer.attention, qk_norm=True)
        if kinds[index] == "sliding_attention":
            attention = replace(attention, reach=window)
        elif windows:
            attention = replace(attention, rope=NoRope())
        return replace(layer, attention=attention, pre_norms=False, post_norms=True)

    return each_layer(spec, change)


EXAONE4 = Family("exaone4", (CheckpointDialect("hf", ("Exaone4ForCausalLM",), from_hf, NAMES, HF_IGNORED),))


def write_random_model(folder: Path) -> torch.nn.Module:
    """A small checkpoint, and the model of transformers that it is of."""
    from transformers import Exaone4Config, Exaone4ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 7, "initializer_range": 0.4}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = Exaone4ForCausalLM(Exaone4Config(**sizes, **heads, **tokens)).eval()
    model.save_pretrained(folder)
    return model


def largest_difference(folder: Path, model: torch.nn.Module, ids: list[int]) -> float:
    """Between the logits of kvilt and those of transformers after a prompt."""
    executor = load_executor(folder, RunConfig(kv_memory=1 << 24, kv_dtype="float32"))
    with executor.create_kv_cache() as kv, torch.no_grad():
        ours = executor.step(ids, kv)[0]
        return float((ours - model(torch.tensor([ids])).logits[0, -1]).abs().max())


def main() -> None:
    registry.FAMILIES = (*registry.FAMILIES, EXAONE4)
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder))
        difference = largest_difference(Path(folder), model, list(range(40)))
    print(f"the logits differ by {difference:.1e} at most")
    assert difference < 1e-3


if __name__ == "__main__":
    main()
