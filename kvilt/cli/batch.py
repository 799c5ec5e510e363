"""`kvilt batch`: the requests of a file, answered together; what an earlier run has answered stays."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import InputError, Unsupported
from ..llm import AsyncLLM, load_async
from ..server.batches.counts import BatchCounts as BatchCounts
from ..server.batches.counts import finished_ids as finished_ids
from .progress import bars, tracked
from .serve import default_name
from .store import open_store

if TYPE_CHECKING:
    from ..server.batches.lines import BatchLine


def batch(
    given: Path, out: Path, model: str, at_once: int, store: dict[str, Any], config: dict[str, Any]
) -> BatchCounts:
    """Answer the requests of `given` that have no answer in `out` yet."""
    try:
        from ..server.batches.lines import read_lines
    except ImportError as error:
        raise Unsupported(f"batches need {error.name}; install it with: pip install 'kvilt[server]'") from None
    with _opened(given) as lines:
        asked = list(read_lines(lines))
    done = finished_ids(out)
    left = [line for line in asked if line.custom_id not in done]
    counts = BatchCounts()
    if not left:
        print(f"all {len(asked)} requests are answered in {out}", file=sys.stderr)
        return counts
    with open_store(store) as kept:
        with bars() as shown:
            llm = load_async(model, on_fetch=shown.fetching, store=kept, **config)
        began_s = time.perf_counter()
        with out.open("a", encoding="utf-8") as written, tracked("requests", len(asked)) as show:
            write = _writer(written, counts, lambda: show(len(asked) - len(left) + counts.answered + counts.failed, ""))
            asyncio.run(_run(llm, model, left, at_once, write))
    print(_summary(counts, time.perf_counter() - began_s, len(asked) - len(left)), file=sys.stderr)
    return counts


async def _run(
    llm: AsyncLLM, model: str, lines: list[BatchLine], at_once: int, write: Callable[[dict[str, Any]], Awaitable[None]]
) -> None:
    from ..server.auth import Caller
    from ..server.batches.runner import BatchRunner, in_turn
    from ..server.config import ServeConfig
    from ..server.service import Service

    async with llm:
        service = Service(llm, ServeConfig(names=(default_name(model),)))
        runner = BatchRunner(service, Caller(), at_once, any_model=True)
        await runner.run(in_turn(sorted(lines, key=lambda line: line.order)), write)


def _writer(out: TextIO, counts: BatchCounts, show: Callable[[], None]) -> Callable[[dict[str, Any]], Awaitable[None]]:
    async def write(answer: dict[str, Any]) -> None:
        counts.add(answer)
        out.write(json.dumps(answer, ensure_ascii=False) + "\n")
        out.flush()  # what is answered is not lost if the rest is
        show()

    return write


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    if str(path) == "-":
        yield sys.stdin
        return
    try:
        with path.open(encoding="utf-8") as file:
            yield file
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a text file: {error}") from None


def _summary(counts: BatchCounts, took_s: float, before: int) -> str:
    rate = counts.generated / max(took_s, 1e-9)
    earlier = f", {before} answered before" if before else ""
    return (
        f"{counts.answered} answered, {counts.failed} failed{earlier} in {took_s:.1f} s: {counts.computed:,} prompt "
        f"tokens computed, {counts.reused:,} reused, {counts.generated:,} generated ({rate:,.0f} tok/s)"
    )
