"""The engine's own blend executor: selects tokens as a recipe says, at the layers where the recipe compares values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import InputError, ParamError
from .interfaces import BlendExecutor, BlendOutput
from .recipe import Recipe, Strategy
from .selection import TokenSelection


class RecipeBlend(BlendExecutor):
    """Selects by a recipe. A recipe that compares no values selects before the first layer, by `select`."""

    def __init__(self, selection: TokenSelection, recipe: Recipe, start: int, ratio: Callable[[], float]) -> None:
        """`start` is the position of the first token; `ratio` may follow how fast layers load."""
        self._selection = selection
        self._factors = dict(enumerate((*recipe.gradual, 1.0), recipe.check_layer)) if recipe.needs("deviation") else {}
        self._start = start
        self._ratio = ratio
        self.scores: dict[Strategy, Tensor] = {"head": selection.heads()}  # by token; `query` is the caller's to add

    @property
    def selection_layers(self) -> Sequence[int]:
        return tuple(self._factors)

    def blend(
        self,
        layer_id: int,
        retrieved_k: Tensor | None,  # noqa: ARG002 (values say how much a token changed)
        retrieved_v: Tensor | None,
        valid_mask: Tensor,  # noqa: ARG002 (the selection knows it)
        original_positions: Tensor,  # noqa: ARG002
        fresh_q: Tensor,
        fresh_k: Tensor,
        fresh_v: Tensor,
        positions: Tensor,
        query_start_loc: Tensor,
        token_dim: int,
    ) -> BlendOutput:
        assert retrieved_v is not None, "a prompt without documents is not blended"
        at = (positions - self._start).cpu()
        self.scores["deviation"] = self._selection.changed(fresh_v.movedim(token_dim, 0), at, retrieved_v)
        local = torch.isin(at, self.select(self._factors[layer_id], at)).nonzero().flatten()
        there = local.to(fresh_q.device)
        q = fresh_q.index_select(token_dim, there)
        starts = torch.tensor([0, len(local)]).to(query_start_loc)
        return BlendOutput(q, fresh_k, fresh_v, positions[local.to(positions.device)], there, starts)

    def select(self, factor: float = 1.0, among: Tensor | None = None) -> Tensor:
        """The tokens that are computed again, as ascending indices; `factor` times the ratio."""
        return self._selection.of(self.scores, self._ratio() * factor, among)


def check_selection_layers(executor: BlendExecutor, layers: int) -> None:
    """Raise unless an executor says where it selects, below the last layer."""
    given = list(executor.selection_layers)
    if not given:
        raise ParamError("blend_executor", f"{type(executor).__name__} must name its selection_layers")
    if given != sorted(set(given)) or not 0 <= given[0] <= given[-1] < layers - 1:
        raise ParamError(
            "blend_executor", f"selection_layers must ascend and lie between 0 and {layers - 2}, not {given}"
        )


def selected_rows(output: BlendOutput, always: Tensor) -> Tensor:
    """The rows that go on: those that an executor selected, and those of the mask `always`."""
    local = output.local_indices.flatten().cpu()
    if local.is_floating_point() or local.dtype == torch.bool or bool(((local < 0) | (local >= len(always))).any()):
        raise InputError(f"local_indices must be row numbers from 0 to {len(always) - 1}")
    rows = always.clone()
    rows[local.long()] = True
    return rows.nonzero().flatten()
