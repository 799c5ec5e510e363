"""Requests and answers of the KV routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..http.schema import RequestModel, ResponseModel
from ..openai.fields import Documents, Ids, LoraScale, Messages, SafeName, TemplateKwargs, Tool, TtlS


class KVHandle(ResponseModel):
    """A KV handle."""

    id: str
    tokens: int
    resident: bool
    pinned: bool
    expires_in_s: float
    kv_bytes: int
    maker: str  # base, or an adapter by content and scale


class CreateRequest(RequestModel):
    """KV to compute and keep: of a prompt, or of the first messages of a conversation."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: str | Ids | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    ttl_s: TtlS | None = None


class ChunksRequest(RequestModel):
    """Documents to compute and store, for the model or for an adapter that is named as the model."""

    model: Annotated[str, Field(max_length=512)] | None = None
    documents: Annotated[Documents, Field(min_length=1)]
    lora_scale: LoraScale | None = None


class StoredChunk(ResponseModel):
    """A document that is stored now."""

    id: str
    tokens: int
    found: bool  # true: it was stored before; false: it was computed now


class ChunkList(ResponseModel):
    """All documents of a request, in their order."""

    object: str
    data: list[StoredChunk]


class ReplaceSpanRequest(RequestModel):
    """New tokens in place of a span of a handle."""

    start: Annotated[int, Field(ge=0)]
    stop: Annotated[int, Field(ge=0)]
    tokens: Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)] | None = None
    text: str | None = None
    repair: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Share of what stands behind that is computed again; 1: all of it. 0.15 by default."
    )
    ttl_s: TtlS | None = None


class ReplacedKVHandle(KVHandle):
    """The new handle, and how its KV was made: exact, or the recipe of a blend."""

    origin: str


class ForkRequest(RequestModel):
    """A second handle on the same content."""

    ttl_s: TtlS | None = None


class TruncateRequest(RequestModel):
    """Drop the tokens from `length` on."""

    length: Annotated[int, Field(ge=1, lt=2**31)]


class PinRequest(RequestModel):
    """Keep a handle for at least this time, and evict its KV after that of other handles."""

    ttl_s: TtlS


class SaveRequest(RequestModel):
    """Write a handle's KV to a file of this name."""

    name: SafeName


class RestoreRequest(RequestModel):
    """A handle from a file that was saved with the same key and model."""

    name: SafeName
    ttl_s: TtlS | None = None


class KVHandleList(ResponseModel):
    """All handles of a key."""

    object: str
    data: list[KVHandle]


class SavedKV(ResponseModel):
    """A file."""

    name: str
    bytes: int


class SavedKVList(ResponseModel):
    """All files of a key."""

    object: str
    data: list[SavedKV]


class Deleted(ResponseModel):
    """The id of what was deleted."""

    id: str
    deleted: bool


class PagePoolState(ResponseModel):
    """The page pool, which all keys share."""

    total: int
    used: int
    free: int
    kept: int  # of the free ones: still hold KV that the prefix cache can find
    shared: int  # of the used ones: in more than one cache
    page_tokens: int
    used_bytes: int


class RunningSample(ResponseModel):
    """One answer in progress."""

    request: str
    index: int
    state: Literal["running", "waiting", "held"]
    priority: int
    prompt_tokens: int
    tokens: int
    computed: int
    cached: int
    pages: int
    shared_pages: int


class PrefixState(ResponseModel):
    """A node of the prefix tree: tokens with cached KV, up to where sequences differ."""

    id: str
    parent: str | None
    adapter: str
    start: int
    tokens: int
    text: str  # of the first tokens
    pages: int
    hits: int
    caches: int


class KVHandleState(KVHandle):
    """A handle and the last prefix that it shares; null while the prefix cache has none of its pages."""

    prefix: str | None


class KVState(ResponseModel):
    """What the KV memory holds for a key; `pages` are those of all keys."""

    pages: PagePoolState
    samples: list[RunningSample]
    prefixes: list[PrefixState]
    handles: list[KVHandleState]
    omitted: int  # samples, prefixes and handles beyond 512 of each


class BlendCertificate(ResponseModel):
    """Measured quality of a recipe; null is not measured yet."""

    model: str  # fingerprint of its weights
    adapter: str
    strategy: str
    asked: str  # the recipe as requests name it
    asked_ratio: float
    ratio: float  # that is used now
    falls_back: bool  # prompts are prefilled whole
    count: int  # comparisons at this ratio, in all
    compared: int  # the latest of them, which the numbers below are over
    mean_kl: float | None
    kl_bound: float | None
    agreement: float | None


class BlendCertificateList(ResponseModel):
    """The certificates of all requested recipes."""

    object: str
    data: list[BlendCertificate]
