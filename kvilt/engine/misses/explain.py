"""From a comparison with earlier prompts, and what a prompt has reused, to why it reused no more.

Another tenant's prompt is never shown: of one under another salt of the same key, only that it is there is said, and
only if the new prompt begins with all of it, so that nothing can be learnt by guessing token after token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .miss import MissCandidate, MissReason, PrefixMiss, TokensAround
from .past_prompts import ComparedPrompt, PastPrompt, PromptComparison

_AROUND = 12  # tokens on each side of the first different one
_SHOWN = 3  # candidates


@dataclass(frozen=True, slots=True)
class ReuseFacts:
    """What a prompt has reused, and what limits that."""

    reused: int  # tokens
    known: int  # tokens of it that the prefix index knew, usable or not
    page_tokens: int
    recurrent: bool = False  # its model has recurrent state
    scored: bool = False  # it asks for log-probabilities of its tokens
    blended: bool = False  # it is blended itself


def explain(comparison: PromptComparison, facts: ReuseFacts, now_s: float) -> PrefixMiss | None:
    """Why no more was reused; None where nothing more could have been."""
    prompt = len(comparison.ids)
    mine = [one for one in comparison.compared if one.past.scope.tenant == comparison.scope.tenant]
    like = [one for one in mine if one.past.scope == comparison.scope]
    exact = next((one for one in like if one.past.shared == "exact" and _counts(one, facts)), None)
    reachable = 0 if exact is None else min(prompt - 1, exact.shared_tokens)
    shown = _candidates(mine, now_s)
    other = _elsewhere(comparison, facts, max(reachable, facts.reused))
    if other is not None:
        reason, expected = other
        return PrefixMiss(reason, expected, facts.reused, candidates=() if reason == "other_salt" else shown)
    if exact is None:
        fresh = facts.reused == 0 and prompt > facts.page_tokens
        return PrefixMiss("not_stored", 0, 0, candidates=shown) if fresh else None
    return _same_scope(comparison, exact, facts, shown)


def _same_scope(
    comparison: PromptComparison, exact: ComparedPrompt, facts: ReuseFacts, shown: tuple[MissCandidate, ...]
) -> PrefixMiss | None:
    """Why a prompt reused no more of an earlier one whose KV it may share."""
    at, most = exact.shared_tokens, len(comparison.ids) - 1
    reachable, whole = min(most, at), min(most, at) // facts.page_tokens * facts.page_tokens
    differs = at < min(len(exact.past.ids), most)
    first = at if differs else None
    around = _around(comparison, exact.past, at) if differs else None
    if facts.reused < whole and not facts.blended:
        return PrefixMiss(_gone(facts, whole, comparison.expired_tokens), reachable, facts.reused, first, around, shown)
    if differs:
        expected = min(len(exact.past.ids), most)
        return PrefixMiss("tokens_differ", expected, facts.reused, first, around, shown)
    if facts.reused < reachable and not facts.blended:
        return PrefixMiss("page_boundary", reachable, facts.reused, candidates=shown)
    return None


def _gone(facts: ReuseFacts, whole: int, expired_tokens: int) -> MissReason:
    """Why whole pages that were computed before were not reused."""
    if facts.scored:
        return "prompt_logprobs"
    if facts.known >= whole:
        return "state_checkpoint" if facts.recurrent else "window"
    return "expired" if expired_tokens > facts.reused else "evicted"


def _counts(one: ComparedPrompt, facts: ReuseFacts) -> bool:
    """Whether an earlier prompt is enough like the new one to explain a miss."""
    return one.shared_tokens >= min(facts.page_tokens, len(one.past.ids)) or one.similar


def _elsewhere(comparison: PromptComparison, facts: ReuseFacts, reachable: int) -> tuple[MissReason, int] | None:
    """KV of at least one page more that this prompt may not share, and why not."""
    most = len(comparison.ids) - 1
    for one in comparison.compared:
        expected = min(most, one.shared_tokens)
        if expected < reachable + facts.page_tokens:
            continue
        scope = one.past.scope
        if scope.tenant != comparison.scope.tenant:
            if one.shared_tokens >= one.past.prompt:
                return "other_salt", min(most, one.past.prompt)  # what was answered there is not compared
        elif scope.adapter != comparison.scope.adapter:
            return "other_adapter", expected
        elif one.past.shared == "blended":
            return "blended_not_shared", expected
        elif one.past.shared == "unshared":
            return "not_stored", expected
    return None


def _around(comparison: PromptComparison, past: PastPrompt, at: int) -> TokensAround:
    return TokensAround(
        tuple(comparison.ids[max(0, at - _AROUND) : at].tolist()),
        tuple(comparison.ids[at : at + _AROUND].tolist()),
        tuple(past.ids[at : at + _AROUND].tolist()),
    )


def _candidates(mine: Iterable[ComparedPrompt], now_s: float) -> tuple[MissCandidate, ...]:
    found = [one for one in mine if one.shared_tokens or one.similar][:_SHOWN]
    return tuple(
        MissCandidate(one.past.request, len(one.past.ids), one.shared_tokens, round(now_s - one.past.ended_s, 3))
        for one in found
    )
