"""Grammars and matchers: masks, acceptance, rollback, forks, limits, and the constraints as fields of params."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from grammars import BYTES, END, allowed, byte_compiler, follow, random_text, takes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.errors import GrammarError, GrammarFailed, GrammarUnsupported, InputError, ParamError
from kvilt.errors import Unsupported as UnsupportedError
from kvilt.sampling.constraint import (
    MAX_CHOICES,
    MAX_TEXT_BYTES,
    Choice,
    Constraint,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
)
from kvilt.sampling.grammar import Compiler, GrammarLimits
from kvilt.sampling.matcher import Matcher, masks
from kvilt.sampling.params import SamplingParams
from kvilt.text import tokenizer as tokenizers

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS: list[Constraint] = [
    JsonSchema(PERSON),
    JsonSchema({"type": "array", "items": {"enum": ["a", "ab", 1, None]}, "maxItems": 4}),
    JsonObject(),
    Regex("(a|bc){1,4}d?"),
    Choice(["yes", "yes, but", "no"]),
    Lark('start: "<" word ("," word)* ">"\nword: /[a-z]+/ | %json {"type": "integer"}'),
]
compiler = byte_compiler()


def matcher(constraint: Constraint) -> Matcher:
    return compiler.compile(constraint).matcher()


def after(constraint: Constraint, text: str) -> Matcher:
    found = follow(matcher(constraint), text.encode())
    assert found is not None, f"{text!r} is no beginning"
    return found


def chars(ids: list[int]) -> str:
    return "".join(chr(i) if i != END else "$" for i in ids)


# What the five kinds mean.


def test_a_schema_allows_what_may_follow_and_the_end_where_it_may_be() -> None:
    assert chars(allowed(matcher(JsonSchema(PERSON)))) == "{"
    assert chars(allowed(after(JsonSchema(PERSON), '{"name":"x","age":'))) == "\n -0123456789"
    assert chars(allowed(after(JsonSchema(PERSON), '{"name":"x","age":9}'))) == "$"


def test_an_object_is_an_object() -> None:
    assert takes(compiler.compile(JsonObject()), '{"a": [1, {"b": null}]}')
    assert not takes(compiler.compile(JsonObject()), "[]")


def test_a_choice_allows_its_strings_and_the_end_behind_each() -> None:
    choice = Choice(["yes", "yes, but", "no"])
    assert chars(allowed(matcher(choice))) == "ny"
    assert chars(allowed(after(choice, "yes"))) == ",$"
    assert chars(allowed(after(choice, "no"))) == "$"


@settings(max_examples=examples(50))
@given(
    choices=st.lists(st.text(min_size=1, max_size=10), min_size=1, max_size=10), others=st.lists(st.text(max_size=10))
)
def test_a_choice_takes_its_strings_and_no_others(choices: list[str], others: list[str]) -> None:
    grammar = compiler.compile(Choice(choices))
    assert all(takes(grammar, choice) for choice in choices)
    assert [text for text in others if takes(grammar, text) and text not in choices] == []


def test_a_lark_grammar_may_hold_schemas_which_are_checked_like_others() -> None:
    grammar = compiler.compile(
        Lark('start: "<" %json {"properties": {"a": {"format": "date"}}} ">"  // %json in a comment')
    )
    assert takes(grammar, '<{"a":"2024-02-29"}>') and not takes(grammar, '<{"a":"2023-02-29"}>')
    assert not takes(grammar, '<{"\\u0061":"x"}>')
    with pytest.raises(GrammarUnsupported) as caught:
        compiler.compile(Lark('start: "a" %json {"contains": {}}'))
    assert caught.value.keyword == "contains"


HIDDEN = [
    '# a/b\nstart: %json {"contains": {}} /x/',
    '// "\nstart: %json {"contains": {}} // "',
    'start: "/" %json {"contains": {}} "/"',
    'start: "\\"" %json {"contains": {}}',
    'start: /"/ %json {"contains": {}} /"/',
    'start: %regex {"substring_words": "a"} %json\n\n {"contains": {}}',
    'start: x\nx: %json {"x-guidance": {"lenient": true}, "contains": {}}',
]


@pytest.mark.parametrize("text", HIDDEN)
def test_no_schema_hides_in_a_lark_grammar(text: str) -> None:
    with pytest.raises(GrammarUnsupported):
        compiler.compile(Lark(text))


def test_the_words_of_lark_may_stand_in_strings_patterns_and_comments() -> None:
    grammar = compiler.compile(Lark('start: "%json <x> stop=" /%json <x>/ # %llguidance <x> temperature=\n'))
    assert takes(grammar, "%json <x> stop=%json <x>")


@pytest.mark.parametrize(
    ("text", "keyword"),
    [
        ("start: <[5]>", "<[5]>"),
        ("start: <|im_end|>", "<|im_end|>"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance"),
        ("start: x\nx[temperature=0.5]: /a/", "temperature"),
        ('start: x "b"\nx[stop = "b"]: /.*/', "stop"),
        ("start: x\nx[max_tokens=3]: /.*/", "max_tokens"),
    ],
)
def test_what_a_lark_grammar_may_not_do_is_refused_by_name(text: str, keyword: str) -> None:
    with pytest.raises(GrammarUnsupported) as caught:
        compiler.compile(Lark(text))
    assert caught.value.keyword == keyword


@pytest.mark.parametrize(
    "text",
    [
        "x",
        'x: "a"',
        "start: y",
        'start: "a',
        "start: /(/",
        "start: @other",
        "start: %json",
        "start: %json {",
        "start: (" * 2_000,
    ],
)
def test_a_broken_lark_grammar_is_refused(text: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(Lark(text))
    assert not isinstance(caught.value, GrammarUnsupported)
    assert len(str(caught.value)) < 400


# Matchers.


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda each: type(each).__name__)
def test_random_texts_of_a_grammar_are_its_texts(constraint: Constraint) -> None:
    grammar, dice = compiler.compile(constraint), random.Random(5)
    made = [text for _ in range(20) if (text := random_text(grammar, dice)) is not None]
    assert made and all(takes(grammar, text) for text in made)


@settings(max_examples=examples(100))
@given(
    constraint=st.sampled_from(CONSTRAINTS),
    seed=st.integers(0, 2**32),
    steps=st.integers(0, 30),
    drafts=st.integers(1, 8),
)
def test_rollback_equals_never_having_accepted(constraint: Constraint, seed: int, steps: int, drafts: int) -> None:
    dice = random.Random(seed)

    def walk(one: Matcher, count: int) -> list[int]:
        taken: list[int] = []
        for _ in range(count):
            taken.append(dice.choice(allowed(one)))
            one.accept(taken[-1])
        return taken

    kept = matcher(constraint)
    path = walk(kept, steps)
    drafted = kept.fork()
    walk(drafted, drafts)
    drafted.rollback(drafts)
    fresh = follow(matcher(constraint), path)
    assert fresh is not None
    for _ in range(10):
        assert allowed(drafted) == allowed(kept) == allowed(fresh)
        assert (
            (drafted.accepting, drafted.finished)
            == (kept.accepting, kept.finished)
            == (fresh.accepting, fresh.finished)
        )
        token = dice.choice(allowed(kept))
        for one in (drafted, kept, fresh):
            one.accept(token)
    drafted.rollback(steps + 10)
    assert allowed(drafted) == allowed(matcher(constraint))


def test_a_finished_grammar_allows_the_end_alone_as_often_as_one_likes() -> None:
    one = after(Choice(["no"]), "no")
    assert one.accepting and one.finished
    for _ in range(3):
        assert allowed(one) == [END]
        one.accept(END)
    with pytest.raises(InputError):
        one.accept(ord("n"))
    one.rollback(4)
    assert not one.accepting and chars(allowed(one)) == "o"


def test_a_token_that_is_not_allowed_is_refused_and_changes_nothing() -> None:
    one = after(Choice(["yes", "no"]), "n")
    for token in (ord("x"), END, 257, 258, -1, 10**9):
        with pytest.raises(InputError, match="does not allow token"):
            one.accept(token)
        assert chars(allowed(one)) == "o"


@pytest.mark.parametrize("count", [-1, 3, 100])
def test_no_more_is_rolled_back_than_was_accepted(count: int) -> None:
    one = after(Choice(["yes"]), "ye")
    with pytest.raises(InputError, match="cannot be taken back"):
        one.rollback(count)
    assert chars(allowed(one)) == "s"


def test_forks_go_their_own_ways() -> None:
    one = after(Choice(["yes", "yea"]), "ye")
    other = one.fork()
    one.accept(ord("s"))
    other.accept(ord("a"))
    assert one.finished and other.finished
    other.rollback(1)
    assert chars(allowed(other)) == "as"


# Masks.


def test_masks_of_several_matchers_are_the_masks_of_each() -> None:
    several = [after(JsonSchema(PERSON), '{"na'), after(Choice(["no"]), "no"), matcher(JsonObject())]
    together = masks(several, len(BYTES))
    assert together.shape == (3, len(BYTES))
    assert [together[row].nonzero()[:, 0].tolist() for row in range(3)] == [allowed(each) for each in several]


@pytest.mark.parametrize("vocab_size", [300, len(BYTES), 100])
def test_masks_have_the_width_of_the_logits(vocab_size: int) -> None:
    """An output layer may be padded past the vocabulary, or end before it."""
    mask = masks([matcher(Choice(["a", "\u00e9"]))], vocab_size)
    assert mask.shape == (1, vocab_size)
    assert mask[0].nonzero()[:, 0].tolist() == [i for i in (97, 0xC3) if i < vocab_size]


def test_all_end_tokens_are_allowed_at_the_end_and_tokens_without_text_never() -> None:
    several = Compiler([*BYTES, b"ab", b"", b"\xff", b""], [END, 261, 999])
    one = several.compile(Regex("(ab)*")).matcher()
    assert allowed(one, 262) == [97, END, 258, 261]
    one.accept(261)
    assert allowed(one, 262) == [END, 261]


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'kvilt\[grammar\]'"):
        byte_compiler()


def test_a_vocabulary_without_an_end_cannot_have_grammars() -> None:
    with pytest.raises(UnsupportedError, match="ends a text"):
        Compiler(BYTES, [999])


# Limits.


def test_a_row_over_its_limits_fails_alone_and_by_name() -> None:
    strict = byte_compiler(limits=GrammarLimits(step_items=60))
    heavy = strict.compile(Lark("start: a\na: a a | /[ab]/ | /[bc]/")).matcher()
    light = strict.compile(Choice(["yes"])).matcher()
    for token in b"bbbbbbbbbbbbbbbbbbbbbbbb":
        heavy.accept(token)  # where a limit is met the token counts, and the next mask says so
    with pytest.raises(GrammarFailed) as caught:
        masks([light, heavy, light, heavy], len(BYTES))
    assert caught.value.rows == (1, 3) and caught.value.reason
    assert chars(allowed(light)) == "y"
    heavy.rollback(23)
    assert chars(allowed(heavy)) == "abc$", "what lies before the limit is as good as ever"


def test_samples_do_not_use_up_each_others_limits() -> None:
    """Matchers of one grammar share a lexer, whose states the library counts together."""
    strict = byte_compiler(limits=GrammarLimits(states=400))
    grammar = strict.compile(Regex("[abcd]*a[abcd]{14}e"))
    for seed in range(6):
        dice, one = random.Random(seed), grammar.matcher()
        for _ in range(150):
            assert allowed(one)
            one.accept(dice.choice(b"abcd"))


def test_the_compiler_keeps_the_last_grammars_used() -> None:
    small = byte_compiler(limits=GrammarLimits(cached=2))
    a, b = small.compile(Choice(["a"])), small.compile(Choice(["b"]))
    assert small.compile(Choice(["a"])) is a
    small.compile(Choice(["c"]))
    assert small.compile(Choice(["a"])) is a
    assert small.compile(Choice(["b"])) is not b


def test_grammars_compile_on_many_threads_at_once() -> None:
    shared = byte_compiler()
    many = [JsonSchema({"properties": {f"p{i % 7}": {"const": i % 7}}}) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        grammars = list(pool.map(shared.compile, many))
    for constraint, grammar in zip(many, grammars, strict=True):
        assert grammar.constraint == constraint
        assert takes(
            grammar,
            json.dumps({name: value["const"] for name, value in json.loads(constraint.text)["properties"].items()}),
        )


@pytest.mark.parametrize(
    "constraint",
    [Lark('start: "a"{1000000}'), Regex("[a-z]{1,9000}"), Lark("start: " + " ".join(['"a"?'] * 1_000))],
    ids=["forced", "counted", "optional"],
)
def test_long_grammars_answer_within_their_limits(constraint: Constraint) -> None:
    one = matcher(constraint)
    for _ in range(20):
        assert ord("a") in allowed(one)
        one.accept(ord("a"))


def test_rules_in_a_long_chain_do_not_end_the_process() -> None:
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(8_000))
    assert takes(compiler.compile(Lark(f'start: r0\n{rules}\nr8000: "a"')), "a")


# The values.


def test_constraints_are_hashable_values() -> None:
    assert JsonSchema({"type": "null"}) == JsonSchema('{"type": "null"}')
    assert hash(Choice(["a", "b", "a"])) == hash(Choice(("a", "b")))
    assert len({*CONSTRAINTS, *CONSTRAINTS}) == len(CONSTRAINTS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Regex("a").pattern = "b"  # type: ignore[misc]


def test_the_order_of_keys_in_a_schema_matters() -> None:
    assert JsonSchema({"properties": {"a": {}, "b": {}}}) != JsonSchema({"properties": {"b": {}, "a": {}}})


SHORT = [
    ("json_schema", PERSON, JsonSchema(PERSON)),
    ("json_schema", "true", JsonSchema(True)),
    ("json_object", True, JsonObject()),
    ("regex", "a+", Regex("a+")),
    ("choice", ["a", "b"], Choice(("a", "b"))),
    ("lark", 'start: "a"', Lark('start: "a"')),
    ("json_object", False, None),
    ("json_schema", None, None),
    ("regex", None, None),
]


@pytest.mark.parametrize(("name", "value", "constraint"), SHORT)
def test_params_take_a_grammar_by_its_kind(name: str, value: Any, constraint: Constraint | None) -> None:
    assert SamplingParams.of(**{name: value}).grammar == constraint
    assert SamplingParams.of(SamplingParams(grammar=Regex("x")), **{name: value}).grammar == (constraint or Regex("x"))
    assert hash(SamplingParams.of(**{name: value})) == hash(SamplingParams(grammar=constraint))


BAD: list[tuple[str, Any]] = [
    *[
        ("json_schema", value)
        for value in ("", 5, [], {"a": {1, 2}}, {"a": float("nan")}, "x" * (MAX_TEXT_BYTES + 1), "\ud800")
    ],
    *[("json_object", value) for value in (1, "yes", {})],
    *[("regex", value) for value in ("", 5, ["a"], b"a", "a" * (MAX_TEXT_BYTES + 1))],
    *[
        ("choice", value)
        for value in ("ab", [], [""], [1], ["a"] * (MAX_CHOICES + 1), {"a"}, ["a" * 300_000], ["\udc00"])
    ],
    *[("lark", value) for value in ("", 5, None.__class__)],
    *[("grammar", value) for value in ("start", {"type": "object"}, JsonObject)],
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:20])
def test_an_invalid_constraint_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(ParamError) as caught:
        SamplingParams.of(**{name: value})
    assert caught.value.field == name
    assert len(str(caught.value)) < 300


def test_a_schema_nested_past_all_measure_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ParamError, match="json_schema"):
        JsonSchema(deep)


def test_two_grammars_and_an_ignored_end_are_refused() -> None:
    for fields in ({"regex": "a", "choice": ["a"]}, {"regex": "a", "grammar": JsonObject()}):
        with pytest.raises(ParamError, match="second grammar"):
            SamplingParams.of(**fields)
    with pytest.raises(ParamError, match="ignore_eos"):
        SamplingParams(grammar=JsonObject(), ignore_eos=True)


# A real vocabulary.


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> tuple[tokenizers.Tokenizer, Compiler]:
    tokenizer = tokenizers.from_gguf(smollm2_path)
    spelled = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    return tokenizer, Compiler(spelled, tokenizer.eos_ids)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda each: type(each).__name__)
def test_a_real_vocabulary_spells_texts_in_many_ways(
    constraint: Constraint, smollm2: tuple[tokenizers.Tokenizer, Compiler]
) -> None:
    """The tokens that the model itself cuts a text into are in the masks, one after another."""
    tokenizer, real = smollm2
    dice = random.Random(7)
    for _ in range(5):
        text = random_text(compiler.compile(constraint), dice, most=60)
        if text is None:
            continue
        one = real.compile(constraint).matcher()
        for token in tokenizer.encode(text, add_special=False):
            assert token in allowed(one, tokenizer.vocab_size)
            one.accept(token)
        assert one.accepting and set(tokenizer.eos_ids) <= {*allowed(one, tokenizer.vocab_size)}


def test_random_tokens_of_a_real_vocabulary_give_valid_json(smollm2: tuple[tokenizers.Tokenizer, Compiler]) -> None:
    tokenizer, real = smollm2
    done = 0
    for seed in range(12):
        dice, one, ids = random.Random(seed), real.compile(JsonSchema(PERSON)).matcher(), []
        while not one.finished and len(ids) < 200:
            ids.append(dice.choice([i for i in allowed(one, tokenizer.vocab_size) if i not in tokenizer.eos_ids]))
            one.accept(ids[-1])
        if one.finished:
            done += 1
            person = json.loads(tokenizer.decode(ids))
            assert list(person) == ["name", "age"] and len(person["name"]) <= 8 and person["age"] <= 99
    assert done
