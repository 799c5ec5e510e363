"""LoRA adapters as llama.cpp's converter writes them: one GGUF file with pairs of small tensors.

Reads what decides the mathematics and refuses the rest by name. Knows no model: which linear map a tensor's name means,
and what shape it has, is for others to say.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import ModelNotFound, Unsupported, WeightError
from ..quant.tensor import QuantTensor
from ..quant.unpack import dequantize
from .gguf import GGUFFile
from .peft import MAX_INVOCATION_TOKENS, MAX_RANK, ModuleTensors

_DOWN, _UP = ".weight.lora_a", ".weight.lora_b"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class GGUFScales:
    """What an adapter's metadata says about its mathematics."""

    alpha: float
    ranks: Mapping[str, int]  # by module, as its tensors have them
    invocation: tuple[int, ...]

    def rank_of(self, module: str) -> int:
        return self.ranks[module]

    def scale_of(self, module: str) -> float:
        """The factor of a module's product; 1 without an alpha."""
        return self.alpha / self.ranks[module] if self.alpha else 1.0


class GGUFAdapter:
    """An open adapter. Close it, or use it as a context manager."""

    kind = "gguf"

    def __init__(self, path: Path, file: GGUFFile) -> None:
        self.path = path
        self._file = file
        self.architecture = _checked_kind(file.metadata)
        self.modules = _modules(file)
        self.copies: Mapping[str, str] = {}
        ranks = {module: _rank(tensors.down, file.shape(tensors.down)) for module, tensors in self.modules.items()}
        self.config = GGUFScales(_alpha(file.metadata), ranks, _invocation(file.metadata))

    def tensor(self, name: str) -> Tensor:
        """A tensor of floats; NaN and infinity are refused."""
        stored = self._file.tensor(name)
        tensor = dequantize(stored) if isinstance(stored, QuantTensor) else stored
        if tensor.dtype not in _FLOATS:
            raise WeightError(name, f"is {self._file.storage(name).format}, and an adapter has floats")
        if not bool(tensor.isfinite().all()):
            raise WeightError(name, "holds NaN or infinity; the adapter is damaged or its training diverged")
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(name)

    @property
    def nbytes(self) -> int:
        """Of all its tensors, from the header alone."""
        return sum(self._file.storage(name).nbytes for name in self._file.names())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def is_gguf(path: Path) -> bool:
    """Whether a path means such a file, as opposed to a PEFT folder."""
    return path.suffix == ".gguf" and not path.is_dir()


def open_gguf_lora(path: str | os.PathLike[str], inside: Path | None = None) -> GGUFAdapter:
    """Open an adapter's file. With `inside`, it must really lie there, whatever links say."""
    file = Path(path)
    try:
        if not file.is_file():
            raise ModelNotFound(f"{str(path)!r} is no file; check the path")
        if inside is not None and not file.resolve().is_relative_to(inside.resolve()):
            raise WeightError(file.name, "lies outside the folder that adapters may be loaded from")
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{str(path)!r} cannot be looked at ({error}); check the path") from error
    return _opened(file, GGUFFile.open(file))


def open_gguf_lora_bytes(data: bytes, name: str = "adapter.gguf") -> GGUFAdapter:
    """An adapter whose file is in memory."""
    return _opened(Path(name), GGUFFile.of_bytes(name, data))


def _opened(path: Path, file: GGUFFile) -> GGUFAdapter:
    try:
        return GGUFAdapter(path, file)
    except BaseException:
        file.close()
        raise


def _checked_kind(metadata: Mapping[str, Any]) -> str:
    """The architecture an adapter is for; anything that is no LoRA adapter is refused."""
    if (kind := metadata.get("general.type")) != "adapter":
        raise Unsupported(
            f"general.type is {kind!r}: this file is no adapter; give the one that was made of an adapter"
        )
    if (kind := metadata.get("adapter.type")) != "lora":
        raise Unsupported(f"adapter.type {kind!r} is not supported; only lora is")
    if metadata.get("split.count", 0) not in (0, 1):
        raise Unsupported("split.count: adapters in several files are not supported; join them first")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise WeightError("general.architecture", "the adapter does not say what architecture it is for")
    return architecture


def _alpha(metadata: Mapping[str, Any]) -> float:
    alpha = metadata.get("adapter.lora.alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise WeightError("adapter.lora.alpha", f"must be a finite number, not {alpha!r}")
    return float(alpha)


def _invocation(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The invocation tokens of an activated LoRA, if it is one."""
    name = "adapter.alora.invocation_tokens"
    if (tokens := metadata.get(name)) is None:
        return ()
    try:
        found = [int(token) for token in tokens]
    except (TypeError, ValueError) as error:
        raise WeightError(name, "must be a list of token ids") from error
    if not 0 < len(found) <= MAX_INVOCATION_TOKENS or min(found) < 0:
        raise WeightError(name, f"must be 1 to {MAX_INVOCATION_TOKENS} token ids")
    return tuple(found)


def _modules(file: GGUFFile) -> dict[str, ModuleTensors]:
    """Both halves of every adapted module."""
    halves: dict[str, dict[str, str]] = {}
    for name in file.names():
        for suffix in (_DOWN, _UP):
            if name.endswith(suffix):
                halves.setdefault(name.removesuffix(suffix), {})[suffix] = name
                break
        else:
            raise Unsupported(f"{name}: this tensor of an adapter is not of a kind that kvilt knows")
    if not halves:
        raise WeightError("tensors", "the file holds no LoRA tensor")
    if "token_embd" in halves:
        raise Unsupported("token_embd: adapters of embeddings in GGUF are not supported; use the PEFT folder")
    for module, found in halves.items():
        if len(found) < 2:
            raise WeightError(module, f"has {next(iter(found.values()))!r} and not the other half of its product")
    return {module: ModuleTensors(found[_DOWN], found[_UP], False) for module, found in halves.items()}


def _rank(name: str, shape: tuple[int, ...]) -> int:
    if len(shape) != 2 or not 0 < shape[0] <= MAX_RANK:
        raise WeightError(name, f"is {list(shape)}; a half of a product is [rank, in], with a rank up to {MAX_RANK}")
    return shape[0]
