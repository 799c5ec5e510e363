"""Typed, bounded reading of a checkpoint's configuration: a bad field is a WeightError that names it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Unsupported, WeightError
from ...ops.contract import Activation
from ...quant.unpack import to_float
from ...weights.source import Checkpoint
from ..spec import FactorScaling, LinearScaling, Llama3Scaling, LongScaling, NoScaling, Scaling, YarnScaling

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "relu": "relu",
}


# What transformers takes where a config has no `sliding_window` at all; an explicit null means none.
DEFAULT_WINDOW = 4096
_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Fields:
    """Configuration values under a prefix."""

    values: Mapping[str, Any]
    prefix: str = ""

    def has(self, name: str) -> bool:
        return self.values.get(self.prefix + name) is not None

    def says_none(self, name: str) -> bool:
        """Whether the field is there and null, which is not the same as absent."""
        return self.values.get(self.prefix + name, ...) is None

    def integer(self, name: str, default: int | None = None, high: int = 1 << 24) -> int:
        """A positive integer up to `high`."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= high:
            raise WeightError(self.prefix + name, f"must be a whole number from 1 to {high}, not {value!r}")
        return value

    def count(self, name: str, default: int | None = None, high: int = 1 << 24) -> int:
        """A whole number from 0 to `high`."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
            raise WeightError(self.prefix + name, f"must be a whole number from 0 to {high}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise WeightError(self.prefix + name, "must be a positive number")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        value = self._value(name, None)
        if not isinstance(value, list):
            raise WeightError(self.prefix + name, "must be a list of numbers")
        return _positive(self.prefix + name, value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(self.prefix + name)
        if value is not None and not isinstance(value, bool):
            raise WeightError(self.prefix + name, f"must be true or false, not {value!r}")
        return default if value is None else value

    def activation(self, name: str, default: str) -> Activation:
        value = self._value(name, default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
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
class RopeFields:
    """A rope as a configuration gives it, before heads are known."""

    theta: float
    scaling: Scaling
    partial: float = 1.0


def layer_kinds(config: Fields, layers: int) -> tuple[str, ...] | None:
    """What each layer attends to, where a config names it layer by layer."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise WeightError("layer_types", f"must name the kind of each of the {layers} layers")
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise WeightError("layer_types", f"{unknown[0]!r} is not a kind of layer; there are {', '.join(_KINDS)}")
    return tuple(kinds)


def hf_rope(config: Mapping[str, Any], kind: str = "", theta: float = 10000.0, partial: float = 1.0) -> RopeFields:
    """The rope of config.json: `rope_parameters` (perhaps one per layer kind), or the older separate fields."""
    values = config.get("rope_parameters") or config.get("rope_scaling")
    values = dict(values) if isinstance(values, Mapping) else {}
    if kind and isinstance(nested := values.get(kind), Mapping):
        values = dict(nested)
    else:  # what the table leaves out stands beside it
        for name in ("rope_theta", "partial_rotary_factor"):
            values.setdefault(name, config.get(name))
    fields = Fields(values)
    return RopeFields(
        fields.number("rope_theta", theta), _hf_scaling(config, fields), fields.number("partial_rotary_factor", partial)
    )


def _hf_scaling(config: Mapping[str, Any], fields: Fields) -> Scaling:
    kind = fields.values.get("rope_type") or fields.values.get("type") or "default"
    match kind:
        case "default":
            return NoScaling()
        case "linear":
            return LinearScaling(fields.number("factor"))
        case "llama3":
            return _hf_llama3(fields)
        case "yarn":
            return _hf_yarn(config, fields)
        case "longrope" | "su":
            return _hf_long(config, fields)
        case _:
            raise Unsupported(
                f"rope scaling {kind!r} is not supported; kvilt knows default, linear, llama3, yarn and longrope"
            )


def _hf_llama3(fields: Fields) -> Llama3Scaling:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low >= high:
        raise WeightError("high_freq_factor", f"must be above low_freq_factor, which is {low:g}")
    return Llama3Scaling(fields.number("factor"), low, high, fields.integer("original_max_position_embeddings"))


