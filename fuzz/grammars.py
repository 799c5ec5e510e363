"""Grammars: whatever a constraint says, compiling and following it ends in time with masks or a typed error.

Oracle: a token that a mask allows is one that the matcher takes, in this matcher and in a fork that shares its lexer; a
token that the mask forbids is refused; going back gives the same mask again. A text that a regex lets end matches it in
Python's `re`.
"""

from __future__ import annotations

import json
import random
import re
import warnings
from typing import Any

from kvilt.errors import GrammarFailed, KviltError
from kvilt.sampling.constraint import Choice, Constraint, JsonSchema, Lark, Regex
from kvilt.sampling.grammar import Compiler, Grammar
from kvilt.sampling.matcher import Matcher, masks

from .driver import main
from .target import Finding, Target, label
from .values import changed

_END = 256
_WORDS = ("ab", "the", "null", "true", '"a"', '":', "{}", "[]", "  ", "é", "00", "-1")
_VOCABULARY = [*(bytes([i]) for i in range(256)), b"", *(word.encode() for word in _WORDS)]
_STEPS = 6
_KINDS = (b"R", b"J", b"L", b"C")
_compilers: list[Compiler] = []


def _compiler() -> Compiler:
    if not _compilers:
        _compilers.append(Compiler(_VOCABULARY, [_END]))
    return _compilers[0]


def _constraint(data: bytes) -> Constraint:
    text = data[1:].decode("utf-8", "replace")
    match data[:1]:
        case b"R":
            return Regex(text)
        case b"J":
            return JsonSchema(text)
        case b"L":
            return Lark(text)
        case _:
            return Choice(text.split("|"))


def check(data: bytes) -> str:
    try:
        constraint = _constraint(data)
        grammar = _compiler().compile(constraint)
    except KviltError as error:
        return f"not compiled: {label(error)}"
    dice = random.Random(len(data))
    try:
        said = [_follow(grammar, dice) for _ in range(2)]
    except GrammarFailed as error:
        return f"not followed: {label(error)}"
    if isinstance(constraint, Regex):
        for whole in said:
            _compare(constraint.pattern, whole)
    return f"followed {type(constraint).__name__}"


def _follow(grammar: Grammar, dice: random.Random) -> bytes | None:
    """A few tokens at random through a grammar; the text if it is whole."""
    matcher, text = grammar.matcher(), b""
    for _ in range(_STEPS):
        allowed = _allowed(matcher)
        if not allowed or allowed == [_END]:
            break
        token = dice.choice(allowed)
        if token == _END:
            break
        _take(matcher, token, allowed, dice)
        text += _VOCABULARY[token]
    if _END in _allowed(matcher) and not matcher.accepting:
        raise Finding("the mask allows the end of a text that is not whole")
    return text if matcher.accepting else None


def _take(matcher: Matcher, token: int, allowed: list[int], dice: random.Random) -> None:
    fork = matcher.fork()
    try:
        fork.accept(token)
        matcher.accept(token)
    except ValueError as error:
        raise Finding(f"the mask allows token {token} and the matcher does not: {error}") from None
    other = dice.randrange(len(_VOCABULARY))
    behind = _allowed(matcher)
    matcher.rollback(1)
    if other not in allowed:
        try:
            matcher.accept(other)
        except ValueError:
            pass
        else:
            _allowed(matcher)  # a limit in the way is no disagreement: GrammarFailed
            raise Finding(f"the mask forbids token {other} and the matcher takes it")
    if _allowed(matcher) != allowed:
        raise Finding("a token taken back leaves another mask")
    matcher.accept(token)
    if _allowed(matcher) != behind or _allowed(fork) != behind:
        raise Finding("a fork, or the same token again, has another mask")


def _allowed(matcher: Matcher) -> list[int]:
    ids: list[int] = masks([matcher], len(_VOCABULARY))[0].nonzero()[:, 0].tolist()
    return ids


