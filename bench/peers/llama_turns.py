"""llama.cpp's server on the turns of a chat, run by the interpreter that has xllamacpp.

JSON on stdin: "model", "tokens" of an answer, "threads", and "turns" as bench/second_turn.py has them: an earlier turn
or null, token ids behind what is kept of it, and what that is. One line of JSON on stdout: for each turn the tokens it
computed of the prompt, those it found in its cache, the answer as token ids, and the log-probabilities of the likeliest
first tokens.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

import xllamacpp

SHOWN = 10


def server(asked: dict[str, Any]) -> xllamacpp.Server:
    """Its defaults, but for threads, slots, a context that fits in each, and KV in float32 as kvilt's is here."""
    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.n_parallel = asked.get("slots", 1)
    params.n_ctx = 8192 * params.n_parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.verbosity = -1
    return xllamacpp.Server(params)


def complete(one: xllamacpp.Server, prompt: list[int], tokens: int) -> dict[str, Any]:
    fields = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": True, "return_tokens": True}
    fields |= {"n_probs": SHOWN, "ignore_eos": True}
    request = urllib.request.Request(
        f"{one.listening_address}/completion", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def prompt_of(turn: tuple[int | None, list[int], str], prompts: list[list[int]], done: list[Any]) -> list[int]:
    """As bench/second_turn.py makes it, with the answers of this server."""
    before, ids, keeps = turn
    if before is None:
        return ids
    prompt = prompts[before]
    kept = {"answer": [*prompt, *done[before]["answer"]], "prompt": prompt, "part": prompt[: len(prompt) * 2 // 3]}
    return [*kept[keeps], *ids]


def main() -> None:
    asked = json.loads(sys.stdin.read())
    one, prompts, done = server(asked), [], []
    for turn in asked["turns"]:
        prompts.append(prompt_of(turn, prompts, done))
        said = complete(one, prompts[-1], asked["tokens"])
        first = said["completion_probabilities"][0]["top_logprobs"]
        timings = said["timings"]
        done.append(
            {
                "computed": timings["prompt_n"],
                "cached": timings.get("cache_n", 0),
                "answer": said["tokens"],
                "first": {shown["id"]: shown["logprob"] for shown in first},
            }
        )
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
