"""`kvilt perplexity`: how well a model predicts a text, in pieces of one context each."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError, ParamError
from ..executor.executor import Executor
from ..llm import load
from .progress import bars, tracked

CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-probability, with its standard error."""

    perplexity: float
    error: float
    tokens: int  # scored
    chunks: int
    seconds: float


def measure(executor: Executor, ids: list[int], chunk_tokens: int) -> Perplexity:
    """Cut `ids` into chunks that know nothing of each other; every token of a chunk but its first is scored."""
    chunks = [ids[start : start + chunk_tokens] for start in range(0, len(ids), chunk_tokens)]
    chunks = [chunk for chunk in chunks if len(chunk) > 1]
    if not chunks:
        raise InputError("the text has fewer than two tokens; there is nothing to predict")
    started_s = time.perf_counter()
    logprobs: list[torch.Tensor] = []
    with tracked("scoring", len(chunks)) as show:
        for done, chunk in enumerate(chunks, 1):
            logprobs.append(executor.score(chunk).logprobs)
            show(done, f"perplexity {math.exp(-torch.cat(logprobs).double().mean()):.4f}")
    return _summary(torch.cat(logprobs).double(), len(chunks), time.perf_counter() - started_s)


def _summary(logprobs: torch.Tensor, chunks: int, seconds: float) -> Perplexity:
    value = math.exp(-logprobs.mean())
    spread = float(logprobs.std(correction=0)) / math.sqrt(len(logprobs))
    return Perplexity(value, value * spread, len(logprobs), chunks, seconds)


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
        found = measure(llm.executor, llm.tokenizer.encode(text, add_special=False)[:limit], chunk_tokens)
    if as_json:
        print(json.dumps({"model": model, **asdict(found)}))
        return
    print(
        f"perplexity {found.perplexity:.4f} ± {found.error:.4f} over {found.tokens} tokens in {found.chunks} chunks "
        f"({found.tokens / found.seconds:.0f} tok/s)"
    )
