"""Errors of one request: what a step contains, and what must go through it.

A step runs code of many requests: samplers, grammars, listeners, drafters, documents. What such code raises ends
only its own request. Refuses to know requests and steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ..errors import Cancelled, KviltError

_log = logging.getLogger(__name__)
T = TypeVar("T")

# These are not errors of a request: the caller of the step caused them.
INTERRUPTS = (Cancelled, KeyboardInterrupt, SystemExit, GeneratorExit)


class CallbackFailed(KviltError):
    """Code that runs for one request failed with something that is no ordinary exception, such as a native panic."""


def contained(error: BaseException) -> Exception:
    """The error as one of a single request; raises it again if it concerns the whole step."""
    if isinstance(error, INTERRUPTS):
        raise error
    if not isinstance(error, KviltError):  # not the client's mistake: the log must lead to the place
        _log.error("a request failed in a way it should not", exc_info=error)
    if isinstance(error, Exception):
        return error
    failed = CallbackFailed(f"{type(error).__name__}: {str(error)[:200]}")
    failed.__cause__ = error
    return failed


def quietly(action: Callable[[], T], otherwise: T) -> T:
    """The result of an action that must not stop the caller; failures are only logged."""
    try:
        return action()
    except BaseException as error:
        if isinstance(contained(error), KviltError):  # others are logged by now
            _log.warning("%s: %s", type(error).__name__, error)
        return otherwise
