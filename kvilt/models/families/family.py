"""What a family is: for each kind of checkpoint, how to read the spec and what the tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...weights.source import Checkpoint
from ..spec import ModelSpec


@dataclass(frozen=True, slots=True)
class CheckpointDialect:
    """One way a family's checkpoints are written."""

    kind: str  # of the weight format
    architectures: tuple[str, ...]  # what the checkpoint calls itself
    spec: Callable[[Checkpoint], ModelSpec]
    names: Mapping[str, str]  # our tensor name to the checkpoint's, with {i} for the layer
    ignored: tuple[str, ...] = ()  # patterns of tensors that may be there without being used
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # one tensor, and the parts that it holds
    pairs_qk: bool = False  # rows of q and k stand in neighbouring pairs, as llama.cpp's converter writes some families
    norm_shift: float = 0.0  # added to norm weights, for families that store them as an offset from 1


@dataclass(frozen=True, slots=True)
class Family:
    """A model family by name."""

    name: str
    dialects: tuple[CheckpointDialect, ...]
