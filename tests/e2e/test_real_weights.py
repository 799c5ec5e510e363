"""Real weights end to end: kvilt against transformers running the same dequantized weights in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from effort import some
from model_results import Shows
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvilt
from kvilt import LLM
from kvilt.batch import Batch, Ids, Last, Row

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Q: What is 12 times 12?\nA:",
    "Die Katze sitzt auf dem",
    "東京は日本の",
    "The three laws of thermodynamics are:\n1.",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "😀 means happy, 😢 means",
    "   indented\n\ttabbed\n\nand blank lines, then",
]
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()  # long, English, and it never changes
STEPS = 64
NEAR_TIE = 1e-3  # logits closer than this may swap between two correct float32 programs


@dataclass(frozen=True)
class Pair:
    """The same file: in transformers, on the reference backend and on native kernels."""

    oracle: PreTrainedModel
    llm: LLM
    native: LLM


def open_pair(path: Path) -> Iterator[Pair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with (
        kvilt.load(str(path), kv_memory="512M", backend="reference") as llm,
        kvilt.load(str(path), kv_memory="512M", backend="native") as native,
    ):
        yield Pair(oracle, llm, native)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Pair]:
    yield from open_pair(smollm2_path)


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Iterator[Pair]:
    yield from open_pair(gemma3_path)


@pytest.fixture(scope="module")
def qwen2(qwen2_path: Path) -> Iterator[Pair]:
    yield from open_pair(qwen2_path)


@pytest.fixture(autouse=True)
def shown(request: pytest.FixtureRequest, shows: Shows) -> None:
    """Each test here runs real weights of a family."""
    for name, path in (("smollm2", "smollm2_path"), ("gemma3", "gemma3_path"), ("qwen2", "qwen2_path")):
        if name in request.fixturenames:
            file = request.getfixturevalue(path)
            shows("real weights", type(request.getfixturevalue(name).oracle).__name__, file.stem)


def theirs(pair: Pair, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return pair.oracle(torch.tensor([ids])).logits[0]


def ours(pair: Pair, ids: list[int]) -> torch.Tensor:
    executor = pair.llm.executor
    with executor.create_kv_cache() as kv:
        kv.reserve(len(ids))
        return executor.run(Batch.of([Row(Ids(ids), range(len(ids)), kv, want=Last(len(ids)))])).values


def check_logits(pair: Pair, prompt: str) -> None:
    """Within 1e-3 of the size of the logits, at every position."""
    ids = pair.llm.tokenizer.encode(prompt)
    expected, found = theirs(pair, ids), ours(pair, ids)
    relative = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(relative.max()) < 1e-3, f"relative error {float(relative.max()):.2e} for {prompt!r}"


def check_greedy(pair: Pair, prompt: str, ids: list[int], generated: list[int]) -> None:
    """Our tokens are the oracle's argmax given the same history, which by induction is its greedy continuation."""
    assert len(generated) == STEPS
    expected = theirs(pair, ids + generated)[len(ids) - 1 : -1]
    for step, (token, logits) in enumerate(zip(generated, expected, strict=True)):
        best = int(logits.argmax())
        gap = float(logits[best] - logits[token])
        assert gap < NEAR_TIE, f"step {step} of {prompt!r}: {token} instead of {best}, behind by {gap:.5f}"


@pytest.mark.parametrize("prompt", some(PROMPTS))
def test_smollm2_prefill_logits(smollm2: Pair, prompt: str) -> None:
    check_logits(smollm2, prompt)


@pytest.mark.slow
def test_smollm2_greedy(smollm2: Pair) -> None:
    """All prompts in one batch: the reference unpacks the weights once for a step, not once for a prompt."""
    many = [smollm2.llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    done = smollm2.llm.generate(many, max_tokens=STEPS, ignore_eos=True)
    for prompt, ids, one in zip(PROMPTS, many, done, strict=True):
        check_greedy(smollm2, prompt, ids, one.token_ids)


def check_native(pair: Pair) -> None:
    """Eight-bit activations move log-probabilities a little: perplexity stays within one percent."""
    ids = pair.llm.tokenizer.encode(TEXT, add_special=False)
    exact, native = (llm.executor.score(ids).logprobs.double() for llm in (pair.llm, pair.native))
    ratio = math.exp(float(exact.mean() - native.mean()))
    assert abs(ratio - 1) < 1e-2, f"perplexity {math.exp(-float(native.mean())):.4f}, {ratio:.4f} times the exact one"


@pytest.mark.slow
def test_smollm2_native_perplexity(smollm2: Pair) -> None:
    check_native(smollm2)


@pytest.mark.slow
def test_gemma3_native_perplexity(gemma3: Pair) -> None:
    check_native(gemma3)


@pytest.mark.slow
def test_qwen2_native_perplexity(qwen2: Pair) -> None:
    check_native(qwen2)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_gemma3_logits(gemma3: Pair, prompt: str) -> None:
    check_logits(gemma3, prompt)


@pytest.mark.slow
def test_gemma3_beyond_its_window(gemma3: Pair) -> None:
    """The window is 512 tokens: a prompt of 900 tells local layers from global ones."""
    check_logits(gemma3, "A list of numbers: " + ", ".join(str(i) for i in range(240)))


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_qwen2_logits(qwen2: Pair, prompt: str) -> None:
    check_logits(qwen2, prompt)
