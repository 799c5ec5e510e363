"""The executor's primitive: `run(batch)`, with the caches, adapters and locks it needs.

It owns weights, kernels and the page pool, and remembers no sequence: all of that is in the `KVCache` passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch, Logits
from ..errors import ContextOverflow, InputError, KviltError, ModelClosed
from ..kv.cache import KVCache, positive
from ..kv.layout import KVLayout
from ..kv.pool import PagePool
from ..kv.prefix import PrefixIndex
from ..metrics import Metrics
from ..models.decoder import Decoder
from ..models.spec import ModelSpec, rope_axes
from ..models.step_adapters import StepAdapters
from ..sampling.pending import PendingSample
from ..sampling.prepare import PreparedSteps
from ..sampling.sampler import SamplerOutput, SamplingState, start_sample
from ..weights.assets import AssetsLike
from .call import CallQueue, ExecutorCall, observe
from .counters import EXECUTOR_METRICS, ROWS, STEPS, TOKENS
from .device_memory import device_memory
from .inputs import check_row
from .kv_maker import mark_rows
from .lora import Adapters
from .parallel.group import RankGroup
from .placement import KVPlacement
from .replay import DecodeSize, Replay


class StepExecutor:
    """Runs the steps of one model. Concurrent calls wait for each other; `cancel` may come from any thread."""

    def __init__(
        self,
        decoder: Decoder,
        pool: PagePool,
        max_context: int,
        metrics: Metrics | None = None,
        on_close: Callable[[], None] = lambda: None,
        lora_memory: int | None = None,
        expanded_formats: tuple[str, ...] = (),
        weight_kernels: Mapping[str, str] | None = None,
        group: RankGroup | None = None,
    ) -> None:
        """`group`: the other ranks that share the model, which do what is done here."""
        self._decoder = decoder
        self._pool = pool
        self.prefixes = PrefixIndex(pool)  # KV that no cache holds any more, for the next sequence with the same tokens
        self._max_context = max_context
        self.metrics = metrics or Metrics(EXECUTOR_METRICS)
        self._calls = CallQueue(self._check_open, pool.ops.alone, self._stop_replay)
        self._group = group
        self.adapters = Adapters(decoder, lora_memory, self._calls.lock, group)
        self._room = min(max_context, pool.tokens)  # tokens a cache may have
        self._replay = Replay(decoder, pool, self._room)
        self.expanded_formats = expanded_formats  # of the checkpoint, which the backend holds as float32
        self.weight_kernels: Mapping[str, str] = weight_kernels or {}  # by format
        self._axes = rope_axes(decoder.spec)
        self._on_close = on_close
        self._closed = False

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    @property
    def layout(self) -> KVLayout:
        return self._pool.layout

    @property
    def pool(self) -> PagePool:
        return self._pool

    @property
    def max_context(self) -> int:
        """Tokens a sequence may have."""
        return self._max_context

    @property
    def deterministic(self) -> bool:
        """Whether a row's bits depend neither on its batch nor on how its prompt was cut into chunks."""
        return self._pool.ops.deterministic

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads, as the backend holds them."""
        return self._decoder.weight_bytes

    @property
    def replay_note(self) -> str:
        """Why decode steps are not recorded and replayed; empty where they are."""
        return self._replay.note

    @property
    def closed(self) -> bool:
        """Whether nothing runs any more."""
        return self._closed

    @property
    def failure(self) -> KviltError | None:
        """Why nothing runs any more, where a process that holds a part of the model is gone."""
        return None if self._group is None else self._group.failure

    @property
    def ranks(self) -> int:
        """The processes that share the model."""
        return 1 if self._group is None else self._group.size

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        return self._calls.busy

    # The primitive.

    def run(self, batch: Batch) -> Logits:
        """One forward over the rows of a batch. Commits nothing: the owner of the caches decides that."""
        logits = self.forward(batch)
        self._count(batch)
        return logits

    def forward(self, batch: Batch) -> Logits:
        """`run` that is not counted."""
        if batch.pool is not self._pool:
            raise InputError("the caches of this batch belong to another executor")
        for row in batch.rows:
            check_row(row, self.spec.vocab_size, self.spec.hidden_size, self._axes, self.spec.state_size)
        with (
            device_memory(f"a step of {batch.num_tokens} tokens", self._pool.device),
            self.call() as stop,
            batch.lease(),
            torch.no_grad(),
            self._adapted(batch) as step_adapters,
        ):
            if self._group is not None:
                observe(stop)  # and not between layers: the other ranks would wait for this one
                with self._group.step(batch, step_adapters) as own:
                    return self._decoder(own, lambda _layer: None, step_adapters)
            logits = self._replay.run(batch, lambda: observe(stop), step_adapters)
            if logits is None:
                logits = self._decoder(batch, lambda _layer: observe(stop), step_adapters)
        return logits

    def decode_sizes(self, max_rows: int) -> list[DecodeSize]:
        """The decode steps of up to `max_rows` rows that are recorded; others are padded to one of them."""
        return self._replay.decode_sizes(max_rows)

    @property
    def draws_in_replays(self) -> bool:
        """Whether rows of `run_steps` may draw; otherwise all of them take their likeliest tokens."""
        return self._replay.draws

    def run_steps(
        self, batch: Batch, steps: int, ends: Sequence[Sequence[int]], draws: PreparedSteps | None = None
    ) -> Tensor | None:
        """`run` of a decode step, up to `steps` times, each with the tokens drawn after the last: tokens [runs, rows].

        The same KV and tokens, to the bit, as so many runs with a sample after each. Without `draws` all rows take
        their likeliest tokens. There must be room for all steps. Stops after the step in which a row draws one of its
        `ends`. None where the backend cannot repeat this batch.
        """
        with self.call() as stop, batch.lease(), torch.no_grad(), self._adapted(batch) as step_adapters:
            drawn = self._replay.sample(batch, steps, ends, lambda: observe(stop), step_adapters, draws)
        for _ in range(0 if drawn is None else len(drawn)):
            self._count(batch)
        return drawn

    @contextmanager
    def _adapted(self, batch: Batch) -> Iterator[StepAdapters | None]:
        """For the length of a step: the adapters of its rows, which are then named in the rows' caches."""
        with self.adapters.step(batch.rows, batch.starts) as step_adapters:
            mark_rows(batch.rows, self.adapters)
            yield step_adapters

    def _count(self, batch: Batch) -> None:
        self.metrics.add(STEPS)
        first, rows = batch.rows[0].adapter, batch.rows
        if all(row.adapter is first for row in rows):  # to hash each of them takes longer
            counts = {first: len(rows)}
        else:
            counts = Counter([row.adapter for row in rows])
        for adapter, count in counts.items():
            self.metrics.add(ROWS, count, adapter=self.adapters.name_of(adapter))
        self.metrics.add(TOKENS, batch.num_tokens)

    def place(self, kv: KVCache, spans: Sequence[range]) -> KVPlacement:
        """Places for stored KV at these positions: all that is written to pages beside what `run` writes."""
        return KVPlacement(self._pool, self.spec, self.call, kv, spans)

    def sample(self, logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> SamplerOutput:
        """One token per row of `logits`; the states do not advance."""
        return self.start_sample(logits, states, positions).wait()

    def start_sample(self, logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> PendingSample:
        """`sample` that does not wait for the device: tokens are there at once, and the host reads them later."""
        ops = self._pool.ops
        with torch.no_grad():
            return start_sample(logits, states, positions, ops.reductions, ops.sampling)

    # Caches and adapters.

    def create_kv_cache(self, batch_size: int = 1, capacity: int | None = None, owner: str = "") -> KVCache:
        """An empty cache with this model's layout; `capacity` tokens per row, the context if not given.

        Its pages are counted for `owner`.
        """
        self._check_open()
        asked = self._room if capacity is None else positive("capacity", capacity)
        if asked > self._max_context:
            raise ContextOverflow(asked, self._max_context)
        return KVCache(self._pool, batch_size, asked, owner)

    def load_lora(self, assets: AssetsLike, name: str | None = None) -> int:
        """Load an adapter and return its id.

        `assets` is the path of its PEFT folder or GGUF file; an open GGUF file, or its bytes; or a mapping from the
        names of a PEFT folder's files to paths, open files or bytes. Open files are read now and may then be closed.
        """
        self._check_open()
        return self.adapters.load(assets, name)

    def unload_lora(self, lora_id: int) -> None:
        """Unload an adapter: new requests do not find it, and it leaves memory when its last user is gone."""
        self.adapters.unload(lora_id)

    def lora_metrics_snapshot(self) -> dict[str, Any]:
        """Adapters, what they take, and the rows each has served."""
        counts, rows = self.adapters.snapshot(), self.metrics.snapshot()[ROWS.name]["series"]
        return {
            "loaded": counts.loaded,
            "unloading": counts.unloading,
            "active": counts.active,
            "resident": counts.resident,
            "bytes": counts.resident_bytes,
            "budget_bytes": self.adapters.budget_bytes,
            "loads": counts.loads,
            "evictions": counts.evictions,
            "rows": {series["labels"]["adapter"]: int(series["value"]) for series in rows},
        }

    # One call at a time.

    def call(self) -> ExecutorCall:
        """Hold the executor for several runs that are one call to `cancel`: it stops the next layer of any of them.

        One caller at a time; a call inside a call shares its stop signal. What comes back is the caller's own handle:
        its `cancel` stops this call alone.
        """
        return self._calls.call()

    def cancel(self) -> None:
        """Stop the call in progress before its next layer; does nothing when there is none.

        With several callers that is the call of one of them, and those that wait go on. A caller that means its own
        call uses the handle from `call`.
        """
        self._calls.cancel()

    def _stop_replay(self) -> None:
        self._replay.stop()

    def close(self) -> None:
        """Let go of the checkpoint's files, once the call in progress is done.

        Nothing runs afterwards and no KV is saved or loaded, since its identity is a hash of those files.
        """
        with self._calls.lock:
            self._closed = True
            self._pool.close()
            self._on_close()

    def _check_open(self) -> None:
        if self._closed:
            raise ModelClosed()
