"""Documents of a request: their texts, how they are blended, and what cannot stand beside them. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..blend.recipe import Recipe
from ..errors import ParamError
from .refusal import Refused
from .schema.fields import Blend, Document, Sampling
from .service import Service
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
        return Recipe.of(None, **_said(asked.blend))
    except ParamError as error:
        raise Refused(400, f"blend.{error}", param=f"blend.{error.field}", code="invalid_value") from None


def _said(blend: Blend) -> dict[str, Any]:
    """The fields of a recipe that a request has."""
    return blend.model_dump(exclude_none=True, exclude={"discover"})


def blend_terms(asked: Sampling) -> dict[str, Any]:
    """The keywords of documents, named or to be found, where there are any."""
    if asked.documents:
        return {"documents": texts_of(asked.documents), "recipe": recipe_of(asked)}
    return {} if asked.blend is None else {"discover": asked.blend.discover, "recipe": recipe_of(asked)}


def check_documents(service: Service, asked: Sampling) -> None:
    """Refuse what cannot be, before any of it is read."""
    check_count(service.config, len(asked.documents or ()))
    if asked.documents and asked.kv is not None:
        raise ParamError("kv", "documents stand in a prompt of their own; leave out kv, or the documents")
    if discovers(asked) and (asked.documents or asked.kv is not None):
        beside = "documents" if asked.documents else "kv"
        said = f"blend.discover: looks for documents in a plain prompt; leave it out, or {beside}"
        raise Refused(400, said, param="blend.discover", code="invalid_value")
    if asked.blend is not None and not asked.documents and not _has_effect(asked, asked.blend, service):
        raise ParamError("blend", "says how documents are blended; give documents, or let it discover some")
    recipe_of(asked)


def discovers(asked: Sampling) -> bool:
    """Whether a request says that documents in its prompt are to be found."""
    return asked.blend is not None and asked.blend.discover is True


def _has_effect(asked: Sampling, blend: Blend, service: Service) -> bool:
    """Whether it matters what is said of documents, where none are named."""
    if blend.discover is False:
        return not _said(blend)
    return asked.kv is None and (blend.discover or service.llm.config.discover)


def check_count(config: ServeConfig, documents: int) -> None:
    """Refuse too many."""
    most = config.max_documents
    if documents > most:
        said = f"documents: {documents} were sent and {most} are allowed"
        raise Refused(400, said, param="documents", code="too_many")
