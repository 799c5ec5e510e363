"""A model by name, ready to use: one of the two places that build things from configuration."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import DEFAULT_MODEL, EngineConfig, GateConfig, RunConfig, parse_bytes
from ..errors import ParamError, warn_renamed
from ..executor.load import build_executor
from ..executor.protocol import Executor
from ..models.families.registry import recognise
from ..ops.kv_dtypes import check_kv_dtype
from ..ops.select import check_name as check_backend
from ..speculative.drafter import Drafter
from ..store.store import Store
from ..text import tokenizer as tokenizers
from ..text.tokenizer import Tokenizer
from ..weights.hub import FetchProgress, resolve
from ..weights.source import Checkpoint, open_checkpoint
from .async_llm import AsyncLLM
from .drafts import DraftLike, check_draft, drafter_for
from .facade import LLM
from .generation import SamplingDefaults, sampling_defaults
from .model import ContextPrefix


def load(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    on_fetch: FetchProgress | None = None,
    on_load: Callable[[int, int], None] | None = None,
    store: Store | None = None,
    gate: GateConfig | None = None,
    context_prefix: ContextPrefix | None = None,
    discover: bool = False,
    draft: DraftLike | None = None,
    draft_tokens: int | None = None,
    behind: ContextPrefix | None = None,
    **options: Any,
) -> LLM:
    """A model by name or path, ready to use. Options: device, threads, kv_memory, max_context, kv_dtype, backend.

    `store` keeps documents that prompts are blended of, across restarts if it has a disk. `context_prefix` is the text,
    or the messages, that most of these prompts begin with: documents are computed after it. `gate` compares some
    blended prompts with whole prefills, and may answer later ones with a higher ratio. `discover` blends known
    documents that prompts hold without naming them; answers then depend on what is stored.
    """
    context_prefix = _renamed(context_prefix, behind)
    check_draft(draft, draft_tokens)
    parts = _parts(model, on_fetch, on_load, options)
    drafter = _drafter(draft, draft_tokens, parts, on_fetch, options)
    return LLM(
        parts.executor,
        parts.tokenizer,
        parts.stop_ids,
        EngineConfig(discover=discover),
        drafter=drafter,
        store=store,
        gate=gate,
        context_prefix=context_prefix,
        defaults=parts.defaults,
    )


def load_async(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    on_fetch: FetchProgress | None = None,
    on_load: Callable[[int, int], None] | None = None,
    engine: EngineConfig | None = None,
    store: Store | None = None,
    gate: GateConfig | None = None,
    context_prefix: ContextPrefix | None = None,
    draft: DraftLike | None = None,
    draft_tokens: int | None = None,
    behind: ContextPrefix | None = None,
    **options: Any,
) -> AsyncLLM:
    """`load` for event loops: many callers share the steps of one model. Blocks while it loads."""
    context_prefix = _renamed(context_prefix, behind)
    check_draft(draft, draft_tokens)
    parts = _parts(model, on_fetch, on_load, options)
    drafter = _drafter(draft, draft_tokens, parts, on_fetch, options)
    return AsyncLLM(
        parts.executor,
        parts.tokenizer,
        parts.stop_ids,
        engine,
        drafter=drafter,
        store=store,
        gate=gate,
        context_prefix=context_prefix,
        defaults=parts.defaults,
    )


def _renamed(context_prefix: ContextPrefix | None, behind: ContextPrefix | None) -> ContextPrefix | None:
    if behind is None:
        return context_prefix
    warn_renamed("load(behind=...)", "load(context_prefix=...)", stacklevel=3)
    return behind


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `LLM` and `AsyncLLM` need of a checkpoint."""

    executor: Executor
    tokenizer: Tokenizer
    stop_ids: list[int]
    defaults: SamplingDefaults


def _parts(
    model: str | os.PathLike[str],
    on_fetch: FetchProgress | None,
    on_load: Callable[[int, int], None] | None,
    options: dict[str, Any],
) -> _Parts:
    config = run_config(**options)
    checkpoint = open_checkpoint(resolve(os.fspath(model), on_fetch))
    try:
        recognise(checkpoint)  # an unknown family is reported before other errors
        tokenizer = _tokenizer(checkpoint)
        executor = build_executor(checkpoint, config, on_load)
    except BaseException:
        checkpoint.tensors.close()
        raise
    return _Parts(executor, tokenizer, _generation_stops(checkpoint), sampling_defaults(checkpoint))


def _drafter(
    draft: DraftLike | None,
    draft_tokens: int | None,
    parts: _Parts,
    on_fetch: FetchProgress | None,
    options: dict[str, Any],
) -> Drafter | None:
    """The drafter for a loaded model; if there can be none, the model is closed."""

    def load_draft(name: str, kv_bytes: int) -> tuple[Executor, Tokenizer]:
        own = {**options, "kv_memory": kv_bytes, "max_context": None}
        small = _parts(name, on_fetch, None, own)
        return small.executor, small.tokenizer

    try:
        return drafter_for(draft, draft_tokens, parts.executor, parts.tokenizer, load_draft)
    except BaseException:
        parts.executor.close()
        raise


def run_config(**options: Any) -> RunConfig:
    """A RunConfig from options as users write them; amounts of memory may be sizes like 2G."""
    known = {option.name for option in dataclasses.fields(RunConfig)}
    for name in options:
        if name not in known:
            raise ParamError(name, f"there is no such option; the options are {', '.join(sorted(known))}")
    for name in ("kv_memory", "lora_memory"):
        if isinstance(options.get(name), str):
            options[name] = parse_bytes(options[name], name)
    config = RunConfig(**options)
    check_backend(config.backend)  # here and not only at load: a model may have to be fetched before
    check_kv_dtype(config.kv_dtype)
    return config


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.format.tokenizer_inside:
        return tokenizers.from_metadata(checkpoint.config)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return tokenizers.from_file(Path(folder) / "tokenizer.json")


def _generation_stops(checkpoint: Checkpoint) -> list[int]:
    """End tokens that a Hugging Face folder names besides the tokenizer's own."""
    named = checkpoint.generation.get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    return [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]
