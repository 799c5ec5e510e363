"""Which part of each tensor a rank has, where several processes share a model (tensor parallelism).

The kind of a linear map decides how it is split, never a family: q, k, v, gate and up by outputs, out and down by
inputs, the embedding and the head by tokens of the vocabulary. What cannot be split is whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..ops.lowrank import LowRank
from ..quant.tensor import QuantTensor, Weight
from .spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec


class Ranks(Protocol):
    """The processes that share a model, as one of them sees them. All of them call the same methods in one order."""

    @property
    def rank(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on every rank, in one order of ranks. May use the memory of `x`."""
        ...

    def gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor] | None:
        """All ranks' tensors on rank 0; None on the others. `shapes` are those of each rank."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a tensor: some of its rows (axis 0) or columns (axis 1), of `whole` in all."""

    axis: Literal[0, 1]
    part: range
    whole: int

    def take(self, weight: Weight) -> Weight:
        """The part, packed as the whole is."""
        start, stop = self.part.start, self.part.stop
        if isinstance(weight, QuantTensor):
            return weight.rows(start, stop) if self.axis == 0 else weight.columns(start, stop)
        return weight[start:stop] if self.axis == 0 else weight[:, start:stop].contiguous()

    def product(self, whole: LowRank) -> LowRank:
        """The part of an adapter's product: up(down(x)) is split where the map that it changes is."""
        part = slice(self.part.start, self.part.stop)
        if self.axis == 0:
            return LowRank(whole.down, whole.up[part].contiguous(), whole.scale)
        return LowRank(whole.down[:, part].contiguous(), whole.up, whole.scale)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of a layer that a rank computes. Ranks beyond the number of KV heads share one of them."""

    query: range
    kv: range


@dataclass(frozen=True, slots=True)
class ModelSplit:
    """What one rank of several has of a model. A layer or block that is not named is whole on every rank."""

    rank: int
    ranks: int
    spec: ModelSpec
    heads: Mapping[int, HeadShare]  # by layer
    inner: Mapping[str, range]  # of feed-forward blocks, by the beginning of their tensors' names: "3."
    vocabulary: range | None

    def cut(self, name: str) -> Cut | None:
        """The part of a tensor, by our name for it; None: all of it."""
        if name in ("embedding", "head"):
            return None if self.vocabulary is None else Cut(0, self.vocabulary, self.spec.vocab_size)
        at, _, part = name.rpartition(".")
        layer, _, block = at.partition(".")
        if not layer.isdecimal():
            return None
        if not block and int(layer) in self.heads:
            attention, share = self.spec.layers[int(layer)].attention, self.heads[int(layer)]
            if (cut := _attention_cut(part, attention, share)) is not None:
                return cut
        prefix = f"{layer}.experts." if block.startswith("experts.") else f"{at}."
        if (own := self.inner.get(prefix)) is None:
            return None
        whole = _inner_of(self.spec.layers[int(layer)], block)
        match part:
            case "gate" | "up" | "gate_bias" | "up_bias":
                return Cut(0, own, whole)
            case "down":
                return Cut(1, own, whole)
        return None

    def adds_bias(self, name: str) -> bool:
        """Whether this rank adds the bias of a map: of one that is split by inputs only rank 0 does."""
        cut = self.cut(name)
        return cut is None or cut.axis == 0 or self.rank == 0

    def whole_shape(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of a whole map, of which a rank's part has `shape`."""
        match self.cut(name):
            case None:
                return shape
            case Cut(0, _, whole):
                return whole, shape[1]
            case Cut(_, _, whole):
                return shape[0], whole

    def kv_heads(self, whole: int, latent: bool) -> range:
        """The KV heads that pages of a rank hold, in layers with so many."""
        for layer, share in self.heads.items():
            if not latent and self.spec.layers[layer].attention.kv_heads == whole:
                return share.kv
        return range(whole)


