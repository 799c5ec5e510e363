"""What a checkpoint is to the rest of kvilt, and how one is opened from a path.

Knows where files lie, not what a model needs from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self

from ..errors import ModelNotFound, WeightError
from ..quant.tensor import Weight
from .gguf import GGUFFile


class TensorSource(Protocol):
    """Named tensors of one checkpoint; opening reads headers, `tensor` maps data."""

    def names(self) -> tuple[str, ...]:
        """Tensor names in file order."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch order."""

    def tensor(self, name: str) -> Weight:
        """The tensor without a copy where the format allows it; never written to."""

    def digest(self) -> str:
        """sha256 over every byte of the files; computed on first use and kept."""

    def close(self) -> None:
        """Let go of the files; tensors handed out stay valid."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model: what its author wrote about it, and its tensors."""

    path: Path
    kind: Literal["gguf", "hf"]
    config: Mapping[str, Any]  # GGUF metadata, or config.json
    generation: Mapping[str, Any]  # generation_config.json; empty for GGUF
    tensors: TensorSource

    @property
    def fingerprint(self) -> str:
        """Content hash of the weights and of the configuration that gives them meaning; reads all of it, once."""
        if self.kind == "gguf":
            return self.tensors.digest()  # the metadata lies in the same file
        meaning = json.dumps(dict(self.config), sort_keys=True)
        return hashlib.sha256(f"{meaning}\n{self.tensors.digest()}".encode()).hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file or a folder that holds one."""
    if not path.exists():
        raise ModelNotFound(f"there is nothing at {str(path)!r}; check the path")
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise WeightError("folder", f"{path.name} holds {len(found)} GGUF files; name one of them")
        path = found[0]
    file = GGUFFile.open(path)
    return Checkpoint(path, "gguf", file.metadata, MappingProxyType({}), file)
