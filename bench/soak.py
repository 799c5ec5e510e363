"""Mixed HTTP requests for an hour: no greedy answer differs from a cold run's, nothing leaks, latency stays flat.

python bench/soak.py [--model smollm2-q4_1] [--requests 100000] [--minutes 60] [--clients 8] [--keys 20]
                     [--compare 0.01] [--csv soak.csv] [--plot soak.png] [--markdown]

Clients with twenty keys chat, complete, stream, leave streams half way, make, fork, cut, save and delete handles, ask
about documents, call tools, follow grammars and send what is wrong. Some greedy answers are asked for again afterwards,
one at a time, of a fresh server and each under a salt of its own, so that nothing is reused. Memory, pages, handles,
files, descriptors and threads are sampled; over the second half none may grow. Exit status 1 says that something did
not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from pathlib import Path

from hostile.client import Client
from hostile.serving import ADMIN, Serving, serving
from peers.models import MODELS
from soaking.mix import Compared, Tally, Visitor, said_in
from soaking.watch import Flat, Sample, flatness, look, plot, quarters, settled, write_csv

_MEMORY_BYTES = 12 << 30
_P99_RATIO = 1.5


async def soak(server: Serving, keys: list[str], asked: argparse.Namespace) -> tuple[Tally, list[Sample]]:
    """All requests, and a sample every few seconds."""
    admin = Client(server.host, server.port, ADMIN)
    clients = [Client(server.host, server.port, key) for key in keys]
    said = await clients[0].post("/tokenize", {"prompt": "one two three four five six seven eight nine ten " * 4})
    words = sorted({int(token) for token in said.json["tokens"]} | set(range(400, 480)))
    tally = Tally(asked.requests, 60 * asked.minutes / asked.requests, asked.compare)
    visitors = [Visitor(clients, random.Random(asked.seed + i), tally, words) for i in range(asked.clients)]
    working = [asyncio.ensure_future(visitor.stay()) for visitor in visitors]
    samples: list[Sample] = []
    said_s = time.monotonic()
    while not all(task.done() for task in working):
        samples.append(await look(server, admin, tally.sent, tally.began_s))
        if time.monotonic() > said_s + 60:
            said_s = time.monotonic()
            print(_progress(tally, samples[-1]), file=sys.stderr, flush=True)
        await asyncio.wait(working, timeout=asked.every_s)
    await asyncio.gather(*working)
    samples.append(await settled(server, admin, tally.sent, tally.began_s))
    for client in (admin, *clients):
        client.close()
    return tally, samples


def _progress(tally: Tally, sample: Sample) -> str:
    rate = sample.requests / sample.second if sample.second else 0.0
    return (
        f"{sample.requests:,} of {tally.limit:,}, {rate:.1f}/s, {sample.rss_mib:.0f} MiB, {sample.pages} pages, "
        f"{sample.handles} handles, {len(tally.wrong)} wrong"
    )


async def cold(server: Serving, key: str, compared: list[Compared]) -> list[str]:
    """The same greedy requests where nothing is known, one at a time; those that are answered otherwise."""
    client, wrong = Client(server.host, server.port, key), []
    for number, one in enumerate(compared):
        answer = await client.post(one.path, {**one.body, "cache_salt": f"cold-{number}"})
        if answer.status != 200 or said_in(answer.json) != one.said:
            wrong.append(f"{one.path} {one.body!r:.300}: {one.said!r:.200}, cold {answer.status} {answer.body[:200]!r}")
    client.close()
    return wrong


def report(tally: Tally, samples: list[Sample], differing: list[str], markdown: bool) -> bool:
    """Print everything; whether all of it held."""
    last = samples[-1]
    took_ms = 1000 * (last.cpu_s - samples[0].cpu_s) / tally.sent
    rate = tally.sent / last.second
    print(f"{tally.sent:,} requests in {last.second:.0f} s ({rate:.1f}/s), {took_ms:.0f} ms of CPU each")
    print(", ".join(f"{kind} {count:,}" for kind, count in tally.kinds.most_common()))
    flat, p99 = flatness(samples[:-1]), quarters(tally.ordinary)
    rows = [("measure", "second half", "growth", "allowed", "")]
    rows += [_row(one) for one in flat]
    if p99:
        ratio = p99[3] / p99[1]
        times = ", ".join(f"{1000 * value:.0f}" for value in p99)
        rows.append(("p99, ms by quarter", times, f"{ratio:.2f}x", f"{_P99_RATIO}x", _word(ratio <= _P99_RATIO)))
    rows.append(
        (
            "greedy answers, cold",
            f"{len(tally.compared)} compared",
            f"{len(differing)} differ",
            "0",
            _word(not differing),
        )
    )
    rows.append(
        ("answers out of place", str(sum(tally.statuses.values())), str(len(tally.wrong)), "0", _word(not tally.wrong))
    )
    left = max(last.running, 0) + max(last.handles, 0)
    rows.append(("running and handles at the end", "", str(left), "0", _word(not left)))
    print(_table(rows, markdown))
    for line in [*tally.wrong[:20], *differing[:20]]:
        print(line)
    return all(row[-1] != "NO" for row in rows)


def _row(one: Flat) -> tuple[str, ...]:
    return one.name, f"{one.middle:.1f}", f"{one.growth:+.1f}", f"{one.allowed:.1f}", _word(one.holds)


def _word(holds: bool) -> str:
    return "yes" if holds else "NO"


def _table(rows: list[tuple[str, ...]], markdown: bool) -> str:
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-q4_1", help=f"a model's name or path, or one of {', '.join(MODELS)}"
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="that the requests are spread over, at least")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--compare", type=float, default=0.01, help="share of greedy answers that are asked for again")
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv-memory", default="256M", help="small, so that it is full long before the second half")
    parser.add_argument("--csv", type=Path, help="where the samples are written")
    parser.add_argument("--plot", type=Path, help="where a picture of them is drawn; needs matplotlib")
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args()
    model = str(MODELS.get(asked.model, asked.model))
    keys = [f"sk-soak-{number:02}" for number in range(asked.keys)]
    # Without the quality gate: it may answer later blended prompts with another ratio, which a cold run cannot know.
    options = ["--kv-memory", asked.kv_memory, "--store-memory", "256M", "--gate-every", "0"]
    with serving(model, keys, threads=asked.threads, memory_bytes=_MEMORY_BYTES, options=options) as server:
        tally, samples = asyncio.run(soak(server, keys, asked))
    if asked.csv:
        write_csv(asked.csv, samples)
    if asked.plot:
        plot(asked.plot, samples)
    with serving(model, keys, threads=asked.threads, memory_bytes=_MEMORY_BYTES, options=options) as server:
        differing = asyncio.run(cold(server, keys[0], tally.compared))
    sys.exit(0 if report(tally, samples, differing, asked.markdown) else 1)


if __name__ == "__main__":
    main()
