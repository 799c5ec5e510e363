"""Every operation in plain torch, obviously right: the oracle of every other backend.

Refuses to be clever: weights are float32 copies made at load, attention is a loop over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from ..quant.formats import Format
from ..quant.tensor import QuantTensor, Weight
from ..quant.unpack import dequantize
from . import recurrent
from . import routing as routing_module
from .contract import (
    Activation,
    AttentionMask,
    Decay,
    ExpertMaps,
    ExpertStack,
    FoldHeads,
    HostCopies,
    HostCopy,
    Interpolation,
    KeysValues,
    LinearMap,
    NewKV,
    PackedWeight,
    PageShape,
    PageStore,
    Paging,
    Pairing,
    Prepared,
    RmsNorm,
    Rotation,
    Routed,
    Routing,
    SamplingKernels,
    SharedExpert,
    StatePlace,
    TemperatureScaling,
)
from .host_copies import DirectCopies
from .kv_dtypes import FLOAT32, KVDtype
from .lowrank import AdapterSlots, LowRank, LowRankTable, PlainTable, adapt
from .mass import first_seen, key_mass, softmax_with_sinks
from .new_kv import write_new
from .packed_values import pack_values, unpack_values
from .streams import StreamOps, TorchStreams

QUERY_BLOCK = 128  # bounds the score matrix of a long prefill: heads * 128 * keys floats

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss

_ACTIVATIONS: MappingProxyType[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "tanh": torch.tanh,
        "relu2": lambda x: F.relu(x).square(),
        "relu": F.relu,
    }
)


@dataclass(frozen=True, slots=True)
class ReferencePages:
    """Pages as two plain tensors, so that a slot is an index into a flat token axis."""

    shape: PageShape
    keys: Tensor  # [layers, pages * page_tokens, kv_heads, key_dim]
    values: Tensor  # [layers, pages * page_tokens, kv_heads, value_width]
    key_scales: Tensor  # [layers, pages * page_tokens, kv_heads, scales]
    value_scales: Tensor


class ReferenceOps:
    """Plain torch on any device, with activations in any float; sums of products of them are torch's own."""

    name = "reference"
    kv_dtype = FLOAT32  # an oracle rounds nothing
    deterministic = False  # torch sums in an order that depends on shapes

    def __init__(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.device = torch.device("cpu") if device is None else device
        self.dtype = dtype
        self.host_copies: HostCopies = DirectCopies(self.device)
        self.streams: StreamOps = TorchStreams()

    @property
    def numerics(self) -> str:
        return f"reference-1/torch-{torch.__version__}/{torch.backends.cpu.get_cpu_capability()}"

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def reductions(self) -> None:
        return None

    @property
    def sampling(self) -> SamplingKernels | None:
        return None

    def recorder(self) -> None:
        return None

    def expands(self, format_: Format) -> bool:
        return format_.packed

    def numerics_for(self, formats: Collection[str]) -> str:  # noqa: ARG002 (the contract's arguments)
        return self.numerics

    def kernel(self, format_: Format) -> str:
        return f"torch in {str(self.dtype).removeprefix('torch.')}" + (", unpacked at load" if format_.packed else "")

    def prepare(self, weight: Weight) -> Tensor:
        if isinstance(weight, QuantTensor):
            return dequantize(weight).to(self.device, self.dtype)
        # A copy, never a view of the mapped file: memory is aligned, and no forward depends on the file staying whole.
        return weight.to(self.device, self.dtype, copy=True)

    def embed(self, table: Prepared, ids: Tensor, scale: float = 1.0) -> Tensor:
        states = F.embedding(ids, _plain(table))
        return states if scale == 1.0 else states * scale

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        out = F.linear(x, _plain(weight), bias)
        return out if residual is None else residual + out

    def linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm | None = None) -> list[Tensor]:
        x = x if norm is None else self.rms_norm(x, *norm)
        return [self.linear(x, weight, bias) for weight, bias in maps]

    def norm_linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm) -> tuple[Tensor, list[Tensor]]:
        normed = self.rms_norm(x, *norm)
        return normed, self.linears(normed, maps)

    def prepare_per_head(self, weight: Tensor) -> Prepared:
        return weight.to(self.device, self.dtype, copy=True, memory_format=torch.contiguous_format)

    def per_head_linear(self, x: Tensor, weight: Prepared, moved: int = 0) -> Tensor:
        factor = x.shape[2] - moved
        made = torch.einsum("thi,hoi->tho", x[..., :factor], _plain(weight))
        return torch.cat((x[..., factor:], made), dim=-1) if moved else made.contiguous()

    def gate_up(
        self, x: Tensor, gate: LinearMap, up: LinearMap, activation: Activation, norm: RmsNorm | None = None
    ) -> Tensor:
        x = x if norm is None else self.rms_norm(x, *norm)
        return gated(self.linear(x, *gate), self.linear(x, *up), activation)

    def act_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return gated(gate, up, activation)

    def stack_experts(self, experts: Sequence[ExpertMaps]) -> ExpertStack:
        return ExpertStack(tuple(experts))

    def route(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None, factors: Tensor | None = None
    ) -> Routed:
        return routing_module.route(logits, routing, bias, factors)

    def experts(
        self,
        x: Tensor,
        routed: Routed,
        stack: ExpertStack,
        activation: Activation,
        residual: Tensor | None = None,
        shared: SharedExpert | None = None,
        weigh_inputs: bool = False,
    ) -> Tensor:
        made = x.new_empty((*routed.chosen.shape, x.shape[1]))
        for index in sorted(set(routed.chosen.flatten().tolist())):
            tokens, place = (routed.chosen == index).nonzero(as_tuple=True)
            gate, up, down = stack.maps[index]
            read = x[tokens] if not weigh_inputs else routing_module.weighed(x[tokens], routed.weights[tokens, place])
            made[tokens, place] = self.linear(self.gate_up(read, gate, up, activation), *down)
        return self.sum_experts(made, routed.unweighted() if weigh_inputs else routed, residual, shared)

    def sum_experts(
        self, made: Tensor, routed: Routed, residual: Tensor | None = None, shared: SharedExpert | None = None
    ) -> Tensor:
        return routing_module.sum_experts(made, routed.weights, residual, shared)

    def prepare_low_rank(self, product: LowRank) -> LowRank:
        down, up = (half.to(self.device, torch.float32, copy=True) for half in (product.down, product.up))
        return LowRank(down, up, product.scale)

    def new_table(self, outputs: int, inputs: int, slots: int) -> PlainTable:  # noqa: ARG002 (the contract's arguments)
        return PlainTable(slots)

    def adapt(
        self, x: Tensor, tables: Sequence[LowRankTable], outs: Sequence[Tensor], adapter_slots: AdapterSlots
    ) -> None:
        adapt(x, tables, outs, adapter_slots)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return _ACTIVATIONS[activation](x)

    def add(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return x + y if scale == 1.0 else x + y * scale

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    def rms_norms(self, xs: Sequence[Tensor], norms: Sequence[RmsNorm]) -> list[Tensor]:
        return [self.rms_norm(x, *norm) for x, norm in zip(xs, norms, strict=True)]

    def gated_norm(self, x: Tensor, norm: RmsNorm, gate: Tensor) -> Tensor:
        return self.act_mul(gate, self.rms_norm(x, *norm).view(gate.shape), "silu")

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)

    def scale_queries(self, query: Tensor, positions: Tensor, scaling: TemperatureScaling) -> Tensor:
        steps = (positions + scaling.offset) // scaling.length
        factors = 1 + scaling.beta * torch.log1p(steps.float())
        return (query.float() * factors.view(-1, 1, 1)).to(query.dtype)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        cos, sin = rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)  # [tokens, 1, pairs]
        dims = 2 * cos.shape[-1]
        rotated, rest = x[..., :dims].float(), x[..., dims:]
        if rotation.pairing == "half":
            a, b = rotated.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        out = out.to(x.dtype)
        return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out

    def rotation(self, positions: Tensor, inv_freq: Tensor, mscale: float, pairing: Pairing) -> Rotation:
        angles = positions.float().unsqueeze(1) * inv_freq
        return Rotation(angles.cos() * mscale, angles.sin() * mscale, pairing)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap

    def attention(
        self,
        query: Tensor,
        store: PageStore,
        layer: int,
        paging: Paging,
        mask: AttentionMask,
        new: NewKV | None = None,
    ) -> Tensor:
        if new is not None:
            query = write_new(self, query, store, layer, paging, new)
        pages = _own(store)
        out = torch.empty(
            (query.shape[0], query.shape[1], pages.shape.value_dim), dtype=query.dtype, device=query.device
        )
        for row in range(len(paging.starts) - 1):
            for start in range(paging.starts[row], paging.starts[row + 1], QUERY_BLOCK):
                block = slice(start, min(start + QUERY_BLOCK, paging.starts[row + 1]))
                out[block] = _attend_block(
                    query[block], pages, layer, paging.tables[row], paging.positions[block], mask
                )
        return out

    def causal_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, place: StatePlace) -> Tensor:
        return recurrent.causal_conv(x, weight, bias, silu, place)

    def gated_delta(
        self, mixed: Tensor, step: Tensor, beta: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace
    ) -> Tensor:
        return recurrent.gated_delta(mixed, step, beta, decay, heads, place)

    def mamba2(
        self, mixed: Tensor, step: Tensor, skip: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace
    ) -> Tensor:
        return recurrent.mamba2(mixed, step, skip, decay, heads, place)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)

    def key_mass(
        self, query: Tensor, store: PageStore, layer: int, table: Tensor, positions: Tensor, mask: AttentionMask
    ) -> Tensor:
        pages, first = _own(store), first_seen(positions, mask)
        at = torch.arange(first, int(positions.max()) + 1, device=query.device)
        slots = table[at // pages.shape.page_tokens] * pages.shape.page_tokens + at % pages.shape.page_tokens
        keys, _ = _kept(pages, layer, slots)
        return key_mass(query.float(), keys, first, positions, mask)

    def new_pages(self, shape: PageShape, pages: int, device: torch.device) -> ReferencePages:
        slots = (shape.layers, pages * shape.page_tokens, shape.kv_heads)
        # Not zeroed: the system hands memory out when a page is first written, so unused room costs nothing.
        return ReferencePages(
            shape,
            torch.empty((*slots, shape.key_dim), dtype=shape.dtype.storage, device=device),
            torch.empty((*slots, shape.value_width), dtype=shape.dtype.value_storage, device=device),
            torch.empty((*slots, shape.scales), device=device),
            torch.empty((*slots, shape.scales), device=device),
        )

    def write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        pages = _own(store)
        keys = keys if rotation is None else self.rotate(keys.float(), rotation)
        dtype = pages.shape.dtype
        _put(dtype, pages.keys[layer], pages.key_scales[layer], slots, keys)
        if dtype.packed_values:
            pages.values[layer, slots], pages.value_scales[layer, slots] = pack_values(values.float())
        else:
            _put(dtype, pages.values[layer], pages.value_scales[layer], slots, values)

    def rotate_and_write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation,
    ) -> Tensor:
        self.write(store, layer, slots, keys, values, rotation)
        return self.rotate(query, rotation)

    def interpolate(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        interpolation: Interpolation,
        kept: tuple[Tensor, Tensor],
        fresh: tuple[Tensor, Tensor],
        rotation: Rotation | None = None,
    ) -> None:
        keys, values = (_interpolated(interpolation, own, new) for own, new in zip(kept, fresh, strict=True))
        self.write(store, layer, slots, keys, values, rotation)

    def copy_pages(self, source: PageStore, sources: list[int], target: PageStore, targets: list[int]) -> None:
        here, there = _own(source), _own(target)
        size = here.shape.page_tokens
        for a, b in zip(sources, targets, strict=True):
            for read, written in zip(_tensors(here), _tensors(there), strict=True):
                written[:, b * size : (b + 1) * size] = read[:, a * size : (a + 1) * size]

    def read_slots(self, store: PageStore, slots: Tensor) -> KeysValues:
        return KeysValues(*self.copy_out(store, slots).wait())

    def copy_out(self, store: PageStore, slots: Tensor) -> HostCopy:
        pages = _own(store)
        parts = [pages.keys[:, slots], pages.values[:, slots]]  # copies, so that the pages may change
        if pages.shape.scales:
            parts += [pages.key_scales[:, slots, :, 0], pages.value_scales[:, slots, :, 0]]
        return self.host_copies.download(parts)

    def write_slots(self, store: PageStore, slots: Tensor, kv: KeysValues) -> None:
        pages = _own(store)
        given = [kv.keys, kv.values, *((kv.key_scales, kv.value_scales) if pages.shape.scales else ())]
        for keys, values, *scales in self.host_copies.uploads([given]):
            pages.keys[:, slots], pages.values[:, slots] = keys, values
            if scales:
                pages.key_scales[:, slots, :, 0], pages.value_scales[:, slots, :, 0] = scales


