"""`kvilt chat` on a server that has the model loaded: its turns are a session there, so each computes its new tokens.

Imports neither torch nor a model. Files of saved chats need a model here, which --no-attach loads.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..config import cache_home
from ..errors import InputError
from .attach import AttachedModel, RemoteAnswer, attached
from .chat_input import open_input
from .chat_loop import converse, plain_sentence
from .chat_screen import Screen

SESSION_TTL_S = 3600


@dataclass(frozen=True, slots=True)
class RemoteTurn:
    """A question and its answer."""

    user: str
    assistant: str


@dataclass(slots=True)
class AttachedChat:
    """The messages of a chat; the server keeps their KV under a session's name, in a tree that finds every branch."""

    model: AttachedModel
    sampling: Mapping[str, Any]  # the given options
    system: str
    template: Mapping[str, Any]
    name: str = field(default_factory=lambda: f"kvilt-chat-{secrets.token_hex(8)}")
    turns: tuple[RemoteTurn, ...] = ()
    branches: dict[str, tuple[str, tuple[RemoteTurn, ...]]] = field(default_factory=dict)
    last: RemoteAnswer | None = None

    def answer(self, screen: Screen, text: str) -> None:
        """Write the answer to a question and keep both; a question without any answer is dropped."""
        body = {
            "messages": [*self._messages(), {"role": "user", "content": text}],
            "session": {"name": self.name, "ttl_s": SESSION_TTL_S, "hint": "will_return"},
            **({"chat_template_kwargs": dict(self.template)} if self.template else {}),
            **self.model.sampling(self.sampling),
        }
        asked = RemoteAnswer(self.model, "/v1/chat/completions", body)
        with screen.interruptible(asked.stop), closing(asked.pieces()) as pieces:  # type: ignore[type-var]
            for piece, reasoning in pieces:
                screen.piece(piece, reasoning=reasoning)
        if asked.text:
            self.turns, self.last = (*self.turns, RemoteTurn(text, asked.text)), asked
            screen.aside(asked.numbers)
        else:
            screen.aside("stopped before the first token; the question was taken back")

    def _messages(self) -> list[dict[str, str]]:
        said = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            said += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
        return said

    def close(self) -> None:
        """Give the session's KV back."""
        self.model.delete(f"/v1/sessions/{self.name}")


def chat_attached(
    model: str, system: str, sampling: Mapping[str, Any], config: Mapping[str, Any], template: Mapping[str, Any]
) -> bool | None:
    """Chat on a running server until the input ends; None where there is none, else as `kvilt chat`."""
    if (found := attached(model, config)) is None:
        return None
    screen = Screen()
    screen.note(f"{found.model.names[0]} · {found.max_context:,} tokens of context · {found.note} · /help")
    with closing(AttachedChat(found, sampling, system, template)) as chat:
        reader = open_input(screen.interactive, cache_home() / "chat_history", [f"/{name}" for name in COMMANDS])
        well = converse(
            screen,
            reader,
            lambda name, rest: run(chat, name, rest),
            lambda text: chat.answer(screen, text),
            plain_sentence,
        )
        return well or screen.interactive


def run(chat: AttachedChat, name: str, rest: str) -> str:
    """Run a command; returns what is shown."""
    name = _OTHER_NAMES.get(name, name)
    if name in _LOADED_HERE:
        raise InputError(f"/{name} needs the model in this process; start the chat with --no-attach")
    if name not in COMMANDS:
        raise InputError(f'there is no command /{name}; /help lists them, and """ around a text sends it as it is')
    return COMMANDS[name][2](chat, rest)


def _help(_chat: AttachedChat, _rest: str) -> str:
    return "\n".join(f"{usage:<16}{does}" for usage, does, _ in COMMANDS.values())


def _leave(_chat: AttachedChat, _rest: str) -> str:
    raise EOFError  # as the end of the input


def _undo(chat: AttachedChat, _rest: str) -> str:
    if not chat.turns:
        raise InputError("there is nothing to undo")
    *before, last = chat.turns
    chat.turns = tuple(before)
    return f'took back "{last.user[:60]}" · {_size(chat)} left'


def _fork(chat: AttachedChat, rest: str) -> str:
    if not rest:
        raise InputError("give a name: /fork NAME")
    chat.branches[rest] = (chat.system, chat.turns)
    return f"forked {rest} · {_size(chat)}"


def _load(chat: AttachedChat, rest: str) -> str:
    if not rest:
        return f"branches  {', '.join(sorted(chat.branches))}" if chat.branches else "/fork NAME makes a branch"
    if rest not in chat.branches:
        raise InputError(f"there is no branch {rest[:60]!r}; saved chats need the model here: --no-attach")
    chat.system, chat.turns = chat.branches[rest]
    return f"loaded {rest} · {_size(chat)}"


def _clear(chat: AttachedChat, _rest: str) -> str:
    chat.turns = ()
    return "a new chat" + (" with the same system message" if chat.system else "")


def _system(chat: AttachedChat, rest: str) -> str:
    if not rest:
        return chat.system or "there is no system message; /system TEXT sets one"
    chat.system, chat.turns = ("" if rest == "-" else rest), ()
    return "a new chat " + ("without a system message" if rest == "-" else "with this system message")


def _stats(chat: AttachedChat, _rest: str) -> str:
    lines = [chat.model.note, f"chat    {_size(chat)}"]
    lines += [f"branch  {name} · {len(turns)} turns" for name, (_, turns) in sorted(chat.branches.items())]
    if chat.last is not None:
        lines.append(f"last    {chat.last.numbers}")
    return "\n".join(lines)


def _size(chat: AttachedChat) -> str:
    return f"{len(chat.turns)} turn{'' if len(chat.turns) == 1 else 's'}"


COMMANDS: Mapping[str, tuple[str, str, Callable[[AttachedChat, str], str]]] = MappingProxyType(
    {
        "help": ("/help", "shows this", _help),
        "undo": ("/undo", "takes the last question and its answer back", _undo),
        "fork": ("/fork NAME", "keeps the chat as it is now as a branch, and goes on", _fork),
        "load": ("/load [NAME]", "goes on with a branch, or lists them", _load),
        "clear": ("/clear", "begins a new chat", _clear),
        "system": ("/system [TEXT]", "begins a new chat with a system message; - for none", _system),
        "stats": ("/stats", "shows the server, the chat and its branches", _stats),
        "bye": ("/bye", "leaves, as /exit, /quit and Ctrl+D do", _leave),
    }
)
_OTHER_NAMES: Mapping[str, str] = MappingProxyType({"exit": "bye", "quit": "bye"})
_LOADED_HERE = ("save", "model")
