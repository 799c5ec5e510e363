"""Checkpoints: how one is opened from a path, and what the rest of kvilt sees of it.

Knows where files lie, not what a model needs from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

from ..errors import KviltError, ModelNotFound, WeightError
from ..quant.tensor import Weight
from .files import CONFIG, GENERATION, PICKLES, part_name
from .gguf import GGUFFile
from .json_file import read_object
from .packed_ints import PackedIntTensors, scheme_of
from .safetensors import SafetensorsFiles
from .tensor_storage import TensorStorage

# How GGUF metadata calls fields of generation_config.json.
_GGUF_SAMPLING: Mapping[str, str] = MappingProxyType(
    {
        "general.sampling.temp": "temperature",
        "general.sampling.top_k": "top_k",
        "general.sampling.top_p": "top_p",
        "general.sampling.min_p": "min_p",
        "general.sampling.penalty_repeat": "repetition_penalty",
    }
)


class TensorSource(Protocol):
    """Named tensors of one checkpoint; opening reads headers, `tensor` maps data."""

    def names(self) -> tuple[str, ...]:
        """Tensor names in file order."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch order."""

    def storage(self, name: str) -> TensorStorage:
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
class WeightFormat:
    """A checkpoint format: how it is recognised and opened, and what it says of itself."""

    kind: str  # as families call it in their dialects
    claims: Callable[[Path], bool]  # whether a file or a folder is written this way
    open: Callable[[Path], Checkpoint]
    label: Callable[[Mapping[str, Any]], str]  # for a listing, from the configuration
    architecture: Callable[[Mapping[str, Any]], tuple[str, object]]  # the field that names it, and its value
    tokenizer_inside: bool  # in the configuration, as opposed to files beside the weights


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model: what its author wrote about it, and its tensors."""

    path: Path
    format: WeightFormat
    config: Mapping[str, Any]  # GGUF metadata, or config.json
    generation: Mapping[str, Any]  # generation_config.json, or what GGUF metadata says of the same fields
    tensors: TensorSource

    @property
    def kind(self) -> str:
        return self.format.kind

    @property
    def architecture(self) -> str:
        """What the checkpoint calls itself."""
        field, value = self.format.architecture(self.config)
        if not isinstance(value, str):
            raise WeightError(field, "the checkpoint does not say what architecture it is")
        return value

    @property
    def fingerprint(self) -> str:
        """Content hash of the weights and of the configuration that gives them meaning; reads all of it, once."""
        if self.format is GGUF:
            return self.tensors.digest()  # the metadata lies in the same file
        meaning = json.dumps(dict(self.config), sort_keys=True)
        return hashlib.sha256(f"{meaning}\n{self.tensors.digest()}".encode()).hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, a safetensors file beside its config.json, or a folder that holds one of these."""
    try:
        if path.is_dir():
            return _open(path)
        if not path.exists():
            raise ModelNotFound(f"there is nothing at {str(path)!r}; check the path")
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{str(path)!r} cannot be looked at ({error}); check the path") from error
    _check_file(path)
    return _open(path)


def _open(path: Path) -> Checkpoint:
    for one in WEIGHT_FORMATS:
        if one.claims(path):
            return one.open(path)
    raise _refused(path)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise WeightError("file", f"{path.name} is not a regular file")
    if path.suffix in PICKLES:
        raise WeightError("file", f"{path.name} may hold a pickle, which is never read; convert it to safetensors")


def _refused(folder: Path) -> KviltError:
    """Why no format claims a folder."""
    found = sorted(folder.glob("*.gguf"))
    if found:
        return WeightError("folder", f"{folder.name!r} holds {len(found)} GGUF files; pass the path of one of them")
    if any(file.suffix in PICKLES for file in folder.iterdir()):
        return WeightError("folder", f"{folder.name!r} may hold pickles, which are never read; convert to safetensors")
    return ModelNotFound(f"{str(folder)!r} holds neither a GGUF file nor {CONFIG} with safetensors; check the path")


# GGUF: one file, or several parts, with the configuration and the tokenizer inside.


def _is_gguf(path: Path) -> bool:
    """A folder with one model in it, or any file that is nothing else: the reader then says what is wrong with it."""
    if not path.is_dir():
        return path.suffix != ".safetensors"
    found = sorted(path.glob("*.gguf"))
    return len(found) == 1 or _one_split(found)


def _one_split(files: list[Path]) -> bool:
    """Whether these are the parts of one model; those that are missing are named when it is opened."""
    named = [part_name(file.name) for file in files]
    return None not in named and len({(name.stem, name.count) for name in named if name}) == 1


def _open_gguf(path: Path) -> Checkpoint:
    first = sorted(path.glob("*.gguf"))[0] if path.is_dir() else path
    file = GGUFFile.open(first)
    return Checkpoint(first, GGUF, file.metadata, gguf_generation(file.metadata), file)


def gguf_generation(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """What metadata says of sampling, under the names of generation_config.json."""
    return MappingProxyType({name: metadata[key] for key, name in _GGUF_SAMPLING.items() if key in metadata})


def _gguf_label(config: Mapping[str, Any]) -> str:
    parts = config.get("split.count", 1)
    return f"GGUF in {parts} parts" if parts > 1 else "GGUF"


def _gguf_architecture(config: Mapping[str, Any]) -> tuple[str, object]:
    return "general.architecture", config.get("general.architecture")


# Hugging Face: safetensors beside config.json and the tokenizer's files.


def _is_hf(path: Path) -> bool:
    if not path.is_dir():
        return path.suffix == ".safetensors"
    return (path / CONFIG).is_file() and any(path.glob("*.safetensors*"))


def _open_hf(weights: Path) -> Checkpoint:
    folder = weights if weights.is_dir() else weights.parent
    if not (folder / CONFIG).is_file():
        raise WeightError(CONFIG, f"must lie beside {weights.name}; it says what the tensors mean")
    config = read_object(folder / CONFIG)
    generation = read_object(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    scheme = scheme_of(config)
    files = SafetensorsFiles.open_folder(weights) if weights.is_dir() else SafetensorsFiles.open(weights)
    tensors: TensorSource = files if scheme is None else PackedIntTensors(files, scheme)
    return Checkpoint(weights, HF, MappingProxyType(config), MappingProxyType(generation), tensors)


def _hf_architecture(config: Mapping[str, Any]) -> tuple[str, object]:
    named = config.get("architectures")
    return "architectures", named[0] if isinstance(named, list) and named else None


HF = WeightFormat("hf", _is_hf, _open_hf, lambda _: "safetensors", _hf_architecture, tokenizer_inside=False)
GGUF = WeightFormat("gguf", _is_gguf, _open_gguf, _gguf_label, _gguf_architecture, tokenizer_inside=True)
# All formats; the first that claims a path opens it.
WEIGHT_FORMATS = (HF, GGUF)
