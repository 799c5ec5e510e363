"""Safetensors whose matrices are packed whole numbers: GPTQ, AWQ, and the packed format of compressed-tensors.

A module's tensors (`qweight`, `qzeros`, `scales`, `g_idx`) are shown as the one `weight` that families know. All
shapes, scales and indices are checked before they are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import Unsupported, WeightError
from ..quant.int_groups import blocks_of, dense, format_for, unpack_words
from ..quant.tensor import Weight
from .safetensors import SafetensorsFiles, check_scales
from .tensor_storage import TensorStorage

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the eight outputs of a word stand


@dataclass(frozen=True, slots=True)
class IntGroups:
    """A number is scale * (code - zero) of its group."""

    scales: Tensor  # [outputs, groups]
    zeros: Tensor  # int32 [outputs, groups]
    group_of: Tensor | None = None  # [inputs], where the inputs of a group do not stand together


@dataclass(frozen=True, slots=True)
class Scheme(ABC):
    """How one method packs: the suffixes of a module's tensors, and what they mean."""

    bits: int
    group: int  # inputs of a group; -1: all of them

    @property
    @abstractmethod
    def suffixes(self) -> tuple[str, ...]:
        """Of the tensors of a module; the first is what marks one."""

    @abstractmethod
    def shape(self, files: SafetensorsFiles, module: str) -> tuple[int, int]:
        """Outputs and inputs."""

    @abstractmethod
    def codes(self, files: SafetensorsFiles, module: str) -> Tensor:
        """The numbers of the matrix, uint8 [outputs, inputs]."""

    @abstractmethod
    def groups_of(self, files: SafetensorsFiles, module: str) -> IntGroups:
        """What the numbers mean."""

    def groups(self, inputs: int, module: str) -> int:
        size = inputs if self.group == -1 else self.group
        if size < 1 or inputs % size:
            raise WeightError(module, f"groups of {size} do not divide its {inputs} inputs")
        return inputs // size


