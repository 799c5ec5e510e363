"""POST /v1/embeddings, /v1/score and /v1/rerank: pooled states of the model, and how near two texts are by them."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.types import Scope

from ...engine.pooling import PoolingKind
from ...errors import ContextOverflow, InputError, ParamError
from ...llm import Embedding, Prompt
from ...llm.embedding import check_dimensions
from ...llm.offload import ANSWER
from ..auth import Caller
from ..http.errors import HTTPError
from ..http.responses import json_bytes, json_response
from ..http.routing import BODY_ERRORS, CallerDep, ServiceDep, StrictRoute
from ..http.schema import RequestModel, ResponseModel
from ..service import Service, new_id
from ..tracing import trace_request, trace_response, trace_usage
from .fields import Dimensions, Ids, Salt

Texts = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=10_000, fail_fast=True)]


class PooledRequest(RequestModel):
    """What all requests for embeddings share."""

    model: Annotated[str, Field(max_length=512)] | None = None
    pooling: PoolingKind | None = Field(None, description="Of the states of all tokens; by default the model's own.")
    dimensions: Dimensions | None = None
    truncate_prompt_tokens: Literal[-1] | None = Field(
        None, description="-1: cut texts that are longer than the context; by default they are refused."
    )
    cache_salt: Salt | None = None
    user: Annotated[str, Field(max_length=512)] | None = Field(None, description="Accepted without effect.")


class EmbeddingsRequest(PooledRequest):
    """Texts to embed."""

    input: str | Ids | Texts | IdLists
    encoding_format: Literal["float", "base64"] | None = Field(None, description="float by default.")
    prompt_name: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="One of the prompts that the model's author puts before texts."
    )


class ScoreRequest(PooledRequest):
    """Pairs of texts: one with each of the others, or one by one."""

    text_1: str | Texts
    text_2: str | Texts


class RerankDocument(RequestModel):
    """A document of a rerank request."""

    text: str


class RerankRequest(PooledRequest):
    """Documents to put in the order of their nearness to a query."""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=10_000, fail_fast=True)]
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="All by default.")
    return_documents: bool | None = Field(None, description="True by default.")


class EmbeddingUsage(ResponseModel):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(ResponseModel):
    """One embedding: numbers, or little-endian 32-bit floats in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(ResponseModel):
    """Embeddings in the order of the input."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class ScoreItem(ResponseModel):
    """The nearness of a pair: the cosine of the angle between its embeddings."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(ResponseModel):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    data: list[ScoreItem]
    model: str
    usage: EmbeddingUsage


class RankedDocument(ResponseModel):
    """A document and its nearness."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankAnswer(ResponseModel):
    """Documents, the nearest first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """How texts are embedded."""

    pooling: PoolingKind | None = None
    prompt_name: str | None = None
    lora: str | None = None
    dimensions: int | None = None
    truncate: bool = False


_TEXTS_AT_ONCE = 64  # of one request, in the engine: starting or ending a thousand at once would hold the event loop


async def embed_all(
    service: Service, texts: Sequence[Prompt], tenant: str, wanted: EmbeddingOptions, field: str
) -> list[Embedding]:
    """The embeddings of texts, in their order; `field` is where errors say that they stand."""
    most, width = service.config.max_prompts, service.llm.executor.spec.hidden_size
    if len(texts) > most:
        raise HTTPError(400, f"{field}: {len(texts)} were sent and {most} are allowed", param=field, code="too_many")
    check_dimensions(wanted.dimensions, width)
    room = asyncio.Semaphore(_TEXTS_AT_ONCE)

    async def one(index: int, text: Prompt) -> Embedding:
        async with room:
            try:
                return await service.llm.embed(text, tenant=tenant, **asdict(wanted))
            except ParamError:
                raise  # it names its field
            except InputError as error:
                place = field if len(texts) == 1 else f"{field}.{index}"
                code = "context_length_exceeded" if isinstance(error, ContextOverflow) else "invalid_value"
                raise HTTPError(400, f"{place}: {error}", param=place, code=code) from None

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index, text)) for index, text in enumerate(texts)]
    return [task.result() for task in tasks]


def _options(service: Service, body: PooledRequest) -> EmbeddingOptions:
    lora = service.check_model(body.model)
    return EmbeddingOptions(
        body.pooling, lora=lora, dimensions=body.dimensions, truncate=body.truncate_prompt_tokens == -1
    )


def _usage(embedded: Sequence[Embedding]) -> dict[str, int]:
    tokens = sum(one.tokens for one in embedded)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def trace_embedded(
    scope: Scope, operation: str, service: Service, model: str | None, lora: str | None, found: Sequence[Embedding]
) -> None:
    """Trace a request of any API that embeds texts; `model` is its name in the request."""
    trace_request(scope, operation, model or service.model)
    trace_response(scope, lora or service.model)
    trace_usage(scope, _usage(found))


