"""KV repair: tokens between recomputed ones take a share of what the keys and values of these have changed by.

Neighbours in a document change alike, so a recomputed token shows in part how the tokens around it would change. A
repair is a value of the row that recomputes; the backend carries it out, layer by layer, before attention reads.
Refuses to know which tokens are recomputed, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..batch import LayerSpan, Repair, UnrotatedKV
from ..ops.contract import Interpolation
from ..store.layer import LayerKV
from .recipe import Span

REACH = 16  # tokens, in which the weight of a computed one falls to 1/e
DOUBT = 0.5  # what weighs for no change: far from computed tokens nothing is known
RUN = 32  # computed tokens at most that are looked at together: they must go in one row
LEAST = 8  # computed tokens: fewer say more of themselves than of others

Stored = Callable[[int, int], LayerKV]  # of a document, by its number, and a layer


@dataclass(frozen=True, slots=True)
class RepairRun:
    """Some computed tokens of one document, and the others from there to the next run."""

    document: int
    first: int  # of the computed ones, among all tokens that are run
    stop: int
    interpolation: Interpolation

    @property
    def repairs(self) -> bool:
        """Whether it has enough computed tokens, and others to repair."""
        return self.stop - self.first >= LEAST and len(self.interpolation.tokens) > 0


def runs(documents: Sequence[Span], positions: Sequence[int], share: float = 1.0) -> list[RepairRun]:
    """Runs of all documents, for computed tokens at these ascending positions; the others take this share of a change.

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
            made.append(RepairRun(number, first, stop, _weights(at[first:stop] - one.start, range(*reach), share)))
    return [one for one in made if one.first < one.stop]


def _weights(computed: Tensor, reach: range, share: float) -> Interpolation:
    is_other = torch.ones(len(reach), dtype=torch.bool)
    is_other[computed - reach.start] = False
    others = torch.arange(reach.start, reach.stop)[is_other]
    near = ((others.unsqueeze(1) - computed.unsqueeze(0)).abs().float() / -REACH).exp()
    return Interpolation(others, computed, share * near / (near.sum(1, keepdim=True) + DOUBT))


class KVRepair:
    """The repairs of one prompt's documents, of which some tokens are computed."""

    def __init__(
        self, documents: Sequence[Span], positions: Sequence[int], share: float, stored: Stored, layers: int
    ) -> None:
        """`positions` are those of all tokens that are run; `stored` gives one of a document's `layers`."""
        self._runs = [one for one in runs(documents, positions, share) if one.repairs]
        self._documents = documents
        self._stored, self._count = stored, layers
        inside = {i for one in self._runs for i in range(one.first + 1, one.stop)}
        self.joints = [i for i in range(1, len(positions) + 1) if i not in inside]

    def of(self, start: int, stop: int, span: LayerSpan) -> tuple[Repair, ...]:
        """For a row of the tokens [start, stop) of those that are run, through these layers."""
        layers = range(span.start, min(span.stop, self._count))
        mine = [one for one in self._runs if start <= one.first and one.stop <= stop]
        stored = {number: self._layers(number, layers) for number in dict.fromkeys(one.document for one in mine)}
        return tuple(
            Repair(
                (self._documents[one.document].start + one.interpolation.tokens).tolist(),
                one.first - start,
                one.stop - start,
                one.interpolation,
                stored[one.document],
            )
            for one in mine
        )

    def _layers(self, document: int, layers: range) -> dict[int, UnrotatedKV]:
        found = ((layer, self._stored(document, layer)) for layer in layers)
        return {layer: UnrotatedKV(one.keys, one.values) for layer, one in found}
