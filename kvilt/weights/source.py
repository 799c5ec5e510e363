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
from .files import CONFIG, GENERATION, PICKLES, part_name
from .gguf import GGUFFile
from .json_file import read_object
from .safetensors import SafetensorsFiles
from .tensor_storage import TensorStorage


class TensorSource(Protocol):
    """Named tensors of one checkpoint; opening reads headers, `tensor` maps data."""

    def names(self) -> tuple[str, ...]:
        """Tensor names in file order."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch order."""

    def stored(self, name: str) -> TensorStorage:
        """Format and size of a tensor, from the header alone."""

    def tensor(self, name: str) -> Weight:
        """The tensor without a copy where the format allows it; never written to."""

    def forget(self, name: str) -> None:
        """Give the memory of a mapped tensor back; a view of it still works and reads the file again."""

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
    """Open a GGUF file, a safetensors file beside its config.json, or a folder that holds one of these."""
    try:
        if path.is_dir():
            return _open_folder(path)
        if not path.exists():
            raise ModelNotFound(f"there is nothing at {str(path)!r}; check the path")
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{str(path)!r} cannot be looked at ({error}); check the path") from error
    if not path.is_file():
        raise WeightError("file", f"{path.name} is not a regular file")
    if path.suffix in PICKLES:
        raise WeightError("file", f"{path.name} may hold a pickle, which is never read; convert it to safetensors")
    if path.suffix == ".safetensors":
        return _open_hf(path.parent, path)
    return _open_gguf(path)


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / CONFIG).is_file() and any(folder.glob("*.safetensors*")):
        return _open_hf(folder, folder)
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1 or _one_split(found):
        return _open_gguf(found[0])
    if found:
        raise WeightError("folder", f"{folder.name!r} holds {len(found)} GGUF files; pass the path of one of them")
    if any(file.suffix in PICKLES for file in folder.iterdir()):
        raise WeightError("folder", f"{folder.name!r} may hold pickles, which are never read; convert to safetensors")
    raise ModelNotFound(f"{str(folder)!r} holds neither a GGUF file nor {CONFIG} with safetensors; check the path")


def _one_split(files: list[Path]) -> bool:
    """Whether these are the parts of one model; those that are missing are named when it is opened."""
    named = [part_name(file.name) for file in files]
    return None not in named and len({(name.stem, name.count) for name in named if name}) == 1


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile.open(path)
    return Checkpoint(path, "gguf", file.metadata, MappingProxyType({}), file)


def _open_hf(folder: Path, weights: Path) -> Checkpoint:
    if not (folder / CONFIG).is_file():
        raise WeightError(CONFIG, f"must lie beside {weights.name}; it says what the tensors mean")
    config = read_object(folder / CONFIG)
    generation = read_object(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    tensors = SafetensorsFiles.open_folder(weights) if weights.is_dir() else SafetensorsFiles.open(weights)
    return Checkpoint(weights, "hf", MappingProxyType(config), MappingProxyType(generation), tensors)
