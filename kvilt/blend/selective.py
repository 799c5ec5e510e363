"""The paper's blender on long tensors: fresh values up to a check layer, a choice there, retrieved values after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import InputError, ParamError
from ..models.spec import Rope
from .interfaces import BlendExecutor, BlendOutput, BlendRetrieverResult
from .key_rotation import KeyRotation, as_key_rotations
from .select import deviations, merge, select


class SelectiveBlend(BlendExecutor):
    """Selects by deviation of values at `check_layer`. One object for each forward batch."""

    def __init__(
        self,
        ropes: Sequence[KeyRotation | Rope],
        ratio: float = 0.15,
        check_layer: int = 1,
        unrotated: bool | None = None,
        selects_only: bool = False,
    ) -> None:
        """`ropes` has one entry for each layer.

        `unrotated` says whether retrieved keys were never rotated, for callers of `blend`; `blend_result` reads it from
        the result. Where it makes a difference and neither says it, blending is refused. `selects_only` is for callers
        that call it at the check layer alone, as kvilt's engine does.
        """
        if not 0 <= ratio <= 1:
            raise ParamError("ratio", f"must be between 0 and 1, not {ratio!r}")
        if not 0 <= check_layer < len(ropes):
            raise ParamError("check_layer", f"must be one of the layers 0 to {len(ropes) - 1}, not {check_layer!r}")
        self._rotations = as_key_rotations(ropes)
        self._ratio = ratio
        self._check_layer = check_layer
        self._unrotated = unrotated
        self._layer = self._first = check_layer - 1 if selects_only else -1
        self._places = torch.empty(0, dtype=torch.int64)  # of all tokens, in the input
        self._chosen = torch.empty(0, dtype=torch.int64)  # rows of the selected tokens among all of them

    @property
    def selection_layers(self) -> Sequence[int]:
        return (self._check_layer,)

    def blend(
        self,
        layer_id: int,
        retrieved_k: Tensor | None,
        retrieved_v: Tensor | None,
        valid_mask: Tensor,
        original_positions: Tensor,
        fresh_q: Tensor,
        fresh_k: Tensor,
        fresh_v: Tensor,
        positions: Tensor,
        query_start_loc: Tensor,
        token_dim: int,
    ) -> BlendOutput:
        self._check(layer_id, positions, valid_mask, (fresh_q, fresh_k, fresh_v), token_dim)
        everything = torch.arange(len(positions), device=fresh_q.device)
        if layer_id < self._check_layer:
            return BlendOutput(fresh_q, fresh_k, fresh_v, positions, everything, None)
        for one, fresh in ((retrieved_k, fresh_k), (retrieved_v, fresh_v)):
            self._check_retrieved(one, fresh.movedim(token_dim, 0))
        valid = valid_mask.bool() if retrieved_k is not None else torch.zeros(len(valid_mask), dtype=torch.bool)
        valid = valid.cpu()
        if layer_id == self._check_layer:
            return self._select(retrieved_v, valid, fresh_q, fresh_k, fresh_v, query_start_loc, token_dim)
        missing = ~valid
        missing[self._chosen.cpu()] = False
        if bool(missing.any()):
            raise InputError(f"layer {layer_id} lacks KV that the check layer had; compute this batch again without it")
        k, v = fresh_k, fresh_v
        if retrieved_k is not None and retrieved_v is not None:
            moved = self._moved(layer_id, retrieved_k, original_positions)
            k, v = (self._long(*pair, token_dim) for pair in ((moved, fresh_k), (retrieved_v, fresh_v)))
        return BlendOutput(fresh_q, k, v, positions, everything, None)

    def blend_result(
        self,
        layer_id: int,
        retrieved: BlendRetrieverResult,
        fresh_q: Tensor,
        fresh_k: Tensor,
        fresh_v: Tensor,
        positions: Tensor,
        query_start_loc: Tensor,
        token_dim: int,
    ) -> BlendOutput:
        if retrieved.rotated is not None:
            if self._unrotated is retrieved.rotated:
                said = "rotated" if retrieved.rotated else "not rotated"
                raise InputError(f"the retriever says that its keys are {said}, and the executor was told otherwise")
            self._unrotated = not retrieved.rotated
        return super().blend_result(
            layer_id, retrieved, fresh_q, fresh_k, fresh_v, positions, query_start_loc, token_dim
        )

    def _select(
        self,
        retrieved_v: Tensor | None,
        valid: Tensor,
        fresh_q: Tensor,
        fresh_k: Tensor,
        fresh_v: Tensor,
        query_start_loc: Tensor,
        token_dim: int,
    ) -> BlendOutput:
        scores = torch.zeros(len(valid))
        if retrieved_v is not None:
            fresh = fresh_v.movedim(token_dim, 0)
            scores = deviations(fresh, retrieved_v.reshape(fresh.shape).to(fresh.device), valid).cpu()
        starts = query_start_loc.tolist()
        self._chosen = select(scores, valid, self._ratio, starts).to(fresh_q.device)
        counts = [int(((self._chosen >= a) & (self._chosen < b)).sum()) for a, b in pairwise(starts)]
        short = torch.tensor([0, *counts]).cumsum(0).to(query_start_loc)
        q = fresh_q.index_select(token_dim, self._chosen)
        at = self._chosen.to(self._places.device)
        return BlendOutput(q, fresh_k, fresh_v, self._places[at], self._chosen, short)

    def _moved(self, layer_id: int, keys: Tensor, original: Tensor) -> Tensor:
        places, rotation = self._places.to(keys.device), self._rotations[layer_id]
        keys = rotation.by_head(keys)
        if self._unrotated:
            return rotation.place(keys, places)
        rotation.check_said(None if self._unrotated is None else True, layer_id)
        return rotation.move(keys, original.to(keys.device), places)

    def _long(self, retrieved: Tensor, fresh: Tensor, token_dim: int) -> Tensor:
        short = fresh.movedim(token_dim, 0)
        long = merge(retrieved.reshape(len(retrieved), *short.shape[1:]).to(fresh), short, self._chosen)
        return long.movedim(0, token_dim)

    def _check_retrieved(self, retrieved: Tensor | None, fresh: Tensor) -> None:
        """Retrieved tensors are [tokens, heads, dim] or [tokens, heads * dim], whatever the shape of the fresh ones."""
        if retrieved is None:
            return
        tokens, numbers = len(self._places), math.prod(fresh.shape[1:])
        if retrieved.dim() not in (2, 3) or retrieved.shape[0] != tokens or retrieved.numel() != tokens * numbers:
            raise InputError(
                f"retrieved tensors must be [{tokens}, heads, dim] or [{tokens}, heads * dim], with {numbers} numbers "
                f"for each token, not {list(retrieved.shape)}"
            )

    def _check(
        self, layer_id: int, positions: Tensor, valid: Tensor, fresh: tuple[Tensor, Tensor, Tensor], token_dim: int
    ) -> None:
        if layer_id != self._layer + 1 or layer_id >= len(self._rotations):
            raise InputError(f"layers are blended in order: {self._layer + 1} comes next, not {layer_id}")
        self._layer = layer_id
        if layer_id == self._first + 1:
            self._places = positions.clone()
        expected = self._places
        if layer_id > self._check_layer:
            expected = self._places[self._chosen.to(self._places.device)]
        if not torch.equal(positions.to(expected.device), expected):
            raise InputError("positions must be those that the last layer handed out")
        if len(valid) != len(self._places):
            raise InputError(f"the mask has {len(valid)} tokens and the batch {len(self._places)}")
        if any(one.shape[token_dim] != len(positions) for one in fresh):
            raise InputError(f"fresh tensors must have {len(positions)} tokens on axis {token_dim}")
