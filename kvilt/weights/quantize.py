"""The tensors of a GGUF model with its matrices in another format: what becomes what, and the file that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ParamError
from ..quant.encode import quantize
from ..quant.formats import FORMATS, Format
from ..quant.tensor import QuantTensor, Weight
from ..quant.unpack import to_float
from .gguf_writer import PlannedTensor, stored_value, write_gguf
from .tensor_storage import TensorStorage


@dataclass(frozen=True, slots=True)
class QuantType:
    """What `--type` names: the format of matrices, that of the output, and its number in GGUF's metadata."""

    name: str
    output: str  # of the head, and of the embedding where it is the head: errors there reach every token
    file_type: int


TYPES: Mapping[str, QuantType] = MappingProxyType(
    {
        one.name: one
        for one in (
            QuantType("Q8_0", "Q8_0", 7),
            QuantType("Q6_K", "Q6_K", 18),
            QuantType("Q5_K", "Q6_K", 16),
            QuantType("Q4_K", "Q6_K", 14),
            QuantType("Q4_0", "Q6_K", 2),
        )
    }
)
# Where rows do not fill blocks of 256, a format with blocks of 32 that loses no more; where they fill neither, floats.
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# Small matrices that decide much stay floats: routers, convolutions, what belongs to single layers or positions.
KEPT = (
    "*_norm.weight", "*ffn_gate_inp*", "*ssm_*", "*shortconv.conv*", "*attn_rel_b*", "position_embd*", "*altup*",
    "*laurel*", "*per_layer_model_proj*", "*.inp_gate.weight", "*attn_k_b*", "*attn_v_b*",
)  # fmt: skip
_QUANTIZATION_VERSION = 2


class GGUFTensors(Protocol):
    """A GGUF file, or what can be seen as one."""

    def raw_metadata(self) -> dict[str, bytes]: ...

    def names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def storage(self, name: str) -> TensorStorage: ...

    def tensor(self, name: str) -> Weight: ...

    def forget(self, name: str) -> None: ...


OnTensor = Callable[[int, int, str], None]  # bytes that are read, of all, and the next tensor


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was written."""

    bytes_before: int
    bytes_after: int
    formats: Mapping[str, int]  # tensors in each format
    packed_before: tuple[str, ...]  # formats of the source that had lost precision already
    without_importance: tuple[str, ...]  # matrices that the importance matrix says nothing about


def quantize_tensors(
    source: GGUFTensors,
    path: Path,
    type_name: str,
    importances: Mapping[str, Tensor] | None = None,
    on_tensor: OnTensor | None = None,
) -> Quantized:
    """Write `source` to `path`, matrices as `type_name`; one tensor is in memory at a time.

    `importances` are those of `kvilt.executor.importance`.
    """
    if type_name not in TYPES:
        raise ParamError("type", f"must be one of {', '.join(TYPES)}, not {type_name!r}")
    file, kind = source, TYPES[type_name]
    plan = list(planned(file, kind))
    total, done = sum(file.storage(name).nbytes for name in file.names()), 0
    missing: list[str] = []

    def data_of(tensor: PlannedTensor) -> Tensor:
        nonlocal done
        if on_tensor is not None:
            on_tensor(done, total, tensor.name)
        weight = file.tensor(tensor.name)
        own = (importances or {}).get(tensor.name)
        changed = tensor.format.packed and file.storage(tensor.name).format != tensor.format.name
        if importances is not None and own is None and changed:
            missing.append(tensor.name)
        data = _encoded(weight, tensor.format, own) if changed else _as_stored(weight, tensor.format)
        file.forget(tensor.name)
        done += file.storage(tensor.name).nbytes
        return data

    metadata = file.raw_metadata() | {
        "general.file_type": stored_value(kind.file_type),
        "general.quantization_version": stored_value(_QUANTIZATION_VERSION),
    }
    write_gguf(path, metadata, plan, data_of)
    if on_tensor is not None:
        on_tensor(total, total, "")
    counts: dict[str, int] = {}
    for one in plan:
        counts[one.format.name] = counts.get(one.format.name, 0) + 1
    before = {file.storage(name).format for name in file.names()}
    packed = tuple(sorted(name for name in before if FORMATS[name].packed))
    return Quantized(total, sum(one.nbytes for one in plan), counts, packed, tuple(missing))


def planned(file: GGUFTensors, kind: QuantType) -> Iterator[PlannedTensor]:
    """Every tensor of the source with the format it gets."""
    names = file.names()
    output = "output.weight" if "output.weight" in names else "token_embd.weight"
    for name in names:
        shape, now = file.shape(name), file.storage(name).format
        matrix = len(shape) > 1 and name.endswith(".weight") and not any(fnmatchcase(name, one) for one in KEPT)
        wanted = _fitting(kind.output if name == output else kind.name, shape[-1]) if matrix else now
        yield PlannedTensor(name, shape, FORMATS[wanted])


def _fitting(name: str, columns: int) -> str:
    """The format, or the nearest one whose blocks rows of so many columns fill."""
    for one in (name, _NARROW.get(name, name)):
        if columns % FORMATS[one].block_elements == 0:
            return one
    return "F16"


def _as_stored(weight: Weight, format_: Format) -> Tensor:
    """The bytes of a tensor that keeps its format, or becomes floats of 16 bits."""
    if isinstance(weight, QuantTensor):
        return weight.blocks if weight.format.name == format_.name else to_float(weight, torch.float16)
    return (weight.half() if format_.name == "F16" else weight).contiguous().view(torch.uint8)


def _encoded(weight: Weight, format_: Format, importance: Tensor | None) -> Tensor:
    """All matrices of a tensor, one after the other."""
    rows = weight.shape[-2]
    matrices = [weight] if len(weight.shape) == 2 else list(_matrices(weight))
    parts = []
    for index, matrix in enumerate(matrices):
        own = None if importance is None else importance[index] if len(importance) > 1 else importance[0]
        known = own if own is not None and bool(own.any()) else None
        parts.append(quantize(to_float(matrix).view(rows, -1), format_.name, known))
    return torch.cat(parts)


def _matrices(weight: Weight) -> Iterator[Weight]:
    rows = weight.shape[-2]
    for index in range(int(torch.Size(weight.shape[:-2]).numel())):
        if isinstance(weight, QuantTensor):
            yield weight.rows(index * rows, (index + 1) * rows)
        else:
            yield weight.reshape(-1, rows, weight.shape[-1])[index]
