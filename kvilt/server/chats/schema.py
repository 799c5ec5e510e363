"""Requests and answers of the routes of conversations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..http.schema import RequestModel, ResponseModel

Title = Annotated[str, Field(min_length=1, max_length=200)]


class SaveChatRequest(RequestModel):
    """A conversation as the page writes it."""

    title: Title = Field(description="Shown in the list, unless the user has given another one.")
    conversation: Annotated[str, Field(max_length=1 << 26)] = Field(description="JSON, which only the page reads.")
    revision: Annotated[int, Field(ge=0, le=1 << 53)] = Field(description="That the writer has seen; 0: it is new.")


class RenameChatRequest(RequestModel):
    """A title that stays."""

    title: Title


class ChatSummary(ResponseModel):
    """What the list shows of a conversation."""

    id: str
    object: Literal["chat"]
    title: str
    named: bool
    changed_s: float
    revision: int


class ChatObject(ChatSummary):
    """A conversation."""

    conversation: str


class ChatList(ResponseModel):
    """The conversations of a key."""

    object: Literal["list"]
    kept: bool  # whether this server keeps any
    data: list[ChatSummary]
