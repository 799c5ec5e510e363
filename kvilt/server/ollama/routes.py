"""The routes of Ollama's API that need no folder of models: chat, generate, embed, show, tags, ps and version."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from ...errors import ParamError
from ...llm.offload import PROMPT
from ..auth import Caller
from ..http.event_stream import EventStream
from ..http.responses import json_response
from ..http.routing import CallerDep, ServiceDep, StrictRoute, error_responses, generation_responses
from ..openai.chat import prepare_chat, trace_chat
from ..openai.embeddings import EmbeddingOptions, embed_all, trace_embedded
from ..service import Service
from .answers import (
    OllamaChatAnswer,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaError,
    OllamaGenerateAnswer,
    OllamaLoadedModels,
    OllamaModels,
    OllamaShown,
    OllamaVersion,
)
from .errors import NDJSON, OLLAMA_STREAM
from .models import VERSION, listed_models, loaded_models, shown_model
from .schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
    ShowRequest,
)
from .translate import translate_chat, translate_prompt
from .writer import OllamaStream, PreparedOllama, now, open_stream, whole_answer

router = APIRouter(route_class=StrictRoute, tags=["ollama"])
_LOOK = error_responses(model=OllamaError)
_ASKED = error_responses(400, 404, 408, 413, 415, 429, model=OllamaError)


@router.get("/api/version", response_model=None, responses={200: {"model": OllamaVersion}, **_LOOK})
async def version() -> Response:
    """The version of Ollama whose API this is."""
    return json_response({"version": VERSION})


@router.get("/api/tags", response_model=None, responses={200: {"model": OllamaModels}, **_LOOK})
async def tags(service: ServiceDep) -> Response:
    """All models."""
    return json_response({"models": listed_models(service)})


@router.get("/api/ps", response_model=None, responses={200: {"model": OllamaLoadedModels}, **_LOOK})
async def ps(service: ServiceDep) -> Response:
    """All models in memory."""
    return json_response({"models": loaded_models(service)})


@router.post("/api/show", response_model=None, responses={200: {"model": OllamaShown}, **_ASKED})
async def show(body: ShowRequest, service: ServiceDep) -> Response:
    """What a model is and can do."""
    name = body.name if body.model is None else body.model
    if name is None:
        raise ParamError("model", "is missing")
    check_model(service, name)
    return json_response(shown_model(service))


@router.post(
    "/api/chat",
    response_model=None,
    responses=generation_responses(OllamaChatAnswer, error=OllamaError, stream=NDJSON),
)
async def chat(body: OllamaChatRequest, request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Answer a conversation."""
    if not body.messages:
        return _nothing(service, body, {"message": {"role": "assistant", "content": ""}})
    return await _answer(request, service, body, caller)


@router.post(
    "/api/generate",
    response_model=None,
    responses=generation_responses(OllamaGenerateAnswer, error=OllamaError, stream=NDJSON),
)
async def generate(body: OllamaGenerateRequest, request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Answer a prompt, or continue it as it is."""
    if not body.prompt:
        return _nothing(service, body, {"response": ""})
    return await _answer(request, service, body, caller)


@router.post("/api/embed", response_model=None, responses={200: {"model": OllamaEmbeddings}, **_ASKED})
async def embed(body: OllamaEmbedRequest, request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Embed texts."""
    texts = [body.input] if isinstance(body.input, str) else body.input
    lora = check_model(service, body.model)
    began_s = time.perf_counter()
    wanted = EmbeddingOptions(lora=lora, dimensions=body.dimensions, truncate=body.truncate is not False)
    found = await embed_all(service, texts, caller.tenant, wanted, "input")
    trace_embedded(request.scope, "embeddings", service, body.model, lora, found)
    answer = {
        "model": body.model,
        "embeddings": [list(one.values) for one in found],
        "total_duration": round((time.perf_counter() - began_s) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": sum(one.tokens for one in found),
    }
    return json_response(answer)


@router.post("/api/embeddings", response_model=None, responses={200: {"model": OllamaEmbedding}, **_ASKED})
async def embed_one(
    body: OllamaEmbeddingsRequest, request: Request, service: ServiceDep, caller: CallerDep
) -> Response:
    """Embed one text, for older clients."""
    lora = check_model(service, body.model)
    (found,) = await embed_all(
        service, [body.prompt], caller.tenant, EmbeddingOptions(lora=lora, truncate=True), "prompt"
    )
    trace_embedded(request.scope, "embeddings", service, body.model, lora, [found])
    return json_response({"embedding": list(found.values)})


def check_model(service: Service, name: str) -> str | None:
    """`Service.check_model` for names with a tag: latest is the tag of every model here."""
    return service.check_model(name.removesuffix(":latest"))


def _nothing(service: Service, body: OllamaGeneration, said: dict[str, Any]) -> Response:
    """The answer to a request that only loads the model, which is always there."""
    check_model(service, body.model)
    reason = "unload" if body.keep_alive == 0 else "load"
    return json_response({"model": body.model, "created_at": now(), **said, "done": True, "done_reason": reason})


def _prepare(service: Service, body: OllamaGeneration, caller: Caller) -> PreparedOllama:
    """Check a request and prepare it; slow, so it runs off the event loop."""
    defaults, raw = service.llm.sampling_defaults.params, None
    if isinstance(body, OllamaGenerateRequest):
        asked = translate_prompt(body, defaults)
        raw = body.prompt if body.raw else None
    else:
        assert isinstance(body, OllamaChatRequest)
        asked = translate_chat(body, defaults)
    asked = asked.model_copy(update={"model": body.model.removesuffix(":latest")})
    return PreparedOllama(prepare_chat(service, asked, caller), body.model, isinstance(body, OllamaChatRequest), raw)


async def _answer(request: Request, service: Service, body: OllamaGeneration, caller: Caller) -> Response:
    prepared = await service.llm.offload.run(PROMPT, _prepare, service, body, caller, owner=caller.tenant)
    on_usage = trace_chat(request.scope, service, prepared.chat, body.model)
    if body.stream is False:
        return json_response(await whole_answer(service, prepared, on_usage))
    stream = await open_stream(service, prepared)
    source = OllamaStream(service, prepared, stream, on_usage)
    return EventStream(source, service.config.keep_alive_s, OLLAMA_STREAM)
