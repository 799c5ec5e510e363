"""Tools of a request, and what they are as functions of the internal request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from ..http.schema import RequestModel
from ..openai.fields import Text, ToolName

IGNORED = "Accepted without effect."
INPUT = "input"  # the only parameter of a custom tool
SEARCH = "tool_search"  # the name of the search for tools, as the model calls it
_LISTED = "Accepted without effect: the prompt lists the tool."


class FunctionTool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Accepted without effect: forced calls always follow their schema.")
    defer_loading: bool | None = Field(None, description=_LISTED)
    output_schema: dict[str, Any] | None = Field(None, description=IGNORED)


class FreeInput(RequestModel):
    """Any text."""

    type: Literal["text"]


class GrammarInput(RequestModel):
    """Text that a grammar derives."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Text


class CustomToolSpec(RequestModel):
    """A tool whose input is text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[FreeInput | GrammarInput, Field(discriminator="type")] | None = None
    defer_loading: bool | None = Field(None, description=_LISTED)


class NamespaceTool(RequestModel):
    """Tools that share a namespace; the model knows them as `namespace.name`."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = Field(None, description=IGNORED)
    tools: Annotated[
        list[Annotated[FunctionTool | CustomToolSpec, Field(discriminator="type")]],
        Field(max_length=1024, fail_fast=True),
    ]


class SearchTool(RequestModel):
    """A search for more tools that the client runs."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OtherTool(RequestModel):
    """A tool of a kind that this server does not run; it is skipped with a warning."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: Annotated[str, Field(min_length=1, max_length=256)]


def _tool_tag(value: Any) -> str:
    kind = _field(value, "type")
    if kind == SEARCH:
        return SEARCH if _field(value, "execution") == "client" else "other"
    return kind if kind in ("function", "custom", "namespace") else "other"


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomToolSpec, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[SearchTool, Tag("tool_search")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_tool_tag),
]
ResponseTools = Annotated[list[ResponseTool], Field(max_length=1024, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that the model may call."""

    spec: FunctionTool | CustomToolSpec | SearchTool
    namespace: str | None = None

    @property
    def name(self) -> str:
        """Its name in the prompt and in calls of the model."""
        return SEARCH if isinstance(self.spec, SearchTool) else qualified(self.spec.name, self.namespace)

    def function(self) -> dict[str, Any]:
        """The tool of the internal request."""
        described = self.spec.description
        if isinstance(self.spec, CustomToolSpec):
            described, parameters = _custom_description(self.spec), _CUSTOM_PARAMETERS
        else:
            parameters = self.spec.parameters
        fields = {"name": self.name, "description": described, "parameters": parameters}
        return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


_CUSTOM_PARAMETERS: dict[str, Any] | None = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
}


def qualified(name: str, namespace: str | None) -> str:
    """The name of a tool in the prompt."""
    return name if namespace is None else f"{namespace}.{name}"


def callable_tools(tools: Iterable[Any]) -> Iterator[CallableTool]:
    """The tools that the model may call; those of other kinds are left out."""
    for tool in tools:
        match tool:
            case FunctionTool() | CustomToolSpec() | SearchTool():
                yield CallableTool(tool)
            case NamespaceTool(name=namespace, tools=inner):
                yield from (CallableTool(one, namespace) for one in inner)


def _custom_description(tool: CustomToolSpec) -> str | None:
    told = [tool.description or ""]
    if isinstance(tool.format, GrammarInput):
        told.append(f"The input must match this grammar ({tool.format.syntax}):\n{tool.format.definition}")
    return "\n\n".join(filter(None, told)) or None
