"""Pages of the native backend and what is done to them: writing, copying, reading, attention over them.

Refuses to know weights: kernels see pages, slots, positions and queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import Unsupported
from ..contract import AttentionMask, Interpolation, KeysValues, PageShape, PageStore, Paging, Rotation
from ..mass import first_seen
from ..mass import key_mass as attention_mass
from .border import F32, FLOATS, I64, F32Address, check, check_dims, checked, f32, floats, i64
from .memory import Buffers

if TYPE_CHECKING:
    from _kvilt_native import KernelRunner, KVDtype, PageLayer

_MOST_TOKENS = 128  # of a page: a tile of the kernels is made of whole pages


@dataclass(frozen=True, slots=True)
class NativePages:
    """Pages one after the other, each with all layers; the order inside is the kernels' own."""

    shape: PageShape
    data: Tensor  # uint8 [pages, bytes]
    layers: tuple[PageLayer, ...]  # handles for the kernels


def new_pages(shape: PageShape, pages: int, device: torch.device) -> NativePages:
    """Room for `pages` pages."""
    import _kvilt_native as module

    if device.type != "cpu" or shape.dtype.name not in module.KVDtype.__members__:
        known = ", ".join(module.KVDtype.__members__)
        raise Unsupported(f"the native backend keeps pages of {known} on the CPU, not {shape.dtype.name} on {device}")
    if shape.page_tokens > _MOST_TOKENS:
        raise Unsupported(f"a page of the native backend holds at most {_MOST_TOKENS} tokens, not {shape.page_tokens}")
    dtype = module.KVDtype[shape.dtype.name]
    head_bytes = module.head_bytes(dtype, shape.page_tokens, shape.key_dim, shape.value_dim)
    # Not zeroed: the system hands memory out when a page is first written, so unused room costs nothing.
    data = torch.empty((pages, shape.layers * shape.kv_heads * head_bytes), dtype=torch.uint8)
    module.use_huge_pages(data)
    sizes = (shape.page_tokens, shape.kv_heads, shape.key_dim, shape.value_dim, shape.layers)
    layers = tuple(module.PageLayer(dtype, data, *sizes, layer) for layer in range(shape.layers))
    return NativePages(shape, data, layers)


def attention(
    runner: KernelRunner,
    buffers: Buffers,
    query: Tensor,
    store: PageStore,
    layer: int,
    paging: Paging,
    mask: AttentionMask,
) -> Tensor:
    """Attention of `query` [tokens, heads, dim] over the pages of each token's row, by position."""
    pages, query = own(store), query.contiguous()
    _check_query(pages.shape, query, paging)
    out = buffers.empty(query.shape[0], query.shape[1], pages.shape.value_dim)
    tables, positions = paging.tables.contiguous(), paging.positions.contiguous()
    where = (i64(tables), tables.shape[1], list(paging.starts), i64(positions))
    if pages.shape.latent:
        check(not mask.window and not mask.soft_cap and mask.sinks is None, "mask", "latent attention sees every key")
        runner.latent_attention(f32(query), query.shape[1], pages.layers[layer], *where, mask.scale, f32(out))
        return out
    sinks = None if mask.sinks is None else checked("sinks", mask.sinks, (query.shape[1],))
    runner.attention(
        f32(query), query.shape[1], pages.layers[layer], *where,
        mask.scale, mask.window, mask.soft_cap, mask.chunked, f32(sinks), f32(out),
    )  # fmt: skip
    return out


