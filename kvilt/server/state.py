"""What the KV memory holds, as an inspector shows it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..engine.handles import HandleInfo
from ..engine.view import EngineView
from ..errors import HandleError
from ..kv.prefix import Branch
from .gate import Caller
from .service import Service

_SHOWN_TOKENS = 64


def state_of(service: Service, caller: Caller) -> dict[str, Any]:
    """The caller's part of the KV memory, and how full all of it is."""
    view = service.llm.view(caller.tenant)
    return {
        "pages": dataclasses.asdict(view.pages),
        "samples": [dataclasses.asdict(sample) for sample in view.samples],
        "prefixes": [_prefix(service, branch) for branch in view.prefixes],
        "handles": [{**dataclasses.asdict(one), "prefix": _leaf(service, caller, view, one)} for one in view.handles],
    }


def _leaf(service: Service, caller: Caller, view: EngineView, handle: HandleInfo) -> str | None:
    """The last known prefix that a handle begins with: those of the same branch share its pages."""
    try:
        ids = service.llm.kv.tokens(handle.id, tenant=caller.tenant)
    except HandleError:
        return None  # gone since it was seen
    size, found = view.pages.page_tokens, None
    for branch in view.prefixes:  # parents come first
        if branch.parent == found and tuple(ids[branch.start : branch.start + size]) == branch.tokens[:size]:
            found = branch.id
    return found


def _prefix(service: Service, branch: Branch) -> dict[str, Any]:
    """A branch with its beginning as text; all of its tokens would be too many."""
    first = [token for token in branch.tokens[:_SHOWN_TOKENS] if isinstance(token, int)]
    rest = {name: getattr(branch, name) for name in ("id", "parent", "adapter", "start", "pages", "hits", "caches")}
    return {**rest, "tokens": len(branch.tokens), "text": service.llm.tokenizer.decode(first, skip_special=False)}
