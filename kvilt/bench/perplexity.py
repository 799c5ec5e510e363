"""Perplexity: how well a model predicts a text, scored in chunks of one context each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import InputError
from ..executor.protocol import Executor
from .progress import Track, untracked

CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-probability, with its standard error."""

    perplexity: float
    error: float
    tokens: int  # scored
    chunks: int
    seconds: float


def measure(
    executor: Executor, ids: list[int], chunk_tokens: int, track: Track = untracked, head: Sequence[int] = ()
) -> Perplexity:
    """Cut `ids` into chunks that know nothing of each other; every token of a chunk but its first is scored.

    Each chunk starts with `head`, the tokens that the model expects before a text: Gemma predicts little without BOS.
    """
    size = chunk_tokens - len(head)
    chunks = [[*head, *ids[start : start + size]] for start in range(0, len(ids), size)]
    chunks = [chunk for chunk in chunks if len(chunk) > 1]
    if not chunks:
        raise InputError("the text has fewer than two tokens; there is nothing to predict")
    started_s = time.perf_counter()
    logprobs: list[torch.Tensor] = []
    with track("scoring", len(chunks)) as show:
        for done, chunk in enumerate(chunks, 1):
            logprobs.append(executor.score(chunk).logprobs)
            show(done, f"perplexity {math.exp(-torch.cat(logprobs).double().mean()):.4f}")
    return _summary(torch.cat(logprobs).double(), len(chunks), time.perf_counter() - started_s)


def _summary(logprobs: torch.Tensor, chunks: int, seconds: float) -> Perplexity:
    value = math.exp(-logprobs.mean())
    spread = float(logprobs.std(correction=0)) / math.sqrt(len(logprobs))
    return Perplexity(value, value * spread, len(logprobs), chunks, seconds)
