"""A draft model: a smaller model with the same tokenizer, which draws with the noise that its sample will draw with.

So where it finds the same tokens likely, it draws the same ones, at any temperature. Its KV is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq

from torch import Tensor

from ..batch import Batch, Ids, Last, Nothing, Row
from ..errors import Cancelled, KviltError, PoolExhausted, TruncateError
from ..executor.inputs import STEP_TOKENS
from ..executor.protocol import Executor
from ..kv.cache import KVCache
from ..sampling.accept import depends_on_history
from ..sampling.sampler import SamplingState
from .drafter import Draft, DraftContext


@dataclass(slots=True, eq=False)
class DraftKV:
    """The draft model's KV of a sample: its first tokens, and perhaps drafts that were not accepted."""

    kv: KVCache
    prompt: int  # tokens there were at its beginning
    drafted: int = 0  # how many of its last tokens were drafts when they were written


@dataclass(slots=True, eq=False)
class ActiveDraft:
    """A sample while its next tokens are drafted."""

    draft_context: DraftContext
    kv: KVCache
    most: int
    begun: int  # tokens its state had drawn
    input: list[int]  # tokens that are known and not computed
    read: int  # of them, those of the prompt
    drafts: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.draft_context.ids) + len(self.drafts)


class ModelDrafter:
    """Drafts by an executor of its own, those of all samples in one batch."""

    def __init__(self, executor: Executor, most: int = 8) -> None:
        self._executor = executor
        self._most = most

    @property
    def executor(self) -> Executor:
        return self._executor

    @property
    def most(self) -> int:
        return self._most

    @property
    def hopes(self) -> Sequence[float]:
        return (0.7,)

    def begin(self, ids: Sequence[int], state: SamplingState, parent: DraftContext | None = None) -> DraftContext:
        near: DraftKV | None = parent.memory if parent is not None else None
        kv = self._executor.create_kv_cache() if near is None else near.kv.fork_to(near.kv.shared_prefix(ids))
        return DraftContext(ids, state, DraftKV(kv, len(ids)))

    def propose(self, draft_contexts: Sequence[DraftContext], k: Sequence[int]) -> list[Draft]:
        active: dict[DraftContext, ActiveDraft] = {}
        drafts: dict[DraftContext, Draft] = {}
        room = STEP_TOKENS
        for draft_context, count in zip(draft_contexts, k, strict=True):
            one = self._start(draft_context, min(count, self._executor.max_context - len(draft_context.ids)))
            if one is None:
                continue
            if len(one.input) > room:  # a long prompt: some of it now, the rest beside the next steps
                drafts[draft_context] = Draft(read=room)
                self._run([one], room)
                room = 0
            else:
                room -= len(one.input)
                active[draft_context] = one
        try:
            self._draft(list(active.values()))
        finally:
            for one in active.values():
                one.draft_context.memory.drafted = len(one.drafts)
                one.draft_context.state.rollback(one.draft_context.state.history.generated_tokens - one.begun)
        drafts |= {draft_context: Draft(one.drafts, read=one.read) for draft_context, one in active.items()}
        return [drafts.get(draft_context, Draft()) for draft_context in draft_contexts]

    def forget(self, draft_context: DraftContext) -> None:
        memory, draft_context.memory = draft_context.memory, None
        if memory is not None:
            memory.kv.close()

    def close(self) -> None:
        self._executor.close()

    def _start(self, draft_context: DraftContext, most: int) -> ActiveDraft | None:
        """What is to be computed for a sample; None where it gets no draft: its context or the KV memory is full."""
        memory: DraftKV | None = draft_context.memory
        if memory is None or most < 1:
            return None
        held = self._settle(memory, draft_context.ids)
        try:
            new = len(draft_context.ids) - held + most - 1
            memory.kv.reserve(new, [range(min(new, STEP_TOKENS + most))])  # what one call computes, and its drafts
        except PoolExhausted:
            self.forget(draft_context)  # and it gets no drafts later: its beginning would have to be computed again
            return None
        begun, known = draft_context.state.history.generated_tokens, list(draft_context.ids[held:])
        return ActiveDraft(draft_context, memory.kv, most, begun, known, max(0, memory.prompt - 1 - held))

    def _settle(self, memory: DraftKV, ids: Sequence[int]) -> int:
        """Cut the cache to a beginning of `ids`, with at least one of them left to compute; its length then."""
        held = memory.kv.num_entries
        sure = held - min(held, memory.drafted)  # tokens that were no drafts are the sample's own
        tail = memory.kv.row(0).ids[sure:held]
        same = sum(1 for _ in takewhile(bool, map(eq, tail, ids[sure:held])))
        kept, memory.drafted = min(sure + same, len(ids) - 1), 0
        try:
            memory.kv.truncate(kept)
        except TruncateError:  # a window gave that part back
            memory.kv.truncate(0)
            return 0
        return int(kept)

    def _draft(self, active: list[ActiveDraft]) -> None:
        """One token of each after the other, until all have as many as they may."""
        while active:
            logits = self._run(active, None)
            tokens = self._sample(logits, active)
            active = [one for one, token in zip(active, tokens, strict=True) if _goes_on(one, token)]

    def _run(self, active: Sequence[ActiveDraft], most: int | None) -> Tensor:
        """Compute the input of each, `most` tokens of it if only KV is wanted; logits after the last ones."""
        inputs = [one.input[:most] for one in active]
        rows = []
        for one, ids in zip(active, inputs, strict=True):
            at = one.kv.num_entries
            rows.append(Row(Ids(ids), range(at, at + len(ids)), one.kv, want=Last() if most is None else Nothing()))
        if not any(inputs):
            return Tensor()
        logits = self._executor.run(Batch.of(rows)).values
        for one, ids in zip(active, inputs, strict=True):
            one.kv.commit([ids])
            del one.input[: len(ids)]
        return logits

    def _sample(self, logits: Tensor, active: Sequence[ActiveDraft]) -> list[int | None]:
        """A token for each; None where this model has none."""
        try:
            drawn = self._executor.sample(
                logits, [one.draft_context.state for one in active], [t.position for t in active]
            )
        except Cancelled:
            raise
        except KviltError:
            if len(active) == 1:
                return [None]
            return [token for i, one in enumerate(active) for token in self._sample(logits[i : i + 1], [one])]
        return [int(token) for token in drawn.tokens.tolist()]


def _goes_on(one: ActiveDraft, token: int | None) -> bool:
    """Append a drafted token; whether another one may be drafted after it."""
    if token is None:
        return False
    state = one.draft_context.state
    one.drafts.append(token)
    if len(one.drafts) >= one.most or token in state.end_ids:
        return False
    one.input.append(token)
    if depends_on_history(state):
        state.advance(token)
    return True
