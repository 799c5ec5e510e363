"""Replacing a span inside a cache: what stands before it is kept, what stands behind it is moved and repaired.

With a repair of 1 all that stands behind is computed again, and the result is exact. The origin of the KV says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..batch import Adapter
from ..blend.cache_retriever import CacheRetriever, check_movable
from ..blend.moved_spans import MovedSpan
from ..blend.plugins import BlendPlugins
from ..blend.recipe import Recipe, Span
from ..engine.admission import BorrowedKV
from ..engine.handles.handles import HandleInfo
from ..engine.request import Request
from ..errors import InputError, ParamError
from ..kv.cache import KVCache
from ..kv.row import EXACT

DEFAULT_REPAIR = 0.15
STRATEGY = "head"  # tokens right behind a replaced span have changed most, and nothing must be computed to know them


@dataclass(frozen=True, slots=True)
class SpanReplacement:
    """New tokens in place of the tokens [start, stop) of a cache."""

    start: int
    stop: int
    tokens: tuple[int, ...] = ()
    repair: float = DEFAULT_REPAIR  # share of what stands behind that is computed again

    def check(self, length: int) -> None:
        """Raise unless a cache of so many tokens has this span."""
        for name in ("start", "stop"):
            if type(getattr(self, name)) is not int:
                raise ParamError(name, f"must be a whole number, not {getattr(self, name)!r}")
        if not 0 <= self.start <= self.stop <= length:
            raise ParamError("start", f"[{self.start}, {self.stop}) is not a span of {length} tokens")
        if isinstance(self.repair, bool) or not isinstance(self.repair, int | float) or not 0 <= self.repair <= 1:
            raise ParamError("repair", f"must be a number between 0 and 1, not {self.repair!r}")
        if not self.start + len(self.tokens) + length - self.stop:
            raise InputError("nothing would be left; give some tokens, or close the cache")

    def ids(self, old: Sequence[int]) -> list[int]:
        """All tokens afterwards."""
        return [*old[: self.start], *self.tokens, *old[self.stop :]]


@dataclass(frozen=True, slots=True)
class ReplaceRequest:
    """A request that computes the KV of a replaced span, and the cache that it begins with."""

    request: Request
    borrowed: BorrowedKV | None

    def leave(self) -> None:
        """The caller does not need it any more."""
        if self.borrowed is not None:
            self.borrowed.kv.close()


@dataclass(frozen=True, slots=True)
class ReplacedHandle:
    """A handle on KV in which a span was replaced, and how that KV was made: `exact`, or the recipe of a blend."""

    info: HandleInfo
    origin: str


def replace_request(
    kv: KVCache, replacement: SpanReplacement, adapter: Adapter, exact: bool, **fields: Any
) -> ReplaceRequest:
    """The request for a replacement in `kv`, which is not changed; `exact`: the engine itself computed its KV."""
    if kv.batch_size != 1 or kv.row(0).embeds:
        raise InputError("a span is replaced in a cache of one row of tokens")
    old = list(kv.row(0).ids)
    replacement.check(len(old))
    new, behind = replacement.ids(old), len(old) - replacement.stop
    begin = min(replacement.start, len(new) - 1)
    moves = replacement.repair < 1 and behind > 1
    plan: dict[str, Any] = {}
    if moves:
        check_movable(kv.layout)
        span = MovedSpan(len(new) - behind, replacement.stop, behind)
        plan = moved_fields(kv, [span], replacement.repair)
        begin = min(begin, span.new)
    base = kv.fork_to(begin) if begin else None
    if base is not None and not base.num_entries:
        base.close()
        base = None
    borrowed = None if base is None else BorrowedKV(base, exact and kv.origin == EXACT)
    request = Request(new, keep_kv=True, adapter=adapter, discover=False, **plan, **fields)
    return ReplaceRequest(request, borrowed)


def moved_fields(kv: KVCache, spans: Sequence[MovedSpan], repair: float, strategy: str = STRATEGY) -> dict[str, Any]:
    """The fields of a request whose prompt has these spans of a cache at other places."""
    return {
        "documents": tuple(Span(one.new, one.new + one.length) for one in spans),
        "recipe": Recipe(ratio=repair, strategy=strategy, min_gain=0.0, gate=False),
        "blend_plugins": BlendPlugins(retriever=CacheRetriever(kv, spans)),
    }
