"""The arguments of each tool; what is not named here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Handle = Annotated[str, Field(max_length=256, description="The id of a KV handle.")]
SavedName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$", description="Letters, digits, - and _; up to 100.")
]
Seconds = Annotated[float, Field(gt=0, description="Seconds until the handle expires.")]
Documents = Annotated[list[str], Field(min_length=1, max_length=1024, description="One text for each document.")]


class ToolArguments(BaseModel):
    """What the arguments of all tools share: unknown names are refused, and values have the type that they are."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NoArguments(ToolArguments):
    """A tool without arguments."""


class ChatToolMessage(ToolArguments):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


Turns = Annotated[list[ChatToolMessage], Field(min_length=1, max_length=2048)]


class SamplingArguments(ToolArguments):
    """How an answer is generated."""

    max_tokens: int = Field(512, ge=1, description="The most tokens of the answer.")
    temperature: float | None = Field(None, ge=0, le=100, description="0, the default, is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, description="The same seed gives the same answer.")
    stop: list[str] | None = Field(None, max_length=64, description="Texts that end the answer.")
    json_schema: dict[str, Any] | None = Field(None, description="A JSON schema that the answer follows.")
    keep_kv: bool = Field(False, description="Keep the KV of prompt and answer as a new handle.")

    def fields(self) -> dict[str, Any]:
        """The keywords of `AsyncLLM.generate`."""
        names = SamplingArguments.model_fields
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}


class GenerateArguments(SamplingArguments):
    """A text to continue."""

    prompt: str = Field(description="The text that the model continues.")
    kv: Handle | None = Field(None, description="A KV handle whose tokens the prompt continues.")


class ChatArguments(SamplingArguments):
    """A conversation to answer."""

    messages: Turns = Field(description="The conversation; the last message is the user's.")
    kv: Handle | None = Field(None, description="A KV handle whose tokens the conversation begins with.")


class BlendArguments(SamplingArguments):
    """A question about documents."""

    documents: Documents
    question: str
    system: str | None = Field(None, description="Instructions for the answer.")
    ratio: float | None = Field(None, ge=0, le=1, description="The share of the documents' tokens to compute again.")
    strategy: str | None = Field(None, description="How these tokens are selected.")


class WarmArguments(ToolArguments):
    """Documents to store."""

    documents: Documents


class CreateArguments(ToolArguments):
    """A prompt, or the first messages of a conversation, whose KV is kept."""

    prompt: str | None = None
    messages: Turns | None = None
    ttl_s: Seconds | None = None


class HandleArguments(ToolArguments):
    """One handle."""

    kv: Handle


class ForkArguments(HandleArguments):
    """A handle to fork."""

    ttl_s: Seconds | None = None


class TruncateArguments(HandleArguments):
    """A handle to shorten."""

    length: int = Field(ge=0, description="The number of tokens that stay.")


class PinArguments(HandleArguments):
    """A handle to keep longer."""

    ttl_s: Seconds


class SaveArguments(HandleArguments):
    """A handle to write to a file."""

    name: SavedName


class RestoreArguments(ToolArguments):
    """A file to read."""

    name: SavedName
    ttl_s: Seconds | None = None
