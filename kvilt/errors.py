"""Every error kvilt raises on purpose, as one tree.

Each message says what was asked, what is possible, and what to do. Nothing here knows HTTP or exit codes. `renamed`
warns of names that changed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class KviltError(Exception):
    """The root: catching it catches everything kvilt raises on purpose."""


class Unsupported(KviltError):
    """Something real that this build, model or backend does not do."""


class InputError(KviltError, ValueError):
    """The caller's input cannot be used as it is."""


class ParamError(InputError):
    """A sampling or configuration field has a value it cannot have."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ContextOverflow(InputError):
    """A sequence does not fit; `setting` names what limits it, `max_context` or `kv_memory`."""

    def __init__(self, tokens: int, limit: int, setting: str = "max_context", *, at_least: bool = False) -> None:
        """`at_least`: the rest of the text was not counted."""
        holder = "the KV memory" if setting == "kv_memory" else "the context"
        needed = f"at least {tokens}" if at_least else f"{tokens}"
        super().__init__(
            f"room for {needed} tokens is needed and {holder} holds {limit}; shorten the prompt or raise {setting}"
        )
        self.tokens = tokens
        self.limit = limit
        self.setting = setting


class AdapterUnknown(InputError):
    """No loaded adapter has that id or name."""

    def __init__(self, which: object) -> None:
        super().__init__(f"there is no LoRA adapter {f'{which!r}'[:80]}; load it first")
        self.which = which


class TokenizerError(KviltError):
    """A tokenizer definition is damaged or of a kind kvilt does not know."""


class TemplateError(InputError):
    """A chat template is broken, refuses these messages, or went over its limits."""


class WeightError(KviltError):
    """A checkpoint is damaged, incomplete or not what it claims; `field` names the part that gave it away."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ModelNotFound(KviltError):
    """No model answers to that name or path, or it cannot be fetched now."""


class ModelClosed(KviltError):
    """The model was closed; its caches can still be looked at and closed."""

    def __init__(self) -> None:
        super().__init__("this model is closed; run it, and save its KV caches, before closing it")


class DeviceMemoryError(KviltError):
    """A device has too little free memory for what was asked of it; whatever was there before still is."""

    def __init__(self, what: str, asked_bytes: int | None, free_bytes: int, total_bytes: int) -> None:
        asked = "more memory" if asked_bytes is None else f"{asked_bytes >> 20:,} MiB"
        super().__init__(
            f"{what} needs {asked}, and {free_bytes >> 20:,} of the device's {total_bytes >> 20:,} MiB are free; "
            "lower gpu_memory, max_context or step_tokens, use fewer rows, or free the device for this process"
        )
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes


class KVError(KviltError):
    """A KV cache cannot do what was asked; it is unchanged."""


class CacheClosed(KVError):
    """The handle was closed; its pages belong to others now."""

    def __init__(self) -> None:
        super().__init__("this KV cache is closed; create, fork or load another one")


class PoolExhausted(KVError):
    """The page pool has fewer free pages than a step needs."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"{needed} more KV pages are needed and {free} of {total} are free; "
            "close caches you no longer need or raise kv_memory"
        )
        self.needed = needed
        self.free = free
        self.total = total


class TruncateError(KVError, ValueError):
    """A truncate asks for a length the cache cannot go back (or grow) to."""

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


class LayoutMismatch(KVError):
    """Two caches, or a cache and a blob, hold KV of different shapes."""


class BlobError(KVError):
    """A serialized cache is foreign, damaged or too large; `field` names the part that gave it away."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class StoreError(KVError):
    """The KV store could not keep a record or give it; `reason` is one word, for tests and metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class StoreMiss(StoreError):
    """A record is not there, not in time, or not to be trusted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "the store cannot give this KV; compute it from its tokens")


class Cancelled(KviltError):
    """The running call was cancelled; caches stand at their last committed length and stay usable."""

    def __init__(self, tokens: Sequence[Sequence[int]] = ()) -> None:
        done = sum(len(row) for row in tokens)
        super().__init__(f"cancelled after {done} sampled tokens; the KV cache is at its last committed length")
        self.tokens = [list(row) for row in tokens]


class NumericsError(KviltError):
    """Some rows of a batch have logits that no token can be chosen from; the other rows are fine."""

    def __init__(self, rows: Sequence[int]) -> None:
        named = ", ".join(str(row) for row in rows)
        super().__init__(
            f"the logits of row {named} are NaN, infinite or empty; "
            "drop these rows and sample the others again, and check the weights"
        )
        self.rows = tuple(rows)