def _attend_block(
    query: Tensor, pages: ReferencePages, layer: int, table: Tensor, positions: Tensor, mask: AttentionMask
) -> Tensor:
    """One block of one row's queries over exactly the keys that some query of the block may see."""
    high = int(positions.max()) + 1
    low = int(mask.first_seen(positions).min())
    at = torch.arange(low, high, device=query.device)
    size = pages.shape.page_tokens
    slots = table[at // size] * size + at % size
    keys, values = _kept(pages, layer, slots)
    (tokens, heads, dim), kv_heads = query.shape, keys.shape[1]
    query = query.float()
    # Heads that share keys stand together: [kv_heads, group * tokens, dim].
    q = query.view(tokens, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.matmul(q, keys.permute(1, 2, 0)).view(kv_heads, -1, tokens, high - low) * mask.scale
    if mask.soft_cap:
        scores = mask.soft_cap * torch.tanh(scores / mask.soft_cap)
    hidden = at > positions.unsqueeze(1)  # [tokens, keys]
    if mask.window:
        hidden |= at < mask.first_seen(positions).unsqueeze(1)
    weights = softmax_with_sinks(scores.masked_fill_(hidden, float("-inf")), mask.sinks)
    values = values.masked_fill(hidden.all(0).view(-1, 1, 1), 0.0)  # never written, perhaps: 0 * NaN is NaN
    mixed = torch.matmul(weights.flatten(1, 2), values.permute(1, 0, 2))
    return mixed.view(kv_heads, -1, tokens, values.shape[-1]).permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def _kept(pages: ReferencePages, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [tokens, kv_heads, query_dim] and values of some slots, in float32."""
    keys, values = pages.keys[layer, slots].float(), pages.values[layer, slots]
    values = unpack_values(values) if pages.shape.dtype.packed_values else values.float()
    if pages.shape.scales:
        keys, values = keys * pages.key_scales[layer, slots], values * pages.value_scales[layer, slots]
    return (torch.cat((keys, values), dim=-1) if pages.shape.latent else keys), values


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up; that of gpt-oss clamps both and adds 1 to `up`."""
    if activation != "swiglu_oai":
        return _ACTIVATIONS[activation](gate) * up
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)


def _plain(weight: Prepared) -> Tensor:
    assert not isinstance(weight, PackedWeight), "a weight packed by another backend"
    return dequantize(weight) if isinstance(weight, QuantTensor) else weight


def _put(dtype: KVDtype, numbers: Tensor, scales: Tensor, slots: Tensor, x: Tensor) -> None:
    """`x` [tokens, heads, dim] into `slots` of one layer, as the numbers that are kept there."""
    if dtype.scaled_to is not None:
        x, scale = _scaled(x.float(), dtype.scaled_to)
        scales.index_copy_(0, slots, scale)
        x = x if dtype.storage.is_floating_point else x.round()
    numbers[slots] = x.to(numbers.dtype)  # not index_copy_, which torch lacks for float8


def _scaled(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """The numbers, scaled so that the largest of each token and head is `largest`, and their scales [..., 1]."""
    if not x.shape[-1]:
        return x, torch.zeros((*x.shape[:-1], 1), device=x.device)
    scale = x.abs().amax(-1, keepdim=True) / largest
    scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 0.0)  # one over it would be no number
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    scaled = x * inverse
    return torch.where(scaled > -largest, scaled, -largest).clamp(max=largest), scale


def _tensors(pages: ReferencePages) -> tuple[Tensor, ...]:
    return pages.keys, pages.values, pages.key_scales, pages.value_scales


def _own(store: PageStore) -> ReferencePages:
    assert isinstance(store, ReferencePages)
    return store


def _interpolated(how: Interpolation, kept: Tensor, fresh: Tensor) -> Tensor:
    change = (fresh.float() - kept[how.anchors].float()).flatten(1)
    return torch.addmm(kept[how.tokens].float().flatten(1), how.weights, change).view(-1, *kept.shape[1:])
