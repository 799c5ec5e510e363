"""Stored KV on its way through the layers of a segment: on the device one layer after the other, then in pages.

What loads and repairs of a layer read is copied to the device while earlier layers compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from torch import Tensor

from ..batch import PlacedLoad, Segment, UnrotatedKV
from ..kv.layout import LayerSlot
from ..ops.contract import Ops, PageStore, Rotation


class StoredLayers:
    """The stored KV that a segment's rows brought, on the device; `advance` once before each layer, in order."""

    def __init__(self, uploads: Iterator[list[Tensor]], items: Sequence[Sequence[Tensor]]) -> None:
        self._uploads, self._items = uploads, iter(items)
        self._there: dict[int, Tensor] = {}  # by the address of the tensor on the host

    def advance(self) -> None:
        """Go on to the next layer; what the last one had may be gone."""
        host, there = next(self._items), next(self._uploads)
        self._there = {one.data_ptr(): copied for one, copied in zip(host, there, strict=True)}

    def on_device(self, stored: UnrotatedKV) -> UnrotatedKV:
        """Stored KV of this layer, as the device has it."""
        return UnrotatedKV(self._there[stored.keys.data_ptr()], self._there[stored.values.data_ptr()])


@contextmanager
def stored_layers(segment: Segment, ops: Ops) -> Iterator[StoredLayers | None]:
    """What the rows of a segment brought; None if they brought nothing."""
    if not segment.loads and not segment.repairs:
        yield None
        return
    items = [_tensors(segment, layer) for layer in range(segment.start, segment.stop)]
    with closing(ops.host_copies.uploads(items)) as uploads:  # also where a layer fails or is cancelled
        yield StoredLayers(uploads, items)


def _tensors(segment: Segment, layer: int) -> list[Tensor]:
    """All that a layer reads, each tensor once."""
    loaded = [one for load in segment.loads for one in load.stored.get(layer, ())]
    repaired = [repair.stored[layer] for repair in segment.repairs]
    every = (*loaded, *repaired)
    parts = (*(one.keys for one in every), *(one.values for one in every))  # so that keys of texts are neighbours
    return list({part.data_ptr(): part for part in parts}.values())


def write_load(
    load: PlacedLoad,
    stored: Sequence[UnrotatedKV],
    ops: Ops,
    store: PageStore,
    place: LayerSlot,
    rotation: Rotation | None,
) -> None:
    """Write one layer of a load to its pages; `stored` is on the device, keys not rotated."""
    keys, values = _joined([one.keys for one in stored]), _joined([one.values for one in stored])
    if keys is not None and values is not None:
        stored = [UnrotatedKV(keys, values)]  # one launch for all
    at = 0
    for one in stored:
        span = slice(at, at + len(one.keys))
        turn = None if rotation is None else Rotation(rotation.cos[span], rotation.sin[span], rotation.pairing)
        ops.write(store, place.layer, load.slots[place.group][span], one.keys, one.values, turn)
        at = span.stop


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """All parts as one tensor, without a copy; None unless they follow each other in memory, as staging buffers do."""
    if not parts:
        return None
    first, end = parts[0], parts[0].data_ptr()
    for one in parts:
        same = one.dtype == first.dtype and one.shape[1:] == first.shape[1:] and one.is_contiguous()
        within = one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not within or one.data_ptr() != end:
            return None
        end += one.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
