"""How a model is sampled where the caller asks for its defaults: by its author's settings, else by measured ones.

Reads what a checkpoint says, which is not trusted; refuses to know commands and requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ParamError
from ..sampling.params import SamplingParams
from ..weights.source import Checkpoint

_log = logging.getLogger(__name__)

# For checkpoints without settings: see "Defaults" in docs/sampling.md for the measurement.
MEASURED = SamplingParams(temperature=0.2, top_p=0.9, repetition_penalty=1.1)

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Params for callers that name none, and where they come from."""

    params: SamplingParams = MEASURED
    source: str = "kvilt's defaults"

    @property
    def fields(self) -> dict[str, float]:
        """The fields that are not off."""
        off = SamplingParams(temperature=1.0)
        return {name: value for name in _FIELDS if (value := getattr(self.params, name)) != getattr(off, name)}


def sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """The checkpoint's own settings, if it has valid ones; an invalid one is left out with a warning."""
    said = checkpoint.generation
    fields = {field: value for field in _FIELDS if (value := _value(said, field)) is not None}
    if said.get("do_sample") is False:
        fields["temperature"] = 0.0
    if not fields:
        return SamplingDefaults()
    # What an author does not name is off, and the temperature is then 1.
    return SamplingDefaults(SamplingParams.of(None, **{"temperature": 1.0, **fields}), "the model's own settings")


def _value(said: Mapping[str, Any], field: str) -> float | int | None:
    """One setting of the checkpoint; None if it is absent or invalid."""
    value: float | int | None = said.get(field)
    if value is None:
        return None
    try:
        value = _tidy(field, value)
        SamplingParams.of(None, **{field: value})
    except ParamError as error:
        _log.warning("the checkpoint's setting %s is left out: %s", field, error)
        return None
    return value


def _tidy(field: str, value: Any) -> Any:
    """The value as SamplingParams spells it: files write 'off' in several ways, and GGUF rounds to 32 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if field in ("temperature", "top_k") and value < 0:
        return 0
    if field == "top_k" and isinstance(value, float) and value.is_integer():
        return int(value)
    return float(f"{value:.6g}") if isinstance(value, float) else value
