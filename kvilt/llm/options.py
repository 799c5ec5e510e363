"""The options of a request. `LLM` and `AsyncLLM` take the same ones, as keywords beside those of sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from ..blend.interfaces import BlendRetriever
from ..blend.plugins import BlendPlugins, MakeBlendExecutor
from ..blend.recipe import Recipe
from ..engine.request import new_id
from ..engine.sessions.session import SessionOptions
from ..errors import ParamError
from ..kv.cache import KVCache
from ..sampling.constraint import SHORT_NAMES
from ..sampling.fields import SamplingFields
from ..sampling.params import SamplingParams
from .documents import DocumentInput, document_prompts
from .model import AdapterChoice, DiscoveryChoice, Prompt


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a request is served, besides how its tokens are drawn."""

    id: str = dataclasses.field(default_factory=new_id)
    priority: int = 0  # the lower, the sooner
    tenant: str = ""  # KV is found again, and handles are seen, only by the same tenant
    kv: KVCache | str | None = None  # what the prompt continues: a cache, which is forked, or, with AsyncLLM, a handle
    keep_kv: bool = False  # the completion's `kv` is then yours to close
    documents: Sequence[Prompt] = ()  # stand before the prompt, or where a chat template puts them, and are blended
    recipe: Recipe | None = None  # how documents are blended; None: the default recipe
    retriever: BlendRetriever | None = None  # gives the KV of documents; None: what is stored
    blend_executor: MakeBlendExecutor | None = None  # makes what selects tokens; None: what the recipe says
    discover: bool | None = None  # blend also known documents that the prompt itself holds; None: the engine's default
    lora: int | str | None = None  # the adapter, by id or name; None: the base model
    lora_scale: float = 1.0
    prediction: str = ""  # text that the answer is expected to repeat; drafts are looked up in it too
    session: SessionOptions | str | None = None  # whose KV the prompt begins with, and which gets a turn

    @property
    def session_options(self) -> SessionOptions | None:
        """The session, with what the request says of it."""
        return SessionOptions(self.session) if isinstance(self.session, str) else self.session

    @property
    def blend_plugins(self) -> BlendPlugins:
        return BlendPlugins(self.retriever, self.blend_executor)

    @property
    def adapter(self) -> AdapterChoice:
        return AdapterChoice(self.lora, self.lora_scale)

    @property
    def discovery(self) -> DiscoveryChoice:
        return DiscoveryChoice(self.discover, self.recipe)

    def numbered(self, index: int) -> RequestOptions:
        """The options of one prompt of several, whose requests need ids of their own."""
        return dataclasses.replace(self, id=f"{self.id}-{index}")

    def with_recipe(self, **fields: Any) -> RequestOptions:
        """The same with a recipe in which these fields are changed; None leaves a field as it is."""
        given = {name: value for name, value in fields.items() if value is not None}
        return dataclasses.replace(self, recipe=Recipe.of(self.recipe, **given))


class RequestFields(TypedDict, total=False):
    """The fields of `RequestOptions` as type checkers and editors see them."""

    id: str
    priority: int
    tenant: str
    kv: KVCache | str | None
    keep_kv: bool
    documents: Sequence[DocumentInput]
    recipe: Recipe | None
    retriever: BlendRetriever | None
    blend_executor: MakeBlendExecutor | None
    discover: bool | None
    lora: int | str | None
    lora_scale: float
    prediction: str
    session: SessionOptions | str | None


class CallFields(RequestFields, SamplingFields, total=False):
    """Every keyword of `generate`, `stream`, `chat`, `stream_chat` and `blend`."""


def split_fields(params: SamplingParams | None, fields: Mapping[str, Any]) -> tuple[RequestOptions, SamplingParams]:
    """The keywords of a call, split into the options of its request and its sampling; others are refused by name."""
    options = [field.name for field in dataclasses.fields(RequestOptions)]
    sampling = [field.name for field in dataclasses.fields(SamplingParams)]
    for name in fields:
        if name not in (*options, *sampling, *SHORT_NAMES):
            known = f"the options are {', '.join(options)}; the sampling fields are {', '.join(sampling)}"
            raise ParamError(name, f"is neither an option nor a sampling field; {known}")
    own = {name: value for name, value in fields.items() if name in options}
    if "documents" in own:
        own["documents"] = document_prompts(own["documents"])
    rest = {name: value for name, value in fields.items() if name not in options}
    return RequestOptions(**own), SamplingParams.of(params, **rest)