router = APIRouter(route_class=StrictRoute, tags=["embeddings"])
_MADE: dict[int | str, dict[str, Any]] = {200: {"model": EmbeddingList}, **BODY_ERRORS}


@router.post("/v1/embeddings", response_model=None, responses=_MADE)
async def embeddings(body: EmbeddingsRequest, request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Embed texts."""
    prepared = prepare_embeddings(service, body, caller)
    found, head = await _embedded(service, prepared)
    trace_embedded(request.scope, "embeddings", service, body.model, prepared.options.lora, found)
    return json_bytes(await service.llm.offload.run(ANSWER, _encoded, body, found, head, owner=caller.tenant))


@dataclass(frozen=True, slots=True)
class PreparedEmbeddings:
    """Texts to embed, checked."""

    body: EmbeddingsRequest
    tenant: str
    options: EmbeddingOptions


def prepare_embeddings(service: Service, body: EmbeddingsRequest, caller: Caller) -> PreparedEmbeddings:
    """Check a request."""
    options = replace(_options(service, body), prompt_name=body.prompt_name)
    return PreparedEmbeddings(body, caller.salted(body.cache_salt).tenant, options)


async def complete_embeddings(service: Service, prepared: PreparedEmbeddings) -> dict[str, Any]:
    """The whole answer."""
    return _listed(prepared.body, *await _embedded(service, prepared))


async def _embedded(service: Service, prepared: PreparedEmbeddings) -> tuple[list[Embedding], dict[str, Any]]:
    wanted = prepared.options
    found = await embed_all(service, _inputs(prepared.body.input), prepared.tenant, wanted, "input")
    return found, {"object": "list", "model": wanted.lora or service.model, "usage": _usage(found)}


def _inputs(given: str | Sequence[Any]) -> list[Prompt]:
    """The texts of an input; a list of numbers is one text."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return list(given)


def _encoded(body: EmbeddingsRequest, found: Sequence[Embedding], head: dict[str, Any]) -> bytes:
    """The answer as JSON; slow where there are many."""
    return bytes(json_response(_listed(body, found, head)).body)


def _listed(body: EmbeddingsRequest, found: Sequence[Embedding], head: dict[str, Any]) -> dict[str, Any]:
    shown = _base64 if body.encoding_format == "base64" else lambda one: list(one.values)
    data = [{"object": "embedding", "index": i, "embedding": shown(one)} for i, one in enumerate(found)]
    return {**head, "data": data}


def _base64(embedding: Embedding) -> str:
    values = array("f", embedding.values)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


@router.post("/v1/score", response_model=None, responses={200: {"model": ScoreList}, **BODY_ERRORS})
async def score(body: ScoreRequest, request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """How near texts are: the cosine of the angle between their embeddings."""
    first, second = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        raise ParamError("text_1", f"has {len(first)} texts and text_2 has {len(second)}; give one, or as many")
    wanted, tenant = _options(service, body), caller.salted(body.cache_salt).tenant
    left = await embed_all(service, first, tenant, wanted, "text_1")
    right = await embed_all(service, second, tenant, wanted, "text_2")
    trace_embedded(request.scope, "score", service, body.model, wanted.lora, [*left, *right])
    pairs = zip(left * len(right) if len(left) == 1 else left, right, strict=True)
    data = [{"object": "score", "index": i, "score": one.similarity(other)} for i, (one, other) in enumerate(pairs)]
    head = {"id": new_id("score"), "object": "list", "created": int(time.time()), "model": service.model}
    return json_response({**head, "data": data, "usage": _usage([*left, *right])})


@router.post("/v1/rerank", response_model=None, responses={200: {"model": RerankAnswer}, **BODY_ERRORS})
async def rerank(body: RerankRequest, request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Put documents in the order of their scores with a query."""
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    wanted, tenant = _options(service, body), caller.salted(body.cache_salt).tenant
    (query,) = await embed_all(service, [body.query], tenant, wanted, "query")
    found = await embed_all(service, texts, tenant, wanted, "documents")
    trace_embedded(request.scope, "rerank", service, body.model, wanted.lora, [query, *found])
    scores = [query.similarity(one) for one in found]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results = [
        {"index": index, "relevance_score": scores[index], "document": {"text": texts[index]}} for index in order
    ]
    if body.return_documents is False:
        results = [{"index": one["index"], "relevance_score": one["relevance_score"]} for one in results]
    head = {"id": new_id("rerank"), "model": wanted.lora or service.model}
    return json_response({**head, "results": results, "usage": _usage([query, *found])})
