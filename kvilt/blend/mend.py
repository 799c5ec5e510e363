"""Tokens between those that are computed again: shifted by what their neighbours' keys and values have changed.

Neighbours in a document change alike, so a computed token shows in part what became of those around it. Where the
keys and values of computed tokens are known in a layer, the others follow before anybody attends to them. Refuses to
know which tokens are computed, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..batch import Mend
from ..store.layer import LayerKV
from .place import Placing
from .recipe import Span

REACH = 16  # tokens, in which the weight of a computed one falls to 1/e
DOUBT = 0.5  # what weighs for no change: far from computed tokens nothing is known
RUN = 32  # computed tokens at most that are looked at together: they must go in one row
LEAST = 4  # computed tokens: fewer say more of themselves than of others

Stored = Callable[[int, int], LayerKV]  # of a document, by its number, and a layer


@dataclass(frozen=True, slots=True)
class Run:
    """Some computed tokens of one document, and the others from there to the next run."""

    document: int
    first: int  # of the computed ones, among all tokens that are run
    computed: Tensor  # offsets in the document
    others: Tensor  # likewise
    weights: Tensor  # [others, computed], each row of a sum below 1

    @property
    def stop(self) -> int:
        return self.first + len(self.computed)

    @property
    def mends(self) -> bool:
        """Whether it has something to say, and somebody to say it of."""
        return len(self.computed) >= LEAST and len(self.others) > 0

    def to(self, device: torch.device) -> Run:
        moved = (part.to(device) for part in (self.computed, self.others, self.weights))
        return Run(self.document, self.first, *moved)

    def shift(self, stored: Tensor, fresh: Tensor, share: float) -> Tensor:
        """The others' keys or values [others, heads, dim], of the document's and those that were computed."""
        kept = stored.to(fresh.device).flatten(1)
        change = fresh.flatten(1).float() - kept[self.computed].float()
        moved = torch.addmm(kept[self.others].float(), self.weights, change, alpha=share)
        return moved.view(-1, *stored.shape[1:])


def runs(documents: Sequence[Span], positions: Sequence[int]) -> list[Run]:
    """Runs of all documents, for computed tokens at these ascending positions.

    A run depends on its own document alone, so that it does not matter how rows are cut, as long as no run is.
    """
    at = torch.tensor(positions, dtype=torch.int64)
    made = []
    for number, one in enumerate(documents):
        low, high = torch.searchsorted(at, torch.tensor([one.start, one.stop])).tolist()
        count = -(-(high - low) // RUN)
        cuts = [low + (high - low) * i // count for i in range(1, count)]
        bounds = [0, *(int(at[i]) - one.start for i in cuts), len(one)]
        for (first, stop), reach in zip(pairwise([low, *cuts, high]), pairwise(bounds), strict=True):
            made.append(_run(number, first, at[first:stop] - one.start, range(*reach)))
    return [one for one in made if len(one.computed)]


def _run(document: int, first: int, computed: Tensor, reach: range) -> Run:
    is_other = torch.ones(len(reach), dtype=torch.bool)
    is_other[computed - reach.start] = False
    others = torch.arange(reach.start, reach.stop)[is_other]
    near = ((others.unsqueeze(1) - computed.unsqueeze(0)).abs().float() / -REACH).exp()
    return Run(document, first, computed, others, near / (near.sum(1, keepdim=True) + DOUBT))


class Mending:
    """The mends of one prompt's documents, of which some tokens are computed."""

    def __init__(self, documents: Sequence[Span], positions: Sequence[int], placing: Placing, stored: Stored) -> None:
        """`positions` are those of all tokens that are run; `placing` has the places of all documents."""
        self._runs = [one.to(placing.device) for one in runs(documents, positions) if one.mends]
        self._starts = [0]
        for one in documents:
            self._starts.append(self._starts[-1] + len(one))
        self._placing = placing
        self._stored = stored
        inside = {i for one in self._runs for i in range(one.first + 1, one.stop)}
        self.joints = [i for i in range(1, len(positions) + 1) if i not in inside]

    def of(self, start: int, stop: int, share: float) -> Mend | None:
        """For a row of the tokens [start, stop) of those that are run; None if there is nothing to mend."""
        mine = [one for one in self._runs if start <= one.first and one.stop <= stop]
        if not mine:
            return None
        places = self._placing.some(torch.cat([self._starts[one.document] + one.others for one in mine]))

        def mend(layer: int, keys: Tensor, values: Tensor) -> None:
            moved = []
            for one in mine:
                stored = self._stored(one.document, layer)
                own = slice(one.first - start, one.stop - start)
                moved.append((one.shift(stored.keys, keys[own], share), one.shift(stored.values, values[own], share)))
            places.write(layer, *(torch.cat(parts) for parts in zip(*moved, strict=True)))

        return mend
