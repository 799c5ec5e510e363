"""Grammars in the sampler and the engine: the same noise, the same neighbours, raw logprobs, and JSON at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from grammars import BYTES, END, allowed, byte_compiler, peaked
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from small import Ask, Ear, finish, load_small, start
from tiny import VOCAB

import kvilt
from kvilt import LLM
from kvilt.config import EngineConfig
from kvilt.engine.engine import Engine
from kvilt.errors import GrammarFailed, GrammarUnsupported, InputError, NoTokenLeft, ParamError
from kvilt.executor.protocol import Executor
from kvilt.sampling.constraint import Choice, Constraint, JsonSchema, Lark, Regex
from kvilt.sampling.grammar import Compiler, GrammarLimits
from kvilt.sampling.params import SamplingParams
from kvilt.sampling.sampler import SamplingState, sample

WIDTH = len(BYTES) + 6  # a padded output layer
compiler = byte_compiler()


def state(constraint: Constraint | None, text: str = "", **fields: Any) -> SamplingState:
    matcher = None if constraint is None else compiler.compile(constraint).matcher()
    made = SamplingState(SamplingParams(grammar=constraint, **fields), (), end_ids=[END], matcher=matcher)
    for byte in text.encode():
        made.advance(byte)
    return made


def drawn(logits: torch.Tensor, *states: SamplingState, at: int = 5) -> list[int]:
    tokens: list[int] = sample(logits, states, [at] * len(states)).tokens.tolist()
    return tokens


def test_greedy_takes_the_likeliest_token_that_is_allowed() -> None:
    logits = peaked(WIDTH, WIDTH - 1, END, ord("x"), ord("n"), ord("y"))
    assert drawn(logits, state(None)) == [WIDTH - 1]
    assert drawn(logits, state(Choice(["yes", "no"]))) == [ord("n")]
    assert drawn(logits, state(Choice(["yes", "no"]), "no")) == [END]


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**32), text=st.sampled_from(["", "a", "ab", "abc"]), at=st.integers(0, 1000))
def test_a_draw_that_the_grammar_allows_is_the_draw_without_it(seed: int, text: str, at: int) -> None:
    """Law 10: the noise of a token is its own, whatever else may be drawn."""
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed))
    held = state(Regex("[a-zA-Z0-9]{2,5}"), text, temperature=1.0, seed=seed)
    free = state(None, text, temperature=1.0, seed=seed)
    assert held.matcher is not None
    may = allowed(held.matcher, WIDTH)
    biased = logits.clone()
    biased[0, may] += 3.0  # often enough inside
    token = drawn(biased, free, at=at)[0]
    got = drawn(biased, held, at=at)[0]
    assert got in may
    if token in may:
        assert got == token


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "seed": 9, "top_p": 0.9}])
def test_rows_with_and_without_grammars_do_not_see_each_other(fields: dict[str, Any]) -> None:
    logits = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    kept = logits.clone()

    def states() -> list[SamplingState]:
        return [
            state(None, "zz", **fields),
            state(JsonSchema({"type": "integer"}), "1", **fields),
            state(None, "zz", repetition_penalty=1.2, **fields),
            state(Choice(["no", "never"]), "n", **fields),
            state(Regex("[a-z]+"), "q", min_tokens=4, **fields),
        ]

    together = drawn(logits, *states())
    alone = [drawn(logits[[row]], one)[0] for row, one in enumerate(states())]
    assert together == alone
    assert torch.equal(logits, kept), "sampling changes nobody's logits"


def test_filters_act_on_what_the_grammar_leaves() -> None:
    logits = peaked(WIDTH, *range(10, 60), ord("y"), ord("n"))
    for seed in range(10):
        assert drawn(logits, state(Choice(["yes", "no"]), temperature=2.0, top_k=1, seed=seed)) == [ord("y")]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2))
    held = sample(logits, [state(Choice(["yes"]), logprobs=3)], [0])
    entry = held.logprobs[0]
    assert entry is not None
    assert held.tokens.tolist() == [ord("y")]
    assert entry.logprob == pytest.approx(float(logits[0].log_softmax(-1)[ord("y")]))
    assert entry.top_ids == tuple(logits[0].topk(3).indices.tolist())


def test_a_row_without_a_token_left_is_named() -> None:
    logits = torch.zeros(3, WIDTH)
    states = [
        state(Choice(["no"]), bad_words_ids=[[ord("n")]]),
        state(Choice(["no"])),
        state(Choice(["no"]), "no", min_tokens=5),
    ]
    with pytest.raises(NoTokenLeft) as caught:
        sample(logits, states, [0, 0, 0])
    assert caught.value.rows == (0, 2)
    never = torch.zeros(1, WIDTH)
    never[0, ord("n")] = float("-inf")
    with pytest.raises(NoTokenLeft):
        sample(never, [state(Choice(["no"]))], [0])


def test_a_row_whose_grammar_is_over_its_limits_is_named() -> None:
    strict = byte_compiler(limits=GrammarLimits(step_items=60))
    grammar = strict.compile(Lark("start: a\na: a a | /[ab]/ | /[bc]/"))
    bad = SamplingState(SamplingParams(grammar=grammar.constraint), (), matcher=grammar.matcher())
    for _ in range(24):
        bad.advance(ord("b"))
    with pytest.raises(GrammarFailed) as caught:
        sample(torch.zeros(3, WIDTH), [state(None), state(None, temperature=1.0), bad], [0, 0, 0])
    assert caught.value.rows == (2,)


def test_a_state_forks_with_its_matcher() -> None:
    one = state(Choice(["yes", "yea"]), "ye")
    other = one.fork(1)
    one.advance(ord("s"))
    assert drawn(peaked(WIDTH, ord("a")), other) == [ord("a")]
    assert drawn(peaked(WIDTH, ord("a")), one) == [END]


def test_a_state_takes_drafts_back_with_its_matcher_and_its_penalties() -> None:
    """Drafts are committed to ask what would follow them; those that are not accepted leave no trace."""
    fields = {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "no_repeat_ngram_size": 2, "temperature": 1.0}
    one, fresh = (state(Regex("[ab]{2,9}"), "ab", **fields, seed=5) for _ in range(2))
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    for draft in "aa", "b", "":
        for letter in draft:
            one.advance(ord(letter))
        sample(logits, [one], [2 + len(draft)])
        one.rollback(len(draft))
        assert one.history.ids == fresh.history.ids
        assert sample(logits, [one], [2]).tokens.tolist() == sample(logits, [fresh], [2]).tokens.tolist()
    with pytest.raises(InputError):
        one.advance(ord("c"))  # a draft that the grammar refuses changes nothing
    with pytest.raises(InputError):
        one.rollback(3)
    one.rollback(2)
    assert one.history.generated == []


def test_a_grammar_needs_its_matcher_and_a_matcher_its_grammar() -> None:
    with pytest.raises(ParamError, match="grammar"):
        SamplingState(SamplingParams(grammar=Regex("a")))
    with pytest.raises(ParamError, match="grammar"):
        SamplingState(SamplingParams(), matcher=compiler.compile(Regex("a")).matcher())


# A tiny random model, whose tokens are taken to spell JSON.

TEXTS = [
    *'{}[]:,".-e0123456789abcdfghijklmnopqrstuvwxyz \n',
    '{"',
    '":',
    '",',
    "true",
    "null",
    "false",
    '"a',
    "10",
    "[[",
    "]}",
]
SPELLED = [text.encode() for text in TEXTS]
SPELLED += [b""] * (VOCAB - len(SPELLED))
TINY_END = VOCAB - 1
ITEM = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -50, "maximum": 50},
        "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "c": {"type": "string", "maxLength": 6},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("small"), pages=24, backend="native")


def text_of(ids: list[int]) -> str:
    return b"".join(SPELLED[i] for i in ids).decode()


@pytest.fixture(scope="module")
def heard(executor: Executor) -> list[Ear]:
    """A dozen constrained requests among free ones, in a pool too small for all of them."""
    grammar = Compiler(SPELLED, [TINY_END]).compile(JsonSchema(ITEM))
    engine = Engine(executor, EngineConfig(step_tokens=32, max_rows=8))
    ears = []
    for seed in range(12):
        held = SamplingParams(max_tokens=200, temperature=1.0, seed=seed, grammar=grammar.constraint, n=1 + seed % 2)
        ears.append(start(engine, Ask((1, 2, seed), held), end_ids=frozenset([TINY_END]), grammar=grammar))
        start(engine, Ask((1, 2, 3, seed), SamplingParams(max_tokens=40, seed=seed, temperature=1.0)))
    finish(engine)
    return ears


def test_a_tiny_model_writes_valid_json(heard: list[Ear]) -> None:
    texts = [
        text_of(ids) for ear in heard for ids, reason in zip(ear.tokens, ear.reasons, strict=True) if reason == "stop"
    ]
    assert len(texts) >= 12
    for text in texts:
        Draft202012Validator(ITEM).validate(json.loads(text))


def test_constrained_requests_say_together_what_they_say_alone(heard: list[Ear], executor: Executor) -> None:
    grammar = Compiler(SPELLED, [TINY_END]).compile(JsonSchema(ITEM))
    for seed in (0, 3, 11):
        engine = Engine(executor)
        held = SamplingParams(max_tokens=200, temperature=1.0, seed=seed, grammar=grammar.constraint, n=1 + seed % 2)
        ear = start(engine, Ask((1, 2, seed), held), end_ids=frozenset([TINY_END]), grammar=grammar)
        finish(engine)
        assert ear.tokens == heard[seed].tokens


def test_a_request_whose_grammar_fails_fails_alone(executor: Executor) -> None:
    strict = Compiler(SPELLED, [TINY_END], GrammarLimits(step_items=60))
    grammar = strict.compile(Lark("start: a\na: a a | /[ab]/ | /[bc]/"))
    bad = SamplingParams(max_tokens=100, grammar=grammar.constraint, min_tokens=99)
    good = Ask((5, 6, 7), SamplingParams(max_tokens=30, temperature=1.0, seed=1))
    engine = Engine(executor)
    failed = start(engine, Ask((1, 2, 3), bad), end_ids=frozenset([TINY_END]), grammar=grammar)
    fine = start(engine, good)
    finish(engine)
    assert failed.reasons == ["error"] and isinstance(failed.error, GrammarFailed)
    assert fine.tokens == [good.alone(executor)]


# The default model.


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with kvilt.load(str(smollm2_path), kv_memory="128M", max_context=512) as model:
        yield model


def test_the_default_model_follows_a_schema(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "born": {"type": "string", "format": "date"}},
        "required": ["name", "born"],
        "additionalProperties": False,
    }
    done = llm.generate("A person as JSON:", json_schema=schema, max_tokens=300, n=3, temperature=0.7, seed=4)
    for sample_ in (done, *done.alternatives):
        assert sample_.finish_reason == "stop"
        Draft202012Validator(schema).validate(json.loads(sample_.text))
    stream = llm.stream("A person as JSON:", json_schema=schema, max_tokens=300, temperature=0.7, seed=4)
    assert "".join(stream) == done.text


def test_the_default_model_chooses_and_matches(llm: LLM) -> None:
    question = [{"role": "user", "content": "Is Paris in France? Answer yes or no."}]
    assert llm.chat(question, choice=["yes", "no"]).text in ("yes", "no")
    assert llm.generate("The year is", regex=r" (19|20)\d\d\.").text[:3] in (" 19", " 20")
    done = llm.generate("An object:", json_object=True, max_tokens=60)
    assert done.text.startswith("{")
    assert done.finish_reason == "length" or isinstance(json.loads(done.text), dict)


def test_what_a_schema_says_without_effect_is_told(llm: LLM) -> None:
    schema = {"enum": ["a"], "x-order": 1}
    told = ("the keyword 'x-order' is not known and has no effect at #",)
    assert llm.generate("x", json_schema=schema).warnings == told
    with llm.stream("x", json_schema=schema) as stream:
        assert "".join(stream) == '"a"'
        assert stream.completion.warnings == told
    assert llm.generate("x", max_tokens=1).warnings == ()


def test_closed_objects_end(llm: LLM) -> None:
    """Without it this model adds properties until the limit."""
    closed = JsonSchema({"type": "object", "properties": {"a": {"enum": [1]}}}, close_objects=True)
    done = llm.generate("An object:", grammar=closed, max_tokens=40, temperature=0.0)
    assert (done.finish_reason, json.loads(done.text)) in (("stop", {"a": 1}), ("stop", {}))


def test_a_grammar_that_cannot_be_is_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(GrammarUnsupported) as caught:
        llm.generate("x", json_schema={"contains": {}})
    assert caught.value.keyword == "contains"
