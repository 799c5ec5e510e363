"""LoRA adapters fitted to a model: which linear map each module is, whether shapes agree, what makes two unlike.

Nothing is half fitted: every name, shape and number is checked before the first product is prepared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import Unsupported, WeightError
from ..ops.lowrank import LowRank
from ..weights.gguf_lora import GGUFAdapter
from ..weights.peft import ModuleTensors, PeftFolder
from .decoder import Decoder
from .families.family import CheckpointDialect, expert_part
from .families.registry import FAMILIES, pairs_qk
from .layers import Linear, linears_in
from .spec import ModelSpec, RopeSpec
from .step_adapters import EMBEDDING, HEAD, EmbeddedRows, part_of

_BLOCK = 4096  # rows of an embedding that are compared at a time, and rows of a map that are measured at a time

OpenAdapter = PeftFolder | GGUFAdapter
Alone = AbstractContextManager[object]  # held while weights are looked at: no step runs meanwhile


@dataclass(frozen=True, slots=True, eq=False)
class FittedAdapter:
    """An adapter in the form one model's backend multiplies with."""

    content: str  # hash of everything that decides what it computes
    products: Mapping[str, LowRank]  # by the name of a linear map
    embedded: EmbeddedRows | None
    invocation: tuple[int, ...]  # tokens that switch it on; empty: it is always on
    rank: int  # the largest
    gains: Mapping[str, Tensor] = field(default_factory=dict)  # by the name of a linear map, [out]: see MagnitudeGain
    # Where several ranks share the model: the whole products, of which each rank gets its part.
    whole: Mapping[str, LowRank] = field(default_factory=dict)

    @property
    def parts(self) -> frozenset[str]:
        """Kinds of maps it changes."""
        return frozenset(part_of(name) for name in self.products)

    @property
    def nbytes(self) -> int:
        embedded = self.embedded.nbytes if self.embedded is not None else 0
        gains = sum(gain.nbytes for gain in self.gains.values())
        return sum(product.nbytes for product in self.products.values()) + embedded + gains


@dataclass(frozen=True, slots=True)
class _Target:
    """A module of the model as checkpoints of its family name it, and its maps in the order of their outputs."""

    maps: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    order: Sequence[int] | None = None  # of the module's outputs, where they are not in the order of its maps

    def ordered(self, rows: Tensor) -> Tensor:
        """A row for each output, in the order of the maps."""
        return rows if self.order is None else rows[torch.tensor(self.order)]


def linears_of(decoder: Decoder) -> dict[str, Linear]:
    """Every linear map that an adapter may change, by name."""
    return {HEAD: decoder.head} | {linear.name: linear for linear in linears_in(decoder.layers)}


def map_shapes(decoder: Decoder) -> dict[str, tuple[int, int]]:
    """[out, in] of every linear map that an adapter may change."""
    return {name: (linear.weight.shape[0], linear.weight.shape[1]) for name, linear in linears_of(decoder).items()}


def fit(adapter: OpenAdapter, decoder: Decoder, alone: Alone | None = None) -> FittedAdapter:
    """An adapter for a model; a named error if it is for another one, damaged, or of a kind that is not computed."""
    alone, share = nullcontext() if alone is None else alone, decoder.share
    targets = dict(_targets(decoder, adapter))
    for module, tensors in adapter.modules.items():
        _check_module(module, tensors, adapter, targets)
    _check_copies(adapter, decoder, targets, alone)
    digest, products = hashlib.sha256(b"kvilt lora 1"), {}
    embedded: EmbeddedRows | None = None
    gains: dict[str, Tensor] = {}
    wholes: dict[str, LowRank] = {}
    _add_to(digest, "invocation", *adapter.config.invocation)
    for module in sorted(adapter.modules):
        tensors, scale = adapter.modules[module], adapter.config.scale_of(module)
        down, up = adapter.tensor(tensors.down), adapter.tensor(tensors.up)
        sizes = None if tensors.magnitude is None else adapter.tensor(tensors.magnitude)
        _add_to(digest, module, scale, tensors.embedding, down.dtype, *down.shape, up.dtype, *up.shape)
        if sizes is not None:
            _add_to(digest, "dora", sizes.dtype, *sizes.shape)
        for tensor in (down, up) if sizes is None else (down, up, sizes):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        if tensors.embedding:
            device, rows_first = decoder.ops.device, down.T.clone(memory_format=torch.contiguous_format)
            embedded = EmbeddedRows(rows_first.to(device), up.T.clone().to(device), scale)
            continue
        target, start = targets[module], 0
        up, sizes = target.ordered(up), None if sizes is None else target.ordered(sizes)
        for name, outputs in zip(target.maps, target.outputs, strict=True):
            rows = slice(start, start + outputs)
            product = LowRank(down, _reordered(name, up[rows], decoder.spec, adapter.kind), scale)
            if sizes is not None and share is not None:
                raise Unsupported(f"{module}: DoRA needs whole maps; load the model without tensor_parallel")
            if sizes is not None:
                own = _reordered(name, sizes[rows, None], decoder.spec, adapter.kind)[:, 0]
                product, gains[name] = _dora(product, own, linears_of(decoder)[name], decoder, alone)
            if share is not None:
                wholes[name] = product
                product = product if (cut := share.split.cut(name)) is None else cut.product(product)
            products[name] = decoder.ops.prepare_low_rank(product)
            start += outputs
    rank = max(adapter.shape(tensors.down)[0] for tensors in adapter.modules.values())
    return FittedAdapter(digest.hexdigest(), products, embedded, adapter.config.invocation, rank, gains, wholes)


