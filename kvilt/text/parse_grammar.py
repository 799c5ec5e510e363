"""The Lark grammar of an answer that must call a tool, in the format of the model's family.

Writes grammars; compiling them, and refusing the schemas inside, belongs to sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ParamError
from .parse_formats import CallFormat, Thinking
from .parse_tools import argument_schemas


def grammar_of(
    calls: CallFormat,
    thinking: Thinking | None,
    opened: bool,
    tools: Sequence[Mapping[str, Any]],
    names: Sequence[str] | None,
    parallel: bool,
) -> str | None:
    """See `Parser.tool_grammar`; `opened` says that the answer begins inside reasoning."""
    schemas = argument_schemas(tools)
    wanted = list(schemas) if names is None else list(dict.fromkeys(names))
    for name in wanted:
        if name not in schemas:
            raise ParamError("tool_choice", f"there is no tool called {name[:64]!r}; add it to tools")
    if not wanted or not calls.openings:
        return None
    rules = [_start(thinking, opened), _calls(calls, parallel)]
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(wanted))))
    for i, name in enumerate(wanted):
        head = f'{{"name": {json.dumps(name)}, "{calls.arguments_key}": '
        rules.append(f'call{i}: {_quoted(head)} arguments{i} "}}"')
        rules.append(f"arguments{i}: %json {schemas[name]}")
    if thinking is not None:
        rules += _thought(thinking)
    return "\n".join(rules) + "\n"


def _start(thinking: Thinking | None, opened: bool) -> str:
    """The start rule: reasoning that the prompt opened must be closed; reasoning that the model opens is optional."""
    if thinking is None:
        return "start: calls"
    if opened:
        return "start: THOUGHT BLANK calls"
    return f"start: calls | {_quoted(thinking.open)} THOUGHT BLANK calls"


def _thought(thinking: Thinking) -> list[str]:
    """Text up to the first closing marker, as one terminal: two would leave open where the first one ends."""
    close = re.escape(thinking.close).replace("/", "\\/")
    return [
        f"THOUGHT: /(?s:.*){close}/ & ~/(?s:.*){close}(?s:.+)/",
        r"BLANK: /\n{0,2}/",
    ]


def _calls(calls: CallFormat, parallel: bool) -> str:
    before, between, after = calls.forced
    if not parallel and calls.lone:
        return "calls: call"
    more = f"({_quoted(between)} call)*" if parallel else ""
    parts = (_quoted(before), "call", more, _quoted(after))
    return "calls: " + " ".join(part for part in parts if part not in ("", '""'))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