def _stretch(config: Mapping[str, Any], fields: Fields) -> tuple[float, int]:
    """The factor of a scaling and the context it starts from, each from where configs are known to keep them."""
    outer = Fields(config)
    context = outer.integer("max_position_embeddings")
    original = fields.integer(
        "original_max_position_embeddings", outer.integer("original_max_position_embeddings", context)
    )
    return fields.number("factor", context / original), original


def _hf_yarn(config: Mapping[str, Any], fields: Fields) -> YarnScaling:
    factor, original = _stretch(config, fields)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    magnitude = mscale(1.0)
    if fields.has("mscale") and fields.has("mscale_all_dim"):
        magnitude = mscale(fields.number("mscale")) / mscale(fields.number("mscale_all_dim"))
    return YarnScaling(
        factor,
        original,
        fields.number("attention_factor", magnitude),
        fields.number("beta_fast", 32.0),
        fields.number("beta_slow", 1.0),
        fields.flag("truncate", True),
    )


def _hf_long(config: Mapping[str, Any], fields: Fields) -> LongScaling:
    factor, original = _stretch(config, fields)
    if original < 2:
        raise WeightError("original_max_position_embeddings", "must be at least 2 for longrope")
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongScaling(
        fields.numbers("short_factor"),
        fields.numbers("long_factor"),
        original,
        fields.number("attention_factor", magnitude),
    )


def gguf_scaling(checkpoint: Checkpoint, fields: Fields, pairs: int) -> Scaling:
    """The rope scaling of a GGUF: tensors of divisors (Llama 3, Phi-3), or metadata."""
    names = checkpoint.tensors.names()
    if "rope_freqs.weight" in names:
        return FactorScaling(_divisors(checkpoint, "rope_freqs.weight", pairs))
    if "rope_factors_long.weight" in names:
        return LongScaling(
            _divisors(checkpoint, "rope_factors_short.weight", pairs),
            _divisors(checkpoint, "rope_factors_long.weight", pairs),
            fields.integer("rope.scaling.original_context_length"),
            fields.number("rope.scaling.attn_factor", 1.0),
        )
    kind = fields.values.get(fields.prefix + "rope.scaling.type", "none")
    match kind:
        case "none":
            return NoScaling()
        case "linear":
            return LinearScaling(fields.number("rope.scaling.factor"))
        case "yarn":
            return _gguf_yarn(fields)
        case _:
            raise Unsupported(
                f"rope scaling {kind!r} is not supported; kvilt knows none, linear and yarn in GGUF files"
            )


def _gguf_yarn(fields: Fields) -> YarnScaling:
    factor = fields.number("rope.scaling.factor")
    magnitude = (1 + 0.1 * math.log(factor)) * fields.number("rope.scaling.attn_factor", 1.0)
    if fields.has("rope.scaling.yarn_log_multiplier"):  # mscale_all_dim, beside an mscale of 1
        magnitude /= 1 + 0.1 * fields.number("rope.scaling.yarn_log_multiplier") * math.log(factor)
    return YarnScaling(
        factor,
        fields.integer("rope.scaling.original_context_length"),
        magnitude,
        fields.number("rope.scaling.yarn_beta_fast", 32.0),
        fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _divisors(checkpoint: Checkpoint, name: str, pairs: int) -> tuple[float, ...]:
    if name not in checkpoint.tensors.names():
        raise WeightError(name, "is missing")
    tensor = checkpoint.tensors.tensor(name)
    if tuple(tensor.shape) != (pairs,):
        raise WeightError(name, f"has shape {tuple(tensor.shape)}, expected ({pairs},)")
    return _positive(name, to_float(tensor).tolist())


def _positive(name: str, values: Sequence[Any]) -> tuple[float, ...]:
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf for v in values):
        raise WeightError(name, "holds something else than positive numbers")
    return tuple(float(value) for value in values)


def whole_heads(heads: int, kv_heads: int) -> None:
    """Query heads must divide evenly over KV heads."""
    if heads % kv_heads:
        raise WeightError("head_count_kv", f"{heads} query heads cannot share {kv_heads} KV heads evenly")


def even_dims(dims: int, head_dim: int) -> int:
    """Rotated dimensions: an even number that a head has."""
    if dims % 2 or not 0 < dims <= head_dim:
        raise WeightError("rope.dimension_count", f"must be even and at most {head_dim}, not {dims}")
    return dims
