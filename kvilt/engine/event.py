"""The events of a request for its listener: its prompt being read, tokens, and the end of each sample.

Never text: that is made above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ..blend.report import BlendReport
from ..kv.cache import KVCache
from ..sampling.sampler import TokenLogprobs
from .misses.miss import PrefixMiss

Reason = Literal["stop", "length", "cancelled", "error"]


@dataclass(slots=True)  # not frozen: see docs/decisions.md, "Records of a row"
class TokenEvent:
    """One sample drew a token."""

    index: int
    token: int
    logprobs: TokenLogprobs | None = None
    drafted: bool = False  # it was an accepted draft


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Tokens that were drafted for a sample, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0
    places: tuple[int, ...] = ()  # how many were accepted as the first, second, ... of their draft

    def plus(self, drafted: int, accepted: int) -> DraftCounts:
        """These, and one more draft."""
        before = [*self.places, *[0] * (drafted - len(self.places))]
        places = tuple(count + (place < accepted) for place, count in enumerate(before))
        return DraftCounts(self.drafted + drafted, self.accepted + accepted, places)


@dataclass(frozen=True, slots=True)
class Ended:
    """One sample has ended; it is the last event of this sample."""

    index: int
    reason: Reason
    cached: int = 0  # tokens of the prompt that it did not compute
    computed: int = 0  # and those that it did
    error: BaseException | None = None
    kv: KVCache | None = None  # with keep_kv: prompt and drawn tokens but the last; the listener closes it
    drafts: DraftCounts = DraftCounts()
    blended: BlendReport | None = None  # where the KV of a blended prompt came from
    miss: PrefixMiss | None = None  # why the prompt reused no more; None where no more was there


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """More KV of a prompt is there, computed or found; only for requests with `progress`."""

    index: int
    tokens: int  # of the prompt, whose KV is there
    cached: int  # of these, not computed
    blended: BlendReport | None = None  # where the rest came from, once a blended prompt is there
    miss: PrefixMiss | None = None  # why no more of it was reused


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of some tokens of a prompt, the first of which stands at `start`."""

    index: int
    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The states of a prompt after the last norm, pooled."""

    index: int
    values: tuple[float, ...]


Event = TokenEvent | Ended | PromptProgress | Scored | PooledPrompt


class Listener(Protocol):
    """Gets the events of one request, in the thread that steps; so it must be quick."""

    def on_event(self, event: Event) -> bool:
        """Handle an event; True after a token means that it was the last one wanted."""
        ...
