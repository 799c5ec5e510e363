"""The keys by which a prefix index knows the pages of one sequence, and the scope of the KV in them.

Hashes chain over tokens, so equal keys are equal beginnings. Refuses to know pools and where pages are.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from .owner import owner_of
from .row import EMBEDDED, HASH_BYTES, Token, made_by

if TYPE_CHECKING:
    from .evicted_page import EvictedPage


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """What besides the tokens decides KV within one pool: the adapter, by content and scale, and the tenant."""

    adapter: str = "base"
    salt: str = ""  # tenant

    @property
    def owner(self) -> str:
        """The owner for which pages are counted, whatever the salt."""
        return owner_of(self.salt)

    def key(self) -> bytes:
        """Where the chains of this scope begin; no two scopes share a beginning."""
        parts = [text.encode("utf-8", "surrogatepass") for text in (self.adapter, self.salt)]
        return _digest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One page of tokens after its parent's; `pages` has GONE where a group's page was not there or was evicted."""

    key: bytes
    content: bytes
    parent: PrefixNode | None
    pages: list[int]
    scope: PrefixScope
    on_evict: Callable[[EvictedPage], None] | None = None  # gets the page when it is about to be lost
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    hits: int = 0  # sequences that began with it
    alive: bool = True
    sent: int = 0  # groups whose pages were there when `on_evict` was last called
    state: int = -1  # the slot of the recurrent state at its end; -1: there is none

    def follows(self, parent: PrefixNode | None, content: bytes, scope: PrefixScope) -> bool:
        """Whether a node found by its key is the one that was looked for: different tokens may have equal hashes."""
        return self.parent is parent and self.content == content and self.scope == scope


def tokens_of(nodes: Sequence[PrefixNode], page_tokens: int) -> list[Token]:
    """The tokens of consecutive nodes."""
    tokens: list[Token] = []
    for node in nodes:
        ids: array[int] = array("q")
        ids.frombytes(node.content[: page_tokens * ids.itemsize])
        hashes = iter(range(page_tokens * ids.itemsize, len(node.content), HASH_BYTES))
        tokens += [
            node.content[(at := next(hashes)) : at + HASH_BYTES] if token == EMBEDDED else token for token in ids
        ]
    return tokens


class PrefixKeys:
    """A key for each whole page of one sequence, and how many of them are in the index.

    With an adapter that begins later, whole pages before it are the base model's, and every sequence with the same
    tokens shares them. The keys of later pages include the position at which the adapter began.
    """

    __slots__ = ("adapted_page", "adapted_scope", "contents", "keys", "node", "placed", "rolling", "scope")

    def __init__(self, scope: PrefixScope, begins: int = 0, page_tokens: int = 1) -> None:
        """`begins` is the position at which the scope's adapter does."""
        self.scope = PrefixScope(salt=scope.salt) if begins else scope
        self.adapted_scope = replace(scope, adapter=made_by(scope.adapter, begins))  # from `adapted_page` on
        self.adapted_page = begins // page_tokens  # the first page that the adapter has a part in
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []
        self.node: PrefixNode | None = None
        self.placed = 0  # whole pages that the index has from this sequence, or gave to it
        self.rolling: PrefixNode | None = None  # the last one that got a state from it which is no checkpoint

    def extend(self, tokens: Sequence[Token], page_tokens: int) -> None:
        """Make keys for the whole pages of `tokens` that have none yet."""
        for start in range(len(self.keys) * page_tokens, len(tokens) - page_tokens + 1, page_tokens):
            self.add(_content(tokens[start : start + page_tokens]))

    def scope_of(self, page: int) -> PrefixScope:
        """The scope of the KV in a page."""
        return self.adapted_scope if page >= self.adapted_page else self.scope

    def twin(self) -> PrefixKeys:
        """Another sequence that begins in the same way; it has no pages yet."""
        other = PrefixKeys(self.scope)
        other.adapted_scope, other.adapted_page = self.adapted_scope, self.adapted_page
        return other

    def add(self, content: bytes) -> None:
        """One more page of tokens."""
        switches = len(self.keys) == self.adapted_page and self.adapted_scope != self.scope
        switch = self.adapted_scope.key() if switches else b""
        self.keys.append(_digest((self.keys[-1] if self.keys else self.scope.key()) + switch + content))
        self.contents.append(content)

    def rewind(self) -> None:
        """The sequence gave its pages up and begins again; its tokens are what they were."""
        self.node, self.placed = None, 0


def _content(tokens: Sequence[Token]) -> bytes:
    """The tokens of a page as `CacheRow.content` has them."""
    try:
        return array("q", cast("Sequence[int]", tokens)).tobytes()
    except TypeError:  # some of them are hashes of embedding rows
        ids = array("q", [EMBEDDED if isinstance(token, bytes) else token for token in tokens])
        return b"".join([ids.tobytes(), *(token for token in tokens if isinstance(token, bytes))])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32, person=b"kvilt prefix").digest()
