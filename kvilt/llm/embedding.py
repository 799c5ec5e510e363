"""Embeddings of texts from any model: pooled states after the last norm, and how near two of them are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from ..batch import Adapter
from ..engine.pooling import PoolingKind
from ..engine.request import Request
from ..errors import ParamError
from .answer import Answer
from .embedding_config import EmbeddingConfig
from .model import Prompt


class EmbedFields(TypedDict, total=False):
    """What a caller may say of embeddings."""

    pooling: PoolingKind | None  # the model's own, or mean where it has none
    dimensions: int | None  # the first so many values
    prompt_name: str | None  # of the prompts that the model's author puts before texts
    lora: int | str | None
    lora_scale: float
    truncate: bool  # cut texts that are longer than the context; by default they are refused


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one text."""

    values: tuple[float, ...]  # of length 1, unless the model's author has them otherwise
    tokens: int

    @classmethod
    def of(cls, answer: Answer, config: EmbeddingConfig, dimensions: int | None = None) -> Embedding:
        """The embedding that a finished request has computed: its first dimensions, for models trained for it."""
        assert answer.embedding is not None
        values = answer.embedding[: dimensions or config.dimensions]
        return cls(normalized(values) if config.normalize else tuple(values), answer.prompt_tokens)

    def similarity(self, other: Embedding) -> float:
        """The cosine of the angle between two embeddings."""
        product = math.fsum(a * b for a, b in zip(self.values, other.values, strict=True))
        length = math.hypot(*self.values) * math.hypot(*other.values)
        return product / length if length else 0.0


@dataclass(frozen=True, slots=True)
class RankedText:
    """A text and how near it is to a query."""

    index: int  # in the texts that were given
    score: float
    text: Prompt


def ranked(
    query: Embedding, texts: Sequence[Prompt], found: Sequence[Embedding], top_n: int | None = None
) -> list[RankedText]:
    """Texts in the order of their nearness to a query, the nearest first; `found` are their embeddings."""
    each = zip(texts, found, strict=True)
    scored = [RankedText(i, query.similarity(one), text) for i, (text, one) in enumerate(each)]
    return sorted(scored, key=lambda one: -one.score)[:top_n]


def check_dimensions(dimensions: int | None, width: int) -> None:
    """Refuse more dimensions than an embedding has."""
    if dimensions is not None and not 0 < dimensions <= width:
        raise ParamError("dimensions", f"must be from 1 to {width}, those of this model's embeddings, not {dimensions}")


def normalized(values: Sequence[float]) -> tuple[float, ...]:
    """The same direction with length 1; zeros stay zeros."""
    length = math.sqrt(math.fsum(value * value for value in values))
    return tuple(value / length for value in values) if length else tuple(values)


def embedding_request(ids: Sequence[int], pooling: PoolingKind, tenant: str, adapter: Adapter) -> Request:
    """The request that computes an embedding. A mean needs the states of all tokens, so nothing is reused for it."""
    return Request(ids, tenant=tenant, pooling=pooling, reuse=pooling == "last", adapter=adapter, discover=False)
