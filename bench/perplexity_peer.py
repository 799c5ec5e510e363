"""Perplexity of the default model in kvilt and in transformers on the dequantized weights, over the same tokens.

    python bench/perplexity_peer.py FILE [--tokens 20000] [--chunk 1024] [--backend reference]

FILE is a text, or a JSON list of questions with passages under `ctxs` (each with a `text`), which are joined.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import kvilt
from kvilt.bench.perplexity import measure
from kvilt.weights.hub import resolve


def read_text(path: Path) -> str:
    """The text itself, or the passages of a question set."""
    if path.suffix != ".json":
        return path.read_text()
    return "\n\n".join(passage["text"] for item in json.loads(path.read_text()) for passage in item["ctxs"])


@torch.no_grad()
def peer_perplexity(model: torch.nn.Module, ids: list[int], chunk_tokens: int) -> float:
    total, count = 0.0, 0
    for start in range(0, len(ids), chunk_tokens):
        chunk = torch.tensor([ids[start : start + chunk_tokens]])
        if chunk.shape[1] > 1:
            logprobs = model(chunk).logits[0, :-1].double().log_softmax(-1)
            total -= float(logprobs.gather(1, chunk[0, 1:, None]).sum())
            count += chunk.shape[1] - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--backend", default="reference")
    arguments = parser.parse_args()
    path = resolve("smollm2")
    with kvilt.load(path, kv_memory="1G", backend=arguments.backend) as llm:
        ids = llm.tokenizer.encode(read_text(arguments.file), add_special=False)[: arguments.tokens]
        ours = measure(llm.executor, ids, arguments.chunk)
    peer = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    theirs = peer_perplexity(peer, ids, arguments.chunk)
    print(f"{len(ids)} tokens in chunks of {arguments.chunk}")
    print(f"kvilt        {ours.perplexity:.6f} ± {ours.error:.4f}")
    print(f"transformers {theirs:.6f}")
    print(f"difference   {abs(ours.perplexity / theirs - 1):.2e} relative")


if __name__ == "__main__":
    main()
