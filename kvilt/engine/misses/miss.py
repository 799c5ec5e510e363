"""What a prompt missed: how much more KV it could have reused, why it did not, and where its tokens differ.

Values only. The text around the first different token is made above the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MissReason = Literal[
    "tokens_differ",  # the earlier prompt has other tokens from `first_different_token` on
    "evicted",  # the KV was in the prefix index, and its pages were needed
    "expired",  # the same, after the time for which the caller asked to keep it
    "other_adapter",  # the KV was computed with another adapter, or another scale
    "other_salt",  # the same prompt is there under another salt of the same key
    "page_boundary",  # only whole pages are shared: less than a page is computed again
    "state_checkpoint",  # a recurrent state is kept at checkpoints only; the tokens behind it are computed again
    "window",  # a sliding window gave the pages back that the next token sees
    "not_stored",  # no earlier prompt begins like this one, or its KV was never shared
    "blended_not_shared",  # the KV of the earlier prompt is blended, and only exact KV is shared
    "prompt_logprobs",  # the prompt is scored, so it is computed
]


@dataclass(frozen=True, slots=True)
class MissCandidate:
    """An earlier prompt of the same tenant that begins like this one."""

    request: str
    tokens: int  # whose KV it computed
    shared_tokens: int  # that both begin with
    age_s: float


@dataclass(frozen=True, slots=True)
class TokensAround:
    """Tokens before the first that differs, and those that follow in this prompt and in the earlier one."""

    before: tuple[int, ...]
    now: tuple[int, ...]
    earlier: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """Why less KV was reused than `expected`, the tokens that an earlier prompt left behind for this one."""

    reason: MissReason
    expected: int
    reused: int
    first_different_token: int | None = None
    around: TokensAround | None = None
    candidates: tuple[MissCandidate, ...] = ()

    @property
    def missed_tokens(self) -> int:
        """Tokens that were computed and could have been reused."""
        return max(0, self.expected - self.reused)
