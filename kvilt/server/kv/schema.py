"""Requests and answers of the routes of KV handles."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..http.schema import RequestModel, ResponseModel
from ..openai.fields import Documents, Ids, LoraScale, Messages, SafeName, Tool, TtlS


class KVHandle(ResponseModel):
    """The handle that `kv_out` asked for."""

    id: str
    tokens: int
    resident: bool
    pinned: bool
    expires_in_s: float
    kv_bytes: int
    maker: str  # base, or an adapter by content and scale


class CreateRequest(RequestModel):
    """KV to compute and keep: of a prompt, or of messages as a conversation begins with them."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: str | Ids | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    ttl_s: TtlS | None = None


class ChunksRequest(RequestModel):
    """Documents to compute and store, for the model or for an adapter that is named as it."""

    model: Annotated[str, Field(max_length=512)] | None = None
    documents: Annotated[Documents, Field(min_length=1)]
    lora_scale: LoraScale | None = None


class StoredChunk(ResponseModel):
    """A document that is stored now."""

    id: str
    tokens: int
    found: bool  # it was there already; else it was computed


class ChunkList(ResponseModel):
    """All documents of a request, in their order."""

    object: str
    data: list[StoredChunk]


class ForkRequest(RequestModel):
    """A second handle on the same content."""

    ttl_s: TtlS | None = None


class TruncateRequest(RequestModel):
    """Forget everything from `length` on."""

    length: Annotated[int, Field(ge=1, lt=2**31)]


class PinRequest(RequestModel):
    """Keep a handle at least so long, and its KV before that of others."""

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
    """What is gone."""

    id: str
    deleted: bool


class PagePoolState(ResponseModel):
    """The page pool, of which every key has a part."""

    total: int
    used: int
    free: int
    kept: int  # of those free, with KV that may be found again
    shared: int  # of those used, seen by more than one cache
    page_tokens: int
    used_bytes: int


class SampleState(ResponseModel):
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
    """The beginning of some texts, whose KV is known: a run of tokens up to where texts part."""

    id: str
    parent: str | None
    adapter: str
    start: int
    tokens: int
    text: str  # how it begins
    pages: int
    hits: int
    caches: int


class KVHandleState(KVHandle):
    """A handle, and the last prefix that it shares; null while none of its pages is known."""

    prefix: str | None


class KVState(ResponseModel):
    """What the KV memory holds for a key; the pages are those of all."""

    pages: PagePoolState
    samples: list[SampleState]
    prefixes: list[PrefixState]
    handles: list[KVHandleState]
    omitted: int  # samples, prefixes and handles beyond 512 of each


class BlendCertificate(ResponseModel):
    """What a quality gate knows of a recipe; null is what it does not know yet."""

    model: str  # fingerprint of its weights
    adapter: str
    strategy: str
    asked: str  # the recipe by its name, as requests ask for it
    asked_ratio: float
    ratio: float  # what is blended with
    falls_back: bool  # prompts are computed as a whole
    count: int  # comparisons at this ratio, ever
    compared: int  # the latest of them, which the rest is about
    mean_kl: float | None
    kl_bound: float | None
    agreement: float | None


class BlendCertificateList(ResponseModel):
    """Of every recipe that was asked for."""

    object: str
    data: list[BlendCertificate]
