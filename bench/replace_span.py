"""What replacing a span of KV costs and saves: KL against a whole prefill, and seconds, on a long chat.

    python bench/replace_span.py [--model smollm2] [--tokens 1500] [--cut 150] [--repairs 0,0.05,0.15,0.3,1]

A text is computed. A span is dropped at three places, and the KV behind it is moved and repaired, or computed again.
The distributions of the tokens of a question are compared with those after a whole prefill of the same tokens.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import kvilt
from kvilt.kv.cache import KVCache

QUESTION = "<|im_end|>\n<|im_start|>user\nWhat was said so far?<|im_end|>\n<|im_start|>assistant\nThe text is about"


def log_probs(llm: kvilt.LLM, kv: KVCache, probe: list[int]) -> torch.Tensor:
    """Log-probabilities after each token of a question behind a cache, [tokens, vocab]."""
    with kv.fork() as own:
        rows = [llm.executor.step([[token]], own)[0].float().cpu() for token in probe]
    return torch.log_softmax(torch.stack(rows), dim=-1)


def compared(full: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Mean KL in nats, and how often both find the same token likeliest."""
    kl = (full.exp() * (full - other)).sum(dim=-1).mean()
    return float(kl), float((full.argmax(-1) == other.argmax(-1)).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--cut", type=int, default=150)
    parser.add_argument("--repairs", default="0,0.05,0.15,0.3,1")
    asked = parser.parse_args()
    text = (Path(__file__).parent / "perplexity_text.txt").read_text(encoding="utf-8")
    with kvilt.load(asked.model, kv_memory="1G") as llm:
        ids = llm.prompt_ids(text[: 8 * asked.tokens])[: asked.tokens]
        probe = llm.prompt_ids(QUESTION, begins=False)
        with llm.prefill(ids) as kv:
            for share in (0.1, 0.4, 0.7):
                start = int(share * len(ids))
                measure(llm, kv, ids, probe, start, start + asked.cut, [float(r) for r in asked.repairs.split(",")])


def measure(
    llm: kvilt.LLM, kv: KVCache, ids: list[int], probe: list[int], start: int, stop: int, repairs: list[float]
) -> None:
    """One span at all ratios."""
    began_s = time.perf_counter()
    with llm.prefill([*ids[:start], *ids[stop:]]) as whole:
        whole_s = time.perf_counter() - began_s
        full = log_probs(llm, whole, probe)
    for repair in repairs:
        began_s = time.perf_counter()
        with llm.replace(kv, start, stop, repair=repair) as made:
            took_s = time.perf_counter() - began_s
            kl, same = compared(full, log_probs(llm, made, probe))
        behind = len(ids) - stop
        shown = f"| {start:,} | {behind:,} | {repair:g} | {kl:.5f} | {same:.0%} | {took_s:.2f} | {whole_s:.2f} |"
        print(shown, flush=True)


if __name__ == "__main__":
    main()
