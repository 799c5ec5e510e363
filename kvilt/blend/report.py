"""Where the KV of a blended prompt came from, and which tokens of its documents were computed again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .recipe import Span


@dataclass(frozen=True, slots=True)
class BlendedDocument:
    """A document of a blended prompt: its tokens, and those that were computed again, as spans of the prompt."""

    start: int
    ids: tuple[int, ...]
    recomputed: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class BlendReport:
    """Where the KV of a blended prompt came from."""

    computed: int  # outside of documents
    reused: int
    recomputed: int  # of the documents' tokens
    made: int  # tokens of documents that were not stored yet, computed standalone before anything else
    recipe: str
    documents: tuple[BlendedDocument, ...] = ()  # once the prompt is there


def blended_documents(
    ids: tuple[int, ...], documents: Sequence[Span], positions: Sequence[int]
) -> tuple[BlendedDocument, ...]:
    """The documents of a prompt, where the tokens at these ascending positions were computed again."""
    return tuple(BlendedDocument(one.start, ids[one.start : one.stop], _spans(positions, one)) for one in documents)


def _spans(positions: Sequence[int], document: Span) -> tuple[Span, ...]:
    """The runs of ascending positions inside of a document."""
    own = positions[bisect_left(positions, document.start) : bisect_left(positions, document.stop)]
    edges = [at for at in range(1, len(own)) if own[at] != own[at - 1] + 1]
    starts, stops = [0, *edges], [*edges, len(own)]
    return tuple(Span(own[a], own[b - 1] + 1) for a, b in zip(starts, stops, strict=True) if b > a)
