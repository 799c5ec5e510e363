"""Time to first token of six documents in changing orders with a question behind them: blended, computed, and a peer.

    python bench/blend_ttft.py --model smollm2 [--peer] [--redis redis://localhost:6379]

Each round asks with the documents in another order, so that a prefix cache finds nothing behind the first of them. All
ways take turns within a round, so that a busy machine is busy for all of them. With ~/.cache/kvilt-bench/venv there,
--peer also asks llama.cpp. Then the same from disk, in a new process, and from Redis if one is given.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from kvilt.blend.recipe import Recipe
from kvilt.llm import LLM, load
from kvilt.store.disk import Disk
from kvilt.store.store import Store
from kvilt.store.tier import Budget, Tier

PEER_PYTHON = Path("~/.cache/kvilt-bench/venv/bin/python").expanduser()
SYSTEM = "Answer from the passages below.\n"
QUESTION = "\nQuestion: which of the passages above says most about rivers, towns and people, and why does it? Answer:"
WORDS = ("river", "town", "people", "north", "winter", "field", "stone", "bridge", "market", "history", "water", "road")
PEER = """
import json, sys, time
from llama_cpp import Llama
model, threads = sys.argv[1], int(sys.argv[2])
llm = Llama(model, n_ctx=4096, n_batch=512, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False)
for line in sys.stdin:
    ids = json.loads(line)
    llm.reset()
    began = time.perf_counter()
    llm.eval(ids)
    token = llm.sample(temp=0.0)
    print(json.dumps(time.perf_counter() - began), flush=True)
"""


def documents(llm: LLM, count: int, tokens: int) -> list[list[int]]:
    """Texts that all differ, each of exactly so many tokens."""
    made = []
    for seed in range(count):
        dice = random.Random(seed)
        text = " ".join(dice.choice(WORDS) + dice.choice(["", "", ",", "."]) for _ in range(2 * tokens))
        made.append(llm.tokenizer.encode(text, add_special=False)[:tokens])
    return made


def orders(count: int, rounds: int) -> Iterator[list[int]]:
    dice = random.Random(7)
    for _ in range(rounds):
        yield dice.sample(range(count), count)


def ask(llm: LLM, parts: list[list[int]], recipe: Recipe | None) -> float:
    """Seconds to the first token."""
    llm.executor.prefixes.clear()
    if recipe is None:
        done = llm.generate([token for part in parts for token in part], max_tokens=1, temperature=0.0)
    else:
        done = llm.blend(parts, recipe=recipe, max_tokens=1, temperature=0.0)
    return done.timing.first_token_s


class Peer:
    """llama.cpp in a process of its own; it computes every prompt as a whole."""

    def __init__(self, model: str, threads: int) -> None:
        command = [str(PEER_PYTHON), "-c", PEER, model, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, ids: list[int]) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(ids) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def measure(
    args: argparse.Namespace, tiers: list[Tier], ways: dict[str, Recipe | None], peer: bool
) -> dict[str, float]:
    """Median seconds of each way; documents are warm after the first round, which does not count."""
    with ExitStack() as stack:
        store = stack.enter_context(Store(None if tiers else Budget(1 << 31), tiers))
        llm = stack.enter_context(load(args.model, threads=args.threads, kv_memory="1G", max_context=4096, store=store))
        other: Callable[[list[int]], float] | None = None
        if peer:
            made = Peer(args.peer_model or args.model, args.threads)
            stack.callback(made.close)
            other = made
        texts = documents(llm, args.documents, args.tokens)
        first, last = (llm.tokenizer.encode(text, add_special=False) for text in (SYSTEM, QUESTION))
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for number, order in enumerate(orders(args.documents, args.rounds + 1)):
            parts = [first, *(texts[i] for i in order), last[:32]]
            for name, recipe in ways.items():
                taken[name].append(ask(llm, parts, recipe))
            if other is not None:
                taken.setdefault("llama.cpp", []).append(other([token for part in parts for token in part]))
            if number == 0:
                store.flush()
        return {name: median(seconds[1:]) for name, seconds in taken.items()}


def in_new_process(args: argparse.Namespace, tier: str, where: str) -> dict[str, float]:
    """The blended ways again, by a process that finds the documents where another one left them."""
    command = [sys.executable, __file__, "--inner", tier, "--where", where, "--model", args.model]
    for name in ("threads", "documents", "tokens", "rounds"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def open_tier(kind: str, where: str) -> Tier:
    if kind == "disk":
        return Disk(where, Budget(8 << 30))
    from kvilt.store.redis import Redis

    return Redis(where, Budget(8 << 30))


def ways(ratio: float) -> dict[str, Recipe | None]:
    return {f"{name} {ratio:.0%}": Recipe(ratio, name, min_gain=0.0) for name in ("head", "query", "deviation")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-model", default=None, help="the GGUF file the peer opens, if not --model")
    parser.add_argument("--redis", default=None)
    parser.add_argument("--inner", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--where", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        print(json.dumps(measure(args, [open_tier(args.inner, args.where)], ways(args.ratio), False)))
        return
    plain: dict[str, Recipe | None] = {"full prefill": None, **ways(args.ratio)}
    print(
        f"{args.documents} documents of {args.tokens} tokens, {args.threads} threads, medians of {args.rounds} rounds"
    )
    print("| documents from | way | TTFT s | against full prefill |\n|---|---|---|---|", flush=True)
    found = measure(args, [], plain, args.peer and PEER_PYTHON.exists())
    full = found["full prefill"]
    show("memory", found, full)
    with tempfile.TemporaryDirectory() as folder:
        for kind, where in ({"disk": folder} | ({"redis": args.redis} if args.redis else {})).items():
            in_new_process(args, kind, where)  # leaves the documents there
            show(f"{kind}, after a restart", in_new_process(args, kind, where), full)


def show(place: str, found: dict[str, float], full: float) -> None:
    for name, seconds in found.items():
        print(f"| {place} | {name} | {seconds:.3f} | {full / seconds:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