def _compare(pattern: str, whole: bytes | None) -> None:
    """Python's own engine, for patterns that mean the same to both and do not run away."""
    if (
        whole is None
        or not re.fullmatch(r"[ -~]*", pattern)
        or re.search(r"\\[^dwsn.]|\(\?|\*.*\*|\+.*\+|[&~]|\{.*\{", pattern)
    ):
        return
    try:
        text = whole.decode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            matches = re.fullmatch(pattern, text)
    except (re.error, UnicodeDecodeError, RecursionError, OverflowError):
        return
    if text.isascii() and not matches:
        raise Finding(f"{text!r} was allowed and {pattern!r} does not match it")


def seeds() -> list[bytes]:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name"],
        "additionalProperties": False,
    }
    schemas: list[Any] = [
        schema,
        {"enum": ["a", 1, None]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    ]
    schemas += [
        {"anyOf": [{"const": "x"}, {"type": "string", "pattern": "^a+$"}]},
        {"allOf": [schema, {"minProperties": 1}]},
    ]
    schemas += [{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}, True, {}]
    regexes = ["[a-z ]*[aeiou][a-z ]{4}[aeiou][a-z ]*", "(a|b)+c?", r"\d{2,4}-\w+", "(a+)+b", "a{10}{10}", "[^x]*é"]
    larks = [
        'start: "a" | "b" start',
        "start: item+\nitem: /[0-9]+/ | NAME\nNAME: /[a-z]+/",
        "start: A\nA: /a+/ & /a{3}/",
        'start: %json {"type": "object"}',
        "start: x\nx[max_tokens=3]: /.*/",
    ]
    made = [b"R" + one.encode() for one in regexes] + [b"J" + json.dumps(one).encode() for one in schemas]
    return [*made, *(b"L" + one.encode() for one in larks), b"Cyes|no|ab", b"Ca|ab|abc|"]


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Another schema, or pieces of patterns and rules put together."""
    kind = dice.choice(_KINDS)
    if kind == b"J":
        schema = json.loads(dice.choice([one for one in seeds() if one[:1] == b"J"])[1:])
        with_more = changed(schema, dice)
        if isinstance(with_more, dict) and dice.random() < 0.7:
            with_more[dice.choice(_KEYWORDS)] = dice.choice(
                [3, "a", [], {}, True, -1, "^a", {"a": {}}, [{}, {"type": "null"}]]
            )
        try:
            return kind + json.dumps(with_more).encode()
        except RecursionError:
            return kind + b"[" * 1000
    if kind == b"R":
        return kind + "".join(dice.choice(_REGEX) for _ in range(dice.randrange(1, 9))).encode()
    if kind == b"L":
        rules = [
            f"{dice.choice('abc')}: {' '.join(dice.choice(_LARK) for _ in range(dice.randrange(1, 5)))}"
            for _ in range(3)
        ]
        return kind + "\n".join(["start: a b?", *rules]).encode()
    return kind + data[1:60]


_KEYWORDS = (
    *(
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "pattern",
        "minLength",
    ),
    *(
        "maxLength",
        "minimum",
        "multipleOf",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "$ref",
        "format",
        "patternProperties",
        "if",
    ),
)
_REGEX = (
    *(
        "a",
        "b",
        "[a-z]",
        "[^a]",
        ".",
        "é",
        "(",
        ")",
        "|",
        "*",
        "+",
        "?",
        "{2}",
        "{0,3}",
        "{1000}",
        r"\d",
        r"\w",
        r"\b",
        "^",
        "$",
    ),
    *("(a|b)", "(?:ab)*", "(?=a)", "(?i)", "[[:alpha:]]", r"\p{L}", "a{2,}", r"\x41", " ", "[]", "[]a]", "&", "~"),
)
_LARK = (
    *(
        '"a"',
        "/b+/",
        "a",
        "b",
        "c",
        "|",
        "*",
        "+",
        "?",
        "(",
        ")",
        "~ 2..3",
        "&",
        '"a".."z"',
        "A",
        "/[a-z]{3}/",
        "[capture]",
        "%json {}",
    ),
    *('"\\n"', "->", "%ignore /x/", "<|end|>", '"', "/", "//", "start", '%regex {"substring_words": "a b"}'),
)
WORDS = tuple(word.encode() for word in (*_REGEX, *_LARK, *(f'"{word}":' for word in _KEYWORDS)))
TARGET = Target("grammars", check, seeds, WORDS, mutate, most_bytes=1 << 12)

if __name__ == "__main__":
    main(TARGET)
