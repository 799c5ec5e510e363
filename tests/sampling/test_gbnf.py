"""Grammars in llama.cpp's notation: texts that they derive, and what is said of broken ones."""

from __future__ import annotations

import pytest
from grammars import byte_compiler, takes

from kvilt.errors import GrammarError, GrammarTooLarge, ParamError
from kvilt.sampling.constraint import Gbnf
from kvilt.sampling.grammar import Grammar
from kvilt.sampling.params import SamplingParams

SUM = r"""
# an arithmetic expression, with a comment
root  ::= expr "=" [0-9]+ "\n"
expr  ::= term ([-+*/] term)*
term  ::= num | "(" ws expr ")"
num   ::= [1-9] [0-9]{0,2}
ws    ::= [ \t]*
"""
LIST = r'''root ::= ("- " item)+
item ::= [^\n]+ "\n"'''
CHESS = r"""root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")*
move ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBQR])?
castle ::= "O-O" "-O"?"""
CASES: list[tuple[str, list[str], list[str]]] = [
    (SUM, ["1=1\n", "12+(3*4)=24\n", "(  7)=7\n"], ["1=", "0=0\n", "1+=2\n", "1234=1\n", "(7=7\n"]),
    (LIST, ["- a\n", "- a b\n- ü\n"], ["a\n", "- \n", "- a"]),
    (CHESS, ["1. e4 e5\n", "1. e4 e5\n2. Nf3 Nc6\n10. O-O exd6\n"], ["1. e9 e5\n", "e4 e5\n"]),
    ('root ::= "a"* "ab"', ["ab", "aab", "aaaab"], ["b", "aa", "aabb"]),
    ('root ::= "x" root "y" | ""', ["", "xy", "xxyy"], ["x", "xyy", "xyxy"]),
    ('root ::= "a"{2} | "b"{1,} | "c"{0,2}', ["aa", "b", "bbb", "", "c", "cc"], ["a", "aaa", "ccc"]),
    ('root ::= item "x"\nitem ::= [a-z]+', ["abx", "xx"], ["x", "ab"]),
    ('root ::= e\ne ::= "(" e ")" | w "x" | "ab" "c" | "a" "bd"\nw ::= [a-z]+', ["(abx)", "abc", "((abd))"], ["(ab)"]),
    ('root ::= e\ne ::= "(" e ")"{1,2} | ("a" | "bc"){2} | ""', ["()", "(())", "(aa))", "bca"], ["a", "())))"]),
    (r'root ::= [\]\x5e\-a-c] | [^\n"] "!"', ["]", "^", "-", "b", "z!"], ["d", "\n!", '"!']),
    (r'root ::= "\x41\u00e4\"\\" .', ['Aä"\\!', 'Aä"\\ö'], ['Aä"\\', "A"]),
    ('root ::= [a-cx] (\n  "1" |\n  "2"\n)', ["a1", "x2"], ["d1", "a3"]),
    ('root ::= Two-Words\nTwo-Words ::= "t" # the end', ["t"], [""]),
]


def compiled(grammar: str) -> Grammar:
    return byte_compiler().compile(Gbnf(grammar))


@pytest.mark.parametrize(("grammar", "right", "wrong"), CASES, ids=[case[0][:20] for case in CASES])
def test_a_grammar_takes_what_it_derives(grammar: str, right: list[str], wrong: list[str]) -> None:
    made = compiled(grammar)
    assert {text: takes(made, text) for text in (*right, *wrong)} == {
        **dict.fromkeys(right, True),
        **dict.fromkeys(wrong, False),
    }


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a',
        "root ::= [a-",
        'start ::= "a"',
        "root ::= missing",
        "root",
        'root ::= ("a"',
        'root ::= "a"{2',
        "::=",
    ],
)
def test_a_broken_grammar_is_refused(grammar: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(grammar)
    assert len(str(caught.value)) < 400


def test_a_grammar_that_is_too_deep_is_refused() -> None:
    with pytest.raises((GrammarTooLarge, GrammarError)):
        compiled("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000)


def test_it_is_a_grammar_among_others() -> None:
    assert SamplingParams.of(gbnf='root ::= "a"').grammar == Gbnf('root ::= "a"')
    with pytest.raises(ParamError, match="second grammar"):
        SamplingParams.of(gbnf='root ::= "a"', regex="a")
    with pytest.raises(ParamError, match="gbnf"):
        Gbnf("")
