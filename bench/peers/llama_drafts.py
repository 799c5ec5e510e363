"""llama.cpp's prompt lookup on given prompts: JSON on stdin, tokens per second without and with it on stdout."""

from __future__ import annotations

import json
import statistics
import sys
import time

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


def speed(llm: Llama, prompt: list[int], tokens: int) -> float:
    """Tokens per second after the first."""
    llm.reset()
    first_s, count = 0.0, 0
    ends = llm.token_eos()
    for token in llm.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
        count += 1
        first_s = first_s or time.perf_counter()
        if token == ends or count >= tokens:
            break
    return (count - 1) / (time.perf_counter() - first_s)


def main() -> None:
    asked = json.loads(sys.stdin.read())
    made = [
        Llama(
            asked["model"],
            n_ctx=2048,
            n_threads=asked["threads"],
            n_threads_batch=asked["threads"],
            draft_model=draft,
            logits_all=draft is not None,
            verbose=False,
        )
        for draft in (None, LlamaPromptLookupDecoding(num_pred_tokens=10))
    ]
    plain: list[float] = []
    drafted: list[float] = []
    for _ in range(asked["rounds"]):
        for llm, speeds in zip(made, (plain, drafted), strict=True):
            speeds.append(statistics.harmonic_mean([speed(llm, one, asked["tokens"]) for one in asked["prompts"]]))
    ratio = statistics.median(b / a for a, b in zip(plain, drafted, strict=True))
    print(json.dumps({"plain": statistics.median(plain), "drafted": statistics.median(drafted), "ratio": ratio}))


if __name__ == "__main__":
    main()