class NoTokenLeft(InputError):
    """Some rows of a batch ban every token they could draw; the other rows are fine."""

    def __init__(self, rows: Sequence[int]) -> None:
        named = ", ".join(str(row) for row in rows)
        super().__init__(
            f"row {named} may draw no token at all: no_repeat_ngram_size, bad words, min_tokens and the grammar "
            "together ban every one; loosen one of them"
        )
        self.rows = tuple(rows)


class GrammarError(InputError):
    """A constraint on the output is broken or nothing satisfies it; `where` names the place inside it."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where


class GrammarUnsupported(GrammarError, Unsupported):
    """A constraint asks for something that kvilt does not enforce; `keyword` names it."""

    def __init__(self, where: str, keyword: str, message: str) -> None:
        super().__init__(where, message)
        self.keyword = keyword


class GrammarTooLarge(GrammarError):
    """A constraint is over a limit on its size, or would take too long to enforce."""


class GrammarFailed(KviltError):
    """The grammars of some rows went over their limits while they were followed; the other rows are fine."""

    def __init__(self, rows: Sequence[int], reason: str) -> None:
        named = ", ".join(str(row) for row in rows)
        super().__init__(
            f"the grammar of row {named} went over its limits ({reason}); "
            "drop these rows and sample the others again, and simplify the grammar"
        )
        self.rows = tuple(rows)
        self.reason = reason


class CompilerFailed(KviltError):
    """The process that compiles grammars cannot be used; this is no fault of the grammar."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the process that compiles grammars {what}; structured output needs it, so try again later")


class QueueFull(KviltError):
    """Too many requests wait already."""

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(f"{waiting} requests wait and {limit} may; try again later")
        self.waiting = waiting
        self.limit = limit


class GrammarQueueFull(QueueFull):
    """Too many grammars wait to be compiled already."""

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(waiting, limit)
        self.args = (f"{waiting} grammars wait to be compiled and {limit} may; try again later",)


class WorkTimeout(KviltError):
    """Reading what a request asks for took longer than it may."""

    def __init__(self, kind: str, limit_s: float) -> None:
        super().__init__(f"this took longer than {limit_s:g} s ({kind}) and was ended; send less, or ask again later")
        self.kind = kind
        self.limit_s = limit_s


class Draining(KviltError):
    """The engine finishes what it has and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("this model is being shut down and takes no more requests; ask another one")


class StepHung(KviltError):
    """A step took longer than `step_timeout_s`, and its requests were failed."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"a step took more than {limit_s:g} s and was given up; try again, with less at once")
        self.limit_s = limit_s


class RankFailed(KviltError):
    """A process that holds a part of the model (tensor parallelism) is gone; nothing runs any more."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; load the model again, or restart the server")


class HandleError(InputError):
    """A named KV handle cannot be used as asked; `handle` is its id."""

    def __init__(self, handle: str, message: str) -> None:
        super().__init__(f"KV handle {handle[:64]!r} {message}")
        self.handle = handle


class HandleUnknown(HandleError):
    """There is no such handle, or another tenant owns it."""

    def __init__(self, handle: str) -> None:
        super().__init__(handle, "does not exist; create one first")


class HandleExpired(HandleError):
    """The handle has expired."""

    def __init__(self, handle: str) -> None:
        super().__init__(handle, "has expired; create it again, or pin it for longer")


class HandleMismatch(HandleError):
    """The prompt does not begin with the handle's tokens; `index` is the first that differs."""

    def __init__(self, handle: str, index: int) -> None:
        super().__init__(handle, f"holds other tokens than the prompt from token {index} on; truncate it to {index}")
        self.index = index


class HandleLimit(KviltError):
    """A tenant has as many handles, or as many pages in them, as it may have."""

    def __init__(self, what: str, asked: int, limit: int) -> None:
        super().__init__(f"{asked} {what} in KV handles were asked for and {limit} are allowed; delete some first")
        self.what = what
        self.asked = asked
        self.limit = limit


class SessionUnknown(InputError):
    """There is no such session, or another tenant owns it, or it has expired."""

    def __init__(self, name: str) -> None:
        super().__init__(f"session {name[:64]!r} does not exist; it was never used, was deleted, or has expired")
        self.name = name


def warn_renamed(old: str, new: str, stacklevel: int = 2) -> None:
    """Warn the caller of a name that works for one more release."""
    said = f"{old} is now {new}; the old name goes in the next release"
    warnings.warn(said, DeprecationWarning, stacklevel=stacklevel + 1)


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` for names that it renamed, from the old to the new: they work for one more release."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", names[name])
        return getattr(sys.modules[module], names[name])

    return find
