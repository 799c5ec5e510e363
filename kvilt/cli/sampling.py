"""Sampling options of `kvilt run` and `kvilt chat`: the user's options over the model's own defaults."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from ..llm import LLM
from ..sampling.params import SamplingParams

_SHOWN = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_SEED_BITS = 32  # short enough to type


def repetition_hint(params: SamplingParams) -> str:
    """The message for an answer that was ended because it repeated itself, with what helps."""
    other = "sample with a --temperature above 0" if params.greedy else "ask again for other draws"
    return (
        f"the answer repeated itself and was ended; {other}, raise --repetition-penalty, "
        "or let it go on with --no-repetition-detection"
    )


def given_params(options: Mapping[str, Any]) -> SamplingParams:
    """The given options as params, checked before a model is loaded."""
    return SamplingParams.of(None, **_given(options))


def sampling_params(options: Mapping[str, Any], llm: LLM) -> SamplingParams:
    """The given options over the model's defaults. A temperature of 0 is greedy and ignores the defaults.

    With a grammar the default repetition penalty is ignored: brackets, quotes and field names must repeat.
    """
    given = _given(options)
    base = None if given.get("temperature") == 0 else llm.sampling_defaults.params
    params = SamplingParams.of(base, **given)
    if params.grammar is None or "repetition_penalty" in given:
        return params
    return SamplingParams.of(params, repetition_penalty=1.0)


def with_short_seed(params: SamplingParams) -> SamplingParams:
    """The params with a seed that the user can type to repeat the answer; greedy params need none."""
    if params.greedy or params.seed is not None:
        return params
    return dataclasses.replace(params, seed=secrets.randbits(_SEED_BITS))


def describe_params(params: SamplingParams, llm: LLM) -> str:
    """The sampling params in one line."""
    own = [f"{name} {value:g}" for name in _SHOWN if (value := getattr(params, name)) != getattr(_OFF, name)]
    if params.greedy:
        own = ["greedy", *own]
    seed = "" if params.seed is None else f" · seed {params.seed}"
    defaults = llm.sampling_defaults
    source = f" ({defaults.source})" if all(getattr(params, n) == getattr(defaults.params, n) for n in _SHOWN) else ""
    return f"{', '.join(own) or 'every token by its probability'}{source}{seed}"


_OFF = SamplingParams()


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the user gave."""
    return {name: value for name, value in options.items() if value is not None}
