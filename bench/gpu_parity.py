"""Whether a model says the same on a GPU as on the CPU: greedy tokens of ten prompts, and the perplexity of a text.

    python bench/gpu_parity.py MODEL.gguf [--device cuda] [--against triton/float32:0.01,triton:0.25] [--tokens 64]
        [--reference reference] [--expected FILE.json]

Each backend of `--against` stands with the largest distance, in logits, between the reference's best two tokens at
which it may choose another one: such places are ties, and are named. After a tie the backend continues from the
reference's token, so that every place counts. Perplexities may differ by 0.5 %. The exit status is 1 where that fails.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.text.tokenizer import from_gguf

GREEDY = SamplingParams(temperature=0.0)
PERPLEXITY_SHARE = 0.005
PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper.",
    "List three uses of a wooden spoon.",
    "def fibonacci(n):",
    "The water cycle begins when",
    "Translate to German: The weather is nice today.",
    "In the year 1969, two astronauts",
    "Give me a recipe for pancakes with",
    "Once upon a time, in a village by the sea,",
    "The difference between a list and a tuple in Python is",
)
TEXT = Path(__file__).with_name("parity_text.txt")


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference's tokens after one prompt, and at each of them how far its second choice was."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]  # in logits


def greedy(executor: Executor, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """So many tokens after each prompt."""
    with executor.create_kv_cache(len(prompts)) as kv:
        return executor.sample_tokens(tokens, [list(prompt) for prompt in prompts], kv, params=GREEDY)


def expected(executor: Executor, prompts: Sequence[list[int]], tokens: int) -> list[Expected]:
    """What the reference says: in one batch, since it unpacks all weights in every step."""
    found = []
    for prompt, drawn in zip(prompts, greedy(executor, prompts, tokens), strict=True):
        top = executor.score([*prompt, *drawn], top=2).top_logprobs[-len(drawn) :]
        found.append(Expected(prompt, drawn, (top[:, 0] - top[:, 1]).tolist()))
    return found


def differences(executor: Executor, truth: Expected) -> list[tuple[int, float]]:
    """Places where another token is drawn, each with the distance of the reference's best two there."""
    found, at = [], 0
    while at < len(truth.tokens):
        (drawn,) = greedy(executor, [[*truth.prompt, *truth.tokens[:at]]], len(truth.tokens) - at)
        while at < len(truth.tokens) and drawn and drawn.pop(0) == truth.tokens[at]:
            at += 1
        if at < len(truth.tokens):
            found.append((at, truth.gaps[at]))
            at += 1
    return found


def perplexity(executor: Executor, ids: Sequence[int]) -> float:
    """Of a text, over all its tokens but the first."""
    return math.exp(-float(executor.score(ids).logprobs.double().mean()))


def load(path: Path, backend: str, device: str) -> Executor:
    return load_executor(path, RunConfig(device=device, backend=backend, kv_memory=256 << 20))


def compare(executor: Executor, truths: Sequence[Expected], text: Sequence[int], wanted: float, limit: float) -> bool:
    """Print how a backend differs from the reference; False if it differs too much."""
    began_s = time.perf_counter()
    found = [(row, at, gap) for row, truth in enumerate(truths) for at, gap in differences(executor, truth)]
    for row, at, gap in found:
        kind = "a tie" if gap <= limit else "A DIFFERENCE"
        print(f"  {kind} in prompt {row} at token {at}: the reference's best two are {gap:.4f} apart")
    made = perplexity(executor, text)
    places = sum(len(truth.tokens) for truth in truths)
    equal = len(truths) - len({row for row, _, _ in found})
    print(
        f"  {equal} of {len(truths)} prompts equal, {len(found)} of {places} tokens differ (limit {limit} of a logit); "
        f"perplexity {made:.4f} beside {wanted:.4f} ({made / wanted - 1:+.3%}); {time.perf_counter() - began_s:.1f} s"
    )
    return all(gap <= limit for _, _, gap in found) and abs(made / wanted - 1) <= PERPLEXITY_SHARE


def ask_reference(
    path: Path, backend: str, text: Sequence[int], prompts: int, tokens: int
) -> tuple[float, list[Expected]]:
    """The perplexity of the text, and the tokens after each prompt, on the CPU."""
    began_s = time.perf_counter()
    tokenizer, executor = from_gguf(path), load(path, backend, "cpu")
    truths = expected(executor, [tokenizer.encode(prompt) for prompt in PROMPTS[:prompts]], tokens)
    wanted = perplexity(executor, text)
    executor.close()
    print(f"{path.name}: {prompts} x {tokens} tokens by {backend} on the CPU in {time.perf_counter() - began_s:.0f} s")
    return wanted, truths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--against", default="triton/float32:0.01,triton:0.25")
    parser.add_argument("--reference", default="reference")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--expected", type=Path, help="a file with the reference's answers; written if it is not there")
    options = parser.parse_args()
    text = from_gguf(options.model).encode(TEXT.read_text(encoding="utf-8"))[:1024]
    if options.expected is not None and options.expected.exists():
        recorded = json.loads(options.expected.read_text())
        wanted, truths = recorded["perplexity"], [Expected(**one) for one in recorded["prompts"]]
    else:
        wanted, truths = ask_reference(options.model, options.reference, text, options.prompts, options.tokens)
        if options.expected is not None:
            recorded = {"perplexity": wanted, "prompts": [asdict(truth) for truth in truths]}
            options.expected.write_text(json.dumps(recorded))
    good = True
    for one in options.against.split(","):
        backend, _, limit = one.partition(":")
        print(f"{backend} on {options.device}:")
        executor = load(options.model, backend, options.device)
        good = compare(executor, truths, text, wanted, float(limit)) and good
        executor.close()
    print("the same" if good else "NOT the same")
    sys.exit(not good)


if __name__ == "__main__":
    main()