def _dora(product: LowRank, sizes: Tensor, linear: Linear, decoder: Decoder, alone: Alone) -> tuple[LowRank, Tensor]:
    """A product scaled by the magnitudes of DoRA, and the gain of each output of the base map.

    m / |W + s B A| is one number for each output, known when the adapter is loaded; the product has it in its upper
    half.
    """
    device, lengths = decoder.ops.device, []
    up, down = product.up.to(device, torch.float32), product.down.to(device, torch.float32)
    for start in range(0, len(up), _BLOCK):
        rows = torch.arange(start, min(start + _BLOCK, len(up)), device=device)
        with alone:
            own = decoder.ops.embed(linear.weight, rows).to(torch.float32, copy=True)
        lengths.append(torch.linalg.vector_norm(own + product.scale * (up[rows] @ down), dim=1))
    grown = sizes.to(device, torch.float32) / torch.cat(lengths)
    if not bool(grown.isfinite().all()):
        raise WeightError(linear.name, "an output of this map is nothing but zeros, and DoRA divides by its length")
    return LowRank(down, grown[:, None] * up, product.scale), grown - 1.0


def _add_to(digest: hashlib._Hash, *facts: object) -> None:
    digest.update(("\0".join(map(str, facts)) + "\n").encode("utf-8", "surrogatepass"))


# Modules and their maps.


def _targets(decoder: Decoder, adapter: OpenAdapter) -> Iterator[tuple[str, _Target]]:
    """Every module that an adapter may name."""
    shapes = map_shapes(decoder)
    if decoder.share is not None:
        shapes = {name: decoder.share.split.whole_shape(name, shape) for name, shape in shapes.items()}
    for dialect in _dialects(decoder.spec, adapter):
        for module, maps in _named(dialect, shapes, len(decoder.spec.layers)):
            order = _order(dialect, module, maps, decoder.spec)
            yield module, _Target(maps, tuple(shapes[name][0] for name in maps), shapes[maps[0]][1], order)
        vocabulary = decoder.spec.vocab_size
        yield _bare(dialect.names[EMBEDDING]), _Target((EMBEDDING,), (decoder.spec.hidden_size,), vocabulary)
        yield _bare(dialect.names[HEAD]), _Target((HEAD,), (vocabulary,), decoder.spec.hidden_size)


def _dialects(spec: ModelSpec, adapter: OpenAdapter) -> list[CheckpointDialect]:
    """PEFT's names are those of Hugging Face, llama.cpp's those of GGUF, whatever file the base model comes from."""
    (family,) = (family for family in FAMILIES if family.name == spec.family)
    found = [dialect for dialect in family.dialects if dialect.kind == adapter.kind]
    if not isinstance(adapter, GGUFAdapter):
        return found
    own = [dialect for dialect in found if adapter.architecture in dialect.architectures]
    if not own:
        raise WeightError("general.architecture", f"is {adapter.architecture!r}, and this model is a {spec.family}")
    return own


