"""How other clients fare while many connections never read and many send a byte a second.

python bench/server_hostile.py [--model smollm2-q4_1] [--silent 500] [--slow 100] [--clients 4] [--seconds 90]

Silent connections ask for a long stream, with a small buffer of their own, and never read it: they are real load until
their buffers are full and the server holds them, and are cut off when they have taken nothing for its write timeout.
Printed are the inter-token latencies of ordinary clients in each ten seconds, and their ratio to those before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from peers.models import MODELS
from server_peers import kvilt_server

from kvilt.cli.bench_serve_http import Target, Trace, ask

WINDOW_S = 10


def body(text: str, tokens: int) -> Mapping[str, Any]:
    return {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}


async def ordinary(target: Target, number: int, until_s: float, traces: list[Trace]) -> None:
    """One client after another request, as fast as they are answered."""
    while time.perf_counter() < until_s:
        traces.append(await ask(target, body(f"Client {number} at {len(traces)} asks for a story. Once", 32)))


async def silent(url: str, number: int, tokens: int) -> socket.socket:
    """A connection whose answer is never read."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.setblocking(False)
    split = urlsplit(url)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(own, (split.hostname, split.port))
    content = json.dumps(body(f"Silent reader {number} wants a story. Once", tokens)).encode()
    await loop.sock_sendall(own, Target(url, chat=False).head("POST", "/completions", len(content)) + content)
    return own


async def slow(url: str, until_s: float) -> None:
    """A connection that sends its request a byte a second, and comes back when it is cut off."""
    split = urlsplit(url)
    while time.perf_counter() < until_s:
        with suppress(OSError):
            _reader, writer = await asyncio.open_connection(split.hostname, split.port)
            for byte in Target(url, chat=False).head("POST", "/completions", 100):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1)
                if time.perf_counter() > until_s or writer.is_closing():
                    break
            writer.close()


def latencies(traces: list[Trace], start_s: float, stop_s: float) -> list[float]:
    """Milliseconds between tokens that came in a span of time."""
    pairs = [(a, b) for trace in traces for a, b in zip(trace.stamps_s, trace.stamps_s[1:], strict=False)]
    return sorted(1000 * (b - a) for a, b in pairs if start_s <= b < stop_s)


async def run(url: str, asked: argparse.Namespace) -> None:
    target, traces = Target(url, chat=False), []
    await ask(target, body("Warm up", 8))
    began_s = time.perf_counter()
    attack_s, until_s = began_s + 2 * WINDOW_S, began_s + 2 * WINDOW_S + asked.seconds
    clients = [asyncio.create_task(ordinary(target, i, until_s, traces)) for i in range(asked.clients)]
    await asyncio.sleep(attack_s - time.perf_counter())
    sockets = await asyncio.gather(*(silent(url, i, asked.tokens) for i in range(asked.silent)))
    senders = [asyncio.create_task(slow(url, until_s)) for _ in range(asked.slow)]
    await asyncio.wait([*clients, *senders], timeout=until_s - time.perf_counter())
    for task in (*clients, *senders):
        task.cancel()
    for own in sockets:
        own.close()
    failed = [trace for trace in traces if trace.error]
    calm = statistics.median(latencies(traces, began_s, attack_s))
    print(f"{'seconds':>12}{'tokens':>8}{'ITL p50 ms':>12}{'p99 ms':>9}{'p50 / before':>14}")
    for at in range(-2 * WINDOW_S, asked.seconds, WINDOW_S):
        found = latencies(traces, attack_s + at, attack_s + at + WINDOW_S)
        if found:
            p50, p99 = statistics.median(found), found[int(0.99 * (len(found) - 1))]
            print(f"{at:>6} to {at + WINDOW_S:<3}{len(found):>7}{p50:>12.1f}{p99:>9.1f}{p50 / calm:>13.2f}x")
        else:
            print(f"{at:>6} to {at + WINDOW_S:<3}{0:>7}")
    print(
        f"{len(traces)} requests of ordinary clients, {len(failed)} failed{': ' + failed[0].message if failed else ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-q4_1", help=f"a .gguf file, or one of {', '.join(MODELS)}")
    parser.add_argument("--silent", type=int, default=500)
    parser.add_argument("--slow", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="that each silent connection asks for")
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    with kvilt_server(MODELS.get(asked.model, Path(asked.model)), asked.threads, 128) as peer:
        asyncio.run(run(peer.url, asked))


if __name__ == "__main__":
    main()
