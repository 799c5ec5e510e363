"""What KV looks like: groups of layers that share a reach and a page table, and layers that keep a state instead.

Refuses to know why a layer reaches as far as it does; a model's spec decides that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..ops.contract import PageShape, StateShape

PAGE_TOKENS = 32  # of models' pages


@dataclass(frozen=True, slots=True)
class Full:
    """Every query sees every earlier key."""


@dataclass(frozen=True, slots=True)
class Window:
    """A query at p sees the keys in (p - tokens, p]; older pages are given back."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention: every query sees every earlier token, of which two vectors are kept for all heads.

    The value is a compressed vector; the key is a rotated part of `rope_dims` numbers, and goes on in the value.
    """

    rope_dims: int


Reach = Full | Window | Latent


@dataclass(frozen=True, slots=True)
class LayerSlot:
    """Where a layer's KV lives: which group, and which of the group's layers it is."""

    group: int
    layer: int


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one reach and one shape; they share a page table."""

    reach: Reach
    layers: tuple[int, ...]
    shape: PageShape

    def first_needed(self, length: int) -> int:
        """The oldest position that a query at `length` or later can see."""
        match self.reach:
            case Window(tokens):
                return max(0, length - tokens + 1)
            case _:
                return 0

    @property
    def window_pages(self) -> int | None:
        """The most pages that a sequence holds between two steps, its next token's included; None: it keeps all."""
        match self.reach:
            case Window(tokens):
                return (tokens - 2) // self.shape.page_tokens + 3  # one of them is slack, see `first_kept`
            case _:
                return None

    def first_kept(self, length: int) -> int:
        """The first page that a sequence of this length keeps.

        One page more than it needs, so that taking back the last few tokens stays possible.
        """
        size = self.shape.page_tokens
        return max(0, self.first_needed(length) - size) // size

    def smallest_length(self, first_held: int) -> int:
        """The smallest length above 0 to go back to when positions below `first_held` are gone."""
        match self.reach:
            case Window(tokens) if first_held > 0:
                return first_held + tokens - 1
            case _:
                return 0

    def describe(self) -> dict[str, Any]:
        """The group as plain data: all that decides the meaning of its canonical bytes."""
        reach: dict[str, Any]
        match self.reach:
            case Full():
                reach = {"kind": "full"}
            case Window(tokens):
                reach = {"kind": "window", "tokens": tokens}
            case Latent(rope_dims):
                reach = {"kind": "latent", "rope_dims": rope_dims}
        return {
            "reach": reach,
            "layers": list(self.layers),
            "kv_heads": self.shape.kv_heads,
            "key_dim": self.shape.key_dim,
            "value_dim": self.shape.value_dim,
            "dtype": self.shape.dtype.name,
        }


@dataclass(frozen=True, slots=True)
class RecurrentGroup:
    """Layers that keep a state of fixed size instead of keys and values: recurrent state and tails of convolutions."""

    layers: tuple[int, ...]
    shape: StateShape

    def describe(self) -> dict[str, Any]:
        """The group as plain data: all that decides the meaning of its canonical bytes."""
        return {"layers": list(self.layers), "tail": list(self.shape.tail), "memory": list(self.shape.memory)}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All layer groups of a model; pages of every group hold the same number of tokens."""

    groups: tuple[LayerGroup, ...]
    recurrent: RecurrentGroup | None = None  # the layers that keep a state, if there are any
    bare: tuple[int, ...] = ()  # layers that keep nothing: they read pages of earlier ones, or look at no other token

    @property
    def page_tokens(self) -> int:
        return self.groups[0].shape.page_tokens

    @property
    def num_layers(self) -> int:
        paged = [layer for group in self.groups for layer in group.layers]
        return len(self.bare) + len(paged if self.recurrent is None else {*paged, *self.recurrent.layers})

    @property
    def all_paged(self) -> bool:
        """Whether every layer keeps keys and values of its own, and nothing else: its KV can be placed anywhere."""
        return self.recurrent is None and not self.bare

    @property
    def state_group(self) -> int:
        """The number by which places, pools and records know the layers that keep a state."""
        return len(self.groups)

    def shape_of(self, group: int) -> PageShape:
        """The shape of a group's pages; a state is one token of one head, with its tail as key."""
        if self.recurrent is not None and group == self.state_group:
            return self.recurrent.shape.page
        return self.groups[group].shape

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in every group together."""
        return sum(group.shape.page_bytes for group in self.groups)

    def slots(self) -> dict[int, tuple[LayerSlot, ...]]:
        """By layer, in order: where its KV lives, and where its state does; without layers that keep nothing."""
        groups: list[LayerGroup | RecurrentGroup] = [*self.groups]
        if self.recurrent is not None:
            groups.append(self.recurrent)
        found: dict[int, tuple[LayerSlot, ...]] = dict.fromkeys(sorted(chain(*(g.layers for g in groups))), ())
        for number, group in enumerate(groups):
            for index, layer in enumerate(group.layers):
                found[layer] += (LayerSlot(number, index),)
        return found

    def places(self) -> tuple[LayerSlot, ...]:
        """Where KV and states live, layer by layer."""
        return tuple(chain(*self.slots().values()))

    def places_in(self, group: int) -> list[int]:
        """Which of `places` are those of a group, or of the layers that keep a state."""
        return [index for index, place in enumerate(self.places()) if place.group == group]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def describe(self) -> dict[str, Any]:
        """The layout as plain data; page size is left out, because canonical bytes do not depend on it."""
        described: dict[str, Any] = {"groups": [group.describe() for group in self.groups]}
        if self.recurrent is not None:
            described["recurrent"] = self.recurrent.describe()
        if self.bare:
            described["bare"] = list(self.bare)
        return described
