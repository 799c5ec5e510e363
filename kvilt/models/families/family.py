"""What a family is: for each kind of checkpoint, how to read the spec and what the tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...errors import WeightError
from ...weights.source import Checkpoint
from ..spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """One tensor with a map, or a bias, of all experts of a layer: [experts, rows, columns]."""

    name: str  # with {i} for the layer
    share: int = 0  # which of the maps that it holds
    shares: int = 1
    alternating: bool = False  # rows of these maps take turns; else one map follows the other
    transposed: bool = False  # [experts, columns, rows]
    mxfp4: bool = False  # may lie as `name`_blocks and `name`_scales instead


@dataclass(frozen=True, slots=True)
class CheckpointDialect:
    """One way a family's checkpoints are written."""

    kind: str  # of the weight format
    architectures: tuple[str, ...]  # what the checkpoint calls itself
    spec: Callable[[Checkpoint], ModelSpec]
    names: Mapping[str, str]  # our tensor name to the checkpoint's, with {i} for the layer and {e} for the expert
    ignored: tuple[str, ...] = ()  # patterns of tensors that may be there without being used
    # One tensor, and the parts that it holds; layers that lack these parts do not have it.
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The rows of a fused tensor in the order of its parts, where the checkpoint has them in another one.
    row_orders: Mapping[str, Callable[[LayerSpec], Sequence[int]]] = field(default_factory=dict)
    stacks: Mapping[str, StackedTensor] = field(default_factory=dict)  # parts of experts that lie in one tensor
    extra_layers: bool = False  # layers behind the last one may be there unused: they predict further tokens
    pairs_qk: bool = False  # rows of q and k stand in neighbouring pairs, by nature or as llama.cpp writes them
    transposed: frozenset[str] = frozenset()  # our names of matrices that are stored [in, out]
    when: str = ""  # a tensor that only checkpoints of this dialect have, where several share an architecture
    # What a plain tensor means, by our name, where the checkpoint keeps another function of it.
    transforms: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    headless: bool = False  # the model without its head, as embedding models are kept; a tied head may be named
    norm_shift: float = 0.0  # added to norm weights, for families that store them as an offset from 1

    def name_of(self, layer: int, part: str) -> str:
        """What the checkpoint calls a tensor of a layer; `experts.3.gate` is looked up as `experts.gate`."""
        pattern = self.names.get(expert_part(part))
        if pattern is None:
            raise WeightError("config", f"asks for {part}, which checkpoints of this kind do not have")
        return pattern.format(i=layer, e=part.split(".")[1] if part.startswith("experts.") else "")


def expert_part(part: str) -> str:
    """`experts.gate` of `experts.3.gate`; other parts as they are."""
    first, *rest = part.split(".")
    return f"{first}.{rest[-1]}" if first == "experts" else part


@dataclass(frozen=True, slots=True)
class Family:
    """A model family by name."""

    name: str
    dialects: tuple[CheckpointDialect, ...]