def _named(dialect: CheckpointDialect, maps: Collection[str], layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What checkpoints call the maps of the layers; one of them may be several of ours."""
    known, inside = {*maps}, {part for parts in dialect.fused.values() for part in parts}
    for name in maps:
        layer, _, part = name.partition(".")
        if part and part not in inside and expert_part(part) not in dialect.stacks:
            yield _bare(dialect.name_of(int(layer), part)), (name,)
    for i in range(layers):
        for whole, parts in dialect.fused.items():
            own = tuple(f"{i}.{part}" for part in parts)
            if known.issuperset(own):
                yield _bare(dialect.names[whole].format(i=i)), own


def _order(dialect: CheckpointDialect, module: str, maps: tuple[str, ...], spec: ModelSpec) -> Sequence[int] | None:
    """The outputs of a fused module in the order of its maps, where a checkpoint has them in another one."""
    layer = int(maps[0].partition(".")[0])
    for whole, order in dialect.row_orders.items():
        if len(maps) > 1 and module == _bare(dialect.names[whole].format(i=layer)):
            return order(spec.layers[layer])
    return None


def _bare(name: str) -> str:
    return name.removesuffix(".weight")


# Whether they fit.


def _check_module(module: str, tensors: ModuleTensors, folder: OpenAdapter, targets: Mapping[str, _Target]) -> None:
    target = targets.get(module)
    if target is None or tensors.embedding != (target.maps == (EMBEDDING,)):
        raise WeightError("target_modules", f"{module!r} is no linear map of this model that an adapter may change")
    rank = folder.config.rank_of(module)
    wanted: dict[str, tuple[int, ...]] = {
        tensors.down: (rank, target.inputs),
        tensors.up: (sum(target.outputs), rank),
    }
    if tensors.magnitude is not None:
        wanted[tensors.magnitude] = (sum(target.outputs),)
    for name, shape in wanted.items():
        if folder.shape(name) != shape:
            raise WeightError(name, f"is {list(folder.shape(name))} instead of {list(shape)}; it is for another model")


def _check_copies(folder: OpenAdapter, decoder: Decoder, targets: Mapping[str, _Target], alone: Alone) -> None:
    """PEFT may save whole embeddings beside an adapter for them; they must be the ones that this model has."""
    for module, name in folder.copies.items():
        maps = targets[module].maps if module in targets else ()
        if maps not in ((EMBEDDING,), (HEAD,)):
            raise Unsupported(f"{name}: whole weights in an adapter are not supported")
        if decoder.share is not None:
            raise Unsupported(f"{name}: whole weights in an adapter are not supported with tensor_parallel")
        own = decoder.embedding if maps == (EMBEDDING,) else decoder.head.weight
        if folder.shape(name) != tuple(own.shape) or not _same(folder.tensor(name), own, decoder, alone):
            raise Unsupported(
                f"{name}: the adapter holds weights unlike this model's own (a packed model's are never the same); "
                "save it with save_embedding_layers=False"
            )


def _same(copy: Tensor, own: object, decoder: Decoder, alone: Alone) -> bool:
    for start in range(0, len(copy), _BLOCK):
        rows = torch.arange(start, min(start + _BLOCK, len(copy)))
        with alone:
            found = decoder.ops.embed(own, rows.to(decoder.ops.device)).cpu()  # type: ignore[arg-type]
            if not torch.equal(found, copy[rows].to(found.dtype)):
                return False
    return True


def _reordered(name: str, up: Tensor, spec: ModelSpec, kind: str) -> Tensor:
    """Outputs in the order of this model's checkpoint: some GGUF files have q and k in neighbouring pairs."""
    ropes = [layer.attention.rope for layer in spec.layers]
    paired = any(isinstance(rope, RopeSpec) and rope.pairing == "interleaved" for rope in ropes)
    given = pairs_qk(spec.family, kind)
    part = part_of(name)
    if part not in ("q", "k") or paired == given:
        return up
    attention = spec.layers[int(name.partition(".")[0])].attention
    if attention.latent is not None:  # its queries have one order in all checkpoints
        return up
    heads = attention.heads if part == "q" else attention.kv_heads
    split = (heads, 2, -1, up.shape[1]) if paired else (heads, -1, 2, up.shape[1])
    return up.reshape(split).transpose(1, 2).reshape(up.shape)
