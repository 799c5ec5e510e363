"""What a restart costs a warm prompt: its first token computed, from the disk after a restart, and from memory.

python bench/store_restart.py [MODEL] [--tokens 64 256 1024] [--rounds 3] [--threads N]

All three are the same prompt in one run, one after the other; medians of the rounds. A new model is loaded for each
restart, and the file cache of the system stays warm, as it does where only the server is restarted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from kvilt.llm import LLM, load
from kvilt.store.disk import Disk
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget

PATIENT = StoreLimits(lookup_s=60, layer_s=60, close_s=600)


def first_token_s(llm: LLM, prompt: list[int], found: bool) -> float:
    began_s = time.perf_counter()
    done = llm.generate(prompt, max_tokens=1, temperature=0.0)
    took_s = time.perf_counter() - began_s
    assert (done.usage.prefix_hit > 0) == found, done.usage
    return took_s


def life(model: str, folder: Path, prompt: list[int], threads: int | None, found: bool) -> tuple[float, float, float]:
    """A model from its first prompt to its end: the prompt as it comes, once more, and how long the end takes."""
    with Store(None, [Disk(folder, Budget(1 << 36))], limits=PATIENT) as store:
        llm = load(model, store=store, threads=threads)
        llm.generate([3, 1, 2], max_tokens=2)
        times = first_token_s(llm, prompt, found), first_token_s(llm, prompt, True)
        began_s = time.perf_counter()
        llm.close()
        store.flush()
        return *times, time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    print("| tokens | computed, ms | from disk, ms | from memory, ms | keeping it at the end, ms |")
    print("|---|---|---|---|---|")
    for tokens in args.tokens:
        rows = []
        for turn in range(args.rounds):
            prompt = [5 + (i * 7919 + turn * 31) % 20_000 for i in range(tokens + 1)]
            with tempfile.TemporaryDirectory() as folder:
                cold, memory, end = life(args.model, Path(folder), prompt, args.threads, False)
                disk, _, _ = life(args.model, Path(folder), prompt, args.threads, True)
            rows.append((cold, disk, memory, end))
        print(
            f"| {tokens} | "
            + " | ".join(f"{1e3 * statistics.median(one):.1f}" for one in zip(*rows, strict=True))
            + " |"
        )


if __name__ == "__main__":
    main()
