"""The retriever over the store: segments of prompts by their exact tokens, layers as they load."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import InputError, StoreMiss
from ..kv.identity import Identity
from ..ops.kv_dtypes import KV_DTYPES
from ..store.address import Form
from ..store.loading import Loading
from ..store.store import Store
from .interfaces import BlendRetriever, BlendRetrieverResult
from .polled import PolledTask

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Piece:
    """One segment: where it stands among all tokens, and its KV while it loads."""

    start: int
    stop: int
    loading: Loading


class StoredTask(PolledTask):
    """Segments that load from the store. Keys come unrotated, so their original positions are 0."""

    def __init__(self, pieces: Sequence[_Piece], total: int, form: Form, device: torch.device) -> None:
        self._pieces = pieces
        self._total = total
        self._form = form
        self._device = device
        self._hits: list[_Piece] | None = None
        self._all: tuple[Tensor, Tensor] | None = None  # the mask and origins of a task that found all its tokens

    def result(self, layer_id: int) -> BlendRetrieverResult:
        """One layer; StoreMiss where a segment with its first layers loaded turns out to be damaged or late."""
        if not 0 <= layer_id < len(self._form):
            raise InputError(f"layer {layer_id} does not exist; this model has layers 0 to {len(self._form) - 1}")
        hits = self._found(layer_id)
        if len(hits) == 1 and hits[0].stop - hits[0].start == self._total:  # as it is stored, without a copy
            layer = hits[0].loading.layer(layer_id)
            if self._all is None:
                self._all = torch.ones(self._total, dtype=torch.uint8), self._zeros()
            k, v = layer.keys.to(self._device), layer.values.to(self._device)
            return BlendRetrieverResult(k, v, *self._all, rotated=False)
        valid, origins = torch.zeros(self._total, dtype=torch.uint8), self._zeros()
        if not hits:
            return BlendRetrieverResult(None, None, valid, origins, rotated=False)
        form = self._form[layer_id]
        k, v = (self._room(form.heads, dim, form.dtype) for dim in (form.key_dim, form.value_dim))
        for piece in hits:
            layer, span = piece.loading.layer(layer_id), slice(piece.start, piece.stop)
            k[span], v[span], valid[span] = layer.keys.to(k), layer.values.to(v), 1
        return BlendRetrieverResult(k, v, valid, origins, rotated=False)

    @property
    def layers_ready(self) -> int:
        return min((piece.loading.layers_ready for piece in self._pieces), default=len(self._form))

    @property
    def reason(self) -> str:
        """Why one of the segments is a miss; empty as long as none is."""
        return next((piece.loading.reason for piece in self._pieces if piece.loading.reason), "")

    def settled(self, layers: int = 0) -> bool:
        each = [piece.loading.settled(layers) for piece in self._pieces]  # each is asked: its deadline begins
        return all(each)

    def patience_s(self, layers: int = 0) -> float:
        return max((piece.loading.patience_s(layers) for piece in self._pieces), default=0.0)

    def settle(self, layers: int = 0) -> None:
        for piece in self._pieces:
            piece.loading.settle(layers)

    def watch(self, notify: Callable[[], None]) -> None:
        for piece in self._pieces:
            piece.loading.watch(notify)

    def cancel(self) -> None:
        for piece in self._pieces:
            piece.loading.cancel()

    def _room(self, heads: int, dim: int, dtype: str) -> Tensor:
        return torch.empty((self._total, heads, dim), dtype=KV_DTYPES[dtype].storage, device=self._device)

    def _zeros(self) -> Tensor:
        return torch.zeros(self._total, dtype=torch.int64, device=self._device)

    def _found(self, layer_id: int) -> list[_Piece]:
        """The segments that are there; settled by the first layer that is asked for."""
        if self._hits is None:
            self._hits = [piece for piece in self._pieces if _has(piece.loading, layer_id)]
        return self._hits


class StoreRetriever(BlendRetriever):
    """Segments of one model's prompts from one store."""

    def __init__(self, store: Store, identity: Identity, form: Form, device: torch.device = _CPU) -> None:
        if any(one.scaled for one in form):
            raise InputError("chunks are kept as floats; give the form of a float dtype")
        self._store = store
        self._identity = identity
        self._form = form
        self._device = device

    def new_request(self, full_prompts: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> StoredTask:
        if len(full_prompts) != len(indices):
            raise InputError(f"{len(indices)} lists of indices were given for {len(full_prompts)} prompts")
        pieces, total = [], 0
        for prompt, starts in zip(full_prompts, indices, strict=True):
            ids = _ids(prompt)
            for start, stop in _segments(starts, len(ids)):
                loading = self._store.open_chunk(self._identity, ids[start:stop], self._form)
                pieces.append(_Piece(total + start, total + stop, loading))
            total += len(ids)
        return StoredTask(pieces, total, self._form, self._device)

    def loaded(self, loading: Loading) -> StoredTask:
        """A task for one segment whose loading has begun already."""
        tokens = loading.address.tokens
        return StoredTask([_Piece(0, tokens, loading)], tokens, self._form, self._device)


def _has(loading: Loading, layer_id: int) -> bool:
    try:
        loading.layer(layer_id)
    except StoreMiss:
        return False
    return True


def int_tensor(numbers: Sequence[int]) -> Tensor:
    """Whole numbers as a tensor [n]; several times as fast as torch reads a list."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)


def _ids(prompt: Tensor) -> list[int]:
    if prompt.dim() != 1 or prompt.is_floating_point() or prompt.dtype == torch.bool:
        raise InputError("a prompt is a 1-D tensor of token ids")
    ids: list[int] = prompt.tolist()
    return ids


def _segments(starts: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Where the segments of a prompt begin and end; empty ones are left out."""
    cuts = [0, *starts, length]
    if any(b < a for a, b in pairwise(cuts)):
        raise InputError(f"segments must start in order and inside the {length} tokens of the prompt, not at {starts}")
    return [(a, b) for a, b in pairwise(cuts) if b > a]
