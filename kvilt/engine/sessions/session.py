"""One session: a name, a tree of turns and how long both are kept; and what requests and callers see of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from ...blend.moved_spans import MovedSpan
from ...kv.cache import KVCache
from ...kv.owner import owner_of
from ...store.address import tenant_of
from .tree import TurnTree

MAX_NAME = 256  # characters


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a request says of its session."""

    name: str
    ttl_s: float | None = None  # how long it is kept after this request; None: as before, or the engine's default
    will_return: bool = False  # the caller comes back: its KV is evicted after that of others
    done: bool = False  # the caller does not come back: its KV is given back after this request
    exact: bool | None = None  # False: KV that was moved and repaired may be used; None: as before, or True


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A tenant, hashed as in notes so that it is the same after a restart, and the id of one of its sessions."""

    tenant: str
    id: str

    @classmethod
    def of(cls, tenant: str, name: str) -> SessionKey:
        """The key of a tenant's session of this name."""
        return cls(tenant_of(tenant), session_id(name))

    @property
    def owner(self) -> str:
        """The API key, hashed, that quotas count for."""
        return owner_of(self.tenant)


@dataclass(slots=True, eq=False)
class Session:
    """A tree of turns. Times are of this process's clock."""

    name: str
    key: SessionKey
    tenant: str  # as the caller's requests name it; empty after a restart, until the next one: no turn has a handle
    expires_s: float
    ttl_s: float
    exact: bool = True
    tree: TurnTree = field(default_factory=TurnTree)

    @property
    def id(self) -> str:
        """An id that is safe in paths."""
        return self.key.id


def session_id(name: str) -> str:
    """The id of a session of this name; sessions of other tenants may have the same."""
    return "sess_" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class SessionLoan:
    """KV that a prompt of a session begins with; the request closes it."""

    kv: KVCache
    turn: str
    shared: bool  # its continuation may enter the prefix index


@dataclass(frozen=True, slots=True)
class MovedLoan:
    """A turn's KV, and the spans of it that stand elsewhere in a prompt; the request closes it."""

    kv: KVCache
    spans: tuple[MovedSpan, ...]
    prefix: int  # tokens that both begin with


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """A turn, for its tenant."""

    id: str
    parent: str | None
    shared_tokens: int  # that it has in common with its parent
    tokens: int
    resident: bool  # its KV is here, in a handle of its own or in that of a turn that continues it
    origin: str
    maker: str


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The state of a session, for its tenant."""

    id: str
    name: str
    turns: tuple[TurnInfo, ...]
    tokens: int  # of the longest turn
    exact: bool
    expires_in_s: float
