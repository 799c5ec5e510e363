"""Requests of Ollama's API; every field that is not named here is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ...sampling.params import MAX_STOPS, MAX_TEMPERATURE, MAX_TOKENS
from ..http.schema import RequestModel
from ..openai.fields import CallId, Dimensions, Stop, ToolName, TopLogprobs
from ..sessions.fields import SessionField

IGNORED = "Accepted without effect."
Name = Annotated[str, Field(min_length=1, max_length=512)]
NoImages = Annotated[list[Any], Field(max_length=0)]
Ignored = int | float | bool | str


class OllamaOptions(RequestModel):
    """How to sample; what is left out is as the model's author set it."""

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    num_predict: Annotated[int, Field(ge=-2, le=MAX_TOKENS)] | None = Field(
        None, description="Maximum number of tokens; by default, and with -1 and -2, the rest of the context."
    )
    mirostat: Literal[0] | None = Field(None, description="Refused unless 0.")
    mirostat_tau: Ignored | None = Field(None, description=IGNORED)
    mirostat_eta: Ignored | None = Field(None, description=IGNORED)
    num_ctx: Ignored | None = Field(None, description=IGNORED)
    num_keep: Ignored | None = Field(None, description=IGNORED)
    num_batch: Ignored | None = Field(None, description=IGNORED)
    num_gpu: Ignored | None = Field(None, description=IGNORED)
    num_thread: Ignored | None = Field(None, description=IGNORED)
    main_gpu: Ignored | None = Field(None, description=IGNORED)
    numa: Ignored | None = Field(None, description=IGNORED)
    low_vram: Ignored | None = Field(None, description=IGNORED)
    f16_kv: Ignored | None = Field(None, description=IGNORED)
    logits_all: Ignored | None = Field(None, description=IGNORED)
    vocab_only: Ignored | None = Field(None, description=IGNORED)
    use_mmap: Ignored | None = Field(None, description=IGNORED)
    use_mlock: Ignored | None = Field(None, description=IGNORED)
    embedding_only: Ignored | None = Field(None, description=IGNORED)
    repeat_last_n: Ignored | None = Field(None, description=IGNORED)
    penalize_newline: Ignored | None = Field(None, description=IGNORED)
    tfs_z: Ignored | None = Field(None, description=IGNORED)


class OllamaGeneration(RequestModel):
    """What chat and generate share."""

    model: Name
    stream: bool | None = Field(None, description="True by default.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="Any JSON object, or a schema.")
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    session: SessionField | None = Field(None, description="The session whose KV is used, and which gets a turn.")
    keep_alive: float | str | None = Field(None, description="Accepted without effect: the model stays.")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    truncate: bool | None = Field(None, description="Accepted without effect: a prompt that is too long is refused.")
    shift: bool | None = Field(None, description=IGNORED)


class OllamaCalledFunction(RequestModel):
    """A function and its arguments."""

    name: ToolName
    arguments: dict[str, Any]
    index: int | None = Field(None, description=IGNORED)
    description: str | None = Field(None, description=IGNORED)


class OllamaCall(RequestModel):
    """A tool call of an earlier answer."""

    function: OllamaCalledFunction
    id: CallId | None = None
    type: Literal["function"] | None = None


class OllamaMessage(RequestModel):
    """A message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_name: ToolName | None = None
    tool_call_id: CallId | None = None
    images: NoImages | None = Field(None, description="Refused unless empty.")


class OllamaFunction(RequestModel):
    """A function that the model may call."""

    name: ToolName
    description: Annotated[str, Field(max_length=65536)] | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(RequestModel):
    """A tool; all are functions."""

    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaChatRequest(OllamaGeneration):
    """A conversation to answer; without messages, nothing is asked."""

    # The server's own limit is lower; this one stops validation early.
    messages: Annotated[list[OllamaMessage], Field(max_length=10_000, fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=1024, fail_fast=True)] | None = None


class OllamaGenerateRequest(OllamaGeneration):
    """A prompt to answer; without a prompt, nothing is asked."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(None, description="Continue the prompt as it is, without the chat template.")
    suffix: Literal[""] | None = Field(None, description="Refused unless empty.")
    template: Literal[""] | None = Field(None, description="Refused unless empty.")
    context: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="Refused unless empty: use chat."
    )
    images: NoImages | None = Field(None, description="Refused unless empty.")


class OllamaEmbedRequest(RequestModel):
    """Texts to embed."""

    model: Name
    input: str | Annotated[list[str], Field(max_length=10_000, fail_fast=True)]
    truncate: bool | None = Field(None, description="Cut texts that are longer than the context; true by default.")
    dimensions: Dimensions | None = None
    options: OllamaOptions | None = Field(None, description=IGNORED)
    keep_alive: float | str | None = Field(None, description="Accepted without effect: the model stays.")


class OllamaEmbeddingsRequest(RequestModel):
    """One text to embed, as older clients ask."""

    model: Name
    prompt: str
    options: OllamaOptions | None = Field(None, description=IGNORED)
    keep_alive: float | str | None = Field(None, description="Accepted without effect: the model stays.")


class ShowRequest(RequestModel):
    """A model to describe; `name` is another name for `model`."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = Field(None, description=IGNORED)
