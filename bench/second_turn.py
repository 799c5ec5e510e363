"""How many tokens of the prompt each turn of a chat computes on a model with recurrent state, beside llama.cpp.

    python bench/second_turn.py [--model FILE.gguf] [--first 1500] [--question 60] [--answer 48] [--threads 2]
                                [--xllama PYTHON]

Without --model a small Granite 4 hybrid with random weights is written and used (needs the package gguf). llama.cpp is
its server in xllamacpp, in an environment of its own, as for bench/server_peers.py; without it, kvilt is alone. Both
answer greedily, and the answers and the likeliest first tokens are compared.

 first        a long prompt
 second       the first prompt, its answer, a question
 third        the second prompt, its answer, a question
 regenerated  the third prompt again
 edited       the second prompt and its answer again, with another question
 dropped      the third prompt and a question, without the answer between: templates leave reasoning out
 rewound      two thirds of the first prompt and a question: an early message was changed
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvilt

sys.path.insert(0, str(Path(__file__).parent))
SHOWN = 10


@dataclass(frozen=True)
class Turn:
    """A turn of the chat: tokens behind what it keeps of an earlier turn."""

    name: str
    before: int | None
    ids: list[int]
    keeps: str = "answer"  # the prompt and the answer, the "prompt" alone, or a "part" of the prompt


def chat(first: int, question: int, vocab: int) -> list[Turn]:
    """The turns of the module's description."""
    dice = random.Random(11)

    def words(count: int) -> list[int]:
        return [dice.randrange(1, vocab) for _ in range(count)]

    return [
        Turn("first", None, words(first)),
        Turn("second", 0, words(question)),
        Turn("third", 1, words(question)),
        Turn("regenerated", 2, [], "prompt"),
        Turn("edited", 1, words(question)),
        Turn("dropped", 2, words(question), "prompt"),
        Turn("rewound", 0, words(question), "part"),
    ]


def kvilt_turns(model: Path, turns: list[Turn], tokens: int, threads: int) -> list[dict[str, Any]]:
    """What each turn computed of its prompt, its answer, and the likeliest first tokens."""
    params = kvilt.SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=SHOWN, ignore_eos=True)
    prompts: list[list[int]] = []
    done: list[dict[str, Any]] = []
    with kvilt.load(model, kv_memory="512M", threads=threads, kv_dtype="float32") as llm:
        for turn in turns:
            prompts.append(prompt_of(turn, prompts, done))
            said = llm.generate(prompts[-1], params)
            assert said.logprobs is not None
            done.append(
                {
                    "computed": said.usage.computed,
                    "cached": said.usage.cached_tokens,
                    "answer": said.token_ids,
                    "first": dict(zip(said.logprobs[0].top_ids, said.logprobs[0].top_logprobs, strict=True)),
                }
            )
    return done


def prompt_of(turn: Turn, prompts: list[list[int]], done: list[dict[str, Any]]) -> list[int]:
    """The tokens of a turn, from the prompts and answers before it."""
    if turn.before is None:
        return turn.ids
    prompt = prompts[turn.before]
    kept = {"answer": [*prompt, *done[turn.before]["answer"]], "prompt": prompt, "part": prompt[: len(prompt) * 2 // 3]}
    return [*kept[turn.keeps], *turn.ids]


def llama_turns(python: str, model: Path, turns: list[Turn], tokens: int, threads: int) -> list[dict[str, Any]]:
    asked = {
        "model": str(model),
        "turns": [[turn.before, turn.ids, turn.keeps] for turn in turns],
        "tokens": tokens,
        "threads": threads,
    }
    script = Path(__file__).parent / "peers" / "llama_turns.py"
    run = subprocess.run([python, str(script)], input=json.dumps(asked), capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"llama.cpp failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def report(turns: list[Turn], ours: list[dict[str, Any]], theirs: list[dict[str, Any]] | None) -> None:
    print(f"{'turn':<12} {'prompt':>7} {'new':>5} {'kvilt':>6}" + (f" {'llama.cpp':>10}  answers" if theirs else ""))
    for i, turn in enumerate(turns):
        prompt, new = ours[i]["computed"] + ours[i]["cached"], len(turn.ids)
        line = f"{turn.name:<12} {prompt:>7} {new:>5} {ours[i]['computed']:>6}"
        if theirs:
            same = "the same" if ours[i]["answer"] == theirs[i]["answer"] else "differ"
            line += f" {theirs[i]['computed']:>10}  {same}"
        print(line)
    if theirs:
        print(f"largest difference of a log-probability: {difference(ours, theirs):.1e}")


def difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Of the likeliest first tokens that both show."""
    found = [
        abs(value - other["first"][str(token)])
        for one, other in zip(ours, theirs, strict=True)
        for token, value in one["first"].items()
        if str(token) in other["first"]
    ]
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--first", type=int, default=1500)
    parser.add_argument("--question", type=int, default=60)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--xllama", help="the Python that has xllamacpp")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or write_default(Path(folder))
        turns = chat(asked.first, asked.question, 256)
        ours = kvilt_turns(model, turns, asked.answer, asked.threads)
        theirs = llama_turns(asked.xllama, model, turns, asked.answer, asked.threads) if asked.xllama else None
    report(turns, ours, theirs)


def write_default(folder: Path) -> Path:
    from hybrid_gguf import write_hybrid

    return write_hybrid(folder / "hybrid.gguf")


if __name__ == "__main__":
    main()
