"""A stage of blending: tokens that are run in rows of any size, and the results put together again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..batch import (
    Hidden,
    HiddenOut,
    Ids,
    KeyMass,
    KVLoad,
    Last,
    LayerSpan,
    Logits,
    Nothing,
    Repair,
    Row,
    Source,
    UnrotatedKV,
    Want,
)
from ..kv.cache import KVCache

Repairs = Callable[[int, int, LayerSpan], tuple[Repair, ...]]


@dataclass(slots=True, eq=False)
class RowStage:
    """Tokens at some positions of a cache through some layers.

    They ascend, and each piece goes through all layers of the span before the next one does: so a piece sees the KV of
    those before it.
    """

    cache: KVCache
    positions: Sequence[int]
    source: Sequence[int] | Tensor  # ids, or the hidden states [tokens, hidden] that the span begins with
    layers: LayerSpan
    want: Want  # of all pieces, but for Last and KeyMass, which only the last one has
    joints: Sequence[int] | None = None  # ascending, up to the end: a piece ends only there, whatever the budget
    repairs: Repairs | None = None  # of the tokens [start, stop), in the layers of the span
    load: KVLoad | None = None  # stored KV that the first piece brings
    at: int = 0  # tokens that are done
    hidden: list[Tensor] = field(default_factory=list)
    kv: dict[int, list[UnrotatedKV]] = field(default_factory=dict)  # by layer
    queries: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer
    mass: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def left(self) -> int:
        return len(self.positions) - self.at

    @property
    def draws(self) -> bool:
        """Whether its last row returns logits."""
        return isinstance(self.want, Last)

    def row(self, tokens: int) -> Row:
        """The next piece, of at most so many tokens."""
        end = len(self.positions)
        stop = min(self.at + max(1, tokens), end)
        if self.joints is not None:
            below = bisect_right(self.joints, stop) - 1
            stop = self.joints[below if below >= 0 and self.joints[below] > self.at else below + 1]
        want = Nothing() if stop < end and isinstance(self.want, Last | KeyMass) else self.want
        repairs = self.repairs(self.at, stop, self.layers) if self.repairs is not None else ()
        places = self.positions[self.at : stop]
        loads = (self.load,) if self.load is not None and not self.at else ()
        return Row(self._source(stop), places, self.cache, layers=self.layers, want=want, repairs=repairs, loads=loads)

    def took(self, tokens: int, logits: Logits, row: int) -> None:
        """A piece was run, as this row of a batch."""
        self.at += tokens
        if isinstance(self.want, HiddenOut):
            self.hidden.append(logits.hidden[row])
            for layer, seen in logits.kv.get(row, {}).items():
                self.kv.setdefault(layer, []).append(seen)
            for layer, query in logits.queries.get(row, {}).items():
                self.queries.setdefault(layer, []).append(query)
        if isinstance(self.want, KeyMass) and not self.left:
            self.mass = logits.mass[row].cpu()

    def _source(self, stop: int) -> Source:
        piece = self.source[self.at : stop]
        return Hidden(piece) if isinstance(piece, Tensor) else Ids(piece)
