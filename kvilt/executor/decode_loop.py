"""Sampling several tokens without leaving the executor: a forward and a draw for each, or many in one replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..batch import Adapter, Batch, Ids, Row
from ..errors import Cancelled, InputError, ParamError
from ..kv.cache import KVCache
from ..sampling.params import SamplingParams
from ..sampling.prepare import prepare_steps
from ..sampling.sampler import SamplingState, is_argmax
from .inputs import NO_INPUT, RowInput
from .replay import REPLAY_STEPS
from .step_executor import StepExecutor

_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class DecodeLoop:
    """One call of `sample_tokens`: the rows of a cache and how each of them samples."""

    executor: StepExecutor
    forward: Callable[[Sequence[RowInput]], Tensor]  # logits after the input of each row that has some
    kv: KVCache
    states: Sequence[SamplingState]
    adapters: Sequence[Adapter]

    def run(self, num_steps: int, rows: Sequence[RowInput]) -> list[list[int]]:
        """Up to `num_steps` tokens for each row, after its input; there must be room for all of them."""
        sampled: list[list[int]] = [[] for _ in rows]
        pending = list(rows)
        try:
            while any(len(row) for row in pending) and max(len(tokens) for tokens in sampled) < num_steps:
                active = [i for i, row in enumerate(pending) if len(row)]
                drawn = self._replayed(num_steps - max(len(tokens) for tokens in sampled), pending, active)
                for tokens in drawn or [self._once(pending, active)]:
                    for i, token in zip(active, tokens, strict=True):
                        sampled[i].append(token)
                        self.states[i].advance(token)
                pending = [NO_INPUT] * len(rows)
                for i in active:
                    if not self._ended(i, sampled[i]):
                        pending[i] = RowInput((sampled[i][-1],), {})
        except Cancelled:
            raise Cancelled(sampled) from None
        return sampled

    def _ended(self, row: int, sampled: Sequence[int]) -> bool:
        params = self.states[row].params
        at_end = sampled[-1] in params.stop_token_ids or len(sampled) == params.max_tokens
        return at_end or self.kv.lengths[row] >= self.kv.capacity

    def _once(self, pending: Sequence[RowInput], active: Sequence[int]) -> list[int]:
        """One forward and one token for each active row."""
        since = self.kv.lengths
        logits, states = self.forward(pending), [self.states[i] for i in active]
        drawn = self.executor.sample(logits, states, [since[i] + len(pending[i]) for i in active])
        self.kv.commit([row.tokens() for row in pending], since)
        return [int(token) for token in drawn.tokens.tolist()]

    def _replayed(self, num_steps: int, pending: Sequence[RowInput], active: Sequence[int]) -> list[list[int]] | None:
        """Several tokens for each active row without Python between them; None where sampling needs more than that."""
        states, draws = [self.states[i] for i in active], self.executor.draws_in_replays
        if self.kv.layout.recurrent is not None:  # a replay would have to move states on as well
            return None
        if any(len(pending[i]) != 1 or pending[i].embeds for i in active):
            return None
        if not all(not state.edited if draws else is_argmax(state) for state in states):
            return None
        kv, steps = self.kv, self._replayed_steps(num_steps, active)
        since = kv.lengths
        prepared = prepare_steps(states, [since[i] + 1 for i in active], steps, self.executor.spec.vocab_size)
        with kv.pool.lock:
            kv.reserve([steps if i in active else 0 for i in range(len(pending))])
            rows = [Row(Ids(pending[i].ids), [since[i]], kv, i, adapter=self.adapters[i]) for i in active]
            batch = Batch.of(rows)
        drawn = self.executor.run_steps(batch, steps, [state.params.stop_token_ids for state in states], prepared)
        if drawn is None or not len(drawn):
            return None
        written: list[list[int]] = [[] for _ in pending]
        for n, i in enumerate(active):  # the last token of each row is drawn, not written
            written[i] = [pending[i].ids[0], *drawn[:-1, n].tolist()]
        kv.commit(written, since)
        return [[int(token) for token in tokens] for tokens in drawn.tolist()]

    def _replayed_steps(self, num_steps: int, active: Sequence[int]) -> int:
        """So many that every active row has room and tokens left for all of them."""
        steps, lengths = min(num_steps, REPLAY_STEPS), self.kv.lengths
        for i in active:
            limit = self.states[i].params.max_tokens
            left = steps if limit is None else limit - self.states[i].history.generated_tokens
            steps = min(steps, left, self.kv.capacity - lengths[i])
        return steps


def sampling_states(
    rows: Sequence[RowInput], kv: KVCache, params: SamplingParams | Sequence[SamplingParams] | None, vocab_size: int
) -> list[SamplingState]:
    """How each row samples, with the tokens before its first draw."""
    given = SamplingParams() if params is None else params
    each = [given] * len(rows) if isinstance(given, SamplingParams) else given
    if not isinstance(each, Sequence) or not all(isinstance(one, SamplingParams) for one in each):
        raise ParamError("params", f"must be a SamplingParams, or one for each row, not {type(given).__name__}")
    if len(each) != len(rows):
        raise InputError(f"{len(each)} sampling params were given for {len(rows)} rows")
    for one in each:
        one.validate_vocab(vocab_size)
        _refuse_text(one)
    histories = [[*kv.tokens(i), *row.tokens()] for i, row in enumerate(rows)]
    return [
        SamplingState(one, [token for token in history if isinstance(token, int)])
        for one, history in zip(each, histories, strict=True)
    ]


def room_for(kv: KVCache, row: int, tokens: int, num_steps: int) -> int:
    """Tokens a row may grow by in `num_steps` steps: its input and all sampled tokens but the last."""
    if kv.lengths[row] + tokens > kv.capacity:
        return tokens  # reserve will say so
    return min(tokens + num_steps - 1, kv.capacity - kv.lengths[row])


def _refuse_text(params: SamplingParams) -> None:
    """An executor samples ids for the rows it is given; what needs text, or more rows, is refused by name."""
    textual = ("stop", "include_stop_str_in_output", "ignore_eos", "bad_words", "n", "logprobs", "prompt_logprobs")
    for field in (*textual, "draft_tokens", "repetition_detection"):
        if getattr(params, field) != getattr(_DEFAULTS, field):
            raise ParamError(field, "does not act in sample_tokens, which returns ids alone; use LLM.generate")
