"""Anthropic's `diagnostics`: which part of a request changed since the message that it names, and what that costs.

Only digests of earlier requests are kept, and only of requests that ask for diagnostics.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ...llm import Usage
from .schema import MessagesRequest

MAX_MESSAGES = 1024  # of all callers together; the oldest are forgotten first


@dataclass(frozen=True, slots=True)
class RequestDigests:
    """The parts of a request as digests."""

    tenant: str
    model: bytes
    system: bytes
    tools: bytes
    messages: tuple[bytes, ...]

    @classmethod
    def of(cls, body: MessagesRequest, tenant: str) -> RequestDigests:
        """Those of a request."""
        shown = body.model_dump(mode="json", include={"model", "system", "tools", "messages"})
        messages = tuple(_digest(_plain(message)) for message in shown["messages"])
        model, system, tools = (_digest(_plain(shown[name])) for name in ("model", "system", "tools"))
        return cls(tenant, model, system, tools, messages)

    def changed_since(self, earlier: RequestDigests) -> str | None:
        """The first part that differs, under Anthropic's name; None where messages were only added."""
        for name in ("model", "system", "tools"):
            if getattr(self, name) != getattr(earlier, name):
                return f"{name}_changed"
        return None if self.messages[: len(earlier.messages)] == earlier.messages else "messages_changed"


class CacheDiagnostics:
    """The latest requests that asked for diagnostics, by the ids of their messages."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, RequestDigests] = OrderedDict()

    def add(self, message: str, digests: RequestDigests) -> None:
        """Note a request that was answered."""
        self._known[message] = digests
        while len(self._known) > MAX_MESSAGES:
            self._known.popitem(last=False)

    def reason(self, digests: RequestDigests, previous: str | None, usage: Usage) -> dict[str, Any] | None:
        """`diagnostics` of an answer; None where nothing differs and all KV was reused."""
        if previous is None:
            return None
        earlier = self._known.get(previous)
        if earlier is None or earlier.tenant != digests.tenant:
            return {"cache_miss_reason": {"type": "previous_message_not_found"}}
        changed = digests.changed_since(earlier)
        if changed is not None:
            missed = 0 if usage.miss is None else max(0, usage.miss.expected - usage.cached_tokens)
            return {"cache_miss_reason": {"type": changed, "cache_missed_input_tokens": missed}}
        if usage.miss is None or usage.miss.reason == "page_boundary":
            return None
        return {"cache_miss_reason": {"type": "unavailable"}}  # the request is right; `usage.kvilt.miss` says more


def _plain(value: Any) -> Any:
    """A part without marks of the cache, which move from turn to turn and are no part of the prompt."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items() if name != "cache_control"}
    return [_plain(part) for part in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _digest(value: Any) -> bytes:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).digest()
