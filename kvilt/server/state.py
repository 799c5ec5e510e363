"""What the KV memory holds, as an inspector shows it."""

from __future__ import annotations

import dataclasses
from typing import Any

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
        "handles": [dataclasses.asdict(handle) for handle in view.handles],
    }


def _prefix(service: Service, branch: Branch) -> dict[str, Any]:
    """A branch with its beginning as text; all of its tokens would be too many."""
    first = [token for token in branch.tokens[:_SHOWN_TOKENS] if isinstance(token, int)]
    rest = {name: getattr(branch, name) for name in ("id", "parent", "adapter", "start", "pages", "hits", "caches")}
    return {**rest, "tokens": len(branch.tokens), "text": service.llm.tokenizer.decode(first, skip_special=False)}
