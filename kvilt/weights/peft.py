"""LoRA adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors.

Reads what decides the mathematics, and refuses by name whatever would change it in a way kvilt does not compute. Knows
no model: which linear map a module is, and what shape it has, is for others to say.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from torch import Tensor

from ..errors import ModelNotFound, Unsupported, WeightError
from .files import PICKLES
from .json_file import parse_object, read_object
from .module_pattern import MatchBudget, ModulePattern
from .safetensors import SafetensorsFiles

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 4096
MAX_PATTERNS = 4096
MAX_INVOCATION_TOKENS = 4096

# Fields that say how an adapter was trained or begun, and nothing about what it computes.
_SILENT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
        "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
        "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "alora_invocation_tokens", "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "modules_to_save",
        "peft_type", "r", "rank_pattern", "use_dora", "use_rslora",
    }
)  # fmt: skip
# Ways to begin that leave the base model as it is; the others move a part of its weights into the adapter.
_BEGUN = (True, False, None, "gaussian", "eva", "orthogonal")
T = TypeVar("T")
Half = Literal["down", "up", "magnitude"]
_HALVES: Mapping[str, tuple[Half, bool]] = MappingProxyType(
    {
        "lora_A.weight": ("down", False),
        "lora_B.weight": ("up", False),
        "lora_embedding_A": ("down", True),
        "lora_embedding_B": ("up", True),
        "lora_magnitude_vector": ("magnitude", False),
        "lora_magnitude_vector.weight": ("magnitude", False),
    }
)


@dataclass(frozen=True, slots=True)
class PatternMap(Generic[T]):
    """Values by module-name pattern; the first pattern that matches counts."""

    entries: tuple[tuple[ModulePattern, T], ...] = ()

    def value(self, module: str, otherwise: T) -> T:
        visits = MatchBudget()
        for pattern, value in self.entries:
            if pattern.matches(module, visits):
                return value
        return otherwise


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What an adapter's configuration says about its mathematics."""

    rank: int
    alpha: float
    rslora: bool
    ranks: PatternMap[int]
    alphas: PatternMap[float]
    invocation: tuple[int, ...]  # tokens that switch it on; empty: it is always on
    dora: bool = False  # each output has a magnitude of its own

    def rank_of(self, module: str) -> int:
        return self.ranks.value(module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of a module is multiplied with."""
        rank = self.rank_of(module)
        return self.alphas.value(module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The names of one module's tensors."""

    down: str  # [rank, in]
    up: str  # [out, rank]
    embedding: bool
    magnitude: str | None = None  # [out], of DoRA


class PeftFolder:
    """An open adapter. Close it, or use it as a context manager."""

    kind = "hf"  # whose names its modules have

    def __init__(self, path: Path, config: PeftConfig, tensors: SafetensorsFiles) -> None:
        self.path = path
        self.config = config
        self._tensors = tensors
        self.modules, self.copies = _modules(tensors.names(), config.dora)

    def tensor(self, name: str) -> Tensor:
        """A tensor as a view of the file; NaN and infinity are refused."""
        tensor = self._tensors.floats(name)
        if not bool(tensor.isfinite().all()):
            raise WeightError(name, "holds NaN or infinity; the adapter is damaged or its training diverged")
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    @property
    def nbytes(self) -> int:
        """Of all its tensors, from the header alone."""
        return sum(self._tensors.storage(name).nbytes for name in self._tensors.names())

    def close(self) -> None:
        self._tensors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_peft(path: str | os.PathLike[str], inside: Path | None = None) -> PeftFolder:
    """Open an adapter's folder. With `inside`, all of it must really lie there, whatever links say."""
    folder = Path(path)
    try:
        _check_folder(folder)
        for file in (folder / CONFIG, folder / WEIGHTS):
            _check_place(file, inside)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{str(path)!r} cannot be looked at ({error}); check the path") from error
    config = read_config(read_object(folder / CONFIG))
    return _opened(folder, config, SafetensorsFiles.open(folder / WEIGHTS))


def open_peft_files(files: Mapping[str, bytes], name: str = "adapter") -> PeftFolder:
    """An adapter whose files are in memory, by their names in a folder."""
    for file in (CONFIG, WEIGHTS):
        if file not in files:
            raise WeightError(file, f"is missing; an adapter is {CONFIG} and {WEIGHTS}, and {sorted(files)} were given")
    config = read_config(parse_object(files[CONFIG], CONFIG))
    return _opened(Path(name), config, SafetensorsFiles.of_bytes(WEIGHTS, files[WEIGHTS]))


def _opened(folder: Path, config: PeftConfig, tensors: SafetensorsFiles) -> PeftFolder:
    try:
        return PeftFolder(folder, config, tensors)
    except BaseException:
        tensors.close()
        raise


def _check_folder(folder: Path) -> None:
    if folder.suffix == ".gguf":
        raise Unsupported(f"{folder.name}: this needs the PEFT folder that the GGUF adapter was made from")
    if not folder.is_dir():
        what = "a file" if folder.exists() else "not there"
        raise ModelNotFound(f"{str(folder)!r} is {what}; an adapter is a folder with {CONFIG} and {WEIGHTS}")
    if not (folder / CONFIG).exists():
        raise ModelNotFound(f"{str(folder)!r} holds no {CONFIG}; it is no adapter's folder")
    if (folder / WEIGHTS).exists():
        return
    if any(file.suffix in PICKLES for file in folder.iterdir()):
        raise WeightError(WEIGHTS, "is missing; the other files may be pickles, which are never read: convert them")
    raise WeightError(WEIGHTS, f"is missing from {folder.name}")


def _check_place(file: Path, inside: Path | None) -> None:
    if not file.is_file():
        raise WeightError(file.name, "is not a regular file")
    if inside is not None and not file.resolve().is_relative_to(inside.resolve()):
        raise WeightError(file.name, "lies outside the folder that adapters may be loaded from")


# The configuration.


def read_config(fields: Mapping[str, Any]) -> PeftConfig:
    """What a configuration says; anything in it that kvilt does not compute is refused by name."""
    if fields.get("peft_type") != "LORA":
        raise Unsupported(f"peft_type {fields.get('peft_type')!r} is not supported; only LORA is")
    _refuse(fields)
    return PeftConfig(
        rank=_rank("r", fields.get("r", 8)),
        alpha=_number("lora_alpha", fields.get("lora_alpha", 8)),
        rslora=_flag("use_rslora", fields.get("use_rslora", False)),
        ranks=_patterns(fields, "rank_pattern", _rank),
        alphas=_patterns(fields, "alpha_pattern", _number),
        invocation=_invocation(fields.get("alora_invocation_tokens")),
        dora=_flag("use_dora", fields.get("use_dora") or False),
    )


def _refuse(fields: Mapping[str, Any]) -> None:
    if (bias := fields.get("bias", "none")) != "none":
        raise Unsupported(f"bias {bias!r}: adapters that train biases are not supported; train with bias='none'")
    if fields.get("modules_to_save"):
        raise Unsupported("modules_to_save: whole modules in an adapter are not supported; merge the adapter instead")
    if (begun := fields.get("init_lora_weights", True)) not in _BEGUN:
        raise Unsupported(
            f"init_lora_weights {begun!r} changes the base model's weights; save the adapter as an ordinary one with "
            "path_initial_model_for_weight_conversion"
        )
    for name, value in fields.items():
        if name not in _SILENT and name not in _READ and value not in (None, False, [], {}, ""):
            raise Unsupported(f"{name}: this setting of an adapter is not supported")


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 0 < value <= MAX_RANK:
        raise WeightError(name, f"must be a whole number from 1 to {MAX_RANK}, not {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WeightError(name, f"must be a finite number, not {value!r}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise WeightError(name, f"must be true or false, not {value!r}")
    return value


def _patterns(fields: Mapping[str, Any], name: str, read: Callable[[str, Any], T]) -> PatternMap[T]:
    found = fields.get(name) or {}
    if not isinstance(found, dict):
        raise WeightError(name, "must be an object")
    if len(found) > MAX_PATTERNS:
        raise WeightError(name, f"has {len(found)} patterns; at most {MAX_PATTERNS} are supported")
    return PatternMap(tuple((_pattern(name, key), read(f"{name}.{key[:64]}", value)) for key, value in found.items()))


def _pattern(name: str, key: str) -> ModulePattern:
    try:
        return ModulePattern(key)
    except Unsupported as error:
        raise WeightError(name, str(error)) from error


def _invocation(tokens: Any) -> tuple[int, ...]:
    if tokens is None:
        return ()
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise WeightError("alora_invocation_tokens", "must be a list of token ids")
    if not 0 < len(tokens) <= MAX_INVOCATION_TOKENS:
        raise WeightError("alora_invocation_tokens", f"must have 1 to {MAX_INVOCATION_TOKENS} tokens")
    return tuple(tokens)


# The tensors.


def _modules(names: tuple[str, ...], dora: bool) -> tuple[dict[str, ModuleTensors], dict[str, str]]:
    """The tensors of every adapted module, and the whole weights of base modules that PEFT may save beside them."""
    halves: dict[str, dict[Half, str]] = {}
    embeddings: set[str] = set()
    copies: dict[str, str] = {}
    for name in names:
        module, half, embedding = _module(name)
        if half is None:
            copies[module] = name
            continue
        halves.setdefault(module, {})[half] = name
        if embedding:
            embeddings.add(module)
    if not halves:
        raise WeightError(WEIGHTS, "holds no LoRA tensor")
    for module, found in halves.items():
        if not {"down", "up"} <= found.keys():
            raise WeightError(module, f"has {next(iter(found.values()))!r} and not the other half of its product")
        if dora and module in embeddings:
            raise Unsupported(f"{module}: DoRA of an embedding is not supported; train it without that target")
        if ("magnitude" in found) != dora:
            raise WeightError(module, f"has {'no' if dora else 'a'} lora_magnitude_vector and use_dora is {dora}")
    made = {
        module: ModuleTensors(found["down"], found["up"], module in embeddings, found.get("magnitude"))
        for module, found in halves.items()
    }
    return made, copies


def _module(name: str) -> tuple[str, Half | None, bool]:
    """The module a tensor belongs to, as the model calls it, and which part of its product it is."""
    bare = name.removeprefix("base_model.model.")
    if bare.endswith(".lora_B.bias"):
        raise Unsupported(f"{name}: adapters with biases are not supported")
    if bare.endswith(".base_layer.weight"):
        return bare.removesuffix(".base_layer.weight"), None, False
    for suffix, (half, embedding) in _HALVES.items():
        if bare.endswith(f".{suffix}"):
            return bare.removesuffix(f".{suffix}"), half, embedding
    raise Unsupported(f"{name}: this tensor of an adapter is not of a kind that kvilt knows")
