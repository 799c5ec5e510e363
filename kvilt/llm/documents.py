"""Documents as callers give them: texts, token ids, or objects with a title and a text. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ParamError

DocumentInput = str | Sequence[int] | Mapping[str, str]


def titled(title: str | None, text: str) -> str:
    """The text of a document; a title is its first line, so it is part of the document's identity."""
    return f"{title}\n{text}" if title else text


def document_prompt(document: DocumentInput) -> str | Sequence[int]:
    """A document as a prompt: `{"title": ..., "text": ...}` becomes a text, texts and ids stay as they are."""
    if not isinstance(document, Mapping):
        return document
    text = document.get("text", document.get("content"))
    if not isinstance(text, str) or not document.keys() <= {"title", "text", "content"}:
        raise ParamError("documents", 'a document is a text, token ids, or {"title": ..., "text": ...}')
    return titled(document.get("title"), text)


def document_prompts(documents: Sequence[DocumentInput]) -> Sequence[str | Sequence[int]]:
    """Documents as prompts; what is no list is left for the check of its type."""
    return [document_prompt(one) for one in documents] if isinstance(documents, list | tuple) else documents  # type: ignore[return-value]
