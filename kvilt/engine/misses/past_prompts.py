"""The latest prompts of each owner, so that a miss can be explained. Bounded; holds tokens and no KV.

Comparing runs in the thread that prepares a request. The thread that steps only notes a prompt that has ended.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...store.address import tenant_of

MAX_PROMPTS = 32  # of an owner
MAX_TOKENS = 1 << 20  # of an owner's prompts together
MAX_OWNERS = 256
MAX_EXPIRED = 32  # handles and sessions
_PROBE = 16  # tokens of a text that is looked for again after the first difference
_PROBE_AT = (4, 32, 128)  # where such texts begin, counted from the difference
_LOOK_TOKENS = 4096  # in which they are looked for

Ids = NDArray[np.int32]
HowShared = Literal["exact", "blended", "unshared"]


@dataclass(frozen=True, slots=True)
class PromptScope:
    """What besides its tokens decides whether KV is shared."""

    owner: str
    tenant: str
    adapter: str


@dataclass(frozen=True, slots=True, eq=False)
class PastPrompt:
    """A prompt and its answer, as far as their KV was computed."""

    request: str
    scope: PromptScope
    ids: Ids
    prompt: int  # of these, tokens of the prompt
    shared: HowShared  # whether its KV entered the prefix index
    ended_s: float


@dataclass(frozen=True, slots=True)
class ComparedPrompt:
    """An earlier prompt beside a new one."""

    past: PastPrompt
    shared_tokens: int  # that both begin with
    similar: bool  # what follows the first different token stands in the new prompt too


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """A new prompt beside the earlier ones of its owner, the most similar first."""

    scope: PromptScope
    ids: Ids
    compared: tuple[ComparedPrompt, ...]
    expired_tokens: int = 0  # of its first ones, whose KV was kept for a time that is over


def token_array(ids: Sequence[int]) -> Ids:
    """Tokens as an array that is compared quickly."""
    return np.asarray(ids, dtype=np.int32)


def shared_tokens(one: Ids, other: Ids) -> int:
    """How many tokens both begin with; stops at the first block that differs."""
    most, at, block = min(len(one), len(other)), 0, 256
    while at < most:
        stop = min(most, at + block)
        differ = np.flatnonzero(one[at:stop] != other[at:stop])
        if differ.size:
            return at + int(differ[0])
        at, block = stop, block * 4
    return most


def continues_alike(new: Ids, past: Ids, at: int) -> bool:
    """Whether text of `past` behind token `at` stands behind it in `new` too, at another place perhaps."""
    behind = new[at : at + _LOOK_TOKENS].tobytes()
    tail = past[at:]
    probes = [tail[start : start + _PROBE].tobytes() for start in _PROBE_AT if start + _PROBE <= len(tail)]
    return any(_holds(behind, probe) for probe in probes)


def _holds(data: bytes, probe: bytes) -> bool:
    found = data.find(probe)
    while found >= 0 and found % 4:  # not at the beginning of a token
        found = data.find(probe, found + 1)
    return found >= 0


class PastPrompts:
    """The latest prompts of all owners. May be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._owners: OrderedDict[str, list[PastPrompt]] = OrderedDict()  # the oldest first, in both
        self._expired: deque[tuple[str, Ids]] = deque(maxlen=MAX_EXPIRED)  # hashed tenant, tokens

    def compare(self, scope: PromptScope, ids: Ids) -> PromptComparison:
        """A new prompt beside the earlier ones of its owner."""
        with self._lock:
            known, expired = list(self._owners.get(scope.owner, ())), list(self._expired)
        compared = [_compared(ids, past) for past in reversed(known)]
        compared.sort(key=lambda one: (one.shared_tokens, one.similar), reverse=True)
        hashed = tenant_of(scope.tenant) if expired else ""
        gone = max((shared_tokens(ids, past) for tenant, past in expired if tenant == hashed), default=0)
        return PromptComparison(scope, ids, tuple(compared), gone)

    def expire(self, hashed_tenant: str, ids: Sequence[int]) -> None:
        """KV that a tenant, by its hashed name, asked to keep for some time is not kept any more."""
        with self._lock:
            self._expired.append((hashed_tenant, token_array(ids)))

    def add(self, past: PastPrompt, compared: Sequence[ComparedPrompt] = ()) -> None:
        """Note a prompt that has ended. Those of the same scope that it continues are forgotten."""
        continued = {
            id(one.past)
            for one in compared
            if one.past.scope == past.scope
            and one.past.shared == past.shared
            and one.shared_tokens == len(one.past.ids) <= len(past.ids)
        }
        with self._lock:
            kept = [one for one in self._owners.pop(past.scope.owner, []) if id(one) not in continued]
            kept.append(past)
            tokens = sum(len(one.ids) for one in kept)
            while len(kept) > 1 and (len(kept) > MAX_PROMPTS or tokens > MAX_TOKENS):
                tokens -= len(kept.pop(0).ids)
            self._owners[past.scope.owner] = kept
            while len(self._owners) > MAX_OWNERS:
                self._owners.popitem(last=False)


def _compared(ids: Ids, past: PastPrompt) -> ComparedPrompt:
    same = shared_tokens(ids, past.ids)
    differs = same < min(len(past.ids), len(ids) - 1)
    return ComparedPrompt(past, same, differs and continues_alike(ids, past.ids, same))
