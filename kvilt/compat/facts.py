"""What is true of an executor now: its capabilities, its state, and what its caches have saved."""

from __future__ import annotations

from typing import Any

from ..executor.protocol import Executor
from .exchange import ExecutorCapabilities, ExecutorStatus, LlmRuntimeConfig, ModelInfo
from .model_table import ModelTable
from .sequence_table import SequenceTable


def capabilities_of(executor: Executor) -> ExecutorCapabilities:
    """Of an executor of kvilt. A closed one can do nothing, and says so."""
    pool, is_open = executor.pool, not executor.closed
    groups = pool.layout.groups
    dtypes = tuple(group.shape.dtype.name for group in groups)
    return ExecutorCapabilities(
        family=executor.spec.family,
        backend=pool.ops.name,
        numerics=pool.ops.numerics,
        device=str(pool.device),
        kv_dtype=dtypes[0],
        max_context=executor.max_context,
        page_tokens=pool.layout.page_tokens,
        layer_groups=(
            *(type(group.reach).__name__.lower() for group in groups),
            *(("recurrent",) if pool.layout.recurrent is not None else ()),
        ),
        max_rows=min(pool.group_pages) if is_open else 0,
        expanded_formats=executor.expanded_formats,
        weight_kernels=tuple(f"{name}: {kernel}" for name, kernel in executor.weight_kernels.items()),
        devices=(str(pool.device),),
        kv_dtypes=dtypes,
        lora=is_open,
        drafts=is_open,
        # Chunks keep values beside keys, and a recurrent state depends on all tokens before it.
        blending=is_open and all(group.shape.value_dim for group in groups) and pool.layout.all_paged,
        deterministic=executor.deterministic,
        closed=not is_open,
        notes=tuple(filter(None, [pool.host_copies.note(), executor.replay_note, _streams_note(executor)])),
    )


def _streams_note(executor: Executor) -> str:
    if executor.spec.per_layer is None:
        return ""
    if executor.pool.ops.name == "native":
        return "steps of a model with inputs of each layer's own are not recorded"
    return "torch mixes residual streams and adds the inputs of each layer's own" if executor.spec.altup else ""


def model_capabilities(info: ModelInfo, config: LlmRuntimeConfig) -> ExecutorCapabilities:
    """Of a model that is not kvilt's: what it says of itself."""
    return ExecutorCapabilities(
        family=info.model_type,
        backend="",
        numerics="",
        device=info.device,
        kv_dtype=info.dtype,
        max_context=config.max_seq_len,
        page_tokens=0,
        layer_groups=(),
        max_rows=0,
        devices=(info.device,),
    )


def status_of(executor: Executor, table: SequenceTable) -> ExecutorStatus:
    """Of an executor of kvilt; waits for no step."""
    usage = executor.pool.usage()
    return ExecutorStatus(
        busy=executor.busy,
        caches=len(table),
        tokens=table.tokens(),
        pages_used=usage.used,
        pages_free=usage.free,
        pages_total=usage.total,
        closed=executor.closed,
    )


def model_status(table: ModelTable) -> ExecutorStatus:
    """Of a model that is not kvilt's; where its KV lies, it alone knows."""
    return ExecutorStatus(
        busy=table.busy, caches=len(table), tokens=table.tokens(), pages_used=0, pages_free=0, pages_total=0
    )


def kv_capacity_of(executor: Executor) -> int:
    """Tokens a new cache could hold now; none once the executor is closed."""
    pool, layout = executor.pool, executor.pool.layout
    if executor.closed:
        return 0
    room = [executor.max_context // layout.page_tokens + 1]
    for g, free in enumerate(pool.free_pages()):
        # A window group with few pages holds any length, as long as it has pages for its window and a step.
        window, step = layout.groups[g].window_pages or 0, layout.pages_for(pool.step_tokens or 0)
        if g not in pool.small_groups or free < window + step:
            room.append(free)
    return min(executor.max_context, min(room) * layout.page_tokens)


def cache_metrics_of(executor: Executor) -> dict[str, Any]:
    """Sequences that began with KV that was there, of any caller, and where the pages are.

    Hits, misses and evictions come from one place, the prefix index, which the engine uses too.
    """
    prefixes, usage = executor.prefixes, executor.pool.usage()
    return {
        "hits": prefixes.hits,
        "misses": prefixes.misses,
        "saved_tokens": prefixes.saved_tokens,
        "evictions": prefixes.evictions,
        "pages_used": usage.used,
        "pages_shared": usage.shared,
        "pages_free": usage.free,
        "pages_cached": usage.cached,
        "bytes_used": usage.used_bytes,
    }
