"""A Hugging Face checkpoint seen as a GGUF file: its metadata, and its tensors under the names of GGUF.

What GGUF would mean is read back and compared with the checkpoint: a model that cannot be said in GGUF is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import Unsupported, WeightError
from ..models.assemble import read_spec
from ..models.families.registry import recognise
from ..models.spec import AttentionSpec, FeedForwardSpec, ModelSpec, RopeSpec, each_attention
from ..quant.tensor import QuantTensor, Weight
from ..text.gguf_vocabulary import gguf_vocabulary
from ..weights.gguf import GGUFFile
from ..weights.gguf_writer import stored_value
from ..weights.source import GGUF, Checkpoint, TensorSource
from ..weights.tensor_storage import TensorStorage

# Families whose layers are all alike, and hold no more than what the metadata below says.
FAMILIES = ("llama", "qwen2", "qwen3")
_FLOATS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
)


class GGUFView:
    """The tensors of a Hugging Face checkpoint as llama.cpp's converter would write them."""

    def __init__(
        self, source: Checkpoint, metadata: Mapping[str, Any], names: Mapping[str, str], paired: Mapping[str, int]
    ) -> None:
        """`names` are those of GGUF to the checkpoint's; parts that are `paired` are reordered, with so many heads."""
        self.metadata = metadata
        self._tensors: TensorSource = source.tensors
        self._names = names
        self._paired = paired

    def renamed(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is known by the checkpoint's names, by those of GGUF."""
        return {name: values[own] for name, own in self._names.items() if own in values}

    def raw_metadata(self) -> dict[str, bytes]:
        """The metadata as it is stored."""
        return {key: stored_value(value) for key, value in self.metadata.items()}

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(self._names[name])

    def storage(self, name: str) -> TensorStorage:
        found = self._tensors.storage(self._names[name])
        if len(self.shape(name)) > 1:
            return found
        return TensorStorage("F32", 4 * self.shape(name)[0])  # llama.cpp takes norms and biases as nothing else

    def tensor(self, name: str) -> Weight:
        found = self._tensors.tensor(self._names[name])
        if isinstance(found, QuantTensor) or found.dtype not in _FLOATS:
            raise Unsupported(f"{self._names[name]} is quantized; start from a checkpoint in F32, F16 or BF16")
        for part, heads in self._paired.items():
            found = _in_pairs(found, heads) if f".{part}." in name else found
        return found.float() if found.dim() == 1 else found

    def forget(self, name: str) -> None:
        self._tensors.forget(self._names[name])

    def digest(self) -> str:
        return self._tensors.digest()

    def close(self) -> None:
        self._tensors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _in_pairs(rows: Tensor, heads: int) -> Tensor:
    """Rows whose halves turn together, so that neighbours do."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape).contiguous()


def gguf_tensors(source: Checkpoint) -> GGUFFile | GGUFView:
    """The tensors and the metadata of a checkpoint as those of a GGUF file; of one that is, as they are."""
    if isinstance(source.tensors, GGUFFile):
        return source.tensors
    family, spec = recognise(source).family, read_spec(source)
    if family.name not in FAMILIES:
        raise Unsupported(f"{family.name} cannot be written to GGUF yet; {', '.join(FAMILIES)} can")
    dialect = next(one for one in family.dialects if one.kind == "gguf")
    folder = source.path if source.path.is_dir() else source.path.parent
    fields = _fields(spec, dialect.architectures[0], folder.name)
    metadata = {**fields, **gguf_vocabulary(folder, spec.vocab_size)}
    attention = spec.layers[0].attention
    paired = {"attn_q": attention.heads, "attn_k": attention.kv_heads} if dialect.pairs_qk else {}
    view = GGUFView(source, metadata, _names(source, spec), paired)
    written = Checkpoint(source.path, GGUF, metadata, source.generation, view)
    if _comparable(read_spec(written)) != _comparable(spec):
        raise Unsupported(
            "this model has settings that its kind of GGUF cannot hold, such as a window or a scaled rope"
        )
    return view


def _fields(spec: ModelSpec, architecture: str, name: str) -> dict[str, Any]:
    attention, feed_forward = spec.layers[0].attention, spec.layers[0].feed_forward
    if not isinstance(attention.rope, RopeSpec) or not isinstance(feed_forward, FeedForwardSpec):
        raise WeightError("config", "asks for layers that this family does not have in GGUF")
    own = {
        "block_count": len(spec.layers),
        "context_length": spec.context,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": feed_forward.hidden,
        "attention.head_count": attention.heads,
        "attention.head_count_kv": attention.kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "rope.dimension_count": attention.rope.dims,
        "rope.freq_base": float(attention.rope.theta),
        "vocab_size": spec.vocab_size,
    }
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        **{f"{architecture}.{key}": value for key, value in own.items()},
    }


def _names(source: Checkpoint, spec: ModelSpec) -> dict[str, str]:
    """GGUF's names of all tensors to the checkpoint's, in the order of the layers."""
    family = recognise(source).family
    theirs, ours = recognise(source).dialect, next(one for one in family.dialects if one.kind == "gguf")
    present, found = frozenset(source.tensors.names()), {}
    for part in ("embedding", "norm", *(() if spec.tied_head else ("head",))):
        found[ours.names[part]] = theirs.names[part]
    for layer in range(len(spec.layers)):
        for part in ours.names:
            name = theirs.names[part].format(i=layer, e="") if part in theirs.names else ""
            if "{i}" in ours.names[part] and name in present:
                found[ours.name_of(layer, part)] = name
    return found


def _comparable(spec: ModelSpec) -> ModelSpec:
    """Without what GGUF keeps in another order, or rounds to 32 bits."""

    def plain(_layer: int, attention: AttentionSpec) -> AttentionSpec:
        rope = attention.rope
        if not isinstance(rope, RopeSpec):
            return attention
        theta = torch.tensor(rope.theta, dtype=torch.float32).item()
        return replace(attention, rope=replace(rope, theta=theta, pairing="half"))

    rounded = torch.tensor(spec.norm_eps, dtype=torch.float32).item()
    return each_attention(replace(spec, norm_eps=rounded), plain)
