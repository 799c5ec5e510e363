"""Sampling options of `kvilt run` and `kvilt chat`: what the user wrote, over what the model's author would choose."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from ..llm import LLM
from ..sampling.params import SamplingParams

_SHOWN = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_SEED_BITS = 32  # short enough to be typed again


def after_a_loop(params: SamplingParams) -> str:
    """Why an answer ended that repeated itself, and what helps."""
    other = "sample with a --temperature above 0" if params.greedy else "ask again for other draws"
    return (
        f"the answer repeated itself and was ended; {other}, raise --repetition-penalty, "
        "or let it go on with --no-repetition-detection"
    )


def written(options: Mapping[str, Any]) -> SamplingParams:
    """The options that were given, checked: a typo should not cost a load."""
    return SamplingParams.of(None, **_given(options))


def chosen(options: Mapping[str, Any], llm: LLM) -> SamplingParams:
    """These options over the model's defaults; a temperature of 0 is greedy, and takes nothing from them.

    A grammar takes no penalty from them: brackets, quotes and field names come again and again.
    """
    given = _given(options)
    base = None if given.get("temperature") == 0 else llm.sampling_defaults.params
    params = SamplingParams.of(base, **given)
    if params.grammar is None or "repetition_penalty" in given:
        return params
    return SamplingParams.of(params, repetition_penalty=1.0)


def with_short_seed(params: SamplingParams) -> SamplingParams:
    """These params with a seed that a user can repeat the answer with; greedy ones need none."""
    if params.greedy or params.seed is not None:
        return params
    return dataclasses.replace(params, seed=secrets.randbits(_SEED_BITS))


def described(params: SamplingParams, llm: LLM) -> str:
    """How an answer is drawn, in one line."""
    own = [f"{name} {value:g}" for name in _SHOWN if (value := getattr(params, name)) != getattr(_OFF, name)]
    if params.greedy:
        own = ["greedy", *own]
    seed = "" if params.seed is None else f" · seed {params.seed}"
    defaults = llm.sampling_defaults
    source = f" ({defaults.source})" if all(getattr(params, n) == getattr(defaults.params, n) for n in _SHOWN) else ""
    return f"{', '.join(own) or 'every token by its probability'}{source}{seed}"


_OFF = SamplingParams()


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that were left to the model."""
    return {name: value for name, value in options.items() if value is not None}
