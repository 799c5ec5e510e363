"""Progress bars on stderr; silent where stderr is no terminal. Models that are here already need none, nor rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID


@dataclass(slots=True)
class ProgressBars:
    """Progress bars for fetching a model."""

    _open: ExitStack
    _progress: Progress | None = None  # from the first stage on
    _tasks: dict[str, TaskID] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def fetching(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """A hub.Progress: one bar per stage of a fetch. Files are fetched on several threads."""
        with self._lock:
            if self._progress is None:
                self._progress = self._open.enter_context(_fetch_progress())
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=total_bytes or None)
            self._progress.update(self._tasks[stage], completed=done_bytes, total=total_bytes or None)


@contextmanager
def tracked(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar over `total` pieces of work; the yielded function takes the number done and a note."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    bar = _progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    )
    with bar as progress:
        task = progress.add_task(what, total=total, note="")
        yield lambda done, note: progress.update(task, completed=done, note=note)


@contextmanager
def bars() -> Iterator[ProgressBars]:
    """Bars for the length of a block; they are erased at its end."""
    with ExitStack() as opened:
        yield ProgressBars(opened)


def _fetch_progress() -> Progress:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    return _progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())


def _progress(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
