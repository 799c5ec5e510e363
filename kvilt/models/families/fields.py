"""Typed, bounded reading of a checkpoint's configuration: a bad field is a WeightError that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import Unsupported, WeightError
from ...ops.contract import Activation
from ...weights.source import Checkpoint
from ..spec import FactorScaling, LinearScaling, Llama3Scaling, NoScaling, Scaling

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Fields:
    """Configuration values under a prefix."""

    values: Mapping[str, Any]
    prefix: str = ""

    def has(self, name: str) -> bool:
        return self.values.get(self.prefix + name) is not None

    def integer(self, name: str, default: int | None = None, high: int = 1 << 24) -> int:
        """A positive integer up to `high`."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= high:
            raise WeightError(self.prefix + name, f"must be a whole number from 1 to {high}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise WeightError(self.prefix + name, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(self.prefix + name)
        if value is not None and not isinstance(value, bool):
            raise WeightError(self.prefix + name, f"must be true or false, not {value!r}")
        return default if value is None else value

    def activation(self, name: str, default: str) -> Activation:
        value = self._value(name, default)
        if value not in _ACTIVATIONS:
            raise Unsupported(f"{self.prefix + name} is {value!r}; kvilt knows {', '.join(sorted(_ACTIVATIONS))}")
        return _ACTIVATIONS[value]

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(self.prefix + name)
        if value is None:
            value = default
        if value is None:
            raise WeightError(self.prefix + name, "missing from the model's configuration")
        return value


@dataclass(frozen=True, slots=True)
class Rope:
    """A rope as a configuration gives it, before heads are known."""

    theta: float
    scaling: Scaling
    partial: float = 1.0


def hf_rope(config: Mapping[str, Any], kind: str = "", theta: float = 10000.0) -> Rope:
    """The rope of config.json: `rope_parameters` (perhaps one per layer kind), or the older separate fields."""
    values = config.get("rope_parameters")
    if isinstance(values, Mapping):
        nested = values.get(kind) if kind else None
        values = nested if isinstance(nested, Mapping) else values
    else:
        older = config.get("rope_scaling")
        values = dict(older) if isinstance(older, Mapping) else {}
        values.setdefault("rope_theta", config.get("rope_theta"))
        values.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    fields = Fields(values)
    return Rope(fields.number("rope_theta", theta), _hf_scaling(fields), fields.number("partial_rotary_factor", 1.0))


def _hf_scaling(fields: Fields) -> Scaling:
    kind = fields.values.get("rope_type") or fields.values.get("type") or "default"
    match kind:
        case "default":
            return NoScaling()
        case "linear":
            return LinearScaling(fields.number("factor"))
        case "llama3":
            return Llama3Scaling(
                fields.number("factor"),
                fields.number("low_freq_factor"),
                fields.number("high_freq_factor"),
                fields.integer("original_max_position_embeddings"),
            )
        case _:
            raise Unsupported(f"rope scaling {kind!r} is not supported; kvilt knows default, linear and llama3")


def gguf_scaling(checkpoint: Checkpoint, fields: Fields, pairs: int) -> Scaling:
    """The rope scaling of a GGUF: a tensor of divisors (Llama 3), or metadata."""
    if "rope_freqs.weight" in checkpoint.tensors.names():
        divisors = checkpoint.tensors.tensor("rope_freqs.weight")
        if tuple(divisors.shape) != (pairs,):
            raise WeightError("rope_freqs.weight", f"has shape {tuple(divisors.shape)}, expected ({pairs},)")
        factors = tuple(float(value) for value in divisors)  # type: ignore[union-attr]
        if not all(0 < value < math.inf for value in factors):
            raise WeightError("rope_freqs.weight", "holds divisors that are not positive numbers")
        return FactorScaling(factors)
    kind = fields.values.get(fields.prefix + "rope.scaling.type", "none")
    match kind:
        case "none":
            return NoScaling()
        case "linear":
            return LinearScaling(fields.number("rope.scaling.factor"))
        case _:
            raise Unsupported(f"rope scaling {kind!r} is not supported; kvilt knows none and linear in GGUF files")


def whole_heads(heads: int, kv_heads: int) -> None:
    """Query heads must divide evenly over KV heads."""
    if heads % kv_heads:
        raise WeightError("head_count_kv", f"{heads} query heads cannot share {kv_heads} KV heads evenly")


def even_dims(dims: int, head_dim: int) -> int:
    """Rotated dimensions: an even number that a head has."""
    if dims % 2 or not 0 < dims <= head_dim:
        raise WeightError("rope.dimension_count", f"must be even and at most {head_dim}, not {dims}")
    return dims
