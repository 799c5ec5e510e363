"""Pages of the native backend and what is done to them: writing, copying, reading, attention over them.

Refuses to know weights: kernels see pages, slots, positions and queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import Unsupported
from ..contract import AttentionMask, KeysValues, PageShape, PageStore, Paging
from .memory import Buffers

_DTYPES = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2})


@dataclass(frozen=True, slots=True)
class NativePages:
    """Keys with tokens as lanes, values with dims as lanes, so that both products run along memory."""

    shape: PageShape
    keys: Tensor  # [layers, pages, kv_heads, key_dim, lanes]
    values: Tensor  # [layers, pages, kv_heads, page_tokens, value_dim]
    layers: tuple[Any, ...]  # handles for the kernels, one per layer


def new_pages(module: Any, shape: PageShape, pages: int, device: torch.device) -> NativePages:
    """Room for `pages` pages; `module` is the compiled one."""
    if device.type != "cpu" or shape.dtype not in _DTYPES:
        raise Unsupported(f"the native backend keeps pages of floats on the CPU, not {shape.dtype} on {device}")
    lanes = -(-shape.page_tokens // 16) * 16
    keys = torch.empty((shape.layers, pages, shape.kv_heads, shape.key_dim, lanes), dtype=shape.dtype)
    values = torch.empty((shape.layers, pages, shape.kv_heads, shape.page_tokens, shape.value_dim), dtype=shape.dtype)
    sizes = (_DTYPES[shape.dtype], shape.page_tokens, lanes, shape.kv_heads, shape.key_dim, shape.value_dim)
    layers = tuple(
        module.PageLayer(*sizes, keys[layer].data_ptr(), values[layer].data_ptr()) for layer in range(shape.layers)
    )
    return NativePages(shape, keys, values, layers)


def attend(
    engine: Any, buffers: Buffers, query: Tensor, store: PageStore, layer: int, paging: Paging, mask: AttentionMask
) -> Tensor:
    """Attention of `query` [tokens, heads, dim] over the pages of each token's row, by position."""
    pages, query = own(store), query.contiguous()
    out = buffers.empty(query.shape[0], query.shape[1], pages.shape.value_dim)
    tables, positions = paging.tables.contiguous(), paging.positions.contiguous()
    where = (tables.data_ptr(), tables.shape[1], list(paging.starts), positions.data_ptr())
    sees = (mask.scale, mask.window, mask.soft_cap)
    engine.attend(query.data_ptr(), query.shape[1], pages.layers[layer], *where, *sees, out.data_ptr())
    return out


def write(engine: Any, store: PageStore, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put `keys` and `values` [tokens, kv_heads, dim] of one layer into `slots`."""
    pages, slots, keys, values = own(store), slots.contiguous(), keys.contiguous(), values.contiguous()
    engine.write(pages.layers[layer], slots.data_ptr(), len(slots), keys.data_ptr(), values.data_ptr())


def copy_pages(source: PageStore, sources: list[int], target: PageStore, targets: list[int]) -> None:
    """Copy whole pages, all layers."""
    here, there = own(source), own(target)
    there.keys[:, targets] = here.keys[:, sources]
    there.values[:, targets] = here.values[:, sources]


def read_slots(store: PageStore, slots: Tensor) -> KeysValues:
    """The KV in `slots`, all layers, in canonical order."""
    pages = own(store)
    page, at = slots // pages.shape.page_tokens, slots % pages.shape.page_tokens
    # Indices around a slice put the tokens first: [tokens, layers, heads, dim].
    keys = pages.keys[:, page, :, :, at].transpose(0, 1)
    values = pages.values[:, page, :, at].transpose(0, 1)
    return KeysValues(keys.contiguous(), values.contiguous())


def write_slots(store: PageStore, slots: Tensor, kv: KeysValues) -> None:
    """The inverse of `read_slots`."""
    pages = own(store)
    page, at = slots // pages.shape.page_tokens, slots % pages.shape.page_tokens
    pages.keys[:, page, :, :, at] = kv.keys.transpose(0, 1)
    pages.values[:, page, :, at] = kv.values.transpose(0, 1)


def own(store: PageStore) -> NativePages:
    """The store as one this backend made."""
    assert isinstance(store, NativePages)
    return store
