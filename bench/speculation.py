"""Tokens per second with and without drafts, side by side in one run, and llama.cpp's ratio beside it.

    python bench/speculation.py [--target FILE] [--draft FILE] [--small FILE] [--rounds 3] [--tokens 200] [--threads 2]
                                [--only edit,pair,nothing,batch] [--json FILE]

Each case is one executor with two facades on it, one with a drafter: a round takes one sample of each, one after the
other, and the median of the rounds' ratios counts. Every pair of answers is compared token by token.

 edit     a function to change stands in the prompt; prompt lookup. llama.cpp's own prompt lookup beside it
 pair     code to write; a smaller model drafts, greedy and at temperature 0.8
 nothing  prose at temperature 1.5, where hardly anything repeats; prompt lookup, and a drafter that is always wrong
 batch    eight edits at once
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kvilt
from kvilt.llm import LLM, Completion
from kvilt.sampling.sampler import SampleState
from kvilt.speculative.drafter import Draft, Drafter, Story
from kvilt.speculative.model import ModelDrafter
from kvilt.speculative.ngram import NgramDrafter

WEIGHTS = Path("~/.cache/kvilt-dev").expanduser()
PEER = Path(os.environ.get("KVILT_PEERS_PYTHON", "~/.cache/kvilt-bench/venv/bin/python")).expanduser()

CODE = """def summary(rows, limit):
    result = {}
    for row in rows:
        name = row["name"]
        if name not in result:
            result[name] = {"count": 0, "total": 0, "largest": None}
        entry = result[name]
        entry["count"] = entry["count"] + 1
        entry["total"] = entry["total"] + row["value"]
        if entry["largest"] is None or row["value"] > entry["largest"]:
            entry["largest"] = row["value"]
    for name in list(result):
        entry = result[name]
        if entry["count"] < limit:
            del result[name]
        else:
            entry["mean"] = entry["total"] / entry["count"]
    return result
"""
EDITS = [
    f"{task} Answer with the whole code and nothing else.\n\n```python\n{CODE}```"
    for task in (
        "Rename the variable `entry` to `group` in this Python code.",
        "Rename the function `summary` to `summarize` in this Python code.",
        "Add a docstring to this Python function.",
    )
]
TASKS = [
    "Write a Python class for a binary search tree with insert, find and delete.",
    "Write a Python function that parses a CSV line with quotes, and tests for it.",
]
PROSE = ["Tell a strange story about a lighthouse.", "Describe a market in a city that does not exist."]


@dataclass(frozen=True, slots=True)
class Measured:
    """One case: medians of tokens per second over the rounds, the median of their ratios, and what was accepted."""

    case: str
    plain: float
    drafted: float
    ratio: float
    accepted: float  # of what was drafted
    per_step: float  # tokens that one step of a sample draws
    same: bool  # token for token


class Wrong:
    """Proposes as much as it may, and never the right token."""

    most, hopes = 8, (0.5,)

    def begin(self, ids: Sequence[int], state: SampleState, parent: Story | None = None) -> Story:  # noqa: ARG002
        return Story(ids, state)

    def propose(self, stories: Sequence[Story], k: Sequence[int]) -> list[Draft]:
        return [Draft([story.ids[0]] * count) for story, count in zip(stories, k, strict=True)]

    def forget(self, story: Story) -> None:
        pass

    def close(self) -> None:
        pass


def speed(done: Sequence[Completion]) -> float:
    """Tokens per second after the first ones, all answers together."""
    later = sum(len(one.token_ids) - 1 for one in done)
    return later / (max(one.timing.total_s for one in done) - max(one.timing.first_token_s for one in done))


def compare(
    case: str, llm: LLM, drafter: Drafter, ask: Callable[[LLM], list[list[Completion]]], rounds: int
) -> Measured:
    """Both facades over one executor, in turns. `ask` gives groups of answers, each group asked at once."""
    drafting = LLM(llm.executor, llm.tokenizer, tuple(llm.stop_ids), drafter=drafter)
    ask(drafting)  # recordings are made, times are learnt
    plain: list[float] = []
    drafted: list[float] = []
    for turn in range(rounds):
        order = (llm, drafting) if turn % 2 else (drafting, llm)
        said = {one: ask(one) for one in order}
        plain.append(statistics.harmonic_mean([speed(group) for group in said[llm]]))
        drafted.append(statistics.harmonic_mean([speed(group) for group in said[drafting]]))
    usages = [one.usage for group in said[drafting] for one in group]
    tokens, accepted = sum(u.completion_tokens for u in usages), sum(u.accepted_tokens for u in usages)
    return Measured(
        case,
        statistics.median(plain),
        statistics.median(drafted),
        statistics.median(b / a for a, b in zip(plain, drafted, strict=True)),
        accepted / max(1, sum(u.drafted_tokens for u in usages)),
        tokens / max(1, tokens - accepted),
        [[one.token_ids for one in group] for group in said[llm]]
        == [[one.token_ids for one in group] for group in said[drafting]],
    )


def chats(texts: Sequence[str], **fields: Any) -> Callable[[LLM], list[list[Completion]]]:
    """One conversation after the other; the prompt's KV is found from the second time on."""
    return lambda llm: [[llm.chat([{"role": "user", "content": text}], **fields)] for text in texts]


