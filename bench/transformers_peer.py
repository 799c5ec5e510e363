"""kvilt beside Hugging Face transformers on the same weights, alternately, in one run.

    pip install -c constraints.txt ".[test]" && python bench/transformers_peer.py [--backend native]

Prints medians and the ratio kvilt / transformers. Only the ratio means something: machines are noisy. transformers runs
the dequantized weights in float32, which is its fastest way on a CPU; so does kvilt's reference backend. Its native one
runs them as they are packed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

import kvilt
from kvilt.weights.hub import resolve

PREFILL, CONTEXT, DECODE = 512, 64, 32


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    path = resolve("smollm2")
    executor = kvilt.load(path, kv_memory="1G", backend=arguments.backend, threads=arguments.threads).executor
    peer = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = [(7 * i) % 40000 + 100 for i in range(PREFILL)]

    def prefill() -> None:
        with executor.create_kv_cache() as kv:
            executor.step(ids, kv)

    @torch.no_grad()
    def peer_prefill() -> None:
        peer(torch.tensor([ids]), logits_to_keep=1)

    def decode(rows: int) -> Callable[[], object]:
        kv = executor.create_kv_cache(batch_size=rows)
        executor.prefill([ids[:CONTEXT]] * rows, kv)

        def work() -> None:
            kv.truncate(CONTEXT)
            executor.sample_tokens(DECODE, [[5]] * rows, kv)

        return work

    def peer_decode(rows: int) -> Callable[[], object]:
        prompt = torch.tensor([ids[:CONTEXT]] * rows)
        return lambda: peer.generate(prompt, max_new_tokens=DECODE, min_new_tokens=DECODE, do_sample=False)

    workloads = {
        f"prefill {PREFILL}": (PREFILL, prefill, peer_prefill),
        "decode, 1 row": (DECODE, decode(1), peer_decode(1)),
        "decode, 8 rows": (8 * DECODE, decode(8), peer_decode(8)),
    }
    print(f"{'workload':<16}{'kvilt tok/s':>14}{'transformers':>14}{'ratio':>8}")
    for name, (tokens, ours, theirs) in workloads.items():
        ours(), theirs()  # warm both
        pairs = [(seconds(ours), seconds(theirs)) for _ in range(arguments.runs)]
        mine, other = (tokens / statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:<16}{mine:>14.1f}{other:>14.1f}{mine / other:>8.2f}")


if __name__ == "__main__":
    main()
