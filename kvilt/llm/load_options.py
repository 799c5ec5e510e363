"""The options of `load` and `load_async`: one value, which both read from their keywords."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from ..config import EngineConfig, GateConfig, RunConfig
from ..errors import ParamError, warn_renamed
from ..store.store import Store
from ..weights.hub import FetchProgress
from .drafts import DraftLike
from .model import ContextPrefix

OnLoad = Callable[[int, int], None]  # tensors that are read, of all
_FORMER = {"behind": "context_prefix"}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is built around a model; how it is run is in `RunConfig`."""

    on_fetch: FetchProgress | None = None  # called while a model is fetched
    on_load: OnLoad | None = None  # called while its weights are read
    engine: EngineConfig | None = None  # how requests share steps
    store: Store | None = None  # keeps documents, across restarts if it has a disk; yours to close
    gate: GateConfig | None = None  # compares some blended prompts with whole prefills, and may raise their ratio
    context_prefix: ContextPrefix | None = None  # what most prompts with documents begin with: computed before them
    discover: bool | None = None  # blend known documents that prompts do not name; None: what `engine` says
    draft: DraftLike | None = None  # "ngram", a smaller model, or a drafter
    draft_tokens: int | None = None  # most tokens of a draft

    @property
    def engine_config(self) -> EngineConfig:
        config = self.engine or EngineConfig()
        return config if self.discover is None else dataclasses.replace(config, discover=self.discover)


class RunFields(TypedDict, total=False):
    """The fields of `RunConfig` as users write them."""

    device: str
    threads: int | None
    kv_memory: int | str | None  # bytes, or a size like 2G
    max_context: int | None
    kv_dtype: str
    backend: str
    lora_memory: int | str | None  # bytes, or a size like 2G
    gpu_memory: float  # share of a GPU that weights, KV and activations may take
    state_every: int | None  # tokens between two checkpoints of recurrent state; None: as memory allows
    numa: bool  # CPU threads stay on physical cores, in equal shares on NUMA nodes
    tensor_parallel: int  # processes that share the model, each with a part of its weights and KV
    parallel_timeout_s: float  # how long one of them waits for the others in a step
    deterministic: bool  # a row's bits do not depend on its batch, on a GPU either


class LoadFields(RunFields, total=False):
    """Every keyword of `load` and `load_async`, as type checkers and editors see them."""

    on_fetch: FetchProgress | None
    on_load: OnLoad | None
    engine: EngineConfig | None
    store: Store | None
    gate: GateConfig | None
    context_prefix: ContextPrefix | None
    discover: bool | None
    draft: DraftLike | None
    draft_tokens: int | None

    behind: ContextPrefix | None  # the former name of `context_prefix`


def split_load_fields(fields: Mapping[str, Any], stacklevel: int) -> tuple[LoadOptions, dict[str, Any]]:
    """The keywords of a call, split into `LoadOptions` and the fields of `RunConfig`; others are refused by name."""
    given = dict(fields)
    for former, name in _FORMER.items():
        if (value := given.pop(former, None)) is not None:
            warn_renamed(f"load({former}=...)", f"load({name}=...)", stacklevel=stacklevel)
            given[name] = value
    options = [field.name for field in dataclasses.fields(LoadOptions)]
    known = [*(field.name for field in dataclasses.fields(RunConfig)), *options]
    for name in given:
        if name not in known:
            raise ParamError(name, f"there is no such option; the options are {', '.join(sorted(known))}")
    own = {name: value for name, value in given.items() if name in options}
    return LoadOptions(**own), {name: value for name, value in given.items() if name not in options}
