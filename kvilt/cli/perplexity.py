"""`kvilt perplexity`: how well a model predicts a text file."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..bench.perplexity import measure
from ..errors import ParamError
from ..llm import load
from .progress import bars, tracked


def report(path: str, model: str, chunk_tokens: int, limit: int | None, as_json: bool, config: dict[str, Any]) -> None:
    """Measure a file and print the result."""
    if chunk_tokens < 2:
        raise ParamError("chunk", f"must be at least 2 tokens, not {chunk_tokens}")
    if limit is not None and limit < 2:
        raise ParamError("limit", f"must be at least 2 tokens, not {limit}")
    text = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode("utf-8", "replace")
    with bars() as shown:
        llm = load(model, on_fetch=shown.fetching, **config)
    with llm:
        if chunk_tokens > llm.executor.max_context:
            raise ParamError("chunk", f"this model reads at most {llm.executor.max_context} tokens, not {chunk_tokens}")
        head = llm.tokenizer.head
        if chunk_tokens <= len(head):
            raise ParamError("chunk", f"the model puts {len(head)} tokens before a text; give more than {chunk_tokens}")
        ids = llm.tokenizer.encode(text, add_special=False)[:limit]
        found = measure(llm.executor, ids, chunk_tokens, tracked, head)
    if as_json:
        print(json.dumps({"model": model, **asdict(found)}))
        return
    print(
        f"perplexity {found.perplexity:.4f} ± {found.error:.4f} over {found.tokens} tokens in {found.chunks} chunks "
        f"({found.tokens / found.seconds:.0f} tok/s)"
    )
