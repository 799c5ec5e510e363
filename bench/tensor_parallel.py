"""One process on two threads against two processes on one thread each, in alternation: ratios of their speeds.

python bench/tensor_parallel.py [--model smollm2] [--ranks 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import kvilt
from kvilt import SamplingParams
from kvilt.llm.facade import LLM

PROMPT_TOKENS, DECODE_TOKENS = 512, 64


def measure(llm: LLM, prompt: list[int], rows: int) -> tuple[float, float]:
    """Tokens per second of a prompt, and of decoding so many rows."""
    executor = llm.executor
    with executor.create_kv_cache(rows) as kv:
        start = time.perf_counter()
        executor.prefill([prompt] * rows, kv)
        middle = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=DECODE_TOKENS)
        executor.sample_tokens(DECODE_TOKENS, [[1]] * rows, kv, params=params)
        end = time.perf_counter()
    return rows * len(prompt) / (middle - start), rows * DECODE_TOKENS / (end - middle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    alone = kvilt.load(given.model, device="cpu", threads=given.ranks, kv_memory="1G")
    ranks = kvilt.load(given.model, device="cpu", threads=1, tensor_parallel=given.ranks, kv_memory="1G")
    with alone, ranks:
        prompt = [(i * 37 + 11) % alone.executor.spec.vocab_size for i in range(PROMPT_TOKENS)]
        for rows in (1, 8):
            found = []
            for _ in range(given.rounds + 1):  # the first round warms up
                one, several = measure(alone, prompt, rows), measure(ranks, prompt, rows)
                found.append([after / before for after, before in zip(several, one, strict=True)])
            for name, each in zip(("prefill", "decode"), zip(*found[1:], strict=True), strict=True):
                print(
                    f"{rows} rows, {name}: {given.ranks} ranks run at {statistics.median(each):.2f} "
                    f"of the speed of one process ({min(each):.2f} to {max(each):.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
