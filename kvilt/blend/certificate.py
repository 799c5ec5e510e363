"""What comparisons have shown about one recipe, as a value, and a file that keeps such values.

The file is plain, versioned and checksummed; where anything about it is in doubt, it is as if it were not there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from ..kv.file import write_whole

_log = logging.getLogger(__name__)
_FORMAT, _VERSION = "kvilt blend certificates", 1
_MOST_BYTES = 4 << 20
_Z = 1.6448536  # of a normal distribution, 95 % lie below so many deviations
RECENT = 32  # comparisons that decide about a recipe: the latest


@dataclass(frozen=True, slots=True)
class Compared:
    """One comparison: a prompt's first token as it was blended, and as a whole prefill has it."""

    kl: float  # KL(whole || blended), in nats
    agrees: bool  # the likeliest token is the same


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is known of a recipe on one model and adapter."""

    model: str  # fingerprint of its weights
    adapter: str
    strategy: str
    asked: str  # the recipe by its name, as requests ask for it
    asked_ratio: float
    ratio: float  # what is blended with: raised, if it had to be; of a fall-back, what is compared meanwhile
    falls_back: bool  # prompts are computed as a whole
    count: int  # comparisons at this ratio, ever
    recent: tuple[Compared, ...] = ()  # the latest of them
    below: tuple[Compared, ...] = ()  # of the next lower ratio, where this one was raised

    @property
    def mean_kl(self) -> float:
        """Of the latest comparisons; not a number before the first."""
        return mean(self.recent)

    @property
    def kl_bound(self) -> float:
        """An upper bound of the mean, at 95 % where comparisons are many; infinite before the third."""
        return bound(self.recent)

    @property
    def agreement(self) -> float:
        """The share of the latest comparisons in which the likeliest token was the same."""
        return sum(one.agrees for one in self.recent) / len(self.recent) if self.recent else math.nan

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.adapter, self.asked

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """From plain values; a ValueError where they are none of a certificate."""
        made = {one.name: plain[one.name] for one in fields(cls)}
        for name in ("recent", "below"):
            made[name] = tuple(Compared(_number(kl), _flag(agrees)) for kl, agrees in made[name])
        for name in ("model", "adapter", "strategy", "asked"):
            if not isinstance(made[name], str):
                raise ValueError(name)
        for name in ("asked_ratio", "ratio"):
            if _number(made[name]) > 1:
                raise ValueError(name)
        if type(made["count"]) is not int or made["count"] < len(made["recent"]) or len(plain) != len(made):
            raise ValueError("count")
        return cls(**{**made, "falls_back": _flag(made["falls_back"])})

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        made = asdict(self)
        for name in ("recent", "below"):
            made[name] = [[one.kl, one.agrees] for one in getattr(self, name)]
        return made


def mean(compared: Sequence[Compared]) -> float:
    return math.fsum(one.kl for one in compared) / len(compared) if compared else math.nan


def bound(compared: Sequence[Compared]) -> float:
    """The mean and its error, by Student's distribution as it is expanded around the normal one."""
    count = len(compared)
    if count < 3:
        return math.inf
    middle, free = mean(compared), count - 1
    spread = math.sqrt(math.fsum((one.kl - middle) ** 2 for one in compared) / free)
    t = _Z + (_Z**3 + _Z) / (4 * free) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * free**2)
    return middle + t * spread / math.sqrt(count)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(value)
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


class CertificateFile:
    """Certificates that outlive a process. A thread writes them, so that no request waits for a slow disk."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()
        self._lock = threading.Lock()
        self._next: list[Certificate] | None = None  # what is to be written, the latest only
        self._writer: threading.Thread | None = None

    def read(self) -> list[Certificate]:
        """What was written; nothing where there is no file, or one that cannot be trusted."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            return _unpacked(data)
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("the certificates in %s are left out: %s", self._path, type(error).__name__)
            return []

    def write(self, certificates: Sequence[Certificate]) -> None:
        """Begin to write these in place of what is there."""
        with self._lock:
            self._next = list(certificates)
            if self._writer is None:
                self._writer = threading.Thread(target=self._run, name="kvilt-certificates", daemon=True)
                self._writer.start()

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until it is written, and not long."""
        with self._lock:
            writer = self._writer
        if writer is not None:
            writer.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                todo, self._next = self._next, None
                if todo is None:
                    self._writer = None
                    return
            try:
                self._put(_packed(todo))
            except OSError as error:
                _log.warning("certificates cannot be written to %s: %s", self._path, error)

    def _put(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, data)


def _packed(certificates: Sequence[Certificate]) -> bytes:
    body = [one.plain() for one in certificates]
    whole = {"format": _FORMAT, "version": _VERSION, "sha256": _digest(body), "certificates": body}
    return json.dumps(whole, indent=1).encode()


def _unpacked(data: bytes) -> list[Certificate]:
    if len(data) > _MOST_BYTES:
        raise ValueError("too large")
    whole = json.loads(data)
    body = whole["certificates"]
    if (whole["format"], whole["version"], whole["sha256"]) != (_FORMAT, _VERSION, _digest(body)):
        raise ValueError("another format, or damaged")
    return [Certificate.of(one) for one in body]


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
