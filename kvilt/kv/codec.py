"""The bytes of a serialized cache: self-describing, versioned, checksummed.

    magic 8 | version u32 | header length u64 | header (JSON) | payload | sha256 of all before

Payload, row by row: token ids (int64), hashes of embedding rows (32 bytes each), then per layer group the keys and the
values as [layer, token, head, dim] in the layout's dtype (values of 4 bits two to a byte) and, where that has scales,
the scales of both as float32 [layer, token, head], all little endian. Recurrent states follow, each as one token of one
head: the tails of its layers as keys, their memories as values, in float32. Refuses to know pages and pools.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..errors import BlobError
from ..ops.contract import KeysValues, PageShape, StateShape
from ..ops.kv_dtypes import KV_DTYPES
from .identity import Identity
from .layout import Full, KVLayout, Latent, LayerGroup, Reach, RecurrentGroup, Window
from .row import EMBEDDED, HASH_BYTES, RowImage, maker_parts
from .row_states import RowStateImages

MAGIC = b"KVILTKV\0"
VERSION = 1
DIGEST_BYTES = 32
_PREFIX = struct.Struct("<8sIQ")
_MAX_HEADER_BYTES = 1 << 26
_MAX_TOKENS = 1 << 40
_MAX_EXTENT = 1 << 20
_IDENTITY_FIELDS = ("model", "adapter", "origin", "salt")


@dataclass(frozen=True, slots=True)
class RowFacts:
    """One row of a serialized cache, without its KV."""

    length: int
    embedded: int  # tokens that were embedding rows
    firsts: tuple[int, ...]  # per group, the oldest position held
    tokens: tuple[int, ...]  # the first few ids; -1 where an embedding row stood
    states: tuple[int, ...] = ()  # where its recurrent states are


@dataclass(frozen=True, slots=True)
class Description:
    """What a serialized cache says of itself."""

    identity: Identity
    layout: KVLayout  # pages of one token: bytes do not remember pages
    rows: tuple[RowFacts, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _RowHeader:
    length: int
    embeds: list[int]  # positions of embedding rows, ascending
    firsts: list[int]
    states: list[int] | None = None  # positions of recurrent states, ascending; None: the layout has none

    def fields(self) -> dict[str, Any]:
        """As the header has it."""
        fields = {"length": self.length, "embeds": self.embeds, "firsts": self.firsts}
        return fields if self.states is None else {**fields, "states": self.states}


def pack(images: Sequence[RowImage], layout: KVLayout, identity: Identity) -> bytes:
    """The bytes of these rows."""
    rows = [_header_of(image) for image in images]
    fields = {"identity": asdict(identity), "layout": layout.describe(), "rows": [row.fields() for row in rows]}
    header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    parts = [_PREFIX.pack(MAGIC, VERSION, len(header)), header]
    for image in images:
        parts.append(image.ids.tobytes())
        parts += [image.embeds[position] for position in sorted(image.embeds)]
        for kv in image.groups:
            parts += map(_to_bytes, (kv.keys, kv.values, kv.key_scales, kv.value_scales))
        if image.states is not None:
            parts += map(_to_bytes, (image.states.numbers.keys, image.states.numbers.values))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.digest()])


def _header_of(image: RowImage) -> _RowHeader:
    states = None if image.states is None else list(image.states.positions)
    return _RowHeader(image.length, sorted(image.embeds), list(image.firsts), states)


def unpack(
    data: bytes, layout: KVLayout, identity: Identity, capacity: int, accept_numerics: bool = False
) -> list[RowImage]:
    """The rows in these bytes, if every doubt about them is settled; otherwise a BlobError that names the field."""
    fields, payload = _open(data)
    _check_identity(fields.get("identity"), identity, accept_numerics)
    # Read as well as compared: to Python true and 1.0 equal 1, and no layout is written that way.
    if fields.get("layout") != layout.describe() or _read_layout(fields["layout"]).describe() != layout.describe():
        raise BlobError("layout", "KV of another shape than this model's; it belongs to another model")
    rows = _row_headers(fields, layout, capacity, payload)
    images, at = [], 0
    for row in rows:
        images.append(_row_image(row, layout, payload[at : at + _row_bytes(row, layout)], identity))
        at += _row_bytes(row, layout)
    return images


def max_bytes(kv_bytes: int, rows: int, capacity: int) -> int:
    """The most bytes that a cache with so much KV can take, where each row holds up to `capacity` tokens."""
    frame = _PREFIX.size + _MAX_HEADER_BYTES + DIGEST_BYTES
    return frame + kv_bytes + rows * capacity * (8 + HASH_BYTES)


def describe(data: bytes | memoryview, first_tokens: int = 16) -> Description:
    """What a serialized cache says of itself, once frame, checksum and every count are right; needs no model."""
    fields, payload = _open(data)
    identity = Identity(**_names(fields.get("identity")))
    layout = _read_layout(fields.get("layout"))
    rows = _row_headers(fields, layout, _MAX_TOKENS, payload)
    facts, at = [], 0
    for row in rows:
        ids = array("q", bytes(payload[at : at + 8 * min(row.length, first_tokens)]))
        facts.append(RowFacts(row.length, len(row.embeds), tuple(row.firsts), tuple(ids), tuple(row.states or ())))
        at += _row_bytes(row, layout)
    return Description(identity, layout, tuple(facts), len(data))


def _open(data: bytes | memoryview) -> tuple[dict[str, Any], memoryview]:
    """Header fields and payload of a blob whose frame and checksum are right."""
    try:
        view = memoryview(data).cast("B")
    except TypeError:
        raise BlobError("data", f"a serialized KV cache is bytes, not {type(data).__name__}") from None
    if len(view) < _PREFIX.size + DIGEST_BYTES:
        raise BlobError("size", f"{len(view)} bytes are too few for a serialized KV cache")
    magic, version, header_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise BlobError("magic", "these bytes are not a serialized KV cache")
    if version != VERSION:
        raise BlobError("version", f"format {version} cannot be read here, only {VERSION}; compute the KV again")
    body = len(view) - _PREFIX.size - DIGEST_BYTES
    if header_bytes > min(body, _MAX_HEADER_BYTES):
        raise BlobError("header", f"a header of {header_bytes} bytes does not fit; the blob is cut short or damaged")
    if hashlib.sha256(view[:-DIGEST_BYTES]).digest() != bytes(view[-DIGEST_BYTES:]):
        raise BlobError("checksum", "the bytes were damaged after they were written; compute the KV again")
    header = bytes(view[_PREFIX.size : _PREFIX.size + header_bytes])
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise BlobError("header", f"not readable as JSON ({type(error).__name__})") from None
    if not isinstance(fields, dict):
        raise BlobError("header", "not an object")
    return fields, view[_PREFIX.size + header_bytes : -DIGEST_BYTES]


def _names(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or found.keys() != {field.name for field in fields_of(Identity)}:
        raise BlobError("identity", "missing or incomplete")
    if not all(isinstance(value, str) for value in found.values()):
        raise BlobError("identity", "not made of names")
    return found


def _row_headers(fields: dict[str, Any], layout: KVLayout, capacity: int, payload: memoryview) -> list[_RowHeader]:
    rows = [_row_header(row, layout, capacity) for row in _list(fields, "rows")]
    if not rows:
        raise BlobError("rows", "there is none; a cache has at least one")
    expected = sum(_row_bytes(row, layout) for row in rows)
    if expected != len(payload):
        raise BlobError("payload", f"the header promises {expected} bytes and {len(payload)} are there")
    return rows


def _check_identity(found: Any, own: Identity, accept_numerics: bool) -> None:
    expected = asdict(own)
    found = _names(found)
    for field in _IDENTITY_FIELDS:
        if found[field] != expected[field]:
            how = f"; to take it as it is, give origin={found[field][:80]!r}" if field == "origin" else ""
            raise BlobError(f"identity.{field}", f"this KV was made by another model, adapter, recipe or tenant{how}")
    if not accept_numerics and found["numerics"] != expected["numerics"]:
        raise BlobError(
            "identity.numerics",
            f"made with {found['numerics'][:80]!r}, this is {expected['numerics']!r}; "
            "open it through the executor to compute it again, or accept it as it is",
        )


def _read_layout(found: Any) -> KVLayout:
    """The inverse of `KVLayout.describe`."""
    groups = found.get("groups") if isinstance(found, dict) else None
    if not isinstance(groups, list) or not groups:
        raise BlobError("layout", "missing or without layer groups")
    layout = KVLayout(
        tuple(map(_read_group, groups)), _read_recurrent(found.get("recurrent")), _read_bare(found.get("bare", []))
    )
    paged = [layer for group in layout.groups for layer in group.layers]
    states = () if layout.recurrent is None else layout.recurrent.layers
    once = all(len(set(each)) == len(each) for each in (paged, states, layout.bare))
    both = not {*layout.bare}.isdisjoint((*paged, *states))
    if not once or both or {*paged, *states, *layout.bare} != set(range(layout.num_layers)):
        raise BlobError("layout.layers", "not every layer of a model, once with KV, with a state, with both or bare")
    return layout


def _read_bare(found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(_count(one, _MAX_EXTENT) for one in found):
        raise BlobError("layout.bare", "not numbers of layers")
    return tuple(found)


def _read_recurrent(found: Any) -> RecurrentGroup | None:
    if found is None:
        return None
    if not isinstance(found, dict):
        raise BlobError("layout.recurrent", "not an object")
    layers, tail, memory = (_list(found, name, "layout.recurrent.") for name in ("layers", "tail", "memory"))
    if not layers or not all(_count(one, _MAX_EXTENT) for one in (*layers, *tail, *memory)):
        raise BlobError("layout.recurrent", "not made of layers and sizes")
    match tail, memory:
        case [channels, inputs], [heads, keys, values]:
            return RecurrentGroup(tuple(layers), StateShape(len(layers), (channels, inputs), (heads, keys, values)))
        case _:
            raise BlobError("layout.recurrent", "a tail has two sizes, and a memory three")


def _read_group(found: Any) -> LayerGroup:
    if not isinstance(found, dict):
        raise BlobError("layout", "a layer group is not an object")
    layers, dtype = _list(found, "layers", "layout."), KV_DTYPES.get(str(found.get("dtype")))
    if dtype is None:
        raise BlobError("layout.dtype", f"not one of {', '.join(KV_DTYPES)}")
    if not layers or not all(_count(layer, _MAX_EXTENT) for layer in layers):
        raise BlobError("layout.layers", "not numbers of layers")
    heads, key_dim, value_dim = (_extent(found, name) for name in ("kv_heads", "key_dim", "value_dim"))
    reach = _read_reach(found.get("reach"))
    shape = PageShape(len(layers), 1, heads, key_dim, value_dim, dtype, isinstance(reach, Latent))
    return LayerGroup(reach, tuple(layers), shape)


def _extent(found: dict[str, Any], name: str) -> int:
    value = found.get(name)
    if not _count(value, _MAX_EXTENT):
        raise BlobError(f"layout.{name}", "not a size")
    return value


def _read_reach(found: Any) -> Reach:
    match found:
        case {"kind": "full"}:
            return Full()
        case {"kind": "window", "tokens": tokens} if _count(tokens, _MAX_TOKENS) and tokens:
            return Window(tokens)
        case {"kind": "latent", "rope_dims": dims} if _count(dims, _MAX_EXTENT):
            return Latent(dims)
        case _:
            raise BlobError("layout.reach", "not a reach that is known here")


def _row_header(entry: Any, layout: KVLayout, capacity: int) -> _RowHeader:
    length, embeds, firsts = _row_fields(entry, len(layout.groups))
    if length > capacity:
        raise BlobError("rows.length", f"{length} tokens are more than this cache may hold ({capacity})")
    for group, first in zip(layout.groups, firsts, strict=True):
        if first > group.first_needed(length):
            raise BlobError("rows.firsts", f"KV from position {first} on is too little for length {length}")
    states = None
    if layout.recurrent is not None:
        states = _list(entry, "states", "rows.")
        if not all(_count(p, length) and p for p in states) or states != sorted(set(states)):
            raise BlobError("rows.states", "not ascending positions inside the row")
    return _RowHeader(length, embeds, firsts, states)


def _row_fields(entry: Any, groups: int) -> tuple[int, list[int], list[int]]:
    if not isinstance(entry, dict):
        raise BlobError("rows", "a row is not an object")
    length = entry.get("length")
    if not _count(length, _MAX_TOKENS):
        raise BlobError("rows.length", "not a length")
    embeds, firsts = _list(entry, "embeds", "rows."), _list(entry, "firsts", "rows.")
    if not all(_count(p, length - 1) for p in embeds) or embeds != sorted(set(embeds)):
        raise BlobError("rows.embeds", "not ascending positions inside the row")
    if len(firsts) != groups or not all(_count(first, length) for first in firsts):
        raise BlobError("rows.firsts", "not one position inside the row for each layer group")
    return length, embeds, firsts


def _row_image(row: _RowHeader, layout: KVLayout, payload: memoryview, identity: Identity) -> RowImage:
    ids = array("q", bytes(payload[: 8 * row.length]))
    at = 8 * row.length
    embeds = {}
    for position in row.embeds:
        embeds[position] = bytes(payload[at : at + HASH_BYTES])
        at += HASH_BYTES
    if any((token == EMBEDDED) != (i in embeds) or token < EMBEDDED for i, token in enumerate(ids)):
        raise BlobError("payload.tokens", "a token id is negative")
    groups = []
    for group, first in zip(layout.groups, row.firsts, strict=True):
        size = sum(_part_bytes(group.shape, row.length - first))
        groups.append(_keys_values(payload[at : at + size], group.shape, row.length - first))
        at += size
    made, states = (identity.origin, *maker_parts(identity.adapter)), None
    if layout.recurrent is not None and row.states is not None:
        numbers = _keys_values(payload[at:], layout.recurrent.shape.page, len(row.states))
        states = RowStateImages(tuple(row.states), numbers)
    return RowImage(ids, embeds, tuple(row.firsts), tuple(groups), *made, states)


def _row_bytes(row: _RowHeader, layout: KVLayout) -> int:
    held = zip(layout.groups, row.firsts, strict=True)
    kv_bytes = sum(sum(_part_bytes(group.shape, row.length - first)) for group, first in held)
    if layout.recurrent is not None and row.states is not None:
        kv_bytes += sum(_part_bytes(layout.recurrent.shape.page, len(row.states)))
    return 8 * row.length + HASH_BYTES * len(row.embeds) + kv_bytes


def _part_bytes(shape: PageShape, tokens: int) -> tuple[int, int, int, int]:
    """Of keys, values, scales of keys, scales of values."""
    heads = shape.layers * tokens * shape.kv_heads
    keys, values = shape.key_dim * shape.dtype.storage.itemsize, shape.value_width * shape.dtype.value_storage.itemsize
    scales = heads * shape.scales * torch.float32.itemsize
    return heads * keys, heads * values, scales, scales


def _keys_values(data: memoryview, shape: PageShape, tokens: int) -> KeysValues:
    heads, at, parts = (shape.layers, tokens, shape.kv_heads), 0, []
    extents: list[tuple[int, ...]] = [(*heads, shape.key_dim), (*heads, shape.value_width)]
    extents += [heads if shape.scales else (0,)] * 2
    dtypes = (shape.dtype.storage, shape.dtype.value_storage, torch.float32, torch.float32)
    for size, dtype, extent in zip(_part_bytes(shape, tokens), dtypes, extents, strict=True):
        parts.append(_from_bytes(data[at : at + size], dtype, extent))
        at += size
    return KeysValues(*parts)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _from_bytes(data: memoryview, dtype: torch.dtype, extent: tuple[int, ...]) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).view(extent) if len(data) else torch.empty(extent, dtype=dtype)
    )


def _count(value: Any, limit: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= limit


def _list(fields: dict[str, Any], name: str, inside: str = "") -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise BlobError(inside + name, "missing or not a list")
    return value
