"""Known documents in a prompt that names none: which of them are blended.

Off unless asked for, since an answer then depends on what happens to be stored. Refuses to know how they are found.
"""

from __future__ import annotations

from dataclasses import replace

from ...batch import Adapted, Base
from ...blend.chunk import ChunkCache
from ...executor.protocol import Executor
from ..request import Request


def discovered(executor: Executor, request: Request, chunks: ChunkCache, known: int) -> Request:
    """The request with documents that stand in its prompt, after the tokens whose exact KV is known already."""
    adapter, stop = request.adapter, len(request.prompt)
    if isinstance(adapter, Adapted) and adapter.begins > 0:  # before its trigger the base model runs
        stop, adapter = adapter.begins, Base()
    found = chunks.find(request.prompt, request.tenant, executor.adapters.identity(adapter), known)
    return replace(request, documents=tuple(span for span in found if span.stop <= stop))


def wants_discovery(request: Request) -> bool:
    """Whether a request asks for it, and is one whose prompt may be blended."""
    scored = request.params is not None and request.params.prompt_logprobs is not None
    plain = request.reuse and not request.documents and request.embeds is None
    return bool(request.discover) and plain and not scored
