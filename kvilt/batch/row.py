"""Row: one sequence's share of a step. Where its tokens come from, where they stand, what comes back.

Refuses to know requests, models and sampling.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..kv.cache import KVCache
from ..ops.contract import Interpolation

# Where a row's hidden states come from.


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Embeds:
    """Token ids with embedding rows in some places: `vectors[i]` stands at index `at[i]`."""

    ids: Sequence[int]  # the id at an embedded place is not looked at
    at: Sequence[int]
    vectors: Tensor  # [len(at), hidden]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states of a row that starts at a later layer."""

    states: Tensor  # [tokens, hidden]


@dataclass(slots=True)  # not frozen: see docs/decisions.md, "Records of a row"
class SampledIds:
    """Ids still on the device, so that a step can be prepared before the last one is read."""

    ids: Tensor  # [tokens] int64
    at: int | None = None  # only the one at this index: what a step drew for this row


Source = Ids | Embeds | Hidden | SampledIds

# What a row wants back.


@dataclass(frozen=True, slots=True)
class Nothing:
    """Only the KV."""


@dataclass(frozen=True, slots=True)
class Last:
    """Logits of the last `k` positions."""

    k: int = 1


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability of `targets[i]` as the token after position i, and the `top` likeliest ones."""

    targets: Sequence[int]
    top: int = 0
    ranks: bool = False  # also how many are likelier; takes a while longer


@dataclass(frozen=True, slots=True)
class HiddenOut:
    """The hidden states after the last layer of the span, and what some of its layers write, before rotation."""

    kv_layers: Sequence[int] = ()
    query_layers: Sequence[int] = ()  # of these also the queries, after rotation


@dataclass(frozen=True, slots=True)
class KeyMass:
    """Attention that each key receives from the row's tokens, for query-driven selection."""

    layers: Sequence[int] = ()  # averaged over these; over all of the span if there are none
    last: int = 0  # so many of the row's last tokens count as queries; all of them if 0


@dataclass(frozen=True, slots=True)
class Pooled:
    """The sum of the states after the last norm of the row's tokens from `first` on, or the last of these states."""

    last: bool = False
    first: int = 0


Want = Nothing | Last | Score | HiddenOut | KeyMass | Pooled

# Which weights a row runs on.


@dataclass(frozen=True, slots=True)
class Base:
    """The model as it was loaded."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """The model with a loaded adapter."""

    adapter_id: int
    scale: float = 1.0
    begins: int = 0  # tokens at earlier positions run on the base model


Adapter = Base | Adapted


@dataclass(frozen=True, slots=True)
class UnrotatedKV:
    """What a layer's attention made of some tokens, before keys were rotated."""

    keys: Tensor  # [tokens, kv_heads, key_dim]
    values: Tensor  # [tokens, kv_heads, value_dim]


@dataclass(frozen=True, slots=True, eq=False)
class Repair:
    """KV of tokens that are not computed: what is stored of them, plus a share of the change of computed ones.

    In every layer of the row's span the backend writes it before attention reads the layer. The computed tokens are
    the row's tokens [first, stop); `interpolation` has the weights, by indices into the stored text.
    """

    positions: Sequence[int]  # in the row's cache, above its length, in reserved room, none of them the row's own
    first: int
    stop: int
    interpolation: Interpolation
    stored: Mapping[int, UnrotatedKV]  # the whole stored text, by layer


@dataclass(frozen=True, slots=True, eq=False)
class KVLoad:
    """Stored KV of tokens that is written to pages, keys rotated to their positions, on the way through the layers.

    In each layer that it has the backend writes it before the row's own KV, so the row may compute some of the tokens
    again. Copies of later layers to the device run while earlier layers compute.
    """

    spans: Sequence[range]  # positions in the row's cache, at or above its length, in reserved room
    stored: Mapping[int, Sequence[UnrotatedKV]]  # by layer, one for each span, on the host


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Layers [start, stop); a stop past the model's end means its end."""

    start: int = 0
    stop: int = sys.maxsize


WHOLE = LayerSpan()


@dataclass(slots=True)  # not frozen: see docs/decisions.md, "Records of a row"
class Row:
    """One sequence's share of a step: what enters, where it stands, how far it runs, what comes back."""

    source: Source
    positions: Sequence[int]  # ascending, at or above the cache's length, in reserved room
    cache: KVCache
    cache_row: int = 0
    layers: LayerSpan = WHOLE
    want: Want = Last()
    adapter: Adapter = Base()
    repairs: tuple[Repair, ...] = ()
    loads: tuple[KVLoad, ...] = ()
    rope_positions: Sequence[Sequence[int]] = ()  # one for each axis that rotation has; empty: `positions` on each


def token_count(source: Source) -> int:
    """Tokens a source stands for."""
    if isinstance(source, Ids | Embeds):
        return len(source.ids)
    if isinstance(source, SampledIds):
        return len(source.ids) if source.at is None else 1
    return len(source.states)


TOKENS = (Ids, SampledIds)  # sources of plain token ids


def is_plain_row(row: Row) -> bool:
    """Whether ids go through all layers to the logits of the last one, and nothing is repaired or loaded."""
    last = type(row.want) is Last and row.want.k == 1
    return last and row.layers is WHOLE and type(row.source) in TOKENS and not row.repairs and not row.loads
