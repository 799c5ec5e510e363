"""Where default sampling settings come from: the checkpoint's own, sound ones only, else measured ones."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import write_tiny_of_bytes

import kvilt
from kvilt import SamplingParams
from kvilt.cli.sampling import describe_params, given_params, sampling_params, with_short_seed
from kvilt.errors import ParamError
from kvilt.llm.generation import MEASURED, SamplingDefaults, sampling_defaults
from kvilt.weights.source import gguf_generation


def of_hf(**said: Any) -> SamplingDefaults:
    return sampling_defaults(SimpleNamespace(generation=said))  # type: ignore[arg-type]


def of_gguf(**said: Any) -> SamplingDefaults:
    keys = {f"general.sampling.{name}": value for name, value in said.items()}
    return sampling_defaults(SimpleNamespace(generation=gguf_generation(keys)))  # type: ignore[arg-type]


def test_a_checkpoint_that_says_nothing_gets_what_was_measured() -> None:
    for defaults in (of_hf(), of_gguf(), of_hf(eos_token_id=2, do_sample=True, temperature=None)):
        assert defaults == SamplingDefaults()
        assert defaults.params == MEASURED
        assert not defaults.params.greedy


def test_settings_of_a_generation_config() -> None:
    said = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    }
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05)
    defaults = of_hf(**said)
    assert (defaults.params, defaults.source) == (expected, "the model's own settings")
    assert of_hf(top_k=64, top_p=0.95).params == SamplingParams(temperature=1.0, top_k=64, top_p=0.95)


def test_an_author_may_want_greedy() -> None:
    assert of_hf(do_sample=False).params == SamplingParams()
    own = of_hf(do_sample=False, temperature=0.7, repetition_penalty=1.2).params
    assert own.greedy and own.repetition_penalty == 1.2
    assert of_gguf(temp=0.0).params.greedy
    assert of_gguf(temp=-1.0).params.greedy


def test_settings_of_a_gguf_file() -> None:
    import numpy as np

    said = {"temp": float(np.float32(0.7)), "top_p": float(np.float32(0.95)), "top_k": 20}
    params = of_gguf(**said, min_p=0.0, penalty_repeat=float(np.float32(1.1)), penalty_last_n=64).params
    assert params == SamplingParams(temperature=0.7, top_p=0.95, top_k=20, repetition_penalty=1.1)
    assert of_gguf(temp=1, top_k=-1).params.top_k == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e9),
        ("temperature", 10**400),
        ("temperature", [0.7]),
        ("top_p", 0),
        ("top_p", -1),
        ("top_p", 1.5),
        ("top_k", 0.5),
        ("top_k", "20"),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", {}),
    ],
)
def test_a_setting_that_is_not_sound_is_left_out_loudly(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert of_hf(**{name: value}) == SamplingDefaults()
        assert of_hf(**{name: value}, typical_p=0.9).params == SamplingParams(temperature=1.0, typical_p=0.9)
    assert name in caplog.text


# What commands make of them.

OWN = SamplingParams(temperature=0.6, top_p=0.95, repetition_penalty=1.05)
LLM = SimpleNamespace(sampling_defaults=SamplingDefaults(OWN, "the model's own settings"))
LEFT = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "seed"))


def asked(**options: Any) -> SamplingParams:
    return sampling_params({**LEFT, "max_tokens": 9, **options}, LLM)  # type: ignore[arg-type]


def test_options_that_were_not_given_are_the_models() -> None:
    assert asked() == SamplingParams.of(OWN, max_tokens=9)
    assert asked(temperature=1.5) == SamplingParams.of(OWN, max_tokens=9, temperature=1.5)
    assert asked(top_p=1.0).top_p == 1.0


def test_temperature_0_is_exactly_greedy() -> None:
    """A penalty of the author's would change the likeliest token."""
    assert asked(temperature=0.0) == SamplingParams(max_tokens=9)
    assert asked(temperature=0.0, repetition_penalty=1.3) == SamplingParams(max_tokens=9, repetition_penalty=1.3)


def test_a_grammar_takes_no_penalty() -> None:
    """Under one, a model would avoid the quotes and brackets that it has to write."""
    assert asked(regex="[a-z]+").repetition_penalty == 1.0
    assert asked(regex="[a-z]+").temperature == 0.6
    assert asked(regex="[a-z]+", repetition_penalty=1.2).repetition_penalty == 1.2


def test_a_typo_is_found_without_a_model() -> None:
    with pytest.raises(ParamError, match="top_p"):
        given_params({**LEFT, "top_p": 7.0})


def test_a_seed_is_drawn_where_it_matters() -> None:
    assert with_short_seed(SamplingParams()).seed is None
    assert with_short_seed(SamplingParams(temperature=1.0, seed=5)).seed == 5
    drawn = {with_short_seed(OWN).seed for _ in range(4)}
    assert len(drawn) > 1
    assert all(seed is not None and 0 <= seed < 2**32 for seed in drawn)


def test_settings_in_words() -> None:
    llm: Any = LLM
    own = "temperature 0.6, top_p 0.95, repetition_penalty 1.05"
    assert describe_params(OWN, llm) == f"{own} (the model's own settings)"
    assert (
        describe_params(SamplingParams.of(OWN, seed=7, max_tokens=3), llm)
        == f"{own} (the model's own settings) · seed 7"
    )
    assert describe_params(SamplingParams(temperature=1.0), llm) == "temperature 1"
    assert describe_params(SamplingParams(), llm) == "greedy"


def test_a_loaded_model_has_them_and_python_stays_greedy(tmp_path: Path) -> None:
    folder = write_tiny_of_bytes(tmp_path / "own")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 5.0, "top_k": 40}))
    with kvilt.load(folder, kv_memory="4M", threads=1) as llm:
        assert llm.sampling_defaults.params == SamplingParams(temperature=5.0, top_k=40)
        greedy = llm.generate("Once", max_tokens=12).token_ids
        assert greedy == llm.generate("Once", SamplingParams(max_tokens=12)).token_ids
        drawn = llm.generate("Once", llm.sampling_defaults.params, max_tokens=12, seed=1).token_ids
        assert drawn != greedy
