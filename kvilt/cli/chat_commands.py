"""The slash commands of `kvilt chat`: one function each, and the table that names them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from ..errors import InputError
from .chat_session import ChatSession, count, mebibytes, names, size, statistics

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Command:
    """The usage line of a command, its help, and its function."""

    usage: str
    does: str
    run: Callable[[ChatSession, str], str]


def run(session: ChatSession, name: str, rest: str) -> str:
    """Run a command; returns what is shown."""
    command = COMMANDS.get(_OTHER_NAMES.get(name, name))
    if command is None:
        raise InputError(f'there is no command /{name}; /help lists them, and """ around a text sends it as it is')
    return command.run(session, rest)


def _help(_session: ChatSession, _rest: str) -> str:
    rows = [(command.usage, command.does) for command in COMMANDS.values()]
    keys = [
        ('"""', "begins and ends a text of many lines"),
        ("Ctrl+C", "stops an answer and keeps what it said"),
    ]
    return "\n".join(f"{written:<16}{does}" for written, does in rows + keys)


def _leave(_session: ChatSession, _rest: str) -> str:
    raise EOFError  # as the end of the input


def _clear(session: ChatSession, _rest: str) -> str:
    session.conversation.clear()
    return "a new chat" + (" with the same system message" if session.conversation.system else "")


def _system(session: ChatSession, rest: str) -> str:
    if not rest:
        return session.conversation.system or "there is no system message; /system TEXT sets one"
    session.conversation.restart("" if rest == "-" else rest)
    return "a new chat " + ("without a system message" if rest == "-" else "with this system message")


def _save(session: ChatSession, rest: str) -> str:
    name = _name(rest, "/save")
    written_bytes, cost = _measured(session, lambda: session.save(name))
    return f"saved {name} · {size(session.conversation)}, {mebibytes(written_bytes)} · {cost}"


def _load(session: ChatSession, rest: str) -> str:
    if not rest:
        return names(session)
    loaded, cost = _measured(session, lambda: session.load(rest))
    again = "\nits KV was made with other numerics, so it was computed again" if loaded.computed else ""
    return f"loaded {rest} · {size(loaded.conversation)} · {cost}{again}{_lost(session)}"


def _fork(session: ChatSession, rest: str) -> str:
    name = _name(rest, "/fork")
    _, cost = _measured(session, lambda: session.branch(name))
    return f"forked {name} · {size(session.conversation)} · {cost}"


def _undo(session: ChatSession, _rest: str) -> str:
    turn, cost = _measured(session, session.conversation.undo)
    return f'took back "{_short(turn.user)}" · {size(session.conversation)} left · {cost}{_lost(session)}'


def _stats(session: ChatSession, _rest: str) -> str:
    return statistics(session)


def _model(session: ChatSession, rest: str) -> str:
    if rest:
        session.change_model(rest)
    spec = session.llm.executor.spec
    begun = " · a new chat" if rest else ""
    return f"{session.label} · {spec.family}, {len(spec.layers)} layers{begun}"


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "help": Command("/help", "shows this", _help),
        "undo": Command("/undo", "takes the last question and its answer back", _undo),
        "fork": Command("/fork NAME", "keeps the chat as it is now as a branch, and goes on", _fork),
        "save": Command("/save NAME", "writes the chat with its KV to disk", _save),
        "load": Command("/load [NAME]", "goes on with a branch or a saved chat, or lists them", _load),
        "clear": Command("/clear", "begins a new chat", _clear),
        "system": Command("/system [TEXT]", "begins a new chat with a system message; - for none", _system),
        "stats": Command("/stats", "shows tokens, KV and memory", _stats),
        "model": Command("/model [NAME]", "names the model, or begins a new chat with another", _model),
        "bye": Command("/bye", "leaves, as /exit, /quit and Ctrl+D do", _leave),
    }
)
_OTHER_NAMES: Mapping[str, str] = MappingProxyType({"exit": "bye", "quit": "bye"})


def _name(rest: str, command: str) -> str:
    if not rest:
        raise InputError(f"{command} needs a name, for example {command} draft")
    return rest


def _measured(session: ChatSession, verb: Callable[[], T]) -> tuple[T, str]:
    """The result of `verb`, and its cost in computed tokens (as the executor counts them) and time."""
    before, started_s = session.computed, time.perf_counter()
    result = verb()
    spent_s = time.perf_counter() - started_s
    return result, f"{count(session.computed - before, 'token')} computed · {_duration(spent_s)}"


def _lost(session: ChatSession) -> str:
    """A warning where KV was lost. One missing token is normal: the last token of an answer was never an input."""
    missing = session.conversation.missing
    return f"\nits KV could not be kept: the next answer computes {missing:,} tokens again" if missing > 1 else ""


def _duration(time_s: float) -> str:
    if time_s >= 1:
        return f"{time_s:.1f} s"
    return f"{time_s * 1000:.0f} ms" if time_s >= 0.01 else f"{time_s * 1000:.1f} ms"


def _short(text: str, most: int = 24) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"
