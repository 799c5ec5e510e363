"""Hugging Face checkpoints written to GGUF: the same logits and tokens, or a refusal that names why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvilt.config import RunConfig
from kvilt.errors import Unsupported
from kvilt.executor.gguf_view import gguf_tensors
from kvilt.executor.importance import importance
from kvilt.executor.load import load_executor
from kvilt.text.pretokenize import PRE_RULES
from kvilt.text.tokenizer import from_file, from_gguf
from kvilt.weights.quantize import quantize_tensors
from kvilt.weights.source import open_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, rope_theta=5e5)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def write_tokenizer(folder: Path, split: str, nfc: bool = False) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(letters)} | {"he": 256, "ll": 257, "Ġw": 258}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l"), ("Ġ", "w")]))
    cuts = [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    core.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    core.normalizer = normalizers.NFC() if nfc else None  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>", "<|user|>"])
    core.add_tokens(["<tool>"])
    core.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    model = MODELS[request.param]()
    for name, weight in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", PRE_RULES["qwen2"].splits[0], nfc=True)
    return tmp_path / "model"


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    executor = load_executor(path, RunConfig(kv_memory=1 << 24, backend="reference", device="cpu"))
    with executor.create_kv_cache() as kv:
        made = executor.step(ids, kv).clone()
    executor.close()
    return made


def test_the_file_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    source, out = open_checkpoint(folder), tmp_path / "out.gguf"
    quantize_tensors(gguf_tensors(source), out, "Q8_0")
    ids, text = [5, 260, 17, 3, 99, 256, 41, 7], "Hello, hello  world 123 <tool> é<|end|>\n\n"
    found, truth = logits(out, ids), logits(folder, ids)
    assert float((found - truth).norm() / truth.norm()) < 2e-2  # of eight bits
    written, original = from_gguf(out), from_file(folder)
    assert written.encode(text) == original.encode(text)
    assert written.encode_with_specials(text) == original.encode_with_specials(text)
    assert (written.chat_template, set(written.eos_ids)) == (TEMPLATE, set(original.eos_ids))
    fields = gguf.GGUFReader(out).fields
    assert bytes(fields["tokenizer.ggml.pre"].parts[-1]) == b"qwen2"


def test_an_importance_matrix_is_that_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    source = open_checkpoint(folder)
    tensors = gguf_tensors(source)
    known = tensors.renamed(importance(source, list(range(100))))  # type: ignore[union-attr]
    matrices = {name for name in tensors.names() if len(tensors.shape(name)) > 1}
    assert matrices - known.keys() <= {"token_embd.weight"}
    assert quantize_tensors(tensors, tmp_path / "out.gguf", "Q4_0", known).formats["Q4_0"] > 10


def test_what_gguf_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    configs: dict[str, Any] = {
        "window": MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)),
        "rope": LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=scaled)),
    }
    for name, model in configs.items():
        model.save_pretrained(tmp_path / name)
        write_tokenizer(tmp_path / name, PRE_RULES["gpt-2"].splits[0])
        with pytest.raises(Unsupported, match="a window or a scaled rope"):
            gguf_tensors(open_checkpoint(tmp_path / name))


def test_a_tokenizer_that_gguf_has_no_name_for_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, r"\w+|\W+")
    with pytest.raises(Unsupported, match="cuts words in a way"):
        gguf_tensors(open_checkpoint(tmp_path))


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "gpt-4o", "tekken", "kimi-k2", "qwen35", "smollm"])
def test_rules_are_told_apart(name: str, tmp_path: Path) -> None:
    """Each finds the first name of its own rule."""
    from kvilt.text.gguf_vocabulary import _rule_name
    from kvilt.text.pretokenize import pre_tokenizer

    rule = PRE_RULES[name]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizer(rule)
    core.normalizer = normalizers.NFC() if rule.nfc else None  # type: ignore[assignment]
    assert PRE_RULES[_rule_name(core, rule.ignore_merges)] == rule
