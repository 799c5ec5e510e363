"""What the KV memory holds, as an inspector shows it."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson

from ..engine.handles import HandleInfo
from ..engine.view import EngineView
from ..errors import HandleError
from ..kv.prefix import Branch
from ..llm import AsyncLLM

_SHOWN_TOKENS = 64
MOST_SHOWN = 512  # samples, prefixes and handles, of each


def state_of(llm: AsyncLLM, tenant: str) -> bytes:
    """A tenant's part of the KV memory, and how full all of it is, as JSON."""
    view = llm.view(tenant, MOST_SHOWN)
    state = {
        "pages": dataclasses.asdict(view.pages),
        "samples": [dataclasses.asdict(sample) for sample in view.samples],
        "prefixes": [_prefix(llm, branch) for branch in view.prefixes],
        "handles": [{**dataclasses.asdict(one), "prefix": _leaf(llm, tenant, view, one)} for one in view.handles],
        "omitted": view.omitted,
    }
    return orjson.dumps(state)


def _leaf(llm: AsyncLLM, tenant: str, view: EngineView, handle: HandleInfo) -> str | None:
    """The last known prefix that a handle begins with: those of the same branch share its pages."""
    try:
        ids = llm.kv.tokens(handle.id, tenant=tenant)
    except HandleError:
        return None  # gone since it was seen
    size, found = view.pages.page_tokens, None
    for branch in view.prefixes:  # parents come first
        if branch.parent == found and tuple(ids[branch.start : branch.start + size]) == branch.tokens[:size]:
            found = branch.id
    return found


def _prefix(llm: AsyncLLM, branch: Branch) -> dict[str, Any]:
    """A branch with its beginning as text; all of its tokens would be too many."""
    first = [token for token in branch.tokens[:_SHOWN_TOKENS] if isinstance(token, int)]
    rest = {name: getattr(branch, name) for name in ("id", "parent", "adapter", "start", "pages", "hits", "caches")}
    return {**rest, "tokens": len(branch.tokens), "text": llm.tokenizer.decode(first, skip_special=False)}
