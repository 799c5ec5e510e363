"""`kvilt chat` with a model that is loaded here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from ..errors import ContextOverflow, KviltError, ParamError, PoolExhausted
from . import chat_commands as commands
from .chat_input import InputReader, open_input
from .chat_loop import converse, plain_sentence
from .chat_screen import Screen
from .chat_session import ChatSession, count, history_file, numbers
from .sampling import given_params
from .template_options import read_template_options


def chat(
    model: str,
    system: str,
    saved: str,
    sampling: dict[str, Any],
    config: dict[str, Any],
    show_drafts: bool = False,
    template_options: Sequence[str] = (),
) -> bool:
    """Chat until the input ends; False if a command or question from a pipe failed."""
    given_params(sampling)
    template = read_template_options(template_options)
    if show_drafts and config.get("draft") is None:
        raise ParamError("show_drafts", "needs a drafter; add --draft ngram or a draft model")
    screen = Screen(show_drafts)
    with closing(ChatSession.open(model, sampling, config, system, template)) as session:
        if screen.interactive:
            limit = session.llm.executor.max_context
            screen.note(f"{session.label} · {count(limit, 'token')} of context · /help · Ctrl+D leaves")
        if saved:
            screen.note(commands.run(session, "load", saved))
        reader = open_input(screen.interactive, history_file(), [f"/{name}" for name in commands.COMMANDS])
        return _converse(session, screen, reader) or screen.interactive


def _converse(session: ChatSession, screen: Screen, reader: InputReader) -> bool:
    """Run the loop; False if a command or a question failed."""
    return converse(
        screen,
        reader,
        lambda name, rest: commands.run(session, name, rest),
        lambda text: _answer(session, screen, text),
        _sentence,
    )


def _answer(session: ChatSession, screen: Screen, text: str) -> None:
    conversation = session.conversation
    with screen.interruptible(conversation.stop), closing(conversation.say(text, session.params)) as pieces:
        for piece in pieces:
            screen.piece(piece, piece.drafted, piece.reasoning)
    session.reused += conversation.last.usage.cached_tokens if conversation.last else 0
    screen.aside(numbers(session))


def _sentence(error: KviltError | OSError) -> str:
    """The message of an error, with what helps in a chat."""
    if isinstance(error, ContextOverflow):
        return (
            f"the chat would have {error.tokens:,} tokens and {error.setting} allows {error.limit:,}; "
            "/undo or /clear makes room"
        )
    if isinstance(error, PoolExhausted):
        return f"{error}; in a chat, /undo or /clear does that"
    return plain_sentence(error)