@dataclass(frozen=True, slots=True)
class GPTQ(Scheme):
    """Words of several inputs [inputs / 8, outputs]; zeros are stored one too small, except in format v2."""

    zero_shift: int = 1

    @property
    def suffixes(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales", "g_idx"

    def shape(self, files: SafetensorsFiles, module: str) -> tuple[int, int]:
        rows, outputs = _two(files, f"{module}.qweight")
        return outputs, rows * (32 // self.bits)

    def codes(self, files: SafetensorsFiles, module: str) -> Tensor:
        return unpack_words(files.integers(f"{module}.qweight"), self.bits, 0).T.contiguous()

    def groups_of(self, files: SafetensorsFiles, module: str) -> IntGroups:
        outputs, inputs = self.shape(files, module)
        groups = self.groups(inputs, module)
        words = _words(files, f"{module}.qzeros", (groups, outputs * self.bits // 32))
        zeros = unpack_words(words, self.bits, 1).T.int() + self.zero_shift
        scales = _scales(files, f"{module}.scales", (groups, outputs)).T
        return IntGroups(scales, zeros, self._group_of(files, module, inputs, groups))

    def _group_of(self, files: SafetensorsFiles, module: str, inputs: int, groups: int) -> Tensor | None:
        """The group of each input, where they do not stand in order (act-order)."""
        name = f"{module}.g_idx"
        if name not in files:
            return None
        if files.shape(name) != (inputs,):
            raise WeightError(name, f"is {list(files.shape(name))} instead of {[inputs]}")
        found = files.integers(name).long()
        if bool((found < 0).any()) or bool((found >= groups).any()):
            raise WeightError(name, f"names groups outside of the {groups} that there are")
        return None if torch.equal(found, torch.arange(inputs) // (inputs // groups)) else found


@dataclass(frozen=True, slots=True)
class AWQ(Scheme):
    """Words of several outputs [inputs, outputs / 8], in an order of their own."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales"

    def shape(self, files: SafetensorsFiles, module: str) -> tuple[int, int]:
        inputs, words = _two(files, f"{module}.qweight")
        return words * (32 // self.bits), inputs

    def codes(self, files: SafetensorsFiles, module: str) -> Tensor:
        return _ordered(files.integers(f"{module}.qweight")).T.contiguous()

    def groups_of(self, files: SafetensorsFiles, module: str) -> IntGroups:
        outputs, inputs = self.shape(files, module)
        groups = self.groups(inputs, module)
        zeros = _ordered(_words(files, f"{module}.qzeros", (groups, outputs * self.bits // 32))).T.int()
        return IntGroups(_scales(files, f"{module}.scales", (groups, outputs)).T, zeros)


def _ordered(words: Tensor) -> Tensor:
    """The outputs of AWQ's words in their order."""
    codes = unpack_words(words, 4, 1)
    return codes.view(len(codes), -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)


@dataclass(frozen=True, slots=True)
class PackedCompressed(Scheme):
    """compressed-tensors, `pack-quantized`: words of several inputs [outputs, inputs / 8] of codes from -8 on."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"

    def shape(self, files: SafetensorsFiles, module: str) -> tuple[int, int]:
        name = f"{module}.weight_shape"
        if files.shape(name) != (2,):
            raise WeightError(name, "must hold two numbers")
        outputs, inputs = (int(n) for n in files.integers(name).tolist())
        words = _two(files, f"{module}.weight_packed")
        if words != (outputs, -(-inputs // (32 // self.bits))):
            raise WeightError(name, f"says {[outputs, inputs]}, and the packed words are {list(words)}")
        return outputs, inputs

    def codes(self, files: SafetensorsFiles, module: str) -> Tensor:
        _, inputs = self.shape(files, module)
        return unpack_words(files.integers(f"{module}.weight_packed"), self.bits, 1)[:, :inputs].contiguous()

    def groups_of(self, files: SafetensorsFiles, module: str) -> IntGroups:
        outputs, inputs = self.shape(files, module)
        groups, per_word = self.groups(inputs, module), 32 // self.bits
        zeros = torch.full((outputs, groups), 1 << (self.bits - 1), dtype=torch.int32)
        if f"{module}.weight_zero_point" in files:
            words = _words(files, f"{module}.weight_zero_point", (-(-outputs // per_word), groups))
            zeros = unpack_words(words, self.bits, 0)[:outputs].int()
        if f"{module}.weight_g_idx" in files:
            raise Unsupported(f"{module}: groups in another order (weight_g_idx) are not read yet")
        return IntGroups(_scales(files, f"{module}.weight_scale", (outputs, groups)), zeros)


def _two(files: SafetensorsFiles, name: str) -> tuple[int, int]:
    shape = files.shape(name)
    if len(shape) != 2:
        raise WeightError(name, f"must have two dimensions, not {len(shape)}")
    return shape[0], shape[1]


def _words(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> Tensor:
    if files.shape(name) != shape:
        raise WeightError(name, f"is {list(files.shape(name))} instead of {list(shape)}")
    return files.integers(name)


def _scales(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> Tensor:
    if files.shape(name) != shape:
        raise WeightError(name, f"is {list(files.shape(name))} instead of {list(shape)}")
    return check_scales(name, files.floats(name))


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """How the matrices of a checkpoint are packed, by its config.json; None: they are not, or as the files say."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    match found.get("quant_method"):
        case "gptq":
            bits, group = _sizes(found, "bits", "group_size", (4, 8))
            return GPTQ(bits, group, 0 if found.get("checkpoint_format") == "gptq_v2" else 1)
        case "awq":
            if str(found.get("version", "gemm")).lower() != "gemm":
                raise Unsupported(f"AWQ in the layout {found.get('version')!r} is not read; use one packed for GEMM")
            return AWQ(*_sizes(found, "bits", "group_size", (4,)))
        case "compressed-tensors" if found.get("format") == "pack-quantized":
            return PackedCompressed(*_sizes(_weights_of(found), "num_bits", "group_size", (4, 8)))
        case "compressed-tensors" | "fp8" | "mxfp4" | None:
            return None
        case "bitsandbytes":
            raise Unsupported("bitsandbytes weights are not read; use the original checkpoint, or a GGUF of the model")
        case other:
            raise Unsupported(f"weights quantized by {other!r} are not read; GPTQ, AWQ, FP8, MXFP4 and GGUF are")


def _weights_of(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """What compressed-tensors says about weights, which must be one thing."""
    groups = found.get("config_groups")
    each = [one.get("weights") for one in groups.values()] if isinstance(groups, Mapping) else []
    if not each or not all(isinstance(one, Mapping) and one == each[0] for one in each):
        raise Unsupported("compressed-tensors with weights packed in several ways is not read")
    first: Mapping[str, Any] = each[0]
    return first if first.get("group_size") is not None else {**first, "group_size": -1}


def _sizes(found: Mapping[str, Any], bits: str, group: str, known: tuple[int, ...]) -> tuple[int, int]:
    values = found.get(bits), found.get(group)
    if type(values[0]) is not int or type(values[1]) is not int or (values[1] < 1 and values[1] != -1):
        raise WeightError("quantization_config", f"{bits} and {group} must be whole numbers, not {values}")
    if values[0] not in known:
        raise Unsupported(f"weights of {values[0]} bits packed this way are not read; {known} are")
    return values[0], values[1]


class PackedIntTensors:
    """A checkpoint's tensors, with one `weight` for each packed module."""

    def __init__(self, files: SafetensorsFiles, scheme: Scheme) -> None:
        self._files, self._scheme = files, scheme
        first = f".{scheme.suffixes[0]}"
        modules = [name.removesuffix(first) for name in files.names() if name.endswith(first)]
        self._modules = {f"{module}.weight": module for module in modules}
        self._parts = {f"{module}.{suffix}" for module in modules for suffix in scheme.suffixes}
        self._parts |= {f"{module}.bias" for module in modules if self._is_empty(f"{module}.bias")}

    def _is_empty(self, name: str) -> bool:
        """Whether a bias is there only because GPTQ's writers give every module one."""
        return name in self._files and not bool(self._files.floats(name).any())

    def names(self) -> tuple[str, ...]:
        """Tensor names as families know them."""
        plain = tuple(name for name in self._files.names() if name not in self._parts)
        return (*plain, *self._modules)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch order."""
        module = self._modules.get(name)
        return self._files.shape(name) if module is None else self._scheme.shape(self._files, module)

    def storage(self, name: str) -> TensorStorage:
        """The format it is given out in, and the bytes of its parts in the files."""
        module = self._modules.get(name)
        if module is None:
            return self._files.storage(name)
        held = [one for suffix in self._scheme.suffixes if (one := f"{module}.{suffix}") in self._files]
        groups = self._scheme.groups_of(self._files, module)
        inputs = self.shape(name)[1]
        kind = (
            None if groups.group_of is not None else format_for(inputs, groups.scales, groups.zeros, self._scheme.bits)
        )
        return TensorStorage(kind or "F16", sum(self._files.storage(one).nbytes for one in held))

    def tensor(self, name: str) -> Weight:
        """The tensor; a packed matrix is a copy in blocks."""
        module = self._modules.get(name)
        if module is None:
            return self._files.tensor(name)
        groups, codes = self._scheme.groups_of(self._files, module), self._scheme.codes(self._files, module)
        if groups.group_of is not None:
            return dense(codes, groups.scales, groups.zeros, groups.group_of)
        return blocks_of(codes, groups.scales, groups.zeros, self._scheme.bits)

    def forget(self, name: str) -> None:
        """Give the memory of mapped tensors back."""
        module = self._modules.get(name)
        for one in [name] if module is None else [f"{module}.{suffix}" for suffix in self._scheme.suffixes]:
            if one in self._files:
                self._files.forget(one)

    def digest(self) -> str:
        return self._files.digest()

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
