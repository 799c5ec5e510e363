"""Streaming clients through the HTTP server, beside the same requests through the engine alone, in one run.

    python bench/http_streams.py [--clients 256] [--tokens 128] [--step-ms 20] [--route chat] [--rounds 2]

Here a stub stands for the device: a step computes nothing, draws random tokens and takes `--step-ms`, so that the
numbers are those of the host. bench/gpu_http.py does the same with a model. The clients are a process of their own: one
loop over plain sockets, which parses nothing but the counts at the end. uvloop is used, as by `kvilt serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import re
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvilt.config import EngineConfig
    from kvilt.executor.protocol import Executor
    from kvilt.text.tokenizer import Tokenizer

_COUNT = re.compile(rb'"completion_tokens":(\d+)')
_LAUNCHES = 350  # of a step with prompts on a model of 32 layers
_TAIL_BYTES = 2048  # the end of a stream, which has its counts


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """What one round of clients has seen."""

    seconds: float
    tokens: int
    chunks: int
    first_s: float  # median time to the first chunk with text
    cpu_s: Mapping[str, float]  # of the threads of the server's process


# The clients.


def request_bytes(path: str, body: Mapping[str, Any]) -> bytes:
    """One request as it is sent."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def run_clients(port: int, path: str, bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Send all requests at once and read their streams to the end."""
    selector = selectors.DefaultSelector()
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in bodies]
    tails, began, firsts = dict.fromkeys(sockets, b""), time.perf_counter(), {}
    tokens = chunks = 0
    for one, body in zip(sockets, bodies, strict=True):
        one.sendall(request_bytes(path, body))
        one.setblocking(False)
        selector.register(one, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select(60):
            one: Any = key.fileobj
            data = one.recv(1 << 16)
            chunks += data.count(b"data: ")
            if not tails[one] and not data.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the server answers {data[:500]!r}")
            tail = tails[one] = (tails[one] + data)[-_TAIL_BYTES:]
            if one not in firsts and (b'"content":"' in data or b'"text":"' in data):
                firsts[one] = time.perf_counter() - began
            if not data or tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                found = _COUNT.search(tail)
                tokens += int(found[1]) if found else 0
                selector.unregister(one)
                one.close()
    seconds = time.perf_counter() - began
    first_s = sorted(firsts.values())[len(firsts) // 2] if firsts else 0.0
    return {"seconds": seconds, "tokens": tokens, "chunks": chunks, "first_s": first_s}


# The server.


async def http_load(port: int, path: str, bodies: Sequence[Mapping[str, Any]]) -> StreamLoad:
    """The clients, in a process of their own, against a server in this one."""
    before = thread_cpu_s()
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await client.communicate(json.dumps({"port": port, "path": path, "bodies": list(bodies)}).encode())
    used = {name: cpu_s - before.get(name, 0.0) for name, cpu_s in thread_cpu_s().items()}
    return StreamLoad(**json.loads(out), cpu_s=used)


def thread_cpu_s() -> dict[str, float]:
    """CPU seconds of each thread of this process, by name."""
    used: dict[str, float] = {}
    for thread in threading.enumerate():
        try:
            stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        except OSError:  # not on this system, or the thread has ended
            continue
        user, system = stat.rpartition(")")[2].split()[11:13]
        used[thread.name] = used.get(thread.name, 0.0) + (int(user) + int(system)) / 100
    return used


async def serve_rounds(
    executor: Executor,
    tokenizer: Tokenizer,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    rounds: int,
    config: EngineConfig | None = None,
) -> list[StreamLoad]:
    """A server for some rounds of the same requests; prefixes of the round before are forgotten."""
    from kvilt.llm import AsyncLLM
    from kvilt.server.config import ServeConfig
    from kvilt.server.listener import HTTPServer
    from kvilt.server.service import Service

    llm = AsyncLLM(executor, tokenizer, config=config)
    listener = HTTPServer(Service(llm, ServeConfig(port=0, names=("random",))))
    serving = asyncio.ensure_future(listener.serve())
    while not listener.started and not serving.done():
        await asyncio.sleep(0.01)
    loads = []
    for _ in range(rounds):
        executor.prefixes.clear()
        loads.append(await http_load(listener.port, path, bodies))
    listener.end()
    await serving
    await asyncio.get_running_loop().run_in_executor(None, llm._driver.close)  # the executor is used again
    return loads


def run_loop(work: Any, switch_s: float | None = None) -> Any:
    """Run a coroutine as `kvilt serve` runs its server: on uvloop, where it is installed, and with few collections."""
    from kvilt.server.listener import SWITCH_S

    gc.collect()
    gc.freeze()
    sys.setswitchinterval(switch_s or SWITCH_S)
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(work)
    finally:
        gc.unfreeze()


def engine_round(executor: Executor, prompts: Sequence[Sequence[int]], tokens: int, config: Any = None) -> float:
    """The same prompts through an engine without text, streams and HTTP: output tokens a second."""
    from kvilt.engine.engine import Engine
    from kvilt.engine.event import TokenEvent
    from kvilt.engine.request import Request
    from kvilt.sampling.params import SamplingParams

    class Count:
        tokens = 0

        def on_event(self, event: object) -> bool:
            self.tokens += isinstance(event, TokenEvent)
            return False

    executor.prefixes.clear()
    engine, count = Engine(executor, config), Count()
    params = SamplingParams(max_tokens=tokens, temperature=0.6)
    began = time.perf_counter()
    for prompt in prompts:
        engine.add(engine.prepare(Request(prompt, params), count))
    while engine.step():
        pass
    return count.tokens / (time.perf_counter() - began)


def report(title: str, engine: Sequence[float], loads: Sequence[StreamLoad]) -> None:
    """One line for the engine, one for each round of HTTP."""
    best = max(engine)
    print(f"{title}: engine {best:.0f} output tok/s (rounds: {', '.join(f'{one:.0f}' for one in engine)})")
    for load in loads:
        speed = load.tokens / load.seconds
        cpu = ", ".join(f"{k} {v / max(1, load.tokens) * 1e6:.0f}" for k, v in load.cpu_s.items() if v >= 0.05)
        print(
            f"{title}: HTTP {speed:.0f} output tok/s, {speed / best:.0%} of the engine's, {load.seconds:.2f} s, "
            f"{load.chunks} chunks, first text {load.first_s * 1e3:.0f} ms, CPU µs a token: {cpu}",
            flush=True,
        )


# Requests, and a tokenizer for models that have none.


def word_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level vocabulary whose other tokens are words; its end is the last id."""
    from kvilt.text.assemble import ByteAlphabet
    from kvilt.text.tokenizer import from_metadata

    alphabet = sorted(ByteAlphabet().byte_of)
    words = [f"Ġw{i:x}" for i in range(vocab - len(alphabet) - 1)]
    return from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*alphabet, *words, "<|endoftext|>"],
            "tokenizer.ggml.token_type": [1] * (vocab - 1) + [3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": vocab - 1,
            "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        }
    )


def random_prompts(count: int, vocab: int, shortest: int = 100, longest: int = 1000) -> list[list[int]]:
    """Token ids, the same ones every time."""
    dice = random.Random(1)
    return [[dice.randrange(vocab - 1) for _ in range(dice.randint(shortest, longest))] for _ in range(count)]


def request_bodies(route: str, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[str, list[dict[str, Any]]]:
    """The path and the bodies of the same requests: ids for completions; for chat a text of about as many tokens."""
    options = {
        "stream": True, "max_tokens": tokens, "temperature": 0.6, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if route == "completions":
        return "/v1/completions", [{"prompt": list(prompt), **options} for prompt in prompts]
    texts = [" ".join(f"{token % 10}" for token in prompt[::2]) for prompt in prompts]
    return "/v1/chat/completions", [{"messages": [{"role": "user", "content": one}], **options} for one in texts]


# The stub of a device.


def stub_executor(vocab: int, step_s: float) -> Executor:
    """A tiny model whose steps compute nothing, and end one after the other, each after `step_s`."""
    import torch

    from kvilt.batch import Last, Logits
    from kvilt.config import RunConfig
    from kvilt.executor.load import build_executor
    from kvilt.sampling.output import SamplerOutput
    from kvilt.sampling.pending import PendingSample

    from random_model import SMALL, random_checkpoint  # isort: skip

    torch.set_num_threads(1)
    shape = {**SMALL, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": vocab}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    checkpoint = random_checkpoint(shape, "cpu", torch.float32)
    executor: Any = build_executor(checkpoint, RunConfig(device="cpu", kv_memory=1 << 28, threads=1))
    dice, free_s, small = torch.Generator().manual_seed(0), 0.0, torch.zeros(1)

    def run(batch: Any) -> Any:
        starts = [0]
        for row in batch.rows:
            starts.append(starts[-1] + (type(row.want) is Last))
        if batch.num_tokens > len(batch.rows):  # a prompt: no graph, and every launch gives the interpreter to others
            for _ in range(_LAUNCHES):
                small.add_(1)
        return Logits(torch.zeros(starts[-1], 1), tuple(starts), {}, {})

    def start_sample(_logits: Any, states: Sequence[Any], _positions: Sequence[int]) -> PendingSample:
        nonlocal free_s
        done_s = free_s = max(free_s, time.perf_counter()) + step_s
        tokens = torch.randint(256, vocab - 1, (len(states),), generator=dice)

        def read() -> SamplerOutput:
            time.sleep(max(0.0, done_s - time.perf_counter()))
            return SamplerOutput(tokens, (None,) * len(states))

        return PendingSample(tokens, read)

    executor.run, executor.start_sample = run, start_sample
    executor.sample = lambda *given: start_sample(*given).wait()
    return executor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--route", choices=("chat", "completions"), default="chat")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--switch-ms", type=float, help="the interpreter's switch interval, if not that of the server")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        print(json.dumps(run_clients(**json.load(sys.stdin))))
        return
    from kvilt.config import EngineConfig

    vocab, config = 32000, EngineConfig(step_tokens=8192, max_rows=256, overlap=True)
    executor, prompts = stub_executor(vocab, options.step_ms / 1e3), random_prompts(options.clients, vocab)
    path, bodies = request_bodies(options.route, prompts, options.tokens)
    engine = [engine_round(executor, prompts, options.tokens, config) for _ in range(2)]
    rounds = serve_rounds(executor, word_tokenizer(vocab), path, bodies, options.rounds, config)
    loads = run_loop(rounds, options.switch_ms and options.switch_ms / 1e3)
    report(f"stub, {options.route}, {options.clients} clients", engine, loads)


if __name__ == "__main__":
    main()
