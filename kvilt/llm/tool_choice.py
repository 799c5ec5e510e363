"""Which tools a chat may or must call, for the facades: lists of tools as schemas, and the grammar of a forced call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ParamError
from ..sampling.params import SamplingParams
from ..text.parse import Tools
from .model import Chat, Model
from .python_tools import Tool, tool_schemas


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a prompt lists, and the sampling that leaves the model no other answer than a call, if it must."""

    tools: Tools | None
    params: SamplingParams


def tool_use(
    model: Model,
    messages: Chat,
    params: SamplingParams,
    tools: Sequence[Tool] | None,
    choice: str,
    template_kwargs: Mapping[str, Any] | None,
) -> ToolUse:
    """`choice` is "auto", "none", "required", or the name of the tool that must be called."""
    listed = tool_schemas(tools)
    if choice == "none" or (not listed and choice == "auto"):
        return ToolUse(None, params)
    if not listed:
        raise ParamError("tool_choice", f"{choice!r} asks for a call, and there are no tools")
    if choice == "auto":
        return ToolUse(listed, params)
    known = [str(one.get("function", one).get("name")) for one in listed]
    if choice != "required" and choice not in known:
        raise ParamError("tool_choice", f"is auto, none, required or one of {', '.join(known)}, not {choice!r}")
    if params.grammar is not None:
        raise ParamError("tool_choice", "cannot force a call beside another grammar; drop one of them")
    prompt = None
    if model.parser.thinking is not None:  # whether reasoning is open already stands at the end of the prompt
        prompt = model.render_chat(messages, listed, template_kwargs=template_kwargs).text
    names = None if choice == "required" else [choice]
    lark = model.parser.tool_grammar(listed, names, names is None, prompt)
    return ToolUse(listed, SamplingParams.of(params, lark=lark))
