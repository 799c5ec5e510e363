"""Hugging Face checkpoints written to GGUF: the same logits and tokens, or a refusal that names why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvilt.config import RunConfig
from kvilt.errors import Unsupported
from kvilt.executor import gguf_view
from kvilt.executor.gguf_view import gguf_tensors
from kvilt.executor.importance import importance
from kvilt.executor.load import load_executor
from kvilt.quant.formats import FORMATS
from kvilt.quant.unpack import to_float
from kvilt.text.pretokenize import PRE_RULES
from kvilt.text.tokenizer import from_file, from_gguf, from_metadata
from kvilt.weights.gguf_writer import PlannedTensor, write_gguf
from kvilt.weights.quantize import quantize_tensors
from kvilt.weights.source import open_checkpoint
from tests.effort import some
from tests.models.families import random_model, write_checkpoint

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


def write_tokenizer(folder: Path, split: str, nfc: bool = False, small: bool = False) -> None:
    """Byte-level BPE; `small`: as many tokens as models of tests/models have, which leaves out some bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(letters)} | {"he": 256, "ll": 257, "Ġw": 258}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w")]
    if small:
        vocabulary, merges = {char: i for i, char in enumerate(letters[:94])}, []
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
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


REFUSED = {
    "mistral-window": "llama cannot hold this model: layer.attention.reach would be lost",
    "qwen2-windows": "qwen2 cannot hold this model: layer.attention.reach would be lost",
    "gemma2": "gemma2 cannot hold this model: layer.attention.scale would be lost",  # not that of a published size
    "qwen3-moe": "qwen3moe cannot hold this model: layer.feed_forward.normalized would be lost",
    "llama-biases": "llama cannot hold this model: config: asks for gate_bias",
    "gemma4": "gemma4 cannot hold this model: gemma4.attention.sliding_window_pattern",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_gguf_cannot_hold_is_refused_by_name(tmp_path: Path, name: str) -> None:
    source = open_checkpoint(write_checkpoint(random_model(name), tmp_path))
    with source.tensors, pytest.raises(Unsupported, match=REFUSED[name]):
        gguf_tensors(source)


# Configurations of tests/models/families.py that GGUF can hold: one of each family, and what is special in some.
WRITTEN = [
    "cohere2", "command-r", "ernie4_5", "ernie4-5-moe", "glm", "glm4", "glm4-moe", "gpt-oss", "gpt2", "granite",
    "granite-hybrid-moe", "lfm2", "lfm2-moe", "linear-rope", "llama3-rope", "llama-yarn-tuned", "llama4-as-published",
    "ministral3", "mixtral", "olmo2", "olmo3", "olmoe", "phi3", "phi3-window", "qwen2-moe-plain",
    "qwen3-moe-normalized", "qwen3-next-experts", "qwen3-yarn", "smollm3", "starcoder2",
]  # fmt: skip


def published(name: str) -> PreTrainedModel:
    """Models with settings as those of published sizes, which GGUF implies."""
    torch.manual_seed(5)
    match name:
        case "gemma2":
            kinds = {"query_pre_attn_scalar": 16, "head_dim": 16, "sliding_window": 24}
            return Gemma2ForCausalLM(Gemma2Config(**SIZES, **kinds))
        case "gemma3":
            kinds = {"query_pre_attn_scalar": 16, "head_dim": 16, "sliding_window": 24}
            return Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 7}, **kinds))
        case _:
            model = random_model("deepseek-v2")
            model.config.rms_norm_eps = 1e-6  # as the norms of its compressed vectors have it
            for module in model.modules():
                if hasattr(module, "variance_epsilon"):
                    module.variance_epsilon = 1e-6
            return model


def check_round_trip(model: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in floats has the checkpoint's logits to the last digits, and the gguf package finds its tensors."""
    monkeypatch.setattr(gguf_view, "gguf_vocabulary", lambda *_: {})  # of tokenizers the tests below
    source, out = open_checkpoint(write_checkpoint(model, folder / "model")), folder / "out.gguf"
    with source.tensors:
        view = gguf_tensors(source)
        plan = [PlannedTensor(name, view.shape(name), FORMATS["F32"]) for name in view.names()]
        write_gguf(out, view.raw_metadata(), plan, lambda one: to_float(view.tensor(one.name)))  # type: ignore[union-attr]
    ids = [int(i) for i in torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(7))]
    found, truth = logits(out, ids), logits(folder / "model", ids)
    assert float((found - truth).abs().max() / truth.abs().max()) < 1e-5
    read = {one.name: tuple(int(n) for n in reversed(one.shape)) for one in gguf.GGUFReader(out).tensors}
    assert read == {one.name: one.shape for one in plan}


@pytest.mark.parametrize("name", some(WRITTEN, 12))
def test_every_family_is_the_same_model_in_gguf(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_round_trip(random_model(name), tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "deepseek-v2"])
def test_published_settings_are_what_gguf_implies(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_round_trip(published(name), tmp_path, monkeypatch)


def test_a_layer_of_experts_is_one_tensor_with_a_row_of_importances_for_each(tmp_path: Path) -> None:
    folder = write_checkpoint(random_model("qwen3-moe-normalized"), tmp_path / "model")
    write_tokenizer(folder, PRE_RULES["qwen2"].splits[0], nfc=True, small=True)
    source = open_checkpoint(folder)
    with source.tensors:
        view = gguf_tensors(source)
        known = view.renamed(importance(source, [i % 97 for i in range(200)]))  # type: ignore[union-attr]
        experts = view.shape("blk.0.ffn_down_exps.weight")[0]
        assert known["blk.0.ffn_down_exps.weight"].shape[0] == experts > 1
        assert view.storage("blk.0.ffn_gate_inp.weight").format == "F32"  # a router
        done = quantize_tensors(view, tmp_path / "out.gguf", "Q8_0", known)
    assert done.formats["Q8_0"] > 5
    assert logits(tmp_path / "out.gguf", [5, 6, 7]).isfinite().all()


@pytest.mark.parametrize("prefixed", [True, False], ids=["llama", "gemma"])
def test_sentencepiece_keeps_its_tokens(tmp_path: Path, prefixed: bool) -> None:
    """Scores take the place of merges: the tokens of a text are the same."""
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 320})).save_pretrained(tmp_path)
    write_sentencepiece(tmp_path, prefixed)
    source = open_checkpoint(tmp_path)
    with source.tensors:
        written, original = from_metadata(gguf_tensors(source).metadata), from_file(tmp_path)
    for text in ("hello world", "  hello  hello\nwe é 漢", "<tool>hello</s> ll", ""):
        assert written.encode(text) == original.encode(text)
        assert written.encode_with_specials(text) == original.encode_with_specials(text)
    assert written.decode(written.encode("hello é 漢 world")) == "hello é 漢 world"
    assert (written.head, written.eos_ids) == (original.head, original.eos_ids)


def write_sentencepiece(folder: Path, prefixed: bool) -> None:
    """BPE with bytes for unknown letters, as transformers converts SentencePiece's models."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁helowrdi"]
    merges = [("h", "e"), ("l", "l"), ("▁", "w"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("o", "r")]
    pieces += [left + right for left, right in merges]
    core = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    blocks = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blocks]) if prefixed else blocks  # type: ignore[assignment]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.add_tokens([AddedToken("<tool>", normalized=False)])
    core.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


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
