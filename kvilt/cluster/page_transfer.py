"""Pages of prefixes from one replica's index into another's: what is asked for, and both ends of it.

A page travels as a sealed record in canonical order. The receiver compares its identity and every token before it is
used; anything that does not fit ends the transfer, and the rest is computed. Refuses to know sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from ..errors import BlobError, InputError
from ..executor.protocol import Executor
from ..kv.evicted_page import EvictedPage
from ..kv.prefix_keys import PrefixKeys, PrefixScope
from ..kv.row import BASE, RowImage
from ..store.address import Address, page_addresses
from ..store.page_record import pack_page, read_page

_RECORD_HEAD_BYTES = 1 << 20  # more than a header of any model takes
_MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class PageSpan:
    """Pages [first, stop) of a prompt, of one tenant and adapter."""

    tokens: tuple[int, ...]
    adapter: str = BASE
    salt: str = ""
    first: int = 0
    stop: int = 0

    def fields(self) -> dict[str, Any]:
        """As a message has it."""
        return asdict(self)

    @classmethod
    def of_fields(cls, fields: Any) -> PageSpan:
        """From a message; InputError where it is none."""
        match fields:
            case {"tokens": list(tokens), "adapter": str(adapter), "salt": str(salt), "first": first, "stop": stop}:
                counts = [first, stop, *tokens]
                if len(tokens) <= _MOST_TOKENS and all(type(one) is int and 0 <= one < 1 << 62 for one in counts):
                    return cls(tuple(tokens), adapter, salt, first, stop)
        raise InputError("this is no span of pages")


class PageTransfer:
    """Sends and takes the pages of one executor. Its methods may be called from any thread."""

    def __init__(
        self, executor: Executor, secret: bytes, on_evict: Callable[[EvictedPage], None] | None = None
    ) -> None:
        """`on_evict` gets pages that came from elsewhere when the index evicts them, as it gets those computed here."""
        self._executor, self._secret, self._on_evict = executor, secret, on_evict
        self._layout = executor.layout
        self._size = executor.layout.page_tokens
        tokens_bytes = 8 * executor.max_context
        self.most_record_bytes = self._layout.page_bytes + tokens_bytes + _RECORD_HEAD_BYTES

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._size

    def records(self, span: PageSpan) -> Iterator[bytes]:
        """The pages of a span that are here, from its first on without a gap, as records."""
        pages = self._executor.prefixes.pages(self._keys(span), span.first, span.stop)
        for address, page in zip(self._addresses(span), pages, strict=False):
            yield pack_page(address, self._layout, page, self._secret)

    def missing(self, span: PageSpan) -> PageSpan:
        """What of a prompt up to `stop` is not here."""
        stop = min(span.stop, len(span.tokens) // self._size)
        asked = replace(span, tokens=span.tokens[: stop * self._size], stop=stop)
        first = self._executor.prefixes.missing(self._keys(asked), stop * self._size)
        return replace(asked, first=min(first, stop))

    def reader(self, span: PageSpan) -> PageReader:
        """Takes the records of a span one after the other."""
        return PageReader(self, self._keys(span), self._addresses(span))

    def read(self, data: bytes, address: Address) -> RowImage:
        """The page of a record; BlobError where it is not the one that was asked for."""
        return read_page(data, address, self._layout, self._secret)

    def place(self, keys: PrefixKeys, images: Sequence[RowImage]) -> int:
        """Put pages into the index; how many of them found room."""
        return self._executor.prefixes.restore(keys, images, self._on_evict)

    def _keys(self, span: PageSpan) -> PrefixKeys:
        keys = PrefixKeys(PrefixScope(span.adapter, span.salt))
        keys.extend(span.tokens[: span.stop * self._size], self._size)
        return keys

    def _addresses(self, span: PageSpan) -> Iterator[Address]:
        identity = replace(self._executor.pool.identity(), adapter=span.adapter, salt=span.salt)
        tokens = span.tokens[: span.stop * self._size]
        if len(tokens) < span.stop * self._size or span.first > span.stop:
            raise InputError("a span of pages ends after its tokens")
        found = page_addresses(identity, tokens, self._layout, self._size, span.first * self._size)
        return islice(found, span.stop - span.first)


class PageReader:
    """The receiver's end of one transfer."""

    def __init__(self, transfer: PageTransfer, keys: PrefixKeys, addresses: Iterator[Address]) -> None:
        self._transfer, self._keys, self._addresses = transfer, keys, addresses
        self.pages = 0

    def take(self, records: Sequence[bytes]) -> bool:
        """Check these records and make their pages known; False where one does not fit, or there is no more room."""
        images: list[RowImage] = []
        sound = True
        for data in records:
            address = next(self._addresses, None)
            try:
                if address is None:
                    raise BlobError("count", "more pages than were asked for")
                images.append(self._transfer.read(data, address))
            except BlobError:
                sound = False
                break
        placed = self._transfer.place(self._keys, images) if images else 0
        self.pages += placed
        return sound and placed == len(images)
