"""A tree of turns: the tokens of each prompt with its answer, and where it parts from the turn it continues.

Knows tokens and ids of handles; refuses to know KV, tenants and time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...kv.row import BASE, EXACT
from ..misses.past_prompts import Ids, shared_tokens, token_array

MAX_TURNS = 128  # of a session; the oldest that others continue are joined with these first


@dataclass(slots=True, eq=False)
class Turn:
    """A prompt and its answer, as far as their KV was computed."""

    id: str
    ids: Ids
    parent: str | None = None  # the turn that it shares most tokens with
    shared: int = 0  # tokens that both begin with
    maker: str = BASE  # what computes its KV: the base model, or an adapter by content and scale
    origin: str = EXACT  # how its KV was made
    handle: str | None = None  # on its KV; None: a later turn holds it, or it was not kept
    imported: bool = False  # its KV came from a file, so that it is used in this session and not shared
    used_s: float = 0.0

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class SharedTurn:
    """A turn, and how many tokens a prompt begins with together with it."""

    turn: Turn
    tokens: int


@dataclass(slots=True, eq=False)
class TurnTree:
    """The turns of one session, parents before children."""

    turns: dict[str, Turn] = field(default_factory=dict)
    numbered: int = 0  # turns there ever were

    def __iter__(self) -> Iterator[Turn]:
        return iter(self.turns.values())

    def __len__(self) -> int:
        return len(self.turns)

    def shared(self, ids: Ids, maker: str) -> list[SharedTurn]:
        """All turns of one maker that begin like a prompt, those that share most first, of these the latest."""
        found = [SharedTurn(turn, shared_tokens(ids, turn.ids)) for turn in reversed(list(self)) if turn.maker == maker]
        return sorted((one for one in found if one.tokens), key=lambda one: one.tokens, reverse=True)

    def children(self, parent: str) -> list[Turn]:
        """The turns that continue a turn, or part from it."""
        return [turn for turn in self if turn.parent == parent]

    def continued(self, turn: Turn) -> bool:
        """Whether a later turn begins with all tokens of this one."""
        return any(child.shared == turn.tokens for child in self.children(turn.id))

    def leaves(self) -> list[Turn]:
        """Turns whose tokens no later turn has all of."""
        return [turn for turn in self if not self.continued(turn)]

    def add(self, ids: Sequence[int], maker: str = BASE, origin: str = EXACT) -> Turn:
        """A new turn after the one that it shares most with; one with the same tokens is returned as it is."""
        array = token_array(ids)
        best = next(iter(self.shared(array, maker)), None)
        if best is not None and best.tokens == best.turn.tokens == len(array) and best.turn.origin == origin:
            return best.turn
        self.numbered += 1
        parent, shared = (None, 0) if best is None else (best.turn.id, best.tokens)
        turn = Turn(f"t{self.numbered}", array, parent, shared, maker, origin)
        self.turns[turn.id] = turn
        return turn

    def excess(self) -> Turn | None:
        """The turn to forget first where there are too many: the oldest that is continued, else the oldest."""
        if len(self) <= MAX_TURNS:
            return None
        return next((turn for turn in self if self.continued(turn)), next(iter(self)))

    def remove(self, turn: Turn) -> None:
        """Forget a turn; those that continue it continue its parent."""
        for child in self.children(turn.id):
            child.parent, child.shared = turn.parent, min(child.shared, turn.shared)
        del self.turns[turn.id]

    def path(self, last: str) -> list[Turn]:
        """A turn and those that it continues, the first of them first."""
        found = [self.turns[last]]
        while (parent := found[-1].parent) is not None:
            found.append(self.turns[parent])
        return found[::-1]

    def copy(self, last: str | None = None) -> TurnTree:
        """The same turns without handles; with `last` those that lead to this turn only."""
        kept = list(self) if last is None else self.path(last)
        return TurnTree({turn.id: replace(turn, handle=None) for turn in kept}, self.numbered)
