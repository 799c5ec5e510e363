"""Tools for chat templates that know none: they become part of the system prompt, calls and results become text.

The prompt asks for calls in a form that the model's parser reads. Refuses to know templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from .parse_formats import LIST, OBJECT, CallFormat

_Messages = list[dict[str, Any]]
# Without it small models repeat the call instead of answering.
_AFTER_RESULTS = "Answer my question with this, in a sentence."


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """How tools are written for one template."""

    calls: CallFormat
    system: bool  # whether the template takes a system message; else the first user's text begins with the tools
    writes_calls: bool  # whether the template writes calls and results itself

    def messages(self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> _Messages:
        """The messages with everything about tools as text; plain JSON values in, plain JSON values out."""
        told = list(messages) if self.writes_calls else self._without_roles(messages)
        return self._introduced(told, self.introduction(tools)) if tools else told

    def introduction(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What the model is told about its tools."""
        listed = "\n".join(_text(tool.get("function", tool)) for tool in tools)
        example = self.written([("TOOL", {"ARGUMENT": "VALUE"})])
        return (
            f"You can call these tools:\n{listed}\n\n"
            f"To call a tool, answer with nothing but the call, in this form:\n{example}\n"
            "Then its result is sent to you, and you answer with it."
        )

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls as the model writes them."""
        objects = [_text({"name": name, "arguments": given}) for name, given in calls]
        if OBJECT in self.calls.openings and len(objects) == 1:
            return objects[0]
        if any(opening.text == LIST.text for opening in self.calls.openings):
            return f"[{', '.join(objects)}]"
        before, between, after = self.calls.forced
        return before + between.join(objects) + after

    def _without_roles(self, messages: Sequence[dict[str, Any]]) -> _Messages:
        """Calls as text of the assistant, results as text of the user; neighbouring results are one message."""
        told: _Messages = []
        names: dict[str, str] = {}  # of tools, by the id of the call
        for is_result, group in groupby(messages, lambda one: one["role"] == "tool"):
            if is_result:
                results = [_result(one, names) for one in group]
                told.append({"role": "user", "content": "\n\n".join([*results, _AFTER_RESULTS])})
            else:
                told += [self._spoken(one, names) if one.get("tool_calls") else one for one in group]
        return told

    def _spoken(self, message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
        calls = []
        for call in message["tool_calls"]:
            function = call.get("function", call)
            names[str(call.get("id"))] = str(function.get("name"))
            calls.append((function.get("name"), _arguments(function.get("arguments"))))
        said = message.get("content")
        text = f"{said}\n\n" if isinstance(said, str) and said else ""
        return {**message, "content": text + self.written(calls)}

    def _introduced(self, messages: _Messages, text: str) -> _Messages:
        first = messages[0]
        role = "system" if self.system else "user"
        if first["role"] == role and isinstance(first.get("content"), str):
            parts = (first["content"], text) if self.system else (text, first["content"])
            return [{**first, "content": "\n\n".join(parts)}, *messages[1:]]
        return [{"role": role, "content": text}, *messages]


def _result(message: Mapping[str, Any], names: Mapping[str, str]) -> str:
    name = message.get("name") or names.get(str(message.get("tool_call_id")), "")
    content = message.get("content")
    return f"The tool {name} returned:\n{content if isinstance(content, str) else _text(content)}"


def _arguments(given: Any) -> Any:
    """Arguments as an object; text that is no JSON stays text."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
