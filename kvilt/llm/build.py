"""A model by name, ready to use: one of the two places that build things from configuration."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Unpack

from ..config import DEFAULT_MODEL, RunConfig, parse_bytes
from ..errors import ParamError
from ..executor.load import build_executor
from ..executor.protocol import Executor
from ..models.families.registry import recognise
from ..ops.kv_dtypes import check_kv_dtype
from ..ops.select import check_name as check_backend
from ..speculative.drafter import Drafter
from ..text import tokenizer as tokenizers
from ..text.tokenizer import Tokenizer
from ..weights.hub import FetchProgress, resolve
from ..weights.source import Checkpoint, open_checkpoint
from .async_llm import AsyncLLM
from .drafts import check_draft, drafter_for
from .embedding_config import EmbeddingConfig, embedding_config
from .facade import LLM
from .generation import SamplingDefaults, sampling_defaults
from .load_options import LoadFields, LoadOptions, OnLoad, split_load_fields

Facade = TypeVar("Facade", LLM, AsyncLLM)


def load(model: str | os.PathLike[str] = DEFAULT_MODEL, **options: Unpack[LoadFields]) -> LLM:
    """A model by name or path, ready to use. The options are the fields of `LoadOptions` and of `RunConfig`."""
    return _build(LLM, model, options)


def load_async(model: str | os.PathLike[str] = DEFAULT_MODEL, **options: Unpack[LoadFields]) -> AsyncLLM:
    """`load` for event loops: many callers share the steps of one model. Blocks while it loads."""
    return _build(AsyncLLM, model, options)


def load_tokenizer(model: str | os.PathLike[str] = DEFAULT_MODEL) -> Tokenizer:
    """The tokenizer of a model, without its weights."""
    checkpoint = open_checkpoint(resolve(os.fspath(model), None))
    try:
        return _tokenizer(checkpoint)
    finally:
        checkpoint.tensors.close()


def _build(facade: type[Facade], model: str | os.PathLike[str], fields: Mapping[str, Any]) -> Facade:
    options, run_options = split_load_fields(fields, stacklevel=4)
    check_draft(options.draft, options.draft_tokens)
    parts = _parts(model, options.on_fetch, options.on_load, run_options)
    return facade(
        parts.executor,
        parts.tokenizer,
        parts.stop_ids,
        options.engine_config,
        drafter=_drafter(options, parts, run_options),
        store=options.store,
        gate=options.gate,
        context_prefix=options.context_prefix,
        defaults=parts.defaults,
        embedding=parts.embedding,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `LLM` and `AsyncLLM` need of a checkpoint."""

    executor: Executor
    tokenizer: Tokenizer
    stop_ids: list[int]
    defaults: SamplingDefaults
    embedding: EmbeddingConfig


def _parts(
    model: str | os.PathLike[str],
    on_fetch: FetchProgress | None,
    on_load: OnLoad | None,
    options: dict[str, Any],
) -> _Parts:
    config = run_config(**options)
    checkpoint = open_checkpoint(resolve(os.fspath(model), on_fetch))
    try:
        recognise(checkpoint)  # an unknown family is reported before other errors
        tokenizer = _tokenizer(checkpoint)
        embedding = embedding_config(checkpoint)
        executor = build_executor(checkpoint, config, on_load)
    except BaseException:
        checkpoint.tensors.close()
        raise
    return _Parts(executor, tokenizer, _generation_stops(checkpoint), sampling_defaults(checkpoint), embedding)


def _drafter(options: LoadOptions, parts: _Parts, run_options: dict[str, Any]) -> Drafter | None:
    """The drafter for a loaded model; if there can be none, the model is closed."""

    def load_draft(name: str, kv_bytes: int) -> tuple[Executor, Tokenizer]:
        # A draft model is small: one process has it.
        own = {**run_options, "kv_memory": kv_bytes, "max_context": None, "tensor_parallel": 1}
        small = _parts(name, options.on_fetch, None, own)
        return small.executor, small.tokenizer

    try:
        return drafter_for(options.draft, options.draft_tokens, parts.executor, parts.tokenizer, load_draft)
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
