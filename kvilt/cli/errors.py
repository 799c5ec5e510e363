"""Errors in a terminal: one sentence and an exit code, 2 for a value that the user can correct, 1 for the rest."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import InputError, KviltError

USAGE, FAILURE, INTERRUPTED = 2, 1, 130


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Run a command's body; a known error becomes a sentence on stderr instead of a traceback."""
    try:
        yield
    except KviltError as error:
        _exit(str(error), USAGE if isinstance(error, InputError) else FAILURE)
    except KeyboardInterrupt:
        _exit("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our pipe has closed it. Python must not report that again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(FAILURE) from None
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _exit(f"{error.strerror or error}{where}", FAILURE)


def _exit(sentence: str, code: int) -> None:
    print(f"kvilt: {sentence}", file=sys.stderr)
    raise SystemExit(code)
