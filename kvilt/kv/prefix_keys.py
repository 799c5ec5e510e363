"""One sequence's way through a prefix index: what its pages are known by, and whose KV they hold.

Hashes chain over tokens, so equal keys are equal beginnings. Refuses to know pools and where pages are.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .owner import owner_of
from .row import made_by


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """What besides the tokens decides KV within one pool: the adapter, by content and scale, and whose it is."""

    adapter: str = "base"
    salt: str = ""  # tenant

    @property
    def owner(self) -> str:
        """For whom pages are counted, whatever the salt."""
        return owner_of(self.salt)

    def key(self) -> bytes:
        """Where the chains of this scope begin; no two scopes share a beginning."""
        parts = [text.encode("utf-8", "surrogatepass") for text in (self.adapter, self.salt)]
        return _digest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One page of tokens behind its parent's; `pages` has GONE where a group's page was not there or was evicted."""

    key: bytes
    content: bytes
    parent: PrefixNode | None
    pages: list[int]
    scope: PrefixScope
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    hits: int = 0  # sequences that began with it
    alive: bool = True
    told: int = 0  # groups whose pages were there when the sink of evicted pages last heard of it


class PrefixKeys:
    """One sequence's way through the index: a key for each of its whole pages, and how far it has been placed.

    With an adapter that begins later, whole pages before that are the base model's, and shared with everybody who has
    the same; those behind know where it began.
    """

    __slots__ = ("contents", "keys", "node", "placed", "scope", "since", "turn")

    def __init__(self, scope: PrefixScope, begins: int = 0, page_tokens: int = 1) -> None:
        """`begins` is the position at which the scope's adapter does."""
        self.scope = PrefixScope(salt=scope.salt) if begins else scope
        self.since = replace(scope, adapter=made_by(scope.adapter, begins))  # behind the turn
        self.turn = begins // page_tokens  # the first page that the adapter has a part in
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []
        self.node: PrefixNode | None = None
        self.placed = 0  # whole pages whose KV the index has from this sequence, or gave to it

    def extend(self, ids: Sequence[int], page_tokens: int) -> None:
        """Make keys for the whole pages of `ids` that have none yet."""
        for start in range(len(self.keys) * page_tokens, len(ids) - page_tokens + 1, page_tokens):
            self.add(array("q", ids[start : start + page_tokens]).tobytes())

    def scope_of(self, page: int) -> PrefixScope:
        """Whose KV a page holds."""
        return self.since if page >= self.turn else self.scope

    def twin(self) -> PrefixKeys:
        """Another sequence that begins in the same way; it has no pages yet."""
        other = PrefixKeys(self.scope)
        other.since, other.turn = self.since, self.turn
        return other

    def add(self, content: bytes) -> None:
        """One more page of tokens."""
        turned = self.since.key() if len(self.keys) == self.turn and self.since != self.scope else b""
        self.keys.append(_digest((self.keys[-1] if self.keys else self.scope.key()) + turned + content))
        self.contents.append(content)

    def rewind(self) -> None:
        """The sequence gave its pages up and begins again; its tokens are what they were."""
        self.node, self.placed = None, 0


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32, person=b"kvilt prefix").digest()
