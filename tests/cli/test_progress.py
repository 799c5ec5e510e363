"""Progress bars of a fetch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from kvilt.cli.progress import bars


def test_threads_share_the_bars_from_the_first_call_on() -> None:
    threads = 8
    for _ in range(5):
        together = Barrier(threads)
        with bars() as shown, ThreadPoolExecutor(threads) as pool:

            def fetch(file: int, fetching=shown.fetching, together=together) -> None:
                together.wait()
                fetching(f"stage {file % 2}", 1, 10)

            list(pool.map(fetch, range(threads)))
