"""What each codec of the KV store costs: bytes, time, and how much worse a model predicts behind KV that it wrote.

python bench/store_codecs.py FILE [--model smollm2] [--tokens 12288] [--context 512] [--threads 2]

FILE is a text, or a JSON list of questions with passages under `ctxs` (each with a `text`), which are joined. The text
is cut into pairs of a context and what follows it. The KV of the context is computed once, written and read by the
codec, and the tokens that follow are scored behind it, teacher-forced; only the first of them is not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

import kvilt
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.kv.row import RowImage
from kvilt.ops.contract import KeysValues
from kvilt.store.codec_registry import codec_named
from kvilt.store.codecs import Codec
from kvilt.store.layer import LayerKV

CODECS = ("raw", "zstd", "int8", "k8v4")


@dataclass(slots=True)
class Cost:
    """One codec's share of the table."""

    nbytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    logprobs: list[torch.Tensor] = field(default_factory=list)


def read_text(path: Path) -> str:
    if path.suffix != ".json":
        return path.read_text()
    return "\n\n".join(passage["text"] for item in json.loads(path.read_text()) for passage in item["ctxs"])


def through(codec: Codec, image: RowImage, cost: Cost) -> RowImage:
    """The row as it is after it was written and read."""
    groups = []
    for kv in image.groups:
        layers = [LayerKV(kv.keys[i], kv.values[i]) for i in range(kv.keys.shape[0])]
        began_s = time.perf_counter()
        frames = [codec.encode(one) for one in layers]
        encoded_s = time.perf_counter()
        found = [codec.decode(frame, one.form, one.keys.shape[0]) for frame, one in zip(frames, layers, strict=True)]
        cost.encode_s += encoded_s - began_s
        cost.decode_s += time.perf_counter() - encoded_s
        cost.nbytes += sum(map(len, frames))
        groups.append(KeysValues(torch.stack([one.keys for one in found]), torch.stack([one.values for one in found])))
    return dataclasses.replace(image, groups=tuple(groups))


def measure(executor: Executor, ids: list[int], context: int) -> tuple[dict[str, Cost], int]:
    costs = {name: Cost() for name in CODECS}
    codecs = {name: codec_named(name) for name in CODECS}
    pairs = len(ids) // (2 * context)
    for pair in range(pairs):
        known = ids[2 * context * pair : 2 * context * pair + context]
        after = ids[2 * context * pair + context : 2 * context * (pair + 1)]
        with executor.create_kv_cache() as kv:
            executor.prefill(known, kv)
            image = kv.row(0).image()
        for name, cost in costs.items():
            with KVCache.of_images(executor.pool, [through(codecs[name], image, cost)], 2 * context) as kv:
                cost.logprobs.append(executor.score(after, kv).logprobs)
        print(f"\r{pair + 1} of {pairs}", end="", flush=True)
    print()
    return costs, pairs * context


def report(costs: dict[str, Cost], tokens: int) -> None:
    exact = torch.cat(costs["raw"].logprobs).double()
    raw_bytes, base = costs["raw"].nbytes, math.exp(-exact.mean())
    print(f"perplexity behind exact KV: {base:.4f} over {len(exact)} tokens")
    print("| codec | KiB per token | of raw | perplexity | change of a token's log-probability | encode, decode GB/s |")
    print("|---|---|---|---|---|---|")
    for name, cost in costs.items():
        found = torch.cat(cost.logprobs).double()
        change = 100 * (math.exp(-found.mean()) / base - 1)
        moved = (found - exact).abs().mean()
        error = 100 * float((found - exact).std(correction=0)) / math.sqrt(len(exact))
        speed = [raw_bytes / seconds / 1e9 for seconds in (cost.encode_s, cost.decode_s)]
        size = f"{cost.nbytes / tokens / 1024:.2f} | {100 * cost.nbytes / raw_bytes:.0f} %"
        print(f"| {name} | {size} | {change:+.2f} ± {error:.2f} % | {moved:.4f} | {speed[0]:.2f}, {speed[1]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=12288)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-dtype", default="auto", help="float32, float16 or bfloat16")
    arguments = parser.parse_args()
    with kvilt.load(arguments.model, threads=arguments.threads, kv_dtype=arguments.kv_dtype) as llm:
        ids = llm.tokenizer.encode(read_text(arguments.file), add_special=False)[: arguments.tokens]
        report(*measure(llm.executor, ids, arguments.context))


if __name__ == "__main__":
    main()
