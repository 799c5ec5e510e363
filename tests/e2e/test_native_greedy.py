"""Greedy answers of the native backend against the reference: the same tokens up to near ties, whose gaps are shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvilt

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "Dear Sir or Madam, I am writing to",
    "The three laws of robotics are",
    "To make bread you need",
    "In 1969 the first man",
    "A list of prime numbers: 2, 3, 5,",
    "The main difference between a cat and a dog is",
]
TOKENS = 64
NEAR_TIE = 0.35  # of a logit: what eight-bit activations may move


@pytest.mark.slow
def test_greedy_answers_are_the_references_up_to_near_ties(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with kvilt.load(str(smollm2_path), backend="native", threads=1, kv_memory="128M") as native:
        answers = [native.generate(prompt, max_tokens=TOKENS, ignore_eos=True).token_ids for prompt in PROMPTS]
    gaps = []
    with kvilt.load(str(smollm2_path), backend="reference", threads=1, kv_memory="256M") as reference:
        torch.set_num_threads(1)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            ids = reference.tokenizer.encode(prompt)
            scores = reference.executor.score([*ids, *answer], top=1)
            # How much likelier the reference finds its own choice, given what the native backend said before.
            gaps += (scores.top_logprobs[len(ids) - 1 :, 0] - scores.logprobs[len(ids) - 1 :]).tolist()
    other = sorted(gap for gap in gaps if gap > 0)
    with capsys.disabled():
        shown = ", ".join(f"{gap:.3f}" for gap in other)
        print(f"\n{len(gaps) - len(other)} of {len(gaps)} greedy tokens equal; the others lie within (logits) {shown}")  # noqa: T201
    assert len(gaps) == TOKENS * len(PROMPTS)
    assert len(other) <= len(gaps) // 20
    assert not other or other[-1] < NEAR_TIE
