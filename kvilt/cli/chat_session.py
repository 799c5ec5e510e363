"""The state of `kvilt chat`: a model, the current conversation, and its branches.

It knows files and numbers. It does not know the terminal and the names of commands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import cache_home
from ..executor.counters import TOKENS
from ..llm import LLM, load
from ..llm.chat_record import chat_path, saved_chats
from ..llm.conversation import Conversation, LoadedConversation
from ..sampling.params import SamplingParams
from .progress import bars
from .run import speed
from .sampling import describe_params, repetition_hint, sampling_params


@dataclass(slots=True)
class ChatSession:
    """Owns the model and every conversation; close it at the end."""

    model: str
    llm: LLM
    sampling: dict[str, Any]  # the given options
    config: dict[str, Any]
    conversation: Conversation
    branches: dict[str, Conversation] = field(default_factory=dict)
    reused: int = 0

    @classmethod
    def open(
        cls,
        model: str,
        sampling: dict[str, Any],
        config: dict[str, Any],
        system: str,
        template: dict[str, Any] | None = None,
    ) -> ChatSession:
        """A new chat with a model; `template` are variables of its chat template."""
        llm = _load(model, config)
        return cls(model, llm, sampling, config, Conversation(llm, system, template_kwargs=template))

    @property
    def params(self) -> SamplingParams:
        """The sampling params for this model."""
        return sampling_params(self.sampling, self.llm)

    @property
    def label(self) -> str:
        """A short name of the model: the last part of a path."""
        return Path(self.model).name if Path(self.model).exists() else self.model

    @property
    def computed(self) -> int:
        """Tokens that the executor has computed since the model was loaded."""
        series = self.llm.executor.metrics.snapshot()[TOKENS.name]["series"]
        return int(sum(point["value"] for point in series))

    def switch(self, conversation: Conversation) -> None:
        """Continue with another conversation."""
        self.conversation.close()
        self.conversation = conversation

    def branch(self, name: str) -> None:
        """Keep a fork of the conversation under a name."""
        chat_path(chats_folder(), name)  # names of branches follow the rule of saved chats
        if (before := self.branches.pop(name, None)) is not None:
            before.close()
        self.branches[name] = self.conversation.fork()

    def save(self, name: str) -> int:
        """Write the conversation to disk; returns its size in bytes."""
        path = chat_path(chats_folder(), name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.conversation.save(path, self.label)

    def load(self, name: str) -> LoadedConversation:
        """Continue with a branch, or with a saved conversation if no branch has this name."""
        if (branch := self.branches.get(name)) is not None:
            loaded = LoadedConversation(branch.fork(), 0)
        else:
            loaded = Conversation.load(self.llm, chat_path(chats_folder(), name))
            loaded.conversation.template_kwargs = self.conversation.template_kwargs
        self.switch(loaded.conversation)
        return loaded

    def change_model(self, model: str) -> None:
        """Start a new chat with another model; if it cannot be loaded, nothing changes."""
        llm = _load(model, self.config)
        system, template = self.conversation.system, self.conversation.template_kwargs
        self.close()
        self.model, self.llm, self.reused = model, llm, 0
        self.branches = {}
        self.conversation = Conversation(llm, system, template_kwargs=template)

    def close(self) -> None:
        """Release the KV and the model's files."""
        for conversation in (self.conversation, *self.branches.values()):
            conversation.close()
        self.llm.close()


def chats_folder() -> Path:
    """The folder of saved chats."""
    return cache_home() / "chats"


def history_file() -> Path:
    """The file of typed lines."""
    return cache_home() / "chat_history"


def names(session: ChatSession) -> str:
    """The names that `/load` accepts."""
    lines = [
        f"{title:<9} {', '.join(found)}"
        for title, found in (("branches", sorted(session.branches)), ("saved", saved_chats(chats_folder())))
        if found
    ]
    return "\n".join(lines) or "there is nothing to load yet; /save NAME and /fork NAME make something"


def numbers(session: ChatSession) -> str:
    """The line of numbers under an answer."""
    conversation, done = session.conversation, session.conversation.last
    if done is None or not done.token_ids:
        return "stopped before the first token; the question was taken back"
    limit = session.llm.executor.max_context
    used = len(conversation.ids)
    parts = [
        count(len(done.token_ids), "token"),
        f"{speed(done):.1f} tok/s",
        f"first token {done.timing.first_token_s:.2f} s",
        f"context {min(used, limit):,} of {limit:,}",
        f"{done.usage.cached_tokens:,} reused",
    ]
    if done.usage.drafted_tokens:
        parts.append(f"{done.usage.accepted_tokens:,} of {done.usage.drafted_tokens:,} drafts accepted")
    if done.finish_reason == "cancelled":
        parts.append("stopped")
    elif done.finish_reason == "repetition":
        parts.append(repetition_hint(session.params))
    elif done.finish_reason == "length":
        parts.append("the context is full: /undo or /clear" if used > limit else "cut off by --max-tokens")
    return " · ".join(parts)


def statistics(session: ChatSession) -> str:
    """What `/stats` shows."""
    executor, conversation = session.llm.executor, session.conversation
    usage = executor.pool.usage()
    lines = [
        ("model", f"{session.label} · {executor.spec.family}, {len(executor.spec.layers)} layers"),
        ("chat", f"{size(conversation)} of {executor.max_context:,} · KV {mebibytes(conversation.kv_bytes)}"),
        ("work", f"{count(session.computed, 'token')} computed · {session.reused:,} reused"),
        *(("branch", f"{name} · {size(branch)}") for name, branch in sorted(session.branches.items())),
        ("draws", describe_params(session.params, session.llm)),
        ("memory", f"{usage.used:,} of {usage.total:,} KV pages · {usage.shared:,} shared"),
    ]
    return "\n".join(f"{title:<7} {text}" for title, text in lines)


def size(conversation: Conversation) -> str:
    """How long a conversation is."""
    return f"{count(len(conversation.turns), 'turn')}, {count(len(conversation.ids), 'token')}"


def count(number: int, thing: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def mebibytes(number: int) -> str:
    return f"{number / (1 << 20):.1f} MiB"


def _load(model: str, config: dict[str, Any]) -> LLM:
    """A model with a chat template."""
    with bars() as shown:
        llm = load(model, on_fetch=shown.fetching, **config)
    try:
        _ = llm.chat_template  # raises now if there is none, not at the first question
    except BaseException:
        llm.close()
        raise
    return llm
