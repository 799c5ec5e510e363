"""The executor: `run(batch)` is the only way tensors flow, and everything else here is made of it.

It owns weights, kernels and the page pool, and remembers no sequence: all of that is in the `KVCache` passed in.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..batch import Adapter, Base, Batch, Ids, Last, Logits, Nothing, Row, Score, Scores
from ..errors import BlobError, Cancelled, ContextOverflow, InputError, ModelClosed, ParamError
from ..kv.cache import KVCache, positive, read_file, read_images
from ..kv.codec import describe
from ..kv.layout import KVLayout
from ..kv.pool import PagePool
from ..kv.prefix import PrefixIndex
from ..kv.row import RowImage, Token, maker_parts
from ..metrics import Metrics
from ..models.decoder import Decoder
from ..models.spec import ModelSpec
from ..models.step_adapters import StepAdapters
from ..sampling.params import SamplingParams
from ..sampling.sampler import SamplerOutput, SamplingState, is_argmax, sample
from .counters import EXECUTOR_METRICS, ROWS, STEPS, TOKENS
from .inputs import NO_INPUT, InputsLike, RowInput, check_row, read_inputs
from .lora import Adapters, mark_rows
from .replay import Replay

_DEFAULTS = SamplingParams()
STEP_TOKENS = 512  # a longer input runs in pieces, so that activations stay small
REPLAY_STEPS = 32  # greedy steps between two returns to Python


class Executor:
    """A model ready to run. Concurrent calls wait for each other; `cancel` may come from any thread."""

    def __init__(
        self,
        decoder: Decoder,
        pool: PagePool,
        max_context: int,
        metrics: Metrics | None = None,
        on_close: Callable[[], None] = lambda: None,
        lora_memory: int | None = None,
        expanded_formats: tuple[str, ...] = (),
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self.prefixes = PrefixIndex(pool)  # KV that no cache holds any more, for the next sequence with the same tokens
        self._max_context = max_context
        self.metrics = metrics or Metrics(EXECUTOR_METRICS)
        self._lock = threading.RLock()
        self.adapters = Adapters(decoder, lora_memory, self._lock)
        self._room = min(max_context, pool.tokens)  # tokens a cache may have
        self._replay = Replay(decoder, pool, self._room)
        self.expanded_formats = expanded_formats  # of the checkpoint, which the backend holds as float32
        self._on_close = on_close
        self._closed = False
        self._running: threading.Event | None = None  # set to stop the call in progress

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
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads, as the backend holds them."""
        return self._decoder.weight_bytes

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        return self._running is not None

    # The primitive.

    def run(self, batch: Batch) -> Logits:
        """One forward over the rows of a batch. Commits nothing: the owner of the caches decides that."""
        if batch.pool is not self._pool:
            raise InputError("the caches of this batch belong to another executor")
        for row in batch.rows:
            check_row(row, self.spec.vocab_size, self.spec.hidden_size)
        with self.call() as stop, batch.lease(), torch.no_grad(), self._adapted(batch) as step_adapters:
            logits = self._replay.run(batch, lambda: _observe(stop), step_adapters)
            if logits is None:
                logits = self._decoder(batch, lambda _layer: _observe(stop), step_adapters)
        self._count(batch)
        return logits

    @contextmanager
    def _adapted(self, batch: Batch) -> Iterator[StepAdapters | None]:
        """For the length of a step: the adapters of its rows, which are then named in the rows' caches."""
        with self.adapters.step(batch.rows, batch.starts) as step_adapters:
            mark_rows(batch.rows, self.adapters)
            yield step_adapters

    def _count(self, batch: Batch) -> None:
        self.metrics.add(STEPS)
        for name, rows in Counter(self.adapters.name_of(row.adapter) for row in batch.rows).items():
            self.metrics.add(ROWS, rows, adapter=name)
        self.metrics.add(TOKENS, batch.num_tokens)

    def sample(self, logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> SamplerOutput:
        """One token per row of `logits`; the states do not advance."""
        with torch.no_grad():
            return sample(logits, states, positions, self._pool.ops.reductions)

    def score(
        self,
        ids: Sequence[int],
        kv: KVCache | None = None,
        top: int = 0,
        lora_id: int | None = None,
        lora_scale: float = 1.0,
    ) -> Scores:
        """Log-probability of every token after the first, with the `top` likeliest beside it.

        The tokens come after what `kv` holds, which stays as it is: this runs on a fork and commits nothing.
        """
        row = read_inputs(list(ids), 1, self.spec.vocab_size, self.spec.hidden_size)[0]
        if len(row) < 2:
            raise InputError("scoring needs at least two tokens: one to start from and one to score")
        with self.call(), self.create_kv_cache() if kv is None else kv.fork() as own:
            if own.batch_size != 1:
                raise InputError(f"scoring continues a cache of one row, this one has {own.batch_size}")
            start, parts = own.num_entries, []
            (adapter,) = self._adapters(lora_id, lora_scale, 1, lambda _: [*own.tokens(), *row.ids])
            own.reserve(len(row) - 1)
            for first in range(0, len(row) - 1, STEP_TOKENS):
                stop = min(first + STEP_TOKENS, len(row) - 1)
                want = Score(row.ids[first + 1 : stop + 1], top)
                positions = range(start + first, start + stop)
                part = Row(Ids(row.ids[first:stop]), positions, own, want=want, adapter=adapter)
                parts.append(self.run(Batch.of([part])).scores[0])
        return Scores(
            torch.cat([part.logprobs for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top_logprobs for part in parts]),
            torch.cat([part.ranks for part in parts]),
        )

    # Caches.

    def create_kv_cache(self, batch_size: int = 1, capacity: int | None = None, owner: str = "") -> KVCache:
        """An empty cache with this model's layout; `capacity` tokens per row, the context if not given.

        Its pages are counted for `owner`.
        """
        self._check_open()
        asked = self._room if capacity is None else positive("capacity", capacity)
        if asked > self._max_context:
            raise ContextOverflow(asked, self._max_context)
        return KVCache(self._pool, batch_size, asked, owner)

    def open_kv_cache(
        self,
        path: str | os.PathLike[str],
        accept_numerics: bool = False,
        lora_id: int | None = None,
        lora_scale: float = 1.0,
    ) -> KVCache:
        """A saved cache. KV made with other numerics is computed again from its tokens, unless accepted as it is.

        KV that an adapter made is opened by naming that adapter, with its scale.
        """
        data = read_file(self._pool, path, self._room)
        adapter = Base() if lora_id is None else self.adapters.choose(lora_id, lora_scale)
        maker = self._maker(data, adapter)
        try:
            images = read_images(self._pool, data, self._room, accept_numerics, maker)
            return KVCache.of_images(self._pool, images, self._room)
        except BlobError as error:
            if error.field != "identity.numerics":
                raise
        return self._compute_again(read_images(self._pool, data, self._room, True, maker), lora_id, lora_scale)

    def _maker(self, data: bytes, adapter: Adapter) -> str:
        """The maker that a blob must name: the adapter, from wherever it was switched on."""
        identity = self.adapters.identity(adapter)
        said = describe(data).identity.adapter
        return said if maker_parts(said)[0] == identity else identity

    # The seeds' executor.

    def prefill(self, inputs: InputsLike, kv: KVCache, lora_id: int | None = None, lora_scale: float = 1.0) -> None:
        """Extend the cache by the input: by all of it, or, if anything fails, not at all."""
        with self.call(), self._using(inputs, kv, lora_id, lora_scale) as (rows, adapters):
            self._extend(rows, kv, adapters)

    def step(self, inputs: InputsLike, kv: KVCache, lora_id: int | None = None, lora_scale: float = 1.0) -> Tensor:
        """One decode step for your own sampler: float32 logits [batch, vocab] after the input."""
        with self.call(), self._using(inputs, kv, lora_id, lora_scale) as (rows, adapters):
            kv.reserve([len(row) for row in rows])
            with settled(kv):
                since = kv.lengths
                logits = self._forward(rows, kv, Last(), adapters)
                kv.commit([row.tokens() for row in rows], since)
            return logits

    def sample_tokens(
        self,
        num_steps: int,
        inputs: InputsLike,
        kv: KVCache,
        lora_id: int | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_scale: float = 1.0,
    ) -> list[list[int]]:
        """Up to `num_steps` sampled ids per row, without leaving the executor.

        A row ends early at one of its stop tokens (which it returns), at its `max_tokens` or at the end of its context.
        Afterwards the cache holds the input and all sampled tokens but the last.
        """
        num_steps = positive("num_steps", num_steps)
        with self.call(), self._using(inputs, kv, lora_id, lora_scale) as (rows, adapters):
            states = self._states(rows, kv, params)
            # All room is found before any work, so that no step can fail for want of pages.
            most = [min(num_steps, state.params.max_tokens or num_steps) for state in states]
            kv.reserve([_room(kv, index, len(row), most[index]) for index, row in enumerate(rows)])
            with settled(kv):
                return self._sample_loop(num_steps, rows, states, kv, adapters)

    def cancel(self) -> None:
        """Stop the call in progress before its next layer; does nothing when there is none."""
        if (running := self._running) is not None:
            running.set()
            self._replay.stop()

    def load_lora(self, assets: str | os.PathLike[str], name: str | None = None) -> int:
        """Load an adapter from its PEFT folder and return its id."""
        self._check_open()
        return self.adapters.load(assets, name)

    def unload_lora(self, lora_id: int) -> None:
        """Unload an adapter: new requests do not find it, and it leaves memory when its last user is gone."""
        self.adapters.unload(lora_id)

    def lora_metrics_snapshot(self) -> dict[str, Any]:
        """Adapters, what they take, and the rows each has served."""
        adapters, rows = self.adapters, self.metrics.snapshot()[ROWS.name]["series"]
        every = adapters.all()
        return {
            "loaded": len(every),
            "active": sum(one.users > 0 for one in every),
            "resident": sum(one.resident for one in every),
            "bytes": adapters.resident_bytes,
            "budget_bytes": adapters.budget_bytes,
            "loads": adapters.loads,
            "evictions": adapters.evictions,
            "rows": {series["labels"]["adapter"]: int(series["value"]) for series in rows},
        }

    def close(self) -> None:
        """Let go of the checkpoint's files, once the call in progress is done.

        Nothing runs afterwards and no KV is saved or loaded, since its identity is a hash of those files.
        """
        with self._lock:
            self._closed = True
            self._pool.close()
            self._on_close()

    @contextmanager
    def call(self) -> Iterator[threading.Event]:
        """Hold the executor for several runs that are one call to `cancel`: it stops the next layer of any of them.

        One caller at a time; a call inside a call shares its stop signal.
        """
        with self._lock:
            self._check_open()
            if self._running is not None:
                yield self._running
                return
            self._running = threading.Event()
            try:
                with self._pool.ops.alone():
                    yield self._running
            finally:
                self._running = None

    # How the above is made of `run`.

    def _check_open(self) -> None:
        if self._closed:
            raise ModelClosed()

    @contextmanager
    def _using(
        self, inputs: InputsLike, kv: KVCache, lora_id: int | None, lora_scale: float
    ) -> Iterator[tuple[list[RowInput], list[Adapter]]]:
        """The rows of an input and what each runs on; the adapter stays loaded for the length of the call."""
        if kv.pool is not self._pool:
            raise InputError("this KV cache belongs to another executor; copy it over with select_and_copy_from")
        rows = read_inputs(inputs, kv.batch_size, self.spec.vocab_size, self.spec.hidden_size)
        adapters = self._adapters(lora_id, lora_scale, len(rows), lambda i: [*kv.tokens(i), *rows[i].tokens()])
        hold = self.adapters.hold(adapters[0])
        try:
            yield rows, adapters
        finally:
            if hold is not None:
                hold.release()

    def _adapters(
        self, lora_id: int | None, scale: float, rows: int, tokens: Callable[[int], list[Token]]
    ) -> list[Adapter]:
        """What each row runs on; an adapter that tokens switch on looks for them in its row."""
        if lora_id is None:
            return [Base()] * rows
        if not self.adapters.find(lora_id).invocation:
            return [self.adapters.choose(lora_id, scale)] * rows
        ids = [[token if isinstance(token, int) else -1 for token in tokens(row)] for row in range(rows)]
        return [self.adapters.choose(lora_id, scale, row) for row in ids]

    def _compute_again(self, images: Sequence[RowImage], lora_id: int | None, lora_scale: float) -> KVCache:
        if any(image.embeds for image in images):
            raise BlobError(
                "identity.numerics", "made on another machine from embeddings, which cannot be computed again"
            )
        kv = self.create_kv_cache(len(images))
        try:
            adapters = self._adapters(lora_id, lora_scale, len(images), lambda i: list(images[i].ids))
            with self.call():
                self._extend([RowInput(tuple(image.ids), {}) for image in images], kv, adapters)
        except BaseException:
            kv.close()
            raise
        return kv

    def _extend(self, rows: Sequence[RowInput], kv: KVCache, adapters: Sequence[Adapter]) -> None:
        kv.reserve([len(row) for row in rows])
        with settled(kv):
            since = kv.lengths
            self._forward(rows, kv, Nothing(), adapters)
            kv.commit([row.tokens() for row in rows], since)

    def _forward(
        self, rows: Sequence[RowInput], kv: KVCache, want: Last | Nothing, adapters: Sequence[Adapter]
    ) -> Tensor:
        """Run each row's input in reserved room of its cache row; [non-empty rows, vocab] if logits are wanted.

        A long input runs in several steps, but positions are explicit, so nothing needs to be committed in between
        and a failure half way leaves the cache as it was.
        """
        lengths, done = kv.lengths, [0] * len(rows)
        logits: dict[int, Tensor] = {}
        while waiting := [i for i, row in enumerate(rows) if done[i] < len(row)]:
            share = max(1, STEP_TOKENS // len(waiting))
            step = []
            for i in waiting:
                start, stop = done[i], min(done[i] + share, len(rows[i]))
                positions = range(lengths[i] + start, lengths[i] + stop)
                wanted = want if stop == len(rows[i]) else Nothing()
                source = rows[i].source(start, stop)
                step.append(Row(source, positions, kv, i, want=wanted, adapter=adapters[i]))
                done[i] = stop
            with self._pool.lock:
                kv.reserve([len(row) for row in rows])  # another thread may have forked the cache: its tail is shared
                batch = Batch.of(step)
            result = self.run(batch)
            logits |= {i: result.of_row(n) for n, i in enumerate(waiting) if done[i] == len(rows[i])}
        return torch.cat([logits[i] for i in sorted(logits)]) if logits else torch.empty(0, self.spec.vocab_size)

    def _states(
        self, rows: Sequence[RowInput], kv: KVCache, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingState]:
        given = SamplingParams() if params is None else params
        each = [given] * len(rows) if isinstance(given, SamplingParams) else given
        if not isinstance(each, Sequence) or not all(isinstance(one, SamplingParams) for one in each):
            raise ParamError("params", f"must be a SamplingParams, or one for each row, not {type(given).__name__}")
        if len(each) != len(rows):
            raise InputError(f"{len(each)} sampling params were given for {len(rows)} rows")
        for one in each:
            one.validate_vocab(self.spec.vocab_size)
            _refuse_text(one)
        histories = [[*kv.tokens(i), *row.tokens()] for i, row in enumerate(rows)]
        return [
            SamplingState(one, [token for token in history if isinstance(token, int)])
            for one, history in zip(each, histories, strict=True)
        ]

    def _sample_loop(
        self,
        num_steps: int,
        rows: list[RowInput],
        states: list[SamplingState],
        kv: KVCache,
        adapters: Sequence[Adapter],
    ) -> list[list[int]]:
        sampled: list[list[int]] = [[] for _ in rows]
        pending = list(rows)
        try:
            while any(len(row) for row in pending) and max(len(tokens) for tokens in sampled) < num_steps:
                active = [i for i, row in enumerate(pending) if len(row)]
                left = num_steps - max(len(tokens) for tokens in sampled)
                drawn = self._replay_greedy(left, pending, active, states, kv, adapters)
                if drawn is None:
                    drawn = [self._sample_once(pending, active, states, kv, adapters)]
                for tokens in drawn:
                    for i, token in zip(active, tokens, strict=True):
                        sampled[i].append(token)
                        states[i].advance(token)
                pending = [NO_INPUT] * len(rows)
                for i in active:
                    token, params = sampled[i][-1], states[i].params
                    ends = token in params.stop_token_ids or len(sampled[i]) == params.max_tokens
                    if not ends and kv.lengths[i] < kv.capacity:
                        pending[i] = RowInput((token,), {})
        except Cancelled:
            raise Cancelled(sampled) from None
        return sampled

    def _sample_once(
        self,
        pending: Sequence[RowInput],
        active: Sequence[int],
        states: Sequence[SamplingState],
        kv: KVCache,
        adapters: Sequence[Adapter],
    ) -> list[int]:
        """One forward and one token for each active row."""
        since = kv.lengths
        logits = self._forward(pending, kv, Last(), adapters)
        drawn = self.sample(logits, [states[i] for i in active], [since[i] + len(pending[i]) for i in active])
        kv.commit([row.tokens() for row in pending], since)
        return [int(token) for token in drawn.tokens.tolist()]

    def _replay_greedy(
        self,
        num_steps: int,
        pending: Sequence[RowInput],
        active: Sequence[int],
        states: Sequence[SamplingState],
        kv: KVCache,
        adapters: Sequence[Adapter],
    ) -> list[list[int]] | None:
        """Several tokens for each active row without Python between them; None where sampling needs more than that."""
        if any(len(pending[i]) != 1 or pending[i].embeds or not is_argmax(states[i]) for i in active):
            return None
        since, steps = kv.lengths, min(num_steps, REPLAY_STEPS)
        for i in active:  # every row that starts a run of steps has room and tokens left for all of it
            limit = states[i].params.max_tokens
            left = steps if limit is None else limit - states[i].history.generated_tokens
            steps = min(steps, left, kv.capacity - since[i])
        with self._pool.lock:
            kv.reserve([steps if i in active else 0 for i in range(len(pending))])
            rows = [Row(Ids(pending[i].ids), [since[i]], kv, i, adapter=adapters[i]) for i in active]
            batch = Batch.of(rows)
        with self.call() as stop, batch.lease(), torch.no_grad(), self._adapted(batch) as step_adapters:
            ends = [states[i].params.stop_token_ids for i in active]
            drawn = self._replay.sample(batch, steps, ends, lambda: _observe(stop), step_adapters)
        if drawn is None or not len(drawn):
            return None
        written: list[list[int]] = [[] for _ in pending]
        for n, i in enumerate(active):  # the last token of each row is drawn, not written
            written[i] = [pending[i].ids[0], *drawn[:-1, n].tolist()]
        kv.commit(written, since)
        for _ in range(len(drawn)):
            self._count(batch)
        return [[int(token) for token in tokens] for tokens in drawn.tolist()]


def _observe(stop: threading.Event) -> None:
    if stop.is_set():
        raise Cancelled()


def _refuse_text(params: SamplingParams) -> None:
    """An executor samples ids for the rows it is given; what needs text, or more rows, is refused by name."""
    textual = ("stop", "include_stop_str_in_output", "ignore_eos", "bad_words", "n", "logprobs", "prompt_logprobs")
    for field in (*textual, "draft_tokens", "repetition_detection"):
        if getattr(params, field) != getattr(_DEFAULTS, field):
            raise ParamError(field, "does not act in sample_tokens, which returns ids alone; use LLM.generate")


def _room(kv: KVCache, row: int, tokens: int, num_steps: int) -> int:
    """Tokens a row may grow by in `num_steps` steps: its input and all sampled tokens but the last."""
    if kv.lengths[row] + tokens > kv.capacity:
        return tokens  # reserve will say so
    return min(tokens + num_steps - 1, kv.capacity - kv.lengths[row])


@contextmanager
def settled(kv: KVCache) -> Iterator[None]:
    """Whatever happens inside, the cache ends at its committed lengths and holds no spare page."""
    try:
        yield
    finally:
        kv.truncate(kv.lengths)
