"""Measures any server with an OpenAI-compatible API: agrees on a request that it accepts, then sends the load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..errors import KviltError
from .progress import Show
from .serve_client import RequestFailed, RequestTrace, ServerTarget, first_model, send_request
from .serve_load import LoadPlan, drive

# Fields that some servers do not know; a field is dropped, with a note, when the server refuses it.
_OPTIONAL: Mapping[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}


class ServerUnusable(KviltError):
    """The server at an address cannot be measured."""


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """The body of a request without its messages."""

    model: str
    chat: bool
    max_tokens: int
    seed: int
    extra: Mapping[str, Any]

    def body(self, before: Sequence[tuple[str, str]], said: str) -> dict[str, Any]:
        """The body for a turn after earlier turns."""
        common = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "seed": self.seed,
            "stream": True,
            **self.extra,
        }
        if not self.chat:
            return {**common, "prompt": "".join(f"{asked}{answer}\n" for asked, answer in before) + said}
        spoken = [(role, text) for pair in before for role, text in zip(("user", "assistant"), pair, strict=True)]
        return {**common, "messages": [{"role": role, "content": text} for role, text in (*spoken, ("user", said))]}


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A finished measurement."""

    model: str
    traces: list[RequestTrace]
    skipped: int
    left_out: list[str]


async def measure(
    target: ServerTarget,
    plan: LoadPlan,
    model: str | None,
    show: Show,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> LoadRun:
    """Find out which fields the server accepts, then send the load; `extra` are more optional fields."""
    optional = {**_OPTIONAL, **extra}
    try:
        name = model or await first_model(target)
    except (RequestFailed, OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as failure:
        raise ServerUnusable(f"{target.url}: {failure}; is a server running there?") from None
    template = await _agree(target, RequestTemplate(name, target.chat, plan.max_tokens, plan.seed, optional))
    traces: list[RequestTrace] = []
    skipped = 0

    async def turn(before: Sequence[tuple[str, str]], said: str, due_s: float | None) -> str | None:
        trace = await send_request(target, template.body(before, said), due_s)
        traces.append(trace)
        show(len(traces) + skipped, trace.error or "")
        return trace.text if trace.error is None else None

    def give_up(turns: int) -> None:
        nonlocal skipped
        skipped += turns

    await drive(plan, turn, give_up)
    return LoadRun(name, traces, skipped, [key for key in optional if key not in template.extra])


async def _agree(target: ServerTarget, template: RequestTemplate) -> RequestTemplate:
    """Send short requests, which also warm the server up, and drop each optional field that it refuses."""
    while True:
        short = replace(template, max_tokens=2)
        trace = await send_request(target, short.body((), "Hello"))
        if trace.error is None or trace.error == "empty answer":
            return template
        unknown = trace.error in ("HTTP 400", "HTTP 422")
        named = [key for key in template.extra if key in trace.message] or list(template.extra)
        if not unknown or not named:
            raise ServerUnusable(f"{target.url} refuses a first request ({trace.error}): {trace.message}")
        template = replace(template, extra={k: v for k, v in template.extra.items() if k != named[0]})
