"""What a retriever of KV and a blender of it promise, on plain tensors. Refuses to know pages and engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlendOutput:
    """Queries of the selected tokens, and keys and values of all of them."""

    q: Tensor  # the selected rows of the fresh queries
    k: Tensor  # one row for each token of the batch, with updated values
    v: Tensor
    positions: Tensor  # of the selected tokens, in the input sequence
    local_indices: Tensor  # of the selected tokens, in the fresh queries
    query_start_loc: Tensor | None  # the new one if tokens were selected here, else None


@dataclass(frozen=True, slots=True)
class BlendRetrieverResult:
    """One layer of what was retrieved. Rows without KV are undefined, and 0 in `valid_mask`."""

    k: Tensor | None  # [total tokens, kv_heads, head_dim]; None only if nothing at all was retrieved
    v: Tensor | None
    valid_mask: Tensor  # [total tokens], on the CPU
    original_positions: Tensor  # [total tokens], where each key was rotated; 0 where invalid
    rotated: bool | None = None  # whether keys are; None: not said, which is refused where it makes a difference


class BlendRetrieverTask(ABC):
    """A retrieval under way."""

    @abstractmethod
    def result(self, layer_id: int) -> BlendRetrieverResult:
        """One layer, once it is there. Its token axis is that of all prompts of the batch, concatenated."""


class BlendRetriever(ABC):
    """Finds KV of segments of prompts."""

    @abstractmethod
    def new_request(self, full_prompts: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> BlendRetrieverTask:
        """Begin to look for the segments of some prompts; does not wait.

        `full_prompts` are 1-D integer tensors on the CPU, `indices` where the segments after the first start in each.
        """


class BlendExecutor(ABC):
    """Blends retrieved KV with fresh KV; one object for each forward batch, layers in order."""

    @property
    def selection_layers(self) -> Sequence[int]:
        """Where it selects tokens, ascending. kvilt's engine calls it there alone, and refuses one that names none.

        Of what comes back the engine reads `local_indices`; it adds tokens without KV and the last one, and places keys
        and values itself.
        """
        return ()

    @abstractmethod
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
        """The queries that go on, and the keys and values they see, in one layer.

        Fresh rows are rotated at `positions`. Up to the layer where tokens are selected they are all tokens, afterwards
        only the selected ones, and the caller hands back the positions it was given. `query_start_loc` [requests + 1]
        is over the original lengths; `token_dim` is the token axis of the fresh tensors, which may have heads and their
        dimensions on one axis. What comes back is on the device of what it was made of.
        """

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
        """`blend` for one layer as a retriever gives it, with all that its result says."""
        return self.blend(
            layer_id,
            retrieved.k,
            retrieved.v,
            retrieved.valid_mask,
            retrieved.original_positions,
            fresh_q,
            fresh_k,
            fresh_v,
            positions,
            query_start_loc,
            token_dim,
        )
