"""A session as a value: its requests, its tree of turns, forks, and its file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..engine.sessions.session import SessionInfo, SessionOptions
from ..kv.file import write_whole
from ..sampling.params import SamplingParams
from .completion import Completion, Stream
from .model import Chat, PromptInput
from .options import CallFields

if TYPE_CHECKING:
    from .facade import LLM


class LLMSession:
    """One named session of an `LLM`. What it holds lives with the model, until `delete` or its time is over."""

    def __init__(self, llm: LLM, options: SessionOptions, tenant: str = "") -> None:
        self._llm = llm
        self._tenant = tenant
        self.options = options

    @property
    def name(self) -> str:
        return self.options.name

    def generate(
        self, prompt: PromptInput, params: SamplingParams | None = None, **fields: Unpack[CallFields]
    ) -> Completion:
        """`LLM.generate` for one prompt, as a turn of this session."""
        return self._llm.generate(prompt, params, **self._fields(fields))

    def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **fields: Unpack[CallFields],
    ) -> Completion:
        """`LLM.chat`, as a turn of this session."""
        return self._llm.chat(messages, params, tools=tools, **self._fields(fields))

    def stream_chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **fields: Unpack[CallFields],
    ) -> Stream:
        """`LLM.stream_chat`, as a turn of this session."""
        return self._llm.stream_chat(messages, params, tools=tools, **self._fields(fields))

    def info(self) -> SessionInfo:
        """Its state, with its tree of turns."""
        return self._llm.sessions.info(self._tenant, self.name)

    def fork(self, name: str, turn: str | None = None) -> LLMSession:
        """Another session with the same turns, or with those that lead to one of them."""
        self._llm.sessions.fork(self._tenant, self.name, name, turn)
        return LLMSession(self._llm, replace(self.options, name=name), self._tenant)

    def delete(self) -> None:
        """Forget the session and its KV."""
        self._llm.sessions.delete(self._tenant, self.name)

    def export(self, path: str | os.PathLike[str], kv: bool = True) -> None:
        """Write the session to a file that is whole or not there; with `kv` also its KV."""
        write_whole(Path(path), self._llm.exchange.export(self._tenant, self.name, kv))

    def _fields(self, fields: CallFields) -> CallFields:
        own: CallFields = {**fields, "session": self.options, "tenant": self._tenant}
        return own
