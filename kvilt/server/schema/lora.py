"""Requests and answers of the routes that load and unload adapters, under vLLM's names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .fields import Shown, Strict

Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadLora(Strict):
    """An adapter to load."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Its PEFT folder, inside the folder that the server's owner named with --lora-dir."
    )


class UnloadLora(Strict):
    """An adapter that nobody new may use; requests in progress go on to their end."""

    lora_name: Name
    lora_int_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class LoraCard(Shown):
    """An adapter."""

    object: Literal["lora"]
    id: str
    lora_int_id: int
    content: str
    rank: int
    targets: list[str]
    bytes: int
    deleted: bool
