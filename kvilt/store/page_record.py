"""One page of a prefix as the bytes of a record, to be sent to another process and checked there like a stored one.

The bytes are those that a tier would hold: canonical order, a digest for each layer, and a seal over the header that is
an HMAC where there is a secret. Refuses to know how they travel.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import BlobError
from ..kv.evicted_page import EvictedPage
from ..kv.layout import KVLayout
from ..kv.row import RowImage
from ..kv.row_states import RowStateImages
from ..ops.contract import KeysValues
from .address import Address
from .codecs import Data, Raw
from .layer import LayerKV, owned, stacked
from .loading import row_image
from .record import RecordHeader, pack, read_content, read_header, read_layer
from .row_layers import empty_layer, layer_slice, per_layer


def page_layers(layout: KVLayout, address: Address, page: EvictedPage) -> list[LayerKV]:
    """The layers of a page, in the model's order; a group that the page lacks has layers without tokens."""
    groups = (*page.kv, page.state)
    layers = []
    for place, form in zip(layout.places(), address.form, strict=True):
        kv = groups[place.group]
        layers.append(empty_layer(form) if kv is None else LayerKV(*layer_slice(kv, place.layer)))
    return layers


def page_firsts(layout: KVLayout, page: EvictedPage) -> tuple[int, ...]:
    """The first position that each layer of a page holds."""
    end = len(page.tokens)
    states = end if page.state is None else end - 1
    return per_layer(layout, (*(end if kv is None else page.start for kv in page.kv), states))


def pack_page(address: Address, layout: KVLayout, page: EvictedPage, secret: bytes) -> bytes:
    """A page as a sealed record; waits until its numbers are on the host."""
    page.wait()
    codec = Raw()
    frames = [codec.encode(one) for one in owned(page_layers(layout, address, page))]
    return b"".join(pack(address.with_firsts(page_firsts(layout, page)), codec, frames, secret))


def read_page(data: bytes, address: Address, layout: KVLayout, secret: bytes) -> RowImage:
    """The page in a record, if its seal, its identity and every token of it are those of the address.

    Anything else is a BlobError.
    """
    view = memoryview(data)

    def read(offset: int, size: int) -> Data:
        return view[offset : offset + size]

    header = read_header(read, len(data), secret)
    if header.codec != Raw().name:
        raise BlobError("codec", "pages are sent as they are")
    read_content(read, header, address)
    layers = [read_layer(read, header, Raw(), index)[1] for index in range(len(header.form))]
    return _image(address, header, layout, layers)


def _image(address: Address, header: RecordHeader, layout: KVLayout, layers: list[LayerKV]) -> RowImage:
    groups, firsts = [], []
    for group in range(len(layout.groups)):
        places = layout.places_in(group)
        starts = {header.firsts[index] for index in places}
        if len(starts) != 1:
            raise BlobError("firsts", "layers of one group begin at different positions")
        firsts.append(starts.pop())
        parts = zip(*(layers[index].parts for index in places), strict=True)
        groups.append(KeysValues(*map(stacked, parts)))
    states = None
    if layout.recurrent is not None:
        places = layout.places_in(layout.state_group)
        own = [layers[index] for index in places]
        there = {header.firsts[index] for index in places} == {address.tokens - 1}
        numbers = KeysValues(stacked([one.keys for one in own]), stacked([one.values for one in own]))
        states = RowStateImages((address.tokens,) if there else (), numbers)
    return replace(row_image(address, tuple(firsts), tuple(groups)), states=states)
