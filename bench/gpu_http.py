"""256 streaming clients through the HTTP server on a GPU, beside the engine alone on the same requests in one run.

    python bench/gpu_http.py [--shape 8b] [--clients 256] [--tokens 128] [--routes completions,chat] [--rounds 2]

Random weights, prompts of 100 to 1,000 tokens. See bench/http_streams.py, which runs without a GPU.
"""

from __future__ import annotations

import argparse
import time
import traceback
from itertools import product

from http_streams import engine_round, random_prompts, report, request_bodies, run_loop, serve_rounds, word_tokenizer
from random_model import LLAMA_1B, LLAMA_8B, QWEN3_06B, random_checkpoint

from kvilt.config import RunConfig
from kvilt.executor.load import build_executor

SHAPES = {"8b": LLAMA_8B, "1b": LLAMA_1B, "0.6b": QWEN3_06B}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--routes", default="completions,chat")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--switch-ms", default="", help="the interpreter's switch intervals, if not that of the server")
    options = parser.parse_args()
    executor = build_executor(random_checkpoint(SHAPES[options.shape]), RunConfig(device="cuda", kv_memory=48 << 30))
    executor.close = lambda: None  # type: ignore[method-assign]  # it outlives each server
    vocab = executor.spec.vocab_size
    tokenizer, prompts = word_tokenizer(vocab), random_prompts(options.clients, vocab)
    began = time.perf_counter()
    tokenizer.max_bytes(1), executor.warm_up(8192, options.clients)  # as `kvilt serve` does
    print(f"warm-up: {time.perf_counter() - began:.1f} s", flush=True)
    engine = [engine_round(executor, prompts, options.tokens) for _ in range(2)][1:]  # the first captures graphs
    for route, switch_ms in product(options.routes.split(","), options.switch_ms.split(",")):
        path, bodies = request_bodies(route, prompts, options.tokens)
        work = serve_rounds(executor, tokenizer, path, bodies, options.rounds)
        try:
            loads = run_loop(work, float(switch_ms) / 1e3 if switch_ms else None)
            report(f"{options.shape}, {route}, {options.clients} clients, {switch_ms}", engine, loads)
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
