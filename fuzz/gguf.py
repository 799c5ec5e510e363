"""GGUF files: whatever is in them, opening, describing and reading one ends with the values or a typed error.

Oracles: an accepted file's tensors have the promised shape and lie inside it, and the `gguf` package, where it reads
the file too, reads the same metadata and the same shapes.
"""

from __future__ import annotations

import math
import random
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf as reference

from kvilt.errors import KviltError, WeightError
from kvilt.models.assemble import read_spec
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import UNPACKED_FORMATS, to_float
from kvilt.text.tokenizer import from_metadata
from kvilt.weights.gguf import GGUFFile
from kvilt.weights.gguf_lora import open_gguf_lora
from kvilt.weights.source import GGUF, Checkpoint

from .driver import main
from .target import Finding, Target, file_in_memory, label

_STRING, _ARRAY = 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def strings(key: str, values: Sequence[str | bytes]) -> bytes:
    return pair(key, _ARRAY, struct.pack("<IQ", _STRING, len(values)) + b"".join(map(text, values)))


def tensor(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def file_of(pairs: Sequence[bytes], tensors: Sequence[bytes], data: bytes) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def _u32(key: str, value: int) -> bytes:
    return pair(key, 4, struct.pack("<I", value))


def _f32(key: str, value: float) -> bytes:
    return pair(key, 6, struct.pack("<f", value))


def _model() -> list[bytes]:
    tokens: list[str | bytes] = ["<unk>", "<s>", "</s>", "a", "b", "ab", b"\xe2\x82", "<0x41>"]
    return [
        pair("general.architecture", _STRING, text("llama")),
        _u32("llama.block_count", 1),
        _u32("llama.context_length", 64),
        _u32("llama.embedding_length", 32),
        _u32("llama.feed_forward_length", 32),
        _u32("llama.attention.head_count", 2),
        _u32("llama.attention.head_count_kv", 1),
        _u32("llama.rope.dimension_count", 16),
        _f32("llama.rope.freq_base", 10000.0),
        _f32("llama.attention.layer_norm_rms_epsilon", 1e-5),
        pair("tokenizer.ggml.model", _STRING, text("llama")),
        strings("tokenizer.ggml.tokens", tokens),
        pair("tokenizer.ggml.scores", _ARRAY, struct.pack("<IQ8f", 6, 8, *(-float(i) for i in range(8)))),
        pair("tokenizer.ggml.token_type", _ARRAY, struct.pack("<IQ8i", 5, 8, 2, 3, 3, 1, 1, 1, 1, 6)),
        _u32("tokenizer.ggml.bos_token_id", 1),
        _u32("tokenizer.ggml.eos_token_id", 2),
        pair("tokenizer.ggml.add_bos_token", 7, b"\x01"),
        pair("tokenizer.chat_template", _STRING, text("{% for m in messages %}{{ m.content }}{% endfor %}")),
    ]


def _byte_level() -> list[bytes]:
    return [
        pair("general.architecture", _STRING, text("qwen2")),
        _u32("qwen2.block_count", 1),
        pair("tokenizer.ggml.model", _STRING, text("gpt2")),
        pair("tokenizer.ggml.pre", _STRING, text("qwen2")),
        strings("tokenizer.ggml.tokens", ["a", "b", "ab", "Ġ", "<|end|>"]),
        strings("tokenizer.ggml.merges", ["a b"]),
        pair("tokenizer.ggml.token_type", _ARRAY, struct.pack("<IQ5i", 5, 5, 1, 1, 1, 1, 3)),
        _u32("general.alignment", 64),
    ]


def _adapter() -> list[bytes]:
    return [
        pair("general.type", _STRING, text("adapter")),
        pair("general.architecture", _STRING, text("llama")),
        pair("adapter.type", _STRING, text("lora")),
        _f32("adapter.lora.alpha", 16.0),
        pair("adapter.alora.invocation_tokens", _ARRAY, struct.pack("<IQ2I", 4, 2, 3, 4)),
    ]


_PARTS = (_model(), _byte_level(), _adapter())


def seeds() -> list[bytes]:
    model = [
        tensor("token_embd.weight", [32, 8], 8, 0),
        tensor("output_norm.weight", [32], 0, 288),
        tensor("blk.0.attn_q.weight", [32, 2], 3, 416),
    ]
    halves = [
        tensor("blk.0.attn_q.weight.lora_a", [32, 2], 0, 0),
        tensor("blk.0.attn_q.weight.lora_b", [2, 32], 0, 256),
    ]
    split = [_u32("split.count", 2), _u32("split.no", 0), _u32("split.tensors.count", 1)]
    return [
        file_of(_PARTS[0], model, bytes(range(256)) * 2),
        file_of(_PARTS[1], [tensor("x", [256, 1], 14, 0)], bytes(300)),
        file_of(_PARTS[2], halves, bytes(512)),
        file_of(split, [], b""),
        file_of([], [], b""),
    ]


def check(data: bytes) -> str:
    with file_in_memory(data) as path:
        return _check(path, len(data))


def _check(path: Path, nbytes: int) -> str:
    try:
        file = GGUFFile.open(path)
    except KviltError as error:
        return f"refused: {label(error)}"
    with file:
        _read_tensors(file, nbytes)
        uses = [_use(file, path), _adapt(path)]
        _compare(file, path)
    return f"read; {'; '.join(uses)}"


def _read_tensors(file: GGUFFile, nbytes: int) -> None:
    held = 0
    for name in file.names():
        stored = file.storage(name)
        held += stored.nbytes
        try:
            weight = file.tensor(name)
        except WeightError as error:
            if "scales" not in str(error):
                raise
            continue
        if isinstance(weight, QuantTensor):
            if weight.nbytes != stored.nbytes:
                raise Finding(f"{name!r} has {weight.nbytes} bytes, not {stored.nbytes}")
            if weight.format.name not in UNPACKED_FORMATS:
                continue
        if tuple(to_float(weight).shape) != file.shape(name):
            raise Finding(f"{name!r} is not of its shape {file.shape(name)}")
    if held > nbytes:
        raise Finding(f"tensors of {held} bytes out of a file of {nbytes}")


def _use(file: GGUFFile, path: Path) -> str:
    """What loading a model does with the metadata before it reads weights."""
    checkpoint = Checkpoint(path, GGUF, file.metadata, MappingProxyType({}), file)
    said = []
    for name, read in (("spec", lambda: read_spec(checkpoint)), ("tokenizer", lambda: _tokenize(file.metadata))):
        try:
            read()
            said.append(name)
        except KviltError as error:
            said.append(f"no {name} ({label(error)})")
    return "; ".join(said)


def _tokenize(metadata: Any) -> None:
    tokenizer = from_metadata(metadata)
    ids = tokenizer.encode("ab a €A")
    tokenizer.decode(ids)


def _adapt(path: Path) -> str:
    try:
        with open_gguf_lora(path) as adapter:
            for tensors in adapter.modules.values():
                adapter.tensor(tensors.down), adapter.tensor(tensors.up)
        return "adapter"
    except KviltError as error:
        return f"no adapter ({label(error)})"


def _compare(file: GGUFFile, path: Path) -> None:
    """The other reader's view of the same file, where it has one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = reference.GGUFReader(path)
    except Exception:
        return  # stricter, or broken by what is only odd
    theirs = {one.name: one for one in other.tensors}
    if theirs.keys() != set(file.names()):
        raise Finding(f"tensors {sorted(file.names())} and {sorted(theirs)}")
    for name, one in theirs.items():
        if one.n_bytes != file.storage(name).nbytes or tuple(int(n) for n in reversed(one.shape)) != file.shape(name):
            raise Finding(f"{name!r} is {file.shape(name)} here and {one.shape} there")
    for key, value in file.metadata.items():
        field = other.fields.get(key)
        if field is not None and not key.startswith("tokenizer.") and not _equal(value, field.contents()):
            raise Finding(f"{key!r} is {value!r:.80} here and {field.contents()!r:.80} there")


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list):
        theirs = [] if theirs is None else theirs
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if isinstance(ours, float) and math.isnan(ours):
        return isinstance(theirs, float) and math.isnan(theirs)
    return bool(ours == theirs)


_KEYS = (
    *("general.architecture", "general.alignment", "general.type", "adapter.type", "adapter.lora.alpha", "split.count"),
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "scores", "token_type", "merges")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "unknown", "padding")),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix", "tokenizer.chat_template"),
    *(f"llama.{name}" for name in ("block_count", "context_length", "embedding_length", "feed_forward_length")),
    *(f"llama.attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "sliding_window")),
    *(f"llama.rope.{name}" for name in ("dimension_count", "freq_base", "scaling.type", "scaling.factor")),
)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def mutate(_data: bytes, dice: random.Random) -> bytes:
    """A file with the right frame around pairs and tensors that may be anything."""
    sound = _PARTS[dice.randrange(len(_PARTS))]
    pairs = [one for one in sound if dice.random() < 0.95]
    for _ in range(dice.randrange(4)):
        key = dice.choice(_KEYS)
        kept = [one for one in pairs if not one.startswith(text(key))] if dice.random() < 0.9 else pairs
        pairs = [*kept, _any_pair(key, dice)]
    shapes = [[dice.choice([0, 1, 2, 8, 31, 32, 256, 1 << 32, 1 << 63]) for _ in range(dice.randrange(1, 4))]]
    tensors = [tensor(dice.choice(["x", "token_embd.weight"]), shape, dice.randrange(40), 0) for shape in shapes]
    return file_of(pairs, tensors if dice.random() < 0.5 else [], bytes(dice.randrange(600)))


def _any_pair(key: str, dice: random.Random) -> bytes:
    kind = dice.choice([*_SIZES, _STRING, _STRING, _ARRAY])
    if kind == _STRING:
        return pair(key, kind, text(dice.choice(_TEXTS)))
    if kind == _ARRAY and dice.random() < 0.5:
        return strings(key, [dice.choice(_TEXTS) for _ in range(dice.randrange(12))])
    if kind == _ARRAY:
        inner, count = dice.choice(list(_SIZES)), dice.randrange(12)
        return pair(key, kind, struct.pack("<IQ", inner, count) + _bits(_SIZES[inner] * count, dice))
    return pair(key, kind, _bits(_SIZES[kind], dice))


def _bits(count: int, dice: random.Random) -> bytes:
    return dice.choice(
        [bytes(count), b"\xff" * count, (1).to_bytes(max(count, 1), "little")[:count], dice.randbytes(count)]
    )


_TEXTS: tuple[str | bytes, ...] = (
    *(
        "",
        "llama",
        "gpt2",
        "qwen2",
        "gemma3",
        "phi3",
        "a",
        "b",
        "ab",
        "a b",
        " a",
        "▁a",
        "<0x41>",
        "<0xZZ>",
        "Ġ",
        "<s>",
    ),
    *("yarn", "linear", "lora", "adapter", "{{ 1 }}", "{% if %}", b"\xff\xfe", b"\xe2\x82", "\x00", "a" * 300),
)
WORDS = (
    *(f"tokenizer.ggml.{name}".encode() for name in ("tokens", "scores", "token_type", "merges", "model", "pre")),
    *(b"general.alignment", b"split.count", b"llama.", b"gemma3.", b"qwen3.", b"rope.scaling.type", b"yarn", b"gpt2"),
    *(b"<0x00>", b"<0xFF>", b"\xe2\x96\x81", struct.pack("<IQ", _STRING, 3), struct.pack("<I", _ARRAY)),
)
TARGET = Target("gguf", check, seeds, WORDS, mutate, most_bytes=1 << 14)

if __name__ == "__main__":
    main(TARGET)
