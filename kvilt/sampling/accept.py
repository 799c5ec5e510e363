"""Acceptance of drafts: a sample draws from one row of logits after another for as long as it draws the drafted token.

What is drawn never depends on drafts (law 10): each token is the one that this state draws at this position, with the
noise of that position. Refuses to know where drafts come from, and leaves every state as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .sampler import SamplerOutput, SamplingState, TokenLogprobs

# Logits [rows, vocab], a state and a position for each row.
Draw = Callable[[Tensor, Sequence[SamplingState], Sequence[int]], SamplerOutput]


@dataclass(frozen=True, slots=True)
class DraftRun:
    """A sample and its rows of logits: the row after its last token is at `row`, the rows after its drafts follow."""

    state: SamplingState
    position: int  # of the first token it draws
    row: int
    drafts: Sequence[int] = ()


@dataclass(slots=True)
class AcceptedTokens:
    """The tokens of a run: its accepted drafts, and one more."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def goes_on(self, run: DraftRun) -> bool:
        """Whether the latest token is the draft in its place, after which there is another row."""
        at = len(self.tokens) - 1
        return at < len(run.drafts) and self.tokens[at] == run.drafts[at] and self.tokens[at] not in run.state.end_ids


def accept(logits: Tensor, runs: Sequence[DraftRun], draw: Draw, at_once: bool = True) -> list[AcceptedTokens]:
    """Tokens of each run, at least one, up to the first that is no draft or ends the sample.

    `at_once` looks at rows that may turn out to be unused, and fails if one of them cannot be drawn from. Without it
    a run fails only if its first token cannot be drawn; a later one is left for its sample to meet again.
    """
    drawn = [AcceptedTokens() for _ in runs]
    begun = [run.state.history.generated_tokens for run in runs]
    ahead = [len(run.drafts) if at_once and not depends_on_history(run.state) else 0 for run in runs]
    _round(logits, [(run, one, count) for run, one, count in zip(runs, drawn, ahead, strict=True)], draw)
    left = [(run, one) for run, one in zip(runs, drawn, strict=True) if one.goes_on(run)]
    try:
        while left:
            for run, one in left:
                run.state.advance(one.tokens[-1])
            try:
                _round(logits, [(run, one, 0) for run, one in left], draw)
            except Exception:
                if at_once:
                    raise
                break
            left = [(run, one) for run, one in left if one.goes_on(run)]
    finally:  # also if a draw fails: states advance only when their owner commits
        _roll_back(runs, begun)
    return drawn


def _roll_back(runs: Sequence[DraftRun], begun: Sequence[int]) -> None:
    """Roll every state back to where it began, also if one of them fails."""
    failures: list[BaseException] = []
    for run, count in zip(runs, begun, strict=True):
        try:
            run.state.rollback(run.state.history.generated_tokens - count)
        except BaseException as error:
            failures.append(error)
    if failures:
        raise failures[0]


def depends_on_history(state: SamplingState) -> bool:
    """Whether what a sample may draw depends on what it drew before, other than through the logits."""
    return state.params.penalized or state.bans or state.matcher is not None


def _round(logits: Tensor, turns: Sequence[tuple[DraftRun, AcceptedTokens, int]], draw: Draw) -> None:
    """Draw the next token of each run, and `ahead` more as if its drafts were accepted; keep them up to a rejection."""
    rows: list[int] = []
    positions: list[int] = []
    states: list[SamplingState] = []
    for run, one, ahead in turns:
        done = len(one.tokens)
        rows += range(run.row + done, run.row + done + ahead + 1)
        positions += range(run.position + done, run.position + done + ahead + 1)
        states += [run.state] * (ahead + 1)
    whole = rows == list(range(len(logits)))
    sampled = draw(logits if whole else logits[rows], states, positions)
    tokens, at = sampled.tokens.tolist(), 0
    for run, one, ahead in turns:
        for place in range(at, at + ahead + 1):
            one.tokens.append(tokens[place])
            one.logprobs.append(sampled.logprobs[place])
            if not one.goes_on(run):
                break
        at += ahead + 1
