"""Chat messages to text and ids through a model's template, in which only the template writes special tokens.

Text from callers stays as it is, and knows what it is (`UserText`). Refuses to know generation and history.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import ParamError, TemplateError
from .budget import TemplateLimits
from .chat_values import ValueLimits, copied_values
from .parse_formats import CallFormat, calls_in
from .pipeline import clean
from .tokenizer import Tokenizer
from .tool_prompt import ToolPrompt
from .user_text import UserText, plain, spans_of

Message = Mapping[str, Any]
_Values = dict[str, Any]
ROLES: Mapping[str, str] = {  # in a request -> in the template
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_OURS = (
    "messages tools documents add_generation_prompt raise_exception strftime_now range dict namespace loop self caller "
    "varargs kwargs context environment bos_token eos_token unk_token pad_token sep_token cls_token mask_token"
)
_RESERVED = frozenset(_OURS.split())
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010fffd]")


class ChatTemplate:
    """One model's template, compiled once; rendering keeps no state, so threads may share it."""

    def __init__(
        self,
        source: str | None,
        named: Mapping[str, str] | None = None,
        special: Mapping[str, int] | None = None,
        limits: TemplateLimits | None = None,
        calls: CallFormat | None = None,
    ) -> None:
        """`named` are the tokens templates know by name (bos_token, ...), `special` the control tokens by text.

        `calls` is how the model's tool calls are read, for templates that know no tools.
        """
        if source is None:
            raise TemplateError("this model has no chat template; use generate with a plain prompt")
        from .sandbox import CompiledTemplate  # jinja2 is loaded by the first template, not by the import

        self._limits = limits or TemplateLimits()
        self._named = dict(named or {})
        self._used = frozenset(_PRIVATE.findall("".join([source, *self._named.values(), *(special or {})])))
        self._compiled = CompiledTemplate(clean(source), self._limits)
        self._source, self._calls = source, calls or calls_in(source, None)[0]

    @cached_property
    def _tool_prompt(self) -> ToolPrompt:
        """How tools reach a model whose template reads none."""
        source = self._source
        refuses = "raise_exception" in source and ("system" not in source or "ystem role not supported" in source)
        return ToolPrompt(self._calls, not refuses, "tool_calls" in source)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, limits: TemplateLimits | None = None, calls: CallFormat | None = None
    ) -> ChatTemplate:
        """The template that came with a tokenizer; TemplateError when none did."""
        return cls(tokenizer.chat_template, tokenizer.named, tokenizer.special, limits, calls)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt as text; other keywords go to the template if it reads them."""
        return plain(self._rendered(self._values(messages, tools, documents, kwargs), add_generation_prompt))

    def render_prompt(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        places: int = 0,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        limit: int | None = None,
        **kwargs: Any,
    ) -> RenderedChat:
        """The prompt, rendered once: its text can be read, and its ids encoded afterwards.

        `documents` are for the template to write. `places` leaves room for so many documents that are encoded by
        themselves: where the template puts documents or, if it reads none, before the last user's content.
        `continue_final_message` ends the prompt with the text of the last message, which the answer goes on with.
        """
        room = ValueLimits.of(self._limits, tokenizer, limit)
        values = self._values(messages, tools, documents, kwargs, room)
        marks = self._marks(values, places + continue_final_message)
        end = marks.pop() if continue_final_message else ""
        if end:
            _mark_end(values["messages"][-1], end)
            add_generation_prompt = False
        if marks:
            rest = self._marked(values, marks, add_generation_prompt)
        else:
            rest = self._rendered(values, add_generation_prompt)
        segments = []
        for mark in marks:
            before, _, rest = rest.partition(mark)
            segments.append(before)
        return RenderedChat.of(tokenizer, [*segments, _before_end(rest, end) if end else rest])

    def _marks(self, values: _Values, count: int) -> list[str]:
        """Characters that stand for places in a prompt: neither the template nor the messages have them."""
        free = _free(self._used.union(*map(_PRIVATE.findall, _strings(values)))) if count else iter(())
        marks = [mark for mark, _ in zip(free, range(count), strict=False)]
        if len(marks) < count:
            raise TemplateError("the messages use every private-use character, so no place in them can be marked")
        return marks

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Message], *, limit: int | None = None, **given: Any
    ) -> list[int]:
        """The prompt as ids: special tokens where the template wrote them, all other text as it is.

        `given` are the keywords of `render_prompt`. More than `limit` ids raise ContextOverflow, before the template
        runs where the messages alone are too long.
        """
        return self.render_prompt(tokenizer, messages, limit=limit, **given).encode(tokenizer, limit)[0]

    def encode_after(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int] | None:
        """The ids after the last assistant's content: a conversation continues with them from generated ids.

        None where the template does not show that content exactly once, so that only encoding everything will do.
        """
        values = self._values(messages, tools, documents, kwargs)
        spoken = [message for message in values["messages"] if message["role"] == "assistant"]
        if not spoken:
            raise TemplateError("there is no assistant message yet that the conversation could go on after")
        mark = next(_free(self._used.union(*map(_PRIVATE.findall, _strings(values)))), None)
        if mark is None:
            return None
        spoken[-1]["content"] = mark  # in our own copy
        _, *after = self._rendered(values, add_generation_prompt).split(mark)
        parts = _parts(tokenizer, after[0]) if len(after) == 1 else None
        # Plain text right after an answer would get the space that this tokenizer puts before a text of its own.
        if parts is None or (tokenizer.drops_space and parts and isinstance(parts[0], str)):
            return None
        return tokenizer.encode_parts(["", *parts])  # the first part is not the beginning of a text

    def encode_around(
        self, tokenizer: Tokenizer, messages: Sequence[Message], places: int, *, limit: int | None = None, **given: Any
    ) -> list[list[int]]:
        """The ids before, between and after so many documents; `limit` as in `encode`, for each part."""
        rendered = self.render_prompt(tokenizer, messages, places=places, limit=limit, **given)
        return rendered.encode(tokenizer, limit)

    def _marked(self, values: _Values, marks: Sequence[str], add_generation_prompt: bool) -> str:
        """The rendered conversation with a mark for each document, each once and in order."""
        if "documents" in self._compiled.variables:
            own = {**values, "documents": [{"title": "", "text": mark, "content": mark} for mark in marks]}
            text = self._rendered(own, add_generation_prompt)
            if _found(text, marks) == list(marks):
                return text
        asked = [message for message in values["messages"] if message["role"] == "user"]
        if not asked or not isinstance(asked[-1].get("content"), str):
            raise TemplateError("documents stand before the last user message, which must be there and be a text")
        asked[-1]["content"] = "".join(f"{mark}\n" for mark in marks) + asked[-1]["content"]  # in our own copy
        text = self._rendered(values, add_generation_prompt)
        if _found(text, marks) != list(marks):
            raise TemplateError("the chat template does not show the last user message as it is")
        return text

    def _values(
        self,
        messages: Sequence[Message],
        tools: Any,
        documents: Any,
        kwargs: Mapping[str, Any],
        room: ValueLimits | None = None,
    ) -> _Values:
        """What the template will see, checked and copied."""
        self._check_keywords(kwargs)
        values = {
            **kwargs,
            "messages": _checked_messages(messages),
            "tools": _checked_objects(tools, "tools"),
            "documents": _checked_objects(documents, "documents"),
        }
        copied = copied_values(values, room or ValueLimits.of(self._limits))
        if "tools" not in self._compiled.variables and _uses_tools(copied):
            copied["messages"] = self._tool_prompt.messages(copied["messages"], copied["tools"])
        return copied

    def _rendered(self, values: _Values, add_generation_prompt: bool) -> str:
        """What the template writes; the spans of a `UserText` are the caller's."""
        own = {name: _mapped(value, UserText) for name, value in values.items()}
        return self._compiled.render({**self._named, **own, "add_generation_prompt": bool(add_generation_prompt)})

    def options_read(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords that the template reads, of those that a caller sends to any model; names are checked."""
        if not isinstance(kwargs, Mapping):
            raise ParamError("chat_template_kwargs", f"must be an object, not {type(kwargs).__name__}")
        if (refused := next(filter(self._is_ours, kwargs), None)) is not None:
            raise ParamError("chat_template_kwargs", f"{str(refused)[:64]!r} is set by kvilt, or is no variable's name")
        return {name: value for name, value in kwargs.items() if name in self._compiled.variables}

    def _is_ours(self, name: object) -> bool:
        """Whether a caller cannot set this name."""
        known = isinstance(name, str) and name.isidentifier()
        return not known or name in _RESERVED or name in self._named or str(name).startswith("_")

    def _check_keywords(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if self._is_ours(name):
                raise TemplateError(f"{name!r} is set by kvilt and cannot be given to the chat template")
            if name not in self._compiled.variables:
                known = ", ".join(sorted(self._compiled.variables - _RESERVED)) or "none"
                raise TemplateError(f"the chat template does not read {name!r}; the options it reads are: {known}")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation rendered by its template: the text of the prompt, and the parts that are tokenized."""

    text: str  # without the documents that are encoded by themselves
    segments: tuple[tuple[str | int, ...], ...]  # text and special tokens around the places of these documents

    @classmethod
    def of(cls, tokenizer: Tokenizer, texts: Sequence[str]) -> RenderedChat:
        return cls("".join(map(plain, texts)), tuple(tuple(_parts(tokenizer, text)) for text in texts))

    def encode(self, tokenizer: Tokenizer, limit: int | None = None) -> list[list[int]]:
        """The ids of each segment; a segment of more than `limit` ids raises ContextOverflow."""
        first, *others = self.segments
        # The empty part says that what follows is not the beginning of a text.
        return [tokenizer.encode_parts(parts, limit=limit) for parts in (first, *(("", *each) for each in others))]


def _uses_tools(values: _Values) -> bool:
    return bool(values["tools"]) or any(one["role"] == "tool" or "tool_calls" in one for one in values["messages"])


def _parts(tokenizer: Tokenizer, text: str) -> list[str | int]:
    """Rendered text cut at the special tokens that the template wrote."""
    return tokenizer.texts.split(plain(text), spans_of(text))


def _mark_end(message: dict[str, Any], mark: str) -> None:
    """Put a mark behind the text of an assistant's message."""
    if message["role"] != "assistant" or not isinstance(message.get("content"), str) or message.get("tool_calls"):
        raise TemplateError("only a last message of the assistant that is a text can be continued")
    message["content"] += mark


def _before_end(text: str, mark: str) -> str:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise TemplateError("the chat template does not show the last message as it is, so it cannot be continued")
    return before


def _found(text: str, marks: Sequence[str]) -> list[str]:
    """The marks in a text, in its order."""
    return re.findall(f"[{re.escape(''.join(marks))}]", text) if marks else []


def _free(taken: frozenset[str]) -> Iterator[str]:
    """Private-use characters that neither the messages nor the template use."""
    for block in (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)):
        yield from (chr(code) for code in block if chr(code) not in taken)


def _strings(value: Any) -> Iterator[str]:
    """Every text that a user may have written, including keys; roles are left out, because they are checked words."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from () if _is_role(key, inner) else _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): inner if _is_role(key, inner) else _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return value


def _is_role(key: str, value: Any) -> bool:
    """A role is one of a few words that were checked, and templates build special tokens around it."""
    return key == "role" and isinstance(value, str) and value in ROLES


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with a known role each, and reasoning under every name templates use for it."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TemplateError("messages must be a list of objects with a role and a content")
    if not messages:
        raise TemplateError("messages is empty; give at least one message")
    found = []
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in ROLES:
            raise TemplateError(f"messages[{i}] must be an object whose role is one of {', '.join(ROLES)}")
        reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        aliases = {} if reasoning is None else {"thinking": reasoning}
        found.append({**aliases, **message, "role": ROLES[role]})
        if reasoning is not None:
            found[-1]["reasoning_content"] = reasoning
    return found


def _checked_objects(values: Any, name: str) -> list[Any] | None:
    if values is None:
        return None
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise TemplateError(f"{name} must be a list of objects")
    if not all(isinstance(value, Mapping) for value in values):
        raise TemplateError(f"{name} must hold objects")
    return list(values)
