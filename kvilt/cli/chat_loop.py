"""The loop of a chat: reads input, tells commands from questions, until the input ends. Knows no model."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import KviltError
from .chat_input import InputReader, unquoted
from .chat_screen import Screen

# Letters only, so that a question may start with a path.
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


def converse(
    screen: Screen,
    reader: InputReader,
    run: Callable[[str, str], str],
    answer: Callable[[str], None],
    explain: Callable[[KviltError | OSError], str],
) -> bool:
    """Run the loop; False if a command or a question failed.

    `run` carries a command out and returns what is shown, `answer` writes the answer to a question, and `explain` is
    the sentence for an error.
    """
    well, leaving = True, False
    while True:
        try:
            _respond(reader.read(), screen, run, answer)
            leaving = False
        except EOFError:
            return well
        except KeyboardInterrupt:
            if not screen.interactive:
                raise
            if leaving:
                return well
            leaving = True
            screen.note("Ctrl+C again or Ctrl+D leaves")
        except BrokenPipeError:
            raise
        except (KviltError, OSError) as error:
            well = False
            screen.complain(explain(error))


def _respond(text: str, screen: Screen, run: Callable[[str, str], str], answer: Callable[[str], None]) -> None:
    quoted = unquoted(text)
    command = parse(text) if quoted is None else None
    if command is not None:
        screen.note(run(*command))
    elif said := (text if quoted is None else quoted).strip():
        answer(said)


def parse(text: str) -> tuple[str, str] | None:
    """The name and the argument of a command; None for other text."""
    found = _COMMAND.fullmatch(text.strip())
    return None if found is None else (found[1], (found[2] or "").strip())


def plain_sentence(error: KviltError | OSError) -> str:
    """The message of an error."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    return str(error)
