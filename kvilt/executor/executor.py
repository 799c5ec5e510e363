"""Everything a caller asks of a model, made of `run`: prefill, single steps, sampling, scores, saved caches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..batch import Adapter, Base, Batch, Ids, Last, Nothing, Row, Score, Scores
from ..errors import BlobError, InputError
from ..kv.cache import KVCache, positive
from ..kv.codec import describe
from ..kv.row import EXACT, RowImage, Token, maker_parts
from ..kv.saved import read_file, read_images
from ..sampling.params import SamplingParams
from .decode_loop import DecodeLoop, room_for, sampling_states
from .inputs import (
    GPU_STEP_TOKENS,
    STEP_TOKENS,
    InputsLike,
    RowInput,
    read_active_inputs,
    read_ids,
    read_inputs,
)
from .protocol import OnWarmup
from .step_executor import StepExecutor
from .warmup import warm_up


class ModelExecutor(StepExecutor):
    """A model ready to run, with every call of the `Executor` protocol."""

    def prefill(self, inputs: InputsLike, kv: KVCache, lora_id: int | None = None, lora_scale: float = 1.0) -> None:
        """Extend the cache by the input: by all of it, or, if anything fails, not at all."""

        def read() -> list[RowInput]:
            return read_inputs(inputs, kv.batch_size, self.spec.vocab_size, self.spec.hidden_size)

        with self.call(), self._using(read, kv, lora_id, lora_scale) as (rows, adapters):
            self._extend(rows, kv, adapters)

    def step(
        self,
        inputs: InputsLike,
        kv: KVCache,
        lora_id: int | None = None,
        lora_scale: float = 1.0,
        active: Sequence[bool] | None = None,
    ) -> Tensor:
        """One decode step for your own sampler: float32 logits [batch, vocab] after the input.

        Rows that are not `active`, or whose input is empty, are skipped: their cache stays, and their logits are NaN.
        """
        read = self._reader(inputs, kv, active)
        with self.call(), self._using(read, kv, lora_id, lora_scale) as (rows, adapters):
            reserve_all(kv, [len(row) for row in rows])
            with settled(kv):
                since = kv.lengths
                logits = self._forward(rows, kv, Last(), adapters)
                kv.commit([row.tokens() for row in rows], since)
            return in_their_rows(logits, rows)

    def sample_tokens(
        self,
        num_steps: int,
        inputs: InputsLike,
        kv: KVCache,
        lora_id: int | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_scale: float = 1.0,
        active: Sequence[bool] | None = None,
    ) -> list[list[int]]:
        """Up to `num_steps` sampled ids per row, without leaving the executor.

        A row ends early at one of its stop tokens (which it returns), at its `max_tokens` or at the end of its context.
        Afterwards the cache holds the input and all sampled tokens but the last. Rows that are not `active`, or whose
        input is empty, are skipped: nothing is sampled for them.
        """
        num_steps = positive("num_steps", num_steps)
        read = self._reader(inputs, kv, active)
        with self.call(), self._using(read, kv, lora_id, lora_scale) as (rows, adapters):
            states = sampling_states(rows, kv, params, self.spec.vocab_size)
            # All room is found before any work, so that no step can fail for want of pages.
            most = [min(num_steps, state.params.max_tokens or num_steps) for state in states]
            room = [room_for(kv, index, len(row), most[index]) if row else 0 for index, row in enumerate(rows)]
            reserve_all(kv, room)

            def forward(pending: Sequence[RowInput]) -> Tensor:
                return self._forward(pending, kv, Last(), adapters)

            with settled(kv):
                return DecodeLoop(self, forward, kv, states, adapters).run(num_steps, rows)

    def embed(self, ids: Sequence[int]) -> Tensor:
        """The embedding rows of token ids, float32 [ids, hidden], as the first layer reads them: rows for `Inputs`.

        They are those of the base model; an adapter of the embedding has no part in them.
        """
        tokens = torch.tensor(read_ids(ids, self.spec.vocab_size), dtype=torch.int64, device=self._pool.device)
        together = nullcontext() if self._group is None else self._group.embed(tokens)
        with self.call(), torch.no_grad(), together:
            return self._decoder.embed(tokens).to(torch.float32, copy=True)

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
            self._fold_again(own, [0], [adapter])
            reserve_all(own, [len(row) - 1])
            size = self._step_tokens(1)
            for first in range(0, len(row) - 1, size):
                stop = min(first + size, len(row) - 1)
                own.reserve(len(row) - 1, [range(first, stop)])
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

    def open_kv_cache(
        self,
        path: str | os.PathLike[str],
        accept_numerics: bool = False,
        lora_id: int | None = None,
        lora_scale: float = 1.0,
        origin: str = EXACT,
    ) -> KVCache:
        """A saved cache. KV made with other numerics is computed again from its tokens, unless accepted as it is.

        KV that an adapter made is opened by naming that adapter, with its scale. KV of a blend, which is not what the
        model computes, is opened by naming its `origin`, and is not computed again.
        """
        data = read_file(self._pool, path, self._room)
        adapter = Base() if lora_id is None else self.adapters.choose(lora_id, lora_scale)
        maker = self._maker(data, adapter)
        try:
            images = read_images(self._pool, data, self._room, accept_numerics, maker, origin)
            return KVCache.of_images(self._pool, images, self._room)
        except BlobError as error:
            if error.field != "identity.numerics" or origin != EXACT:
                raise
        return self._compute_again(read_images(self._pool, data, self._room, True, maker), lora_id, lora_scale)

    def _maker(self, data: bytes, adapter: Adapter) -> str:
        """The maker that a blob must name: the adapter, from wherever it was switched on."""
        identity = self.adapters.identity(adapter)
        said = describe(data).identity.adapter
        return said if maker_parts(said)[0] == identity else identity

    def _reader(self, inputs: InputsLike, kv: KVCache, active: Sequence[bool] | None) -> Callable[[], list[RowInput]]:
        """Reads the inputs of a call that may skip rows."""
        spec = self.spec
        return lambda: read_active_inputs(inputs, kv.batch_size, spec.vocab_size, spec.hidden_size, active)

    @contextmanager
    def _using(
        self, read: Callable[[], list[RowInput]], kv: KVCache, lora_id: int | None, lora_scale: float
    ) -> Iterator[tuple[list[RowInput], list[Adapter]]]:
        """The rows of an input and what each runs on; the adapter stays loaded for the length of the call."""
        if kv.pool is not self._pool:
            raise InputError("this KV cache belongs to another executor; copy it over with select_and_copy_from")
        rows = read()
        adapters: list[Adapter] = [Base()] * len(rows)
        running = [i for i, row in enumerate(rows) if row]
        chosen = self._adapters(
            lora_id, lora_scale, len(running), lambda n: [*kv.tokens(running[n]), *rows[running[n]].tokens()]
        )
        for i, adapter in zip(running, chosen, strict=True):
            adapters[i] = adapter
        hold = self.adapters.hold(chosen[0])
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
        reserve_all(kv, [len(row) for row in rows])
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
        self._fold_again(kv, [i for i, row in enumerate(rows) if row], adapters)
        lengths, done = kv.lengths, [0] * len(rows)
        logits: dict[int, Tensor] = {}
        while waiting := [i for i, row in enumerate(rows) if done[i] < len(row)]:
            share = self._step_tokens(len(waiting))
            steps = [range(start, min(start + share, len(row))) for start, row in zip(done, rows, strict=True)]
            step = []
            for i in waiting:
                start, stop = steps[i].start, steps[i].stop
                positions = range(lengths[i] + start, lengths[i] + stop)
                wanted = want if stop == len(rows[i]) else Nothing()
                source = rows[i].source(start, stop)
                step.append(Row(source, positions, kv, i, want=wanted, adapter=adapters[i]))
                done[i] = stop
            with self._pool.lock:
                # Windows may have room for one step only, and another thread may have forked the cache and its tail.
                kv.reserve([len(row) for row in rows], steps)
                batch = Batch.of(step)
            result = self.run(batch)
            logits |= {i: result.of_row(n) for n, i in enumerate(waiting) if done[i] == len(rows[i])}
        return torch.cat([logits[i] for i in sorted(logits)]) if logits else torch.empty(0, self.spec.vocab_size)

    def _fold_again(self, kv: KVCache, rows: Sequence[int], adapters: Sequence[Adapter]) -> None:
        """Compute tokens again that rows hold past their newest recurrent state, so that the next ones can follow.

        They only change the state: their keys and values are there.
        """
        while behind := [i for i in rows if kv.resumes_at[i] < kv.lengths[i]]:
            share, folds = self._step_tokens(len(behind)), [range(0)] * kv.batch_size
            for i in behind:
                folds[i] = range(kv.resumes_at[i], min(kv.resumes_at[i] + share, kv.lengths[i]))
            with self._pool.lock:
                kv.reserve(0, folds=folds)
                step = [Row(_ids_again(kv, i, folds[i]), folds[i], kv, i, want=Nothing()) for i in behind]
                batch = Batch.of([replace(row, adapter=adapters[row.cache_row]) for row in step])
            self.run(batch)
            kv.commit([[] for _ in range(kv.batch_size)])

    def warm_up(self, step_tokens: int, max_rows: int, on_progress: OnWarmup | None = None) -> None:
        """Compile, load and capture what steps of up to so many tokens and rows need; a CPU's kernels are ready."""
        if self._pool.device.type != "cpu":
            warm_up(self, step_tokens, max_rows, on_progress)

    def _step_tokens(self, rows: int) -> int:
        """Tokens of each of so many rows in a step."""
        most = STEP_TOKENS if self._pool.device.type == "cpu" else GPU_STEP_TOKENS
        return min(max(1, most // rows), self._pool.step_tokens or most)


def _ids_again(kv: KVCache, row: int, positions: range) -> Ids:
    tokens = kv.tokens(row)[positions.start : positions.stop]
    if not all(isinstance(token, int) for token in tokens):
        raise InputError(
            "no recurrent state follows the embedding rows of this cache, which cannot be computed again; "
            "go back to before them, or give the whole input again"
        )
    return Ids([token for token in tokens if isinstance(token, int)])


def in_their_rows(logits: Tensor, rows: Sequence[RowInput]) -> Tensor:
    """Logits of the rows that ran as logits of all rows; NaN, which no sampler draws from, for those that did not."""
    if len(logits) == len(rows):
        return logits
    every = logits.new_full((len(rows), logits.shape[1]), float("nan"))
    every[[i for i, row in enumerate(rows) if row]] = logits
    return every


def reserve_all(kv: KVCache, tokens: Sequence[int]) -> None:
    """Find room for all new tokens of each row; windows that have few pages find theirs before each step."""
    kv.reserve(tokens, [range(0)] * len(tokens))


@contextmanager
def settled(kv: KVCache) -> Iterator[None]:
    """Whatever happens inside, the cache ends at its committed lengths and holds no spare page."""
    try:
        yield
    finally:
        kv.truncate(kv.lengths)