def together(texts: Sequence[str], **fields: Any) -> Callable[[LLM], list[list[Completion]]]:
    """All at once."""
    return lambda llm: [llm.generate([llm.chat_ids([{"role": "user", "content": t}]) for t in texts], **fields)]


def llama(path: Path, llm: LLM, tokens: int, threads: int, rounds: int) -> dict[str, Any] | None:
    """llama.cpp's prompt lookup on the same prompts, if it is there."""
    if not PEER.exists():
        return None
    prompts = [llm.chat_ids([{"role": "user", "content": text}]) for text in EDITS]
    asked = {"model": str(path), "prompts": prompts, "tokens": tokens, "threads": threads, "rounds": rounds}
    worker = Path(__file__).parent / "peers" / "llama_drafts.py"
    done = subprocess.run([PEER, worker], input=json.dumps(asked), capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"llama.cpp is left out: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def show(one: Measured) -> None:
    print(
        f"{one.case:<34} {one.plain:7.1f} {one.drafted:8.1f} tok/s   x{one.ratio:.2f}   "
        f"{one.accepted:4.0%} accepted, {one.per_step:.2f} tokens a step, {'same tokens' if one.same else 'DIFFERENT'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=WEIGHTS / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
    parser.add_argument("--draft", type=Path, default=WEIGHTS / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
    parser.add_argument("--small", default="smollm2", help="for the case where nothing is accepted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="edit,pair,nothing,batch")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cases, options = given.only.split(","), {"threads": given.threads, "kv_memory": "1G"}
    results: list[Measured] = []
    peers: dict[str, Any] = {}

    def note(one: Measured) -> None:
        results.append(one)
        show(one)

    if not given.target.exists():
        print(f"{given.target} is not here: edit, pair and batch are left out", file=sys.stderr)
        cases = [case for case in cases if case == "nothing"]
    if {"edit", "pair", "batch"} & {*cases}:
        with kvilt.load(given.target, **options) as llm:
            name, most = given.target.stem.split("-instruct")[0], {"max_tokens": given.tokens}
            if "edit" in cases:
                note(compare(f"edit: {name}, ngram", llm, NgramDrafter(), chats(EDITS, **most), given.rounds))
                if found := llama(given.target, llm, given.tokens, given.threads, given.rounds):
                    peers["edit: llama.cpp"] = found
                    print(
                        f"{'edit: llama.cpp, prompt lookup':<34} {found['plain']:7.1f} {found['drafted']:8.1f} tok/s   "
                        f"x{found['ratio']:.2f}",
                        flush=True,
                    )
            if "pair" in cases and given.draft.exists():
                with kvilt.load(given.draft, **options) as small:
                    for heat in (0.0, 0.8):
                        ask = chats(TASKS, temperature=heat, seed=1, **most)
                        note(
                            compare(
                                f"pair: at temperature {heat}", llm, ModelDrafter(small.executor), ask, given.rounds
                            )
                        )
            if "batch" in cases:
                ask = together([*EDITS, *EDITS, *EDITS[:2]], **most)
                note(compare(f"batch of 8 edits: {name}, ngram", llm, NgramDrafter(), ask, given.rounds))
    if "nothing" in cases:
        with kvilt.load(given.small, **options) as llm:
            ask = chats(PROSE, temperature=1.5, seed=3, ignore_eos=True, max_tokens=2 * given.tokens)
            note(compare("nothing: prose, ngram", llm, NgramDrafter(), ask, 3 * given.rounds))
            note(compare("nothing: always wrong", llm, Wrong(), ask, 3 * given.rounds))
    if given.json:
        given.json.write_text(json.dumps({"results": [asdict(one) for one in results], "peers": peers}, indent=1))


if __name__ == "__main__":
    main()
