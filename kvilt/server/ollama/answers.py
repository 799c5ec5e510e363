"""Answers of Ollama's API as the OpenAPI document lists them; routes write them by hand."""

from __future__ import annotations

from typing import Any

from ..http.schema import ResponseModel


class OllamaError(ResponseModel):
    """Every answer that is no success."""

    error: str


class OllamaVersion(ResponseModel):
    """The version of the API."""

    version: str


class OllamaDetails(ResponseModel):
    """What a model is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(ResponseModel):
    """A model."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(ResponseModel):
    """All models."""

    models: list[OllamaModel]


class OllamaLoadedModel(ResponseModel):
    """A model in memory."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaLoadedModels(ResponseModel):
    """All models in memory."""

    models: list[OllamaLoadedModel]


class OllamaShown(ResponseModel):
    """The description of a model."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaEmbeddings(ResponseModel):
    """Embeddings of texts."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(ResponseModel):
    """The embedding of one text."""

    embedding: list[float]


class OllamaAnswer(ResponseModel):
    """An answer, or its end; counts are of tokens, durations are nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[dict[str, Any]] | None = None
    kvilt: dict[str, Any] | None = None


class OllamaChatAnswer(OllamaAnswer):
    """An answer to a conversation."""

    message: dict[str, Any]


class OllamaGenerateAnswer(OllamaAnswer):
    """An answer to a prompt."""

    response: str
    thinking: str | None = None
