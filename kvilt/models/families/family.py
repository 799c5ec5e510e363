"""What a family is: for each kind of checkpoint, how to read the spec and what the tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...errors import WeightError
from ...weights.source import Checkpoint
from ..spec import ModelSpec


@dataclass(frozen=True, slots=True)
class CheckpointDialect:
    """One way a family's checkpoints are written."""

    kind: str  # of the weight format
    architectures: tuple[str, ...]  # what the checkpoint calls itself
    spec: Callable[[Checkpoint], ModelSpec]
    names: Mapping[str, str]  # our tensor name to the checkpoint's, with {i} for the layer and {e} for the expert
    ignored: tuple[str, ...] = ()  # patterns of tensors that may be there without being used
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # one tensor, and the parts that it holds
    pairs_qk: bool = False  # rows of q and k stand in neighbouring pairs, as llama.cpp's converter writes some families
    norm_shift: float = 0.0  # added to norm weights, for families that store them as an offset from 1

    def name_of(self, layer: int, part: str) -> str:
        """What the checkpoint calls a tensor of a layer; `experts.3.gate` is looked up as `experts.gate`."""
        *of_experts, last = part.split(".")
        pattern = self.names.get(f"{of_experts[0]}.{last}" if of_experts else last)
        if pattern is None:
            raise WeightError("config", f"asks for {part}, which checkpoints of this kind do not have")
        return pattern.format(i=layer, e=of_experts[1] if of_experts else "")


@dataclass(frozen=True, slots=True)
class Family:
    """A model family by name."""

    name: str
    dialects: tuple[CheckpointDialect, ...]