@dataclass(frozen=True, slots=True)
class ModelShare:
    """A rank's part of a model, and the ranks that have the others."""

    split: ModelSplit
    ranks: Ranks
    every: Sequence[ModelSplit]  # the splits of all ranks

    @property
    def leads(self) -> bool:
        """Whether results are put together here."""
        return self.split.rank == 0

    def gather_heads(self, x: Tensor, layer: int, kind: Literal["query", "kv"]) -> Tensor:
        """All heads of `x` [tokens, heads, dim] on rank 0; other ranks keep their own."""
        if layer not in self.split.heads:
            return x
        spans = [one.heads[layer].query if kind == "query" else one.heads[layer].kv for one in self.every]
        parts = self.ranks.gather(x.contiguous(), [(len(x), len(span), x.shape[2]) for span in spans])
        return x if parts is None else joined_heads(parts, spans, 1)

    def mean_over_heads(self, x: Tensor, layer: int) -> Tensor:
        """The mean over all heads, of a mean over those of each rank."""
        if (own := self.split.heads.get(layer)) is None:
            return x
        return self.ranks.sum(x * (len(own.query) / self.split.spec.layers[layer].attention.heads))

    def gather_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits [tokens, vocab] of all tokens of the vocabulary on rank 0; other ranks keep their own."""
        if self.split.vocabulary is None:
            return logits
        sizes = [len(one.vocabulary) for one in self.every if one.vocabulary is not None]
        parts = self.ranks.gather(logits.contiguous(), [(len(logits), size) for size in sizes])
        return logits if parts is None else torch.cat(parts, dim=1)


def joined_heads(parts: Sequence[Tensor], spans: Sequence[range], axis: int) -> Tensor:
    """The heads of all ranks in order, each once; `spans` are those of each rank."""
    kept, reached = [], 0
    for part, span in zip(parts, spans, strict=True):
        if span.stop > reached:
            kept.append(part)
            reached = span.stop
    return torch.cat(kept, dim=axis)


# Who has what.


class BlockSizes(Protocol):
    """The numbers of rows and columns of a tensor, by our name, that a cut may not separate."""

    def __call__(self, name: str) -> tuple[int, int]: ...


def split_model(spec: ModelSpec, block_sizes: BlockSizes, rank: int, ranks: int) -> ModelSplit:
    """The part of a rank. Every rank comes to the same conclusions, from the spec and the formats of the weights."""
    heads: dict[int, HeadShare] = {}
    for kv_heads in dict.fromkeys(layer.attention.kv_heads for layer in spec.layers):
        # Pages of layers with the same number of heads have one shape, so they are split together or not at all.
        layers = [i for i, one in enumerate(spec.layers) if _has_heads(one) and one.attention.kv_heads == kv_heads]
        shares = {i: _head_shares(i, spec.layers[i], block_sizes, ranks) for i in layers}
        if all(shares.values()):
            heads |= {i: found[rank] for i, found in shares.items() if found is not None}
    inner: dict[str, range] = {}
    for i, layer in enumerate(spec.layers):
        if layer.blocks != "mixer":
            inner |= {name: found[rank] for name, found in _inner_shares(i, layer, block_sizes, ranks).items()}
    rows = math.lcm(block_sizes("embedding")[0], *(() if spec.tied_head else (block_sizes("head")[0],)))
    vocabulary = _even(spec.vocab_size, ranks, rows)
    return ModelSplit(rank, ranks, spec, heads, inner, None if vocabulary is None else vocabulary[rank])


def _has_heads(layer: LayerSpec) -> bool:
    return layer.has_attention and layer.attention.latent is None


def _even(count: int, ranks: int, unit: int = 1) -> list[range] | None:
    """`count` things in whole units, in order, as evenly as it goes; None if some rank would have none."""
    units = count // unit
    if count % unit or units < ranks:
        return None
    return [range(units * r // ranks * unit, units * (r + 1) // ranks * unit) for r in range(ranks)]


def share_heads(heads: int, kv_heads: int, ranks: int) -> list[HeadShare] | None:
    """Whole KV heads with their queries; or, where there are fewer of them than ranks, parts of their queries."""
    group = heads // kv_heads
    if (kv := _even(kv_heads, ranks)) is not None:
        return [HeadShare(range(one.start * group, one.stop * group), one) for one in kv]
    each = ranks // kv_heads
    if ranks % kv_heads or (parts := _even(group, each)) is None:
        return None
    return [
        HeadShare(range(head * group + part.start, head * group + part.stop), range(head, head + 1))
        for head in range(kv_heads)
        for part in parts
    ]


def _head_shares(index: int, layer: LayerSpec, block_sizes: BlockSizes, ranks: int) -> list[HeadShare] | None:
    """The heads of every rank, unless something needs all heads at once or blocks of weights lie across them."""
    spec = layer.attention
    shares = share_heads(spec.heads, spec.kv_heads, ranks)
    if shares is None or spec.qk_norm_whole or layer.recurrent is not None:
        return None
    for share in shares:
        for part, axis in (("q", 0), ("k", 0), ("v", 0), ("q_gate", 0), ("out", 1)):
            cut = _attention_cut(part, spec, share)
            if cut is not None and not _is_whole(cut, block_sizes(f"{index}.{part}")[axis]):
                return None
    return shares


def _is_whole(cut: Cut, unit: int) -> bool:
    return cut.part.start % unit == 0 and (cut.part.stop % unit == 0 or cut.part.stop == cut.whole)


def _attention_cut(part: str, spec: AttentionSpec, share: HeadShare) -> Cut | None:
    q, kv, dim = share.query, share.kv, spec.head_dim
    match part:
        case "q" | "q_bias" | "q_gate" | "q_gate_bias":
            return Cut(0, range(q.start * dim, q.stop * dim), spec.heads * dim)
        case "k" | "v" | "k_bias" | "v_bias":
            return Cut(0, range(kv.start * dim, kv.stop * dim), spec.kv_heads * dim)
        case "sinks":
            return Cut(0, q, spec.heads)
        case "out":
            return Cut(1, range(q.start * dim, q.stop * dim), spec.heads * dim)
    return None


def _inner_shares(index: int, layer: LayerSpec, block_sizes: BlockSizes, ranks: int) -> dict[str, list[range]]:
    """The inner numbers of the feed-forward blocks of a layer, of every rank."""

    def share(spec: FeedForwardSpec, prefixes: Sequence[str]) -> list[range] | None:
        if spec.sparse_cut is not None:  # looks at all inner numbers at once
            return None
        opening = ("gate", "up") if spec.gated else ("up",)
        names = [f"{prefix}{name}" for prefix in prefixes for name in opening]
        rows = [block_sizes(name)[0] for name in names]
        columns = [block_sizes(f"{prefix}down")[1] for prefix in prefixes]
        return _even(spec.hidden, ranks, math.lcm(*rows, *columns))

    block, found = layer.feed_forward, {}
    match block:
        case FeedForwardSpec():
            found = {f"{index}.": share(block, [f"{index}."])}
        case ExpertsSpec():
            experts = share(block.expert, [f"{index}.experts.{e}." for e in range(block.experts)])
            found = {f"{index}.experts.": experts}
            if block.shared is not None:  # its result is added to that of the experts before ranks are summed
                shared = share(block.shared.block, [f"{index}.shared."])
                both = experts is not None and shared is not None
                found = {f"{index}.experts.": experts, f"{index}.shared.": shared} if both else {}
            if block.dense is not None:
                found[f"{index}."] = share(block.dense, [f"{index}."])
    return {name: each for name, each in found.items() if each is not None}


def _inner_of(layer: LayerSpec, block: str) -> int:
    """The inner numbers of a block of a layer: "", "shared" or "experts.5"."""
    own = layer.feed_forward
    if isinstance(own, FeedForwardSpec):
        return own.hidden
    if block == "shared" and own.shared is not None:
        return own.shared.block.hidden
    if not block and own.dense is not None:
        return own.dense.hidden
    return own.expert.hidden