def key_mass(
    runner: KernelRunner,
    query: Tensor,
    store: PageStore,
    layer: int,
    table: Tensor,
    positions: Tensor,
    mask: AttentionMask,
) -> Tensor:
    """Attention that each key of one row receives. In plain torch, on a copy of the row's keys in this layer."""
    pages, first = own(store), first_seen(positions, mask)
    size = pages.shape.page_tokens
    at = torch.arange(first, int(positions.max()) + 1)
    kv = _read(runner, pages, [layer], table[at // size] * size + at % size)
    keys = kv.keys[0].float()
    if pages.shape.scales:
        keys = keys * kv.key_scales[0].unsqueeze(-1)
    if pages.shape.latent:
        values = kv.values[0].float()
        keys = torch.cat((keys, values * kv.value_scales[0].unsqueeze(-1) if pages.shape.scales else values), dim=-1)
    return attention_mass(query, keys, first, positions, mask)


def write(
    runner: KernelRunner,
    store: PageStore,
    layer: int,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    rotation: Rotation | None = None,
) -> None:
    """Put `keys` and `values` [tokens, kv_heads, dim] of one layer into `slots`."""
    pages, slots = own(store), _slots(slots)
    keys, values = _heads(pages.shape, keys, values, len(slots))
    rotated = _rotation_args(rotation, len(slots), pages.shape.key_dim)
    runner.write(pages.layers[layer], i64(slots), len(slots), f32(keys), f32(values), *rotated)


def interpolate(
    runner: KernelRunner,
    store: PageStore,
    layer: int,
    slots: Tensor,
    interpolation: Interpolation,
    kept: tuple[Tensor, Tensor],
    fresh: tuple[Tensor, Tensor],
    rotation: Rotation | None = None,
) -> None:
    """Put what tokens take over from the anchors into `slots`."""
    pages, slots = own(store), _slots(slots)
    tokens = checked("tokens", interpolation.tokens.contiguous(), (len(slots),), I64)
    anchors = checked("anchors", interpolation.anchors.contiguous(), (interpolation.anchors.numel(),), I64)
    weights = checked("weights", interpolation.weights.float().contiguous(), (len(tokens), len(anchors)))
    new = _heads(pages.shape, *fresh, len(anchors))
    check(kept[0].dtype in FLOATS, "kept", f"must be floats, not {kept[0].dtype}")
    old = _heads(pages.shape, *kept, len(kept[0]), kept[0].dtype)
    document = (_float_dtype(old[0].dtype), len(old[0]), floats(old[0]), floats(old[1]))
    cos, sin, pairs, interleaved = _rotation_args(rotation, len(slots), pages.shape.key_dim)
    runner.interpolate(
        pages.layers[layer], i64(slots), len(slots), *document,
        i64(tokens), i64(anchors), len(anchors), f32(weights), f32(new[0]), f32(new[1]),
        cos, sin, pairs, interleaved,
    )  # fmt: skip


def _float_dtype(dtype: torch.dtype) -> KVDtype:
    """What the kernels call one of FLOATS."""
    import _kvilt_native as module

    return module.KVDtype[str(dtype).removeprefix("torch.")]


def _rotation_args(rotation: Rotation | None, tokens: int, dim: int) -> tuple[F32Address, F32Address, int, bool]:
    if rotation is None:
        return (F32Address(0), F32Address(0), 0, False)
    pairs = check_rotation(rotation, tokens, dim)
    return (f32(rotation.cos), f32(rotation.sin), pairs, rotation.pairing == "interleaved")


def check_rotation(rotation: Rotation, tokens: int, dim: int) -> int:
    """The pairs that a rotation of so many tokens turns in a head."""
    check_dims("cos", rotation.cos, 2)
    pairs = rotation.cos.shape[1]
    check(2 * pairs <= dim, "cos", f"turns {pairs} pairs of a head of {dim}")
    checked("cos", rotation.cos, (tokens, pairs))
    checked("sin", rotation.sin, (tokens, pairs))
    return pairs


def _slots(slots: Tensor) -> Tensor:
    return checked("slots", slots.contiguous(), (slots.numel(),), I64)


def _heads(
    shape: PageShape, keys: Tensor, values: Tensor, tokens: int, dtype: torch.dtype = F32
) -> tuple[Tensor, Tensor]:
    """Keys and values of some tokens, [tokens, kv_heads, dim]."""
    each = (tokens, shape.kv_heads)
    return (
        checked("keys", keys.to(dtype).contiguous(), (*each, shape.key_dim), dtype),
        checked("values", values.to(dtype).contiguous(), (*each, shape.value_dim), dtype),
    )


def _check_query(shape: PageShape, query: Tensor, paging: Paging) -> None:
    check_dims("query", query, 3)
    check_dims("tables", paging.tables, 2)
    tokens, heads, _ = query.shape
    checked("query", query, (tokens, heads, shape.query_dim))
    checked("tables", paging.tables.contiguous(), paging.tables.shape, I64)
    checked("positions", paging.positions.contiguous(), (tokens,), I64)
    check(heads % shape.kv_heads == 0, "query", f"has {heads} heads for {shape.kv_heads} of the keys")
    starts = paging.starts
    check(len(starts) == paging.tables.shape[0] + 1 and starts[0] == 0, "starts", "must begin each row of the tables")
    check(starts[-1] == tokens and list(starts) == sorted(starts), "starts", f"must ascend to {tokens} tokens")


def copy_pages(source: PageStore, sources: list[int], target: PageStore, targets: list[int]) -> None:
    """Copy whole pages, all layers."""
    here, there = own(source).data, own(target).data
    for a, b in zip(sources, targets, strict=True):
        there[b].copy_(here[a])


def read_slots(runner: KernelRunner, store: PageStore, slots: Tensor) -> KeysValues:
    """The KV in `slots`, all layers, in canonical order."""
    pages = own(store)
    return _read(runner, pages, range(pages.shape.layers), slots)


def _read(runner: KernelRunner, pages: NativePages, layers: Sequence[int], slots: Tensor) -> KeysValues:
    shape, slots = pages.shape, _slots(slots)
    each = (len(layers), len(slots), shape.kv_heads)
    keys = torch.empty((*each, shape.key_dim), dtype=shape.dtype.storage)
    values = torch.empty((*each, shape.value_width), dtype=shape.dtype.value_storage)
    kv = KeysValues(keys, values)
    if shape.scales:
        kv = KeysValues(keys, values, torch.empty(each), torch.empty(each))
    handles = [pages.layers[layer] for layer in layers]
    runner.read_slots(handles, slots, kv.keys, kv.values, kv.key_scales, kv.value_scales)
    return kv


def write_slots(runner: KernelRunner, store: PageStore, slots: Tensor, kv: KeysValues) -> None:
    """The inverse of `read_slots`."""
    pages, slots = own(store), _slots(slots)
    shape = pages.shape
    each = (shape.layers, len(slots), shape.kv_heads)
    kv = KeysValues(
        checked("keys", kv.keys.contiguous(), (*each, shape.key_dim), shape.dtype.storage),
        checked("values", kv.values.contiguous(), (*each, shape.value_width), shape.dtype.value_storage),
        _scales("key_scales", kv.key_scales, each if shape.scales else None),
        _scales("value_scales", kv.value_scales, each if shape.scales else None),
    )
    runner.write_slots(list(pages.layers), slots, kv.keys, kv.values, kv.key_scales, kv.value_scales)


def _scales(name: str, scales: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """Scales of this shape; pages without scales take tensors without elements, of any shape."""
    if shape is None:
        check(not scales.numel(), name, "must be empty for pages without scales")
    return checked(name, scales.contiguous(), scales.shape if shape is None else shape)


def own(store: PageStore) -> NativePages:
    """The store as one this backend made."""
    assert isinstance(store, NativePages)
    return store
