"""Embeddings of texts from any model: pooled states after the last norm, of length 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..batch import Adapter
from ..engine.pooling import PoolingKind
from ..engine.request import Request
from .answer import Answer


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one text."""

    values: tuple[float, ...]  # of length 1
    tokens: int

    @classmethod
    def of(cls, answer: Answer) -> Embedding:
        """The embedding that a finished request has computed."""
        assert answer.embedding is not None
        return cls(normalized(answer.embedding), answer.prompt_tokens)

    def shortened(self, dimensions: int) -> Embedding:
        """Its first dimensions, again of length 1: for models that are trained for it."""
        return Embedding(normalized(self.values[:dimensions]), self.tokens)

    def similarity(self, other: Embedding) -> float:
        """The cosine of the angle between two embeddings."""
        return math.fsum(a * b for a, b in zip(self.values, other.values, strict=True))


def normalized(values: Sequence[float]) -> tuple[float, ...]:
    """The same direction with length 1; zeros stay zeros."""
    length = math.sqrt(math.fsum(value * value for value in values))
    return tuple(value / length for value in values) if length else tuple(values)


def embedding_request(ids: Sequence[int], pooling: PoolingKind, tenant: str, adapter: Adapter) -> Request:
    """The request that computes an embedding. A mean needs the states of all tokens, so nothing is reused for it."""
    return Request(ids, tenant=tenant, pooling=pooling, reuse=pooling == "last", adapter=adapter, discover=False)
