"""llama.cpp with and without drafts on given prompts, run by the interpreter that has xllamacpp.

JSON on stdin: "model", "draft" (null: its prompt lookup), "most" (null: its own default), "prompts" as token ids,
"tokens", "threads", "rounds", "seconds". One line of JSON on stdout: tokens per second without and with drafts, the
median of the rounds' ratios, the accepted share, and whether both said the same. Progress goes to stderr. A round takes
every prompt on one server and then on the other; no round but the first begins after `seconds`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import urllib.request
from typing import Any

import xllamacpp

Timings = dict[str, float]


def server(asked: dict[str, Any], drafts: bool) -> xllamacpp.Server:
    """Its defaults, but for threads and a context that fits; nothing is copied away between requests."""
    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.n_parallel = 1
    params.n_ctx = 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    params.cache_ram_mib = 0
    params.verbosity = -1
    if drafts:
        own, kinds = params.speculative, xllamacpp.common_speculative_type
        if asked["draft"] is None:
            own.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        else:
            own.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            own.draft.mparams.path = asked["draft"]
            own.draft.cpuparams.n_threads = own.draft.cpuparams_batch.n_threads = asked["threads"]
            if asked.get("most"):
                own.draft.n_max = asked["most"]
    return xllamacpp.Server(params)


def complete(one: xllamacpp.Server, prompt: list[int], tokens: int) -> tuple[list[int], Timings]:
    """A greedy answer, and what the server says it took behind the prompt."""
    fields = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": True, "return_tokens": True}
    request = urllib.request.Request(
        f"{one.listening_address}/completion", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        said = json.load(answer)
    return said["tokens"], said["timings"]


def speed(timings: Timings) -> float:
    return 1000 * (timings["predicted_n"] - 1) / timings["predicted_ms"]


def main() -> None:
    asked = json.loads(sys.stdin.read())
    until_s = time.monotonic() + asked["seconds"]
    servers = [server(asked, False), server(asked, True)]
    for one in servers:
        complete(one, asked["prompts"][0], 8)
    speeds: list[list[float]] = [[], []]
    same, drafted, accepted = [], 0.0, 0.0
    for turn in range(asked["rounds"]):
        if turn and time.monotonic() > until_s:
            break
        said: list[list[list[int]]] = [[], []]
        for which in (0, 1) if turn % 2 else (1, 0):
            done = [complete(servers[which], prompt, asked["tokens"]) for prompt in asked["prompts"]]
            said[which] = [tokens for tokens, _ in done]
            speeds[which].append(statistics.harmonic_mean([speed(timings) for _, timings in done]))
            drafted += sum(timings.get("draft_n", 0) for _, timings in done)
            accepted += sum(timings.get("draft_n_accepted", 0) for _, timings in done)
            print(f"  llama.cpp round {turn + 1}, {'drafted' if which else 'plain'}: {speeds[which][-1]:.1f} tok/s",
                  file=sys.stderr, flush=True)  # fmt: skip
        same.append(said[0] == said[1])
    plain, with_drafts = speeds
    result = {
        "plain": statistics.median(plain),
        "drafted": statistics.median(with_drafts),
        "ratio": statistics.median(b / a for a, b in zip(plain, with_drafts, strict=True)),
        "accepted": accepted / max(1.0, drafted),
        "same": all(same),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
