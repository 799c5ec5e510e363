"""Documents of a request: their texts, how they are blended, and what cannot stand beside them. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..blend.recipe import Recipe
from ..errors import ParamError
from .refusal import Refused
from .schema.fields import Document, Sampling
from .settings import ServeConfig


def texts_of(documents: Sequence[str | Document] | None) -> list[str]:
    """What stands in the prompt; a title is the first line of its document, and so of its identity."""
    return [one if isinstance(one, str) else _written(one) for one in documents or ()]


def _written(document: Document) -> str:
    text = document.text if document.content is None else document.content
    assert text is not None
    return text if document.title is None else f"{document.title}\n{text}"


def recipe_of(asked: Sampling) -> Recipe | None:
    """How the documents are blended; None: as the model does without being told."""
    if asked.blend is None:
        return None
    try:
        return Recipe.of(None, **asked.blend.model_dump(exclude_none=True))
    except ParamError as error:
        raise Refused(400, f"blend.{error}", param=f"blend.{error.field}", code="invalid_value") from None


def blend_terms(asked: Sampling) -> dict[str, Any]:
    """The keywords of documents, where there are any."""
    return {"documents": texts_of(asked.documents), "recipe": recipe_of(asked)} if asked.documents else {}


def check_documents(config: ServeConfig, asked: Sampling) -> None:
    """Refuse what cannot be, before any of it is read."""
    check_count(config, len(asked.documents or ()))
    if not asked.documents:
        if asked.blend is not None:
            raise ParamError("blend", "says how documents are blended; give documents, or leave it out")
        return
    if asked.kv is not None:
        raise ParamError("kv", "documents stand in a prompt of their own; leave out kv, or the documents")
    recipe_of(asked)


def check_count(config: ServeConfig, documents: int) -> None:
    """Refuse too many."""
    most = config.max_documents
    if documents > most:
        said = f"documents: {documents} were sent and {most} are allowed"
        raise Refused(400, said, param="documents", code="too_many")
