"""A stored response: what was said, and where its KV is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...llm import AsyncStream
from .items import Message


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where the KV of a response ends, so that the next prompt goes on from its tokens."""

    handle: str
    prompt: bytes  # a digest of all that stands before the messages: instructions, tools, template variables, adapter
    unread: tuple[int, ...]  # the last token, if it was sampled and belongs to the text: its KV is not computed
    exact: bool  # the tokens of the answer are its text and nothing else: neither reasoning nor calls


@dataclass(slots=True)
class StoredResponse:
    """One response."""

    tenant: str
    shown: dict[str, Any]  # as clients get it
    messages: list[Message] = field(default_factory=list)  # the whole conversation, without instructions
    continuation: Continuation | None = None
    stream: AsyncStream | None = None  # while it is in progress
    cancelled: bool = False  # by a request
    expires_s: float = 0.0
    bytes: int = 0
