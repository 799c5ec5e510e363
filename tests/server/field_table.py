"""`python -m tests.server.field_table` writes docs/doors.md: every field of every API, from the schemas.

Fields that only the clients know are refused by name; the command finds them in the installed clients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvilt.server.anthropic.schema import CountTokensRequest, MessagesRequest
from kvilt.server.batches.schema import BatchRequest
from kvilt.server.http.schema import RequestModel
from kvilt.server.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from kvilt.server.openai.embeddings import EmbeddingsRequest, RerankRequest, ScoreRequest
from kvilt.server.openai.schema import ChatRequest, CompletionRequest
from kvilt.server.responses.schema import ResponsePrompt, ResponseRequest

PAGE = Path(__file__).parents[2] / "docs" / "doors.md"
DOORS: dict[str, type[BaseModel]] = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/responses": ResponseRequest,
    "POST /v1/responses/input_tokens": ResponsePrompt,
    "POST /v1/embeddings": EmbeddingsRequest,
    "POST /v1/score": ScoreRequest,
    "POST /v1/rerank": RerankRequest,
    "POST /v1/batches": BatchRequest,
    "POST /v1/messages": MessagesRequest,
    "POST /v1/messages/count_tokens": CountTokensRequest,
    "POST /api/chat": OllamaChatRequest,
    "POST /api/generate": OllamaGenerateRequest,
    "POST /api/embed": OllamaEmbedRequest,
    "POST /api/embeddings": OllamaEmbeddingsRequest,
    "POST /api/show": ShowRequest,
}
HEAD = """# Every field of every API

`python -m tests.server.field_table` writes this page from the schemas. A field that is in no table is refused by name.
The last row of a table has the fields that the official client knows and kvilt refuses.
`a[].b` is the field `b` of the objects in the list `a`.
`a[user].b` is the field `b` of the objects whose type or role is `user`.
"""
REFUSED, IGNORED, SUPPORTED = "refused by name", "accepted without effect", "supported"


def page(unknown: Mapping[str, Sequence[str]]) -> str:
    """The page; `unknown` are the fields by API that only clients know."""
    parts = [HEAD]
    for door, model in DOORS.items():
        rows = [f"| `{path}` | {status(field)} | {told(field)} |" for path, field in fields(model)]
        names = ", ".join(f"`{name}`" for name in sorted(unknown.get(door, ())))
        more = [f"| {names} | {REFUSED} | |"] if names else []
        parts.append("\n".join([f"## `{door}`\n", "| field | status | note |", "|---|---|---|", *rows, *more]) + "\n")
    return "\n".join(parts)


def status(field: FieldInfo) -> str:
    """What happens to a field."""
    words = field.description or ""
    if field.annotation is NoneType or words.startswith("Refused"):
        return REFUSED
    return IGNORED if words.startswith("Accepted without effect") else SUPPORTED


def told(field: FieldInfo) -> str:
    """What a table says of a field besides its status."""
    text = (field.description or "").removeprefix("Accepted without effect").lstrip(".: ")
    return text[:1].upper() + text[1:]


def fields(model: type[BaseModel], path: str = "", seen: tuple[type, ...] = ()) -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a model and of the models inside it."""
    for name, field in model.model_fields.items():
        own = f"{path}{field.alias or name}"
        yield own, field
        for inner, many in models_in(field.annotation):
            if inner in seen or status(field) != SUPPORTED:
                continue
            kind = kind_of(inner)
            place = f"{own}[{kind or ''}]" if many or kind else own
            yield from fields(inner, f"{place}.", (*seen, model))


def models_in(annotation: Any, many: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """The models of an annotation, and whether they stand in a list."""
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        yield annotation, many
    for inner in get_args(annotation):
        yield from models_in(inner, many or get_origin(annotation) is list)


def kind_of(model: type[BaseModel]) -> str:
    """The words by which a model is told from others, if it is."""
    for name in ("type", "role"):
        field = model.model_fields.get(name)
        words = [] if field is None else [word for word in literals(field.annotation) if isinstance(word, str)]
        if words and field is not None and (name == "role" or field.is_required()):
            return " or ".join(words)
    return ""


def literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for inner in get_args(annotation):
            yield from literals(inner)


def unknown_to_us() -> dict[str, list[str]]:
    """The fields of the installed clients that no schema has."""
    from anthropic.types.message_count_tokens_params import MessageCountTokensParams
    from anthropic.types.message_create_params import MessageCreateParamsBase
    from ollama import _types as ollama
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
    from openai.types.completion_create_params import CompletionCreateParamsBase as Completion
    from openai.types.embedding_create_params import EmbeddingCreateParams
    from openai.types.responses.input_token_count_params import InputTokenCountParams
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    theirs: dict[str, Any] = {
        "POST /v1/chat/completions": Chat,
        "POST /v1/completions": Completion,
        "POST /v1/responses": ResponseCreateParamsBase,
        "POST /v1/responses/input_tokens": InputTokenCountParams,
        "POST /v1/embeddings": EmbeddingCreateParams,
        "POST /v1/messages": MessageCreateParamsBase,
        "POST /v1/messages/count_tokens": MessageCountTokensParams,
        "POST /api/chat": ollama.ChatRequest,
        "POST /api/generate": ollama.GenerateRequest,
        "POST /api/embed": ollama.EmbedRequest,
        "POST /api/embeddings": ollama.EmbeddingsRequest,
        "POST /api/show": ollama.ShowRequest,
    }
    return {door: [name for name in _names(made) if name not in _names(DOORS[door])] for door, made in theirs.items()}


def _names(model: Any) -> set[str]:
    return set(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else set(_typed(model))


def _typed(model: Any) -> Iterator[str]:
    for base in (*getattr(model, "__orig_bases__", ()), model):
        yield from getattr(base, "__annotations__", {})


def listed(text: str) -> dict[str, list[str]]:
    """The last lines of a page: the fields by API that only clients know."""
    found: dict[str, list[str]] = {}
    for part in text.split("\n## `")[1:]:
        last = part.strip().splitlines()[-1]
        if last.startswith("| `") and last.endswith(f"| {REFUSED} | |"):
            found[part.partition("`")[0]] = re.findall(r"`([^`]+)`", last)
    return found


if __name__ == "__main__":
    PAGE.write_text(page(unknown_to_us()), encoding="utf-8")
