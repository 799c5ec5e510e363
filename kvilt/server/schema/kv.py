"""Requests and answers of the routes of KV handles."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .answers import Kept
from .chat import Messages, Tool
from .completion import Ids
from .fields import Documents, LoraScale, SafeName, Shown, Strict, TtlS


class CreateRequest(Strict):
    """KV to compute and keep: of a prompt, or of messages as a conversation begins with them."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: str | Ids | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    ttl_s: TtlS | None = None


class ChunksRequest(Strict):
    """Documents to compute and store, for the model or for an adapter that is named as it."""

    model: Annotated[str, Field(max_length=512)] | None = None
    documents: Annotated[Documents, Field(min_length=1)]
    lora_scale: LoraScale | None = None


class Chunk(Shown):
    """A document that is stored now."""

    id: str
    tokens: int
    found: bool  # it was there already; else it was computed


class Chunks(Shown):
    """All documents of a request, in their order."""

    object: str
    data: list[Chunk]


class ForkRequest(Strict):
    """A second handle on the same content."""

    ttl_s: TtlS | None = None


class TruncateRequest(Strict):
    """Forget everything from `length` on."""

    length: Annotated[int, Field(ge=1, lt=2**31)]


class PinRequest(Strict):
    """Keep a handle at least so long, and its KV before that of others."""

    ttl_s: TtlS


class SaveRequest(Strict):
    """Write a handle's KV to a file of this name."""

    name: SafeName


class RestoreRequest(Strict):
    """A handle from a file that was saved with the same key and model."""

    name: SafeName
    ttl_s: TtlS | None = None


class Handles(Shown):
    """All handles of a key."""

    object: str
    data: list[Kept]


class Saved(Shown):
    """A file."""

    name: str
    bytes: int


class SavedList(Shown):
    """All files of a key."""

    object: str
    data: list[Saved]


class Deleted(Shown):
    """What is gone."""

    id: str
    deleted: bool


class Pages(Shown):
    """The page pool, of which every key has a part."""

    total: int
    used: int
    free: int
    kept: int  # of those free, with KV that may be found again
    shared: int  # of those used, seen by more than one cache
    page_tokens: int
    used_bytes: int


class Running(Shown):
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


class Prefix(Shown):
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


class Holding(Kept):
    """A handle, and the last prefix that it shares; null while none of its pages is known."""

    prefix: str | None


class KVState(Shown):
    """What the KV memory holds for a key; the pages are those of all."""

    pages: Pages
    samples: list[Running]
    prefixes: list[Prefix]
    handles: list[Holding]
    omitted: int  # samples, prefixes and handles beyond 512 of each


class Certificate(Shown):
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


class Certificates(Shown):
    """Of every recipe that was asked for."""

    object: str
    data: list[Certificate]
