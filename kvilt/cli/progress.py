"""Progress bars on stderr; silent where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


@dataclass(slots=True)
class ProgressBars:
    """Progress bars for fetching a model."""

    _progress: Progress
    _tasks: dict[str, TaskID] = field(default_factory=dict)

    def fetching(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """A hub.Progress: one bar per stage of a fetch."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total_bytes or None)
        self._progress.update(self._tasks[stage], completed=done_bytes, total=total_bytes or None)


@contextmanager
def tracked(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar over `total` pieces of work; the yielded function takes the number done and a note."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=total, note="")
        yield lambda done, note: progress.update(task, completed=done, note=note)


@contextmanager
def bars() -> Iterator[ProgressBars]:
    """Bars for the length of a block; they are erased at its end."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        yield ProgressBars(progress)
