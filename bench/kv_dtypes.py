"""What KV in fewer bits costs and brings: perplexity, agreement with float32 KV, memory, and the speed of decoding.

    python bench/kv_dtypes.py MODEL.gguf ... [--dtypes float16,int8,k8v4] [--tokens 4096] [--context 1024]
                              [--speed 9] [--contexts 1024,4096] [--threads 2]

The model runs on the native backend with its KV in each dtype, over the same text (`perplexity_text.txt`) in pieces of
`--context` tokens. Columns: perplexity and its change from float32 KV, mean KL divergence from float32 KV over all
positions, how often the likeliest token is the same, bytes a token takes, and the memory of a context of 8,192 tokens.
`--speed ROUNDS` decodes behind contexts of so many tokens as well, all dtypes in turn, and prints tokens a second with
the median ratio to the first dtype.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

import kvilt
from kvilt.batch import Batch, Ids, Last, Row

TEXT = Path(__file__).with_name("perplexity_text.txt")
TRUTH = "float32"
PIECE = 64  # positions whose logits are in memory
LONG = 8192  # tokens, for the column of memory
STEPS = 32


@dataclass(slots=True)
class Found:
    """Sums over positions of one dtype."""

    losses: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    same: int = 0

    def add(self, logits: torch.Tensor, truth: torch.Tensor, targets: torch.Tensor) -> None:
        own, other = logits.double().log_softmax(-1), truth.double().log_softmax(-1)
        self.divergences += (other.exp() * (other - own)).sum(-1).tolist()
        self.same += int((own.argmax(-1) == other.argmax(-1)).sum())
        scored = own[: len(targets)].gather(1, targets.view(-1, 1))
        self.losses += (-scored).flatten().tolist()

    @property
    def perplexity(self) -> float:
        return math.exp(statistics.fmean(self.losses))


def logits_of(llm: kvilt.LLM, ids: Sequence[int], cache: kvilt.KVCache) -> torch.Tensor:
    """Logits of the next positions of a cache."""
    cache.reserve(len(ids))
    start = cache.lengths[0]
    row = Row(Ids(ids), range(start, start + len(ids)), cache, want=Last(len(ids)))
    made = llm.executor.run(Batch.of([row])).values
    cache.commit([list(ids)])
    return made


def quality(models: dict[str, kvilt.LLM], ids: Sequence[int], context: int) -> dict[str, Found]:
    """All dtypes side by side over the text; each piece of `context` tokens begins anew."""
    found = {name: Found() for name in models}
    for start in range(0, len(ids), context):
        part = ids[start : start + context]
        with ExitStack() as open_caches:
            caches = {name: open_caches.enter_context(llm.executor.create_kv_cache()) for name, llm in models.items()}
            for at in range(0, len(part), PIECE):
                piece = part[at : at + PIECE]
                targets = torch.tensor(part[at + 1 : at + 1 + len(piece)])
                logits = {name: logits_of(llm, piece, caches[name]) for name, llm in models.items()}
                for name, own in logits.items():
                    found[name].add(own, logits[TRUTH], targets)
    return found


def rows_of(models: dict[str, kvilt.LLM], found: dict[str, Found]) -> Iterator[str]:
    base = found[TRUTH].perplexity
    for name, llm in models.items():
        own, layout = found[name], llm.executor.pool.layout
        each = layout.page_bytes // layout.page_tokens
        change, kl = own.perplexity / base - 1, statistics.fmean(own.divergences)
        yield (
            f"| `{name}` | {own.perplexity:.4f} ({change:+.2%}) | {kl:.5f} | {own.same / len(own.divergences):.2%} "
            f"| {each / 1024:.2f} KiB | {each * LONG / 2**20:.1f} MiB |"
        )


def decode_rounds(
    models: dict[str, kvilt.LLM], ids: Sequence[int], context: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of some steps behind a context, dtypes in turn, backwards every other time; the first round warms up."""
    greedy, times = kvilt.SamplingParams(temperature=0.0), {name: [] for name in models}
    prompt = (list(ids) * (context // len(ids) + 1))[:context]
    with ExitStack() as open_caches:
        caches = {name: open_caches.enter_context(llm.executor.create_kv_cache()) for name, llm in models.items()}
        for name, llm in models.items():
            llm.executor.step([prompt], caches[name])
        for turn in range(rounds + 1):
            for name in list(models)[:: 1 if turn % 2 else -1]:
                began_s = time.perf_counter()
                models[name].executor.sample_tokens(STEPS, [[prompt[0]]], caches[name], params=greedy)
                times[name].append(time.perf_counter() - began_s)
                caches[name].truncate(context)
    return {name: own[1:] for name, own in times.items()}


def speed_rows(times: dict[str, list[float]], context: int) -> Iterator[str]:
    first = next(iter(times.values()))
    for name, own in times.items():
        ratio = statistics.median(base / one for base, one in zip(first, own, strict=True))
        yield f"| `{name}` | {context:,} | {STEPS / statistics.median(own):.1f} | {ratio:.3f}x |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--dtypes", default="float16,int8,k8v4")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--speed", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--contexts", default="1024,4096")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    names = options.dtypes.split(",")
    contexts = [int(one) for one in options.contexts.split(",")]
    most = max(*contexts, options.context) + STEPS + 1
    for path in options.models:
        with ExitStack() as open_models:
            sizes = {"kv_memory": "512M", "max_context": most, "threads": options.threads}
            models = {
                name: open_models.enter_context(kvilt.load(path, kv_dtype=name, **sizes)) for name in (TRUTH, *names)
            }
            ids = models[TRUTH].tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: options.tokens]
            print(f"{path.stem}, {len(ids)} tokens in pieces of {options.context}\n")
            print("| `kv_dtype` | perplexity | KL | same token | a token | 8,192 tokens |\n|---|---|---|---|---|---|")
            print("\n".join(rows_of(models, quality(models, ids, options.context))), flush=True)
            if options.speed:
                print("\n| `kv_dtype` | context | tokens/s | to the first |\n|---|---|---|---|")
                timed = {name: models[name] for name in names}
                for context in contexts:
                    rounds = decode_rounds(timed, ids, context, options.speed)
                    print("\n".join(speed_rows(rounds, context)), flush=True)


if __name__ == "__main__":
    main()
