"""The output of a response as items, and the events by which a stream tells of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from ...text.parse import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning
from ..openai.message import call_arguments
from .items import sealed
from .tools import INPUT, CallableTool, CustomToolSpec, SearchTool

Event = dict[str, Any]
_MESSAGE, _REASONING, _FUNCTION, _CUSTOM = "message", "reasoning", "function_call", "custom_tool_call"
_SEARCH = "tool_search_call"
_PREFIXES = {_MESSAGE: "msg", _REASONING: "rs", _FUNCTION: "fc", _CUSTOM: "ctc", _SEARCH: "tsc"}


class OutputItems:
    """Builds the items of one response. Items do not overlap: each is done before the next is added."""

    def __init__(
        self, tools: Mapping[str, CallableTool] | None = None, forced: str | None = None, seals: bool = False
    ) -> None:
        """`tools` are those that may be called. `forced` is the custom tool whose input is the whole answer: a grammar
        holds for it. With `seals`, reasoning has its `encrypted_content`."""
        self.output: list[dict[str, Any]] = []
        self._tools = tools or {}
        self._forced = forced
        self._seals = seals
        self._open = ""  # the type of the item that is open, if one is
        self._text = ""  # of the item that is open: text, reasoning, arguments or input
        self._logprobs: list[dict[str, Any]] = []
        self._unsaid: list[dict[str, Any]] = []  # logprobs of tokens whose text is not certain yet
        self._blank = ""  # white space that may stand before text, or between calls, where it is left out

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return any(item["type"] in (_FUNCTION, _CUSTOM, _SEARCH) for item in self.output)

    def add(self, pieces: Iterable[Piece], logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        """Add pieces of the answer; the events of the items that begin, grow and end."""
        self._unsaid += logprobs or []
        return [event for piece in pieces for event in self._add(piece)]

    def finish(self, status: str = "completed") -> list[Event]:
        """The events at the end of the answer; `status` is that of an item which is open still."""
        rest = self._grow_text(self._blank) if self._blank and not self.has_calls else []
        self._logprobs += self._unsaid if self._open == _MESSAGE else []
        return [*rest, *self._end(status)]

    def _add(self, piece: Piece) -> list[Event]:
        match piece:
            case Content(text) if self._forced is not None:
                return self._grow_input(text)
            case Content(text):
                return self._add_text(text)
            case Reasoning(text):
                self._unsaid = []
                begun = [] if self._open == _REASONING else self._begin(_REASONING, summary=[], content=[])
                return [*begun, self._grow("response.reasoning_text.delta", text, content_index=0)]
            case CallStart(_, name):
                self._unsaid = []
                return self._begin_call(name)
            case CallArguments(_, text) if self._open in (_CUSTOM, _SEARCH):
                self._text += text  # JSON around the input, or an object: told when it is complete
                return []
            case CallArguments(_, text):
                return [self._grow("response.function_call_arguments.delta", text)]
            case CallEnd():
                return self._end("completed" if piece.whole else "incomplete")

    def _begin_call(self, name: str) -> list[Event]:
        call = {"call_id": _new_call_id()}
        tool = self._tools.get(name)
        match None if tool is None else tool.spec:
            case SearchTool():
                return self._begin(_SEARCH, **call, execution="client", arguments={})
            case CustomToolSpec():
                return self._begin(_CUSTOM, **call, **_name(name, tool), input="")
            case _:
                return self._begin(_FUNCTION, **call, **_name(name, tool), arguments="")

    def _add_text(self, text: str) -> list[Event]:
        if self._open != _MESSAGE:
            text = self._blank + text
            self._blank = "" if text.strip() else text
            if self._blank:
                return []
        return self._grow_text(text)

    def _grow_text(self, text: str) -> list[Event]:
        begun = [] if self._open == _MESSAGE else self._begin(_MESSAGE, role="assistant", content=[])
        logprobs, self._unsaid = self._unsaid, []
        self._logprobs += logprobs
        return [*begun, self._grow("response.output_text.delta", text, content_index=0, logprobs=logprobs)]

    def _grow_input(self, text: str) -> list[Event]:
        """More input of the custom tool that is forced."""
        named = _name(self._forced or "", self._tools.get(self._forced or ""))
        begun = [] if self._open == _CUSTOM else self._begin(_CUSTOM, call_id=_new_call_id(), **named, input="")
        return [*begun, self._grow("response.custom_tool_call_input.delta", text)]

    def _grow(self, kind: str, text: str, **more: Any) -> Event:
        self._text += text
        return self._event(kind, delta=text, **more)

    def _begin(self, kind: str, **fields: Any) -> list[Event]:
        ended = self._end("completed")
        self._open, self._text, self._logprobs, self._blank = kind, "", [], ""
        item = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress", **fields}
        self.output.append(item)
        added = {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": dict(item)}
        parts = [self._event("response.content_part.added", content_index=0, part=self._part())]
        return [*ended, added, *(parts if kind in (_MESSAGE, _REASONING) else [])]

    def _end(self, status: str) -> list[Event]:
        """The item that is open, if one is, is done."""
        kind = self._open
        if not kind:
            return []
        item, events = self.output[-1], self._done_events(kind)
        item["status"] = status
        match kind:
            case "message":
                item["content"] = [self._part()]
            case "reasoning":
                item["content"] = [self._part()]
                if self._seals:
                    item["encrypted_content"] = sealed(self._text)
            case "function_call":
                item["arguments"] = self._text
            case "tool_search_call":
                item["arguments"] = call_arguments(self._text)
            case "custom_tool_call":
                item["input"] = self._input()
        self._open = ""
        done = {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": dict(item)}
        return [*events, done]

    def _done_events(self, kind: str) -> list[Event]:
        part = {"content_index": 0, "part": self._part()}
        match kind:
            case "message":
                said = {"content_index": 0, "text": self._text, "logprobs": self._logprobs}
                done = self._event("response.output_text.done", **said)
                return [done, self._event("response.content_part.done", **part)]
            case "reasoning":
                done = self._event("response.reasoning_text.done", content_index=0, text=self._text)
                return [done, self._event("response.content_part.done", **part)]
            case "function_call":
                name = self.output[-1]["name"]
                return [self._event("response.function_call_arguments.done", name=name, arguments=self._text)]
            case "tool_search_call":
                return []
            case _:
                done = self._event("response.custom_tool_call_input.done", input=self._input())
                if self._forced is not None:
                    return [done]
                return [self._event("response.custom_tool_call_input.delta", delta=self._input()), done]

    def _input(self) -> str:
        """The input of a custom call: a call that the model wrote has it as the one argument."""
        if self._forced is not None:
            return self._text
        found = call_arguments(self._text)
        return str(found.get(INPUT, self._text))

    def _part(self) -> dict[str, Any]:
        if self._open == _REASONING:
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}

    def _event(self, kind: str, **fields: Any) -> Event:
        index = len(self.output) - 1
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": index, **fields}


def _name(name: str, tool: CallableTool | None) -> dict[str, str]:
    """A tool's own name, and its namespace, if it has one."""
    if tool is None or isinstance(tool.spec, SearchTool) or tool.namespace is None:
        return {"name": name}
    return {"name": tool.spec.name, "namespace": tool.namespace}


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
