"""From a checkpoint and a run configuration to a ready executor. One of the two places that build things."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from ..config import STEP_SIZES, RunConfig, available_cpus, available_memory_bytes, env_threads
from ..errors import ParamError
from ..kv.checkpoints import CheckpointSchedule, schedule_for
from ..kv.identity import Identity
from ..kv.layout import PAGE_TOKENS as PAGE_TOKENS
from ..kv.layout import KVLayout
from ..kv.pool import PagePool
from ..kv.row_states import ROW_STATES
from ..kv.sizing import split_memory, split_states
from ..models.assemble import assemble, read_spec
from ..models.loader import Progress
from ..models.spec import ModelSpec, at_context, kv_layout
from ..ops.contract import Ops, StateStore
from ..ops.kv_dtypes import KV_DTYPES, check_kv_dtype
from ..ops.select import check_name as check_backend
from ..ops.select import for_weights, only_on_cpu, select
from ..quant.formats import FORMATS
from ..weights.source import Checkpoint, TensorSource, open_checkpoint
from .device_memory import device_memory
from .executor import ModelExecutor
from .parallel.group import RankGroup
from .parallel.pages import ParallelOps, ParallelStates, held_layout
from .parallel.start import start_group

ACTIVATION_BYTES = 4 << 30  # of a GPU, left to steps and graphs


def load_executor(path: Path, config: RunConfig | None = None, progress: Progress | None = None) -> ModelExecutor:
    """An executor for the checkpoint at `path`."""
    checkpoint = open_checkpoint(path)
    try:
        return build_executor(checkpoint, config or RunConfig(), progress)
    except BaseException:
        checkpoint.tensors.close()
        raise


def build_executor(
    checkpoint: Checkpoint, config: RunConfig, progress: Progress | None = None, ops: Ops | None = None
) -> ModelExecutor:
    """An executor for an open checkpoint, which it closes in the end; `ops` stand in the place of a backend's."""
    threads = config.threads or env_threads()
    if config.tensor_parallel > 1:
        threads = threads or max(1, available_cpus() // config.tensor_parallel)
    if threads:
        torch.set_num_threads(threads)
    check_backend(config.backend)
    check_kv_dtype(config.kv_dtype)
    if ops is None:
        device = device_of(config)
        config = replace(config, backend=for_weights(config.backend, _weight_bytes(checkpoint.tensors), device))
        ops = select(config.backend, threads, device, config.deterministic, config.numa)
    spec = read_spec(checkpoint)
    max_context = _max_context(spec, config)
    spec = at_context(spec, max_context)
    kv_dtype = ops.kv_dtype if config.kv_dtype == "auto" else KV_DTYPES[config.kv_dtype]
    layout = kv_layout(spec, PAGE_TOKENS, kv_dtype)
    group = None
    if config.tensor_parallel > 1:
        group = start_group(checkpoint, spec, replace(config, threads=threads), ops.device, max_context, kv_dtype.name)
    try:
        with device_memory("loading the weights", ops.device):
            decoder = assemble(checkpoint, spec, layout, ops, progress, None if group is None else group.share)
        if group is not None:
            group.connect()
        formats = _formats_of(checkpoint.tensors)
        numerics = ops.numerics_for(formats) if group is None else group.numerics(ops.numerics_for(formats))
        identity = cache(lambda: _identity(checkpoint, spec, numerics))
        pool = _pool(spec, layout, ops, config, max_context, identity, group)
        return ModelExecutor(
            decoder,
            pool,
            max_context,
            on_close=checkpoint.tensors.close if group is None else lambda: _close(checkpoint, group),
            lora_memory=config.lora_memory,
            expanded_formats=tuple(name for name in formats if ops.expands(FORMATS[name])),
            weight_kernels={name: ops.kernel(FORMATS[name]) for name in formats},
            group=group,
        )
    except BaseException:
        if group is not None:
            group.close()
        raise


def _close(checkpoint: Checkpoint, group: RankGroup) -> None:
    group.close()
    checkpoint.tensors.close()


def _pool(
    spec: ModelSpec,
    layout: KVLayout,
    ops: Ops,
    config: RunConfig,
    max_context: int,
    identity: Callable[[], Identity],
    group: RankGroup | None,
) -> PagePool:
    """Pages and states for all the memory that there is; with other ranks, theirs are counted too."""
    ranks, held = (1, layout) if group is None else (group.size, held_layout(layout, group.splits))
    budget_bytes = config.kv_memory or _kv_budget(ops.device, config)
    states = split_states(layout, budget_bytes // ranks, max_context)
    states_bytes = 0 if layout.recurrent is None else ranks * states * layout.recurrent.shape.slot_bytes
    pages = split_memory(held, budget_bytes - states_bytes, max_context, STEP_SIZES[ops.device.type].step_tokens)
    if layout.recurrent is not None and states < ROW_STATES:
        least = ranks * ROW_STATES * layout.recurrent.shape.slot_bytes
        raise ParamError("kv_memory", f"{budget_bytes} bytes hold no recurrent state; states alone take {least} bytes")
    if min(pages) < 1:
        raise ParamError("kv_memory", f"{budget_bytes} bytes hold no page; give at least {held.page_bytes} bytes")
    new_states = StateStore.empty
    if group is not None:
        ops, new_states = ParallelOps.over(ops, group), partial(ParallelStates.following, group)
        group.make_pages(pages, states)
    kept = (states, _checkpoints(config, states), new_states)
    try:
        with device_memory("KV pages", ops.device):
            return PagePool(layout, pages, ops, identity, ops.device, spec.vocab_size, *kept)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # torch has no error of its own for it
        raise ParamError("kv_memory", f"{budget_bytes} bytes are more than this machine can map") from error


def _checkpoints(config: RunConfig, states: int) -> CheckpointSchedule:
    """Where checkpoints of recurrent state stand: as asked for, in whole pages, or as the slots allow."""
    if config.state_every is None:
        return schedule_for(states, PAGE_TOKENS)
    return CheckpointSchedule(-(-config.state_every // PAGE_TOKENS) * PAGE_TOKENS)


def device_of(config: RunConfig) -> torch.device:
    """The device that a configuration asks for; an error names what there is."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() and not only_on_cpu(config.backend) else "cpu")
    device = torch.device(config.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ParamError("device", f"{config.device} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _kv_budget(device: torch.device, config: RunConfig) -> int:
    """Bytes for pages: a quarter of what the machine has left, or of a GPU what weights and activations leave."""
    if device.type != "cuda":
        return available_memory_bytes() // 4
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * config.gpu_memory) - (total - free) - ACTIVATION_BYTES)


def _formats_of(tensors: TensorSource) -> list[str]:
    """The formats of a checkpoint's weights."""
    return sorted({tensors.storage(name).format for name in tensors.names()} & FORMATS.keys())


def _weight_bytes(tensors: TensorSource) -> int:
    return sum(tensors.storage(name).nbytes for name in tensors.names())


def _max_context(spec: ModelSpec, config: RunConfig) -> int:
    if config.max_context is not None and config.max_context > spec.context:
        raise ParamError("max_context", f"this model reads at most {spec.context} tokens, not {config.max_context}")
    return config.max_context or spec.context


def _identity(checkpoint: Checkpoint, spec: ModelSpec, numerics: str) -> Identity:
    """Weights by content; the spec beside them, because rope and reach decide what keys mean."""
    model = hashlib.sha256(f"{checkpoint.fingerprint}\n{spec!r}".encode()).hexdigest()
    return Identity(model=model, numerics=numerics)
