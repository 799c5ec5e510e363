"""Lark grammars before the library sees them: schemas inside are checked like any other, some features are refused.

Knows where strings, patterns and comments end, and nothing else of the language.
"""

from __future__ import annotations

import json
import re

from ..errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from .schema_check import MAX_WRITTEN, checked

# The library's own idea of a comment, a string and a pattern (which may hold line ends), so that none hides anything.
# Quantifiers give nothing back, and a string or pattern without an end ends the search: each character is looked at a
# bounded number of times.
_PARTS = re.compile(
    r'(?:#|//)[^\n]*+|"(?:\\.|[^"\\\x00-\x1f\x7f])*+"|/(?:\\.|[^/\\])++/|(?P<open>["/])|(?P<schema>%json)|(?P<regex>%regex)'
    r"|(?P<options>%llguidance)|(?P<token><[^<>\s]++>)"
    r"|(?P<option>(?<![a-z0-9_-])(?:temperature|max_tokens|stop)\s*+=)"
)
_BLANK = re.compile(r"[ \t\r\n]*")


def checked_lark(text: str) -> str:
    """The grammar to give to the library for this one."""
    pieces: list[str] = []
    at = written = 0
    while (found := _PARTS.search(text, at)) is not None:
        match found.lastgroup:
            case "schema" | "regex":
                start = _end_of_blank(text, found.end())
                end = _end_of_json(text, start)
                inside = text[start:end]
                inside = checked(inside) if found.lastgroup == "schema" else inside
                written += len(inside)
                if written > MAX_WRITTEN:
                    raise GrammarTooLarge("lark", f"its schemas need more than {MAX_WRITTEN} characters written out")
                pieces += [text[at : found.end()], " ", inside]
                at = end
            case "open":
                what = "string" if found[0] == '"' else "pattern"
                raise GrammarError("lark", f"the {what} that begins at character {found.start()} has no end")
            case "options" | "token" | "option":
                raise _refusal(found)
            case _:
                pieces.append(text[at : found.end()])
                at = found.end()
    return "".join((*pieces, text[at:]))


def _refusal(found: re.Match[str]) -> GrammarUnsupported:
    what = found[0].rstrip("= \t\r\n")[:40]
    reasons = {
        "options": "kvilt sets the options of grammars itself",
        "token": "grammars describe text, and special tokens are none",
        "option": "it would not be obeyed; use SamplingParams",
    }
    return GrammarUnsupported("lark", what, f"{what} is not supported: {reasons[str(found.lastgroup)]}")


def _end_of_blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    assert found is not None
    return found.end()


def _end_of_json(text: str, start: int) -> int:
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise GrammarError("lark", f"there is no JSON after the % at character {start}: {str(error)[:80]}") from None
    return end
