"""Drafts through the facade: with real weights the same answers, who may draft, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from drafters import Free
from effort import some

import kvilt
from kvilt.errors import ParamError
from kvilt.llm import LLM
from kvilt.llm.drafts import first_difference
from kvilt.sampling.params import SamplingParams
from kvilt.speculative.cost import DraftCosts
from kvilt.speculative.model import ModelDrafter
from kvilt.speculative.ngram import NgramDrafter

TEXT = "One, two, three, four, five. One, two, three, four, five. One, two,"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 5},
    "penalties": {"temperature": 0.7, "seed": 1, "repetition_penalty": 1.2, "top_p": 0.9},
    "schema": {"temperature": 0.8, "seed": 2, "json_schema": SCHEMA},
    "stop": {"stop": [" five", "4"]},
    "logprobs": {"temperature": 0.8, "seed": 3, "logprobs": 2},
    "several": {"temperature": 0.9, "seed": 4, "n": 3},
}


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> Iterator[LLM]:
    with kvilt.load(smollm2_path, kv_memory="256M", threads=1) as llm:
        yield llm


@pytest.fixture(scope="module", params=some(["ngram", "model"]))
def drafted(request: pytest.FixtureRequest, plain: LLM, smollm2_path: Path) -> Iterator[LLM]:
    """The same executor with a drafter: its own weights again are a draft model, too."""
    if request.param == "ngram":
        yield LLM(plain.executor, plain.tokenizer, tuple(plain.stop_ids), drafter=NgramDrafter(6))
        return
    with kvilt.load(smollm2_path, kv_memory="128M", threads=1) as small:
        drafter = ModelDrafter(small.executor, 4)
        yield LLM(plain.executor, plain.tokenizer, tuple(plain.stop_ids), drafter=drafter)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as may be is drafted, however long a step takes here."""
    monkeypatch.setattr(DraftCosts, "price", Free.price)


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_the_same(plain: LLM, drafted: LLM, name: str) -> None:
    expected = plain.generate(TEXT, max_tokens=24, **ASKED[name])
    found = drafted.generate(TEXT, max_tokens=24, **ASKED[name])
    for one, other in zip((expected, *expected.alternatives), (found, *found.alternatives), strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert one.logprobs == other.logprobs
        assert one.usage.drafted_tokens == 0
        assert other.usage.accepted_tokens == sum(other.usage.accepted_places)
    if name == "greedy":  # others may be too short, or too new, for a match
        assert found.usage.drafted_tokens > 0


def test_a_prediction_is_drafted_from(plain: LLM) -> None:
    """An answer that the prediction holds and the prompt does not: the same tokens, nearly all of them drafted."""
    drafted = LLM(plain.executor, plain.tokenizer, tuple(plain.stop_ids), drafter=NgramDrafter(6))
    prompt = "A short story about a fox:"
    expected = plain.generate(prompt, max_tokens=40, temperature=0.0)
    without = drafted.generate(prompt, max_tokens=40, temperature=0.0)
    found = drafted.generate(prompt, max_tokens=40, temperature=0.0, prediction=expected.text)
    wrong = drafted.generate(prompt, max_tokens=40, temperature=0.0, prediction="Nothing of this is said. " * 3)
    assert found.token_ids == without.token_ids == wrong.token_ids == expected.token_ids
    assert found.usage.accepted_tokens >= 25 > without.usage.accepted_tokens


def test_pieces_say_what_was_drafted(plain: LLM, drafted: LLM) -> None:
    stream = drafted.stream(TEXT, max_tokens=24)
    pieces = list(stream)
    assert "".join(pieces) == plain.generate(TEXT, max_tokens=24).text
    assert any(piece.drafted for piece in pieces)
    assert not all(piece.drafted for piece in pieces)
    assert drafted.generate(TEXT, max_tokens=24, draft_tokens=0).usage.drafted_tokens == 0


def test_kept_kv_goes_on_after_a_stop_inside_a_draft(plain: LLM, drafted: LLM) -> None:
    first = drafted.generate(TEXT, max_tokens=24, stop=[" four"], keep_kv=True)
    assert first.kv is not None
    with first.kv as kv:
        assert kv.tokens() == [*plain.prompt_ids(TEXT), *first.token_ids[:-1]]


def test_a_draft_model_with_another_tokenizer_is_refused(plain: LLM, smollm2_path: Path, gemma3_path: Path) -> None:
    with pytest.raises(ParamError, match="another tokenizer") as caught:
        kvilt.load(smollm2_path, draft=gemma3_path, kv_memory="64M", threads=1)
    assert caught.value.field == "draft"
    assert first_difference(plain.tokenizer, plain.tokenizer) is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"draft_tokens": 4}, "draft_tokens"),
        ({"draft": "ngram", "draft_tokens": 0}, "draft_tokens"),
        ({"draft": "ngram", "draft_tokens": 33}, "draft_tokens"),
        ({"draft": NgramDrafter(), "draft_tokens": 4}, "draft_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(options: dict[str, object], param: str) -> None:
    with pytest.raises(ParamError) as caught:
        kvilt.load("/nowhere/at/all.gguf", **options)
    assert caught.value.field == param


@pytest.mark.parametrize("value", [-1, 33, 1.5, True])
def test_draft_tokens_of_a_request_are_checked(value: object) -> None:
    with pytest.raises(ParamError, match="draft_tokens"):
        SamplingParams.of(draft_tokens=value)


def test_a_name_loads_a_draft_model(smollm2_path: Path) -> None:
    with kvilt.load(smollm2_path, draft=smollm2_path, draft_tokens=3, kv_memory="64M", threads=1) as llm:
        done = llm.generate(TEXT, max_tokens=12)
        assert done.usage.accepted_tokens == done.usage.drafted_tokens > 0
        assert len(done.usage.accepted_places) == 3
