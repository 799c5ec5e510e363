"""Tokens per second with and without drafts, side by side in one run, and llama.cpp's ratio beside it.

    python bench/speculation.py [--target FILE] [--draft FILE] [--small FILE] [--rounds 2] [--tokens 96] [--threads 2]
                                [--only edit,pair,batch,nothing] [--minutes 8] [--xllama PYTHON] [--json FILE]

Each case is one executor with two facades on it, one with a drafter: a round takes one sample of each, one after the
other, and the median of the rounds' ratios counts. Every pair of answers is compared token by token. A table comes at
the end, lines as it goes; no round is begun after `--minutes`, and cases that are left out are named.

 edit     a function to change stands in the prompt; prompt lookup, and llama.cpp's own
 pair     code to write; a smaller model drafts, greedy and at temperature 0.8; llama.cpp with the same two files,
          greedy, with as many drafts as is its default and with as many as ours may have
 batch    eight edits at once, and four: some of them rename, where drafts are accepted, the others add text
 nothing  prose at temperature 1.5, where hardly anything repeats; prompt lookup, and a drafter that is always wrong

llama.cpp is xllamacpp in an environment of its own, as for bench/server_peers.py; without it, kvilt is alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kvilt
from kvilt.llm import LLM, Completion
from kvilt.sampling.sampler import SamplingState
from kvilt.speculative.drafter import Draft, DraftContext, Drafter
from kvilt.speculative.model import ModelDrafter
from kvilt.speculative.ngram import NgramDrafter

WEIGHTS = Path("~/.cache/kvilt-dev").expanduser()
XLLAMA = Path("~/.cache/kvilt-bench/xllama/bin/python").expanduser()

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
    engine: str
    plain: float
    drafted: float
    ratio: float
    accepted: float  # of what was drafted
    per_step: float | None  # tokens that one step of a sample draws
    same: bool  # token for token
    rounds: int


@dataclass(slots=True)
class Clock:
    """When no more is begun."""

    until_s: float

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()


class Wrong:
    """Proposes as much as it may, and never the right token."""

    most, hopes = 8, (0.5,)

    def begin(self, ids: Sequence[int], state: SamplingState, parent: DraftContext | None = None) -> DraftContext:  # noqa: ARG002
        return DraftContext(ids, state)

    def propose(self, draft_contexts: Sequence[DraftContext], k: Sequence[int]) -> list[Draft]:
        return [Draft([draft_context.ids[0]] * count) for draft_context, count in zip(draft_contexts, k, strict=True)]

    def forget(self, draft_context: DraftContext) -> None:
        pass

    def close(self) -> None:
        pass


def speed(done: Sequence[Completion]) -> float:
    """Tokens per second after the first ones, all answers together."""
    later = sum(len(one.token_ids) - 1 for one in done)
    return later / (max(one.timing.total_s for one in done) - max(one.timing.first_token_s for one in done))


def compare(
    case: str, llm: LLM, drafter: Drafter, ask: Callable[[LLM], list[list[Completion]]], rounds: int, clock: Clock
) -> Measured:
    """Both facades over one executor, in turns. `ask` gives groups of answers, each group asked at once."""
    drafting = LLM(llm.executor, llm.tokenizer, tuple(llm.stop_ids), drafter=drafter)
    ask(drafting)  # recordings are made, times are learnt
    plain: list[float] = []
    drafted: list[float] = []
    same = True
    for turn in range(rounds):
        if turn and clock.left_s < 0:
            break
        order = (llm, drafting) if turn % 2 else (drafting, llm)
        said = {one: ask(one) for one in order}
        plain.append(statistics.harmonic_mean([speed(group) for group in said[llm]]))
        drafted.append(statistics.harmonic_mean([speed(group) for group in said[drafting]]))
        tell(f"  {case}, round {turn + 1}: {plain[-1]:.1f} and {drafted[-1]:.1f} tok/s")
        both = [[[one.token_ids for one in group] for group in said[which]] for which in (llm, drafting)]
        same = same and both[0] == both[1]
    usages = [one.usage for group in said[drafting] for one in group]
    tokens, accepted = sum(u.completion_tokens for u in usages), sum(u.accepted_tokens for u in usages)
    return Measured(
        case,
        "kvilt",
        statistics.median(plain),
        statistics.median(drafted),
        statistics.median(b / a for a, b in zip(plain, drafted, strict=True)),
        accepted / max(1, sum(u.drafted_tokens for u in usages)),
        tokens / max(1, tokens - accepted),
        same,
        len(plain),
    )


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def chats(texts: Sequence[str], **fields: Any) -> Callable[[LLM], list[list[Completion]]]:
    """One conversation after the other; the prompt's KV is found from the second time on."""
    return lambda llm: [[llm.chat([{"role": "user", "content": text}], **fields)] for text in texts]


def together(texts: Sequence[str], **fields: Any) -> Callable[[LLM], list[list[Completion]]]:
    """All at once."""
    return lambda llm: [llm.generate([llm.chat_ids([{"role": "user", "content": t}]) for t in texts], **fields)]


def llama(
    case: str, prompts: Sequence[list[int]], given: argparse.Namespace, clock: Clock, **fields: Any
) -> Measured | None:
    """llama.cpp on the same prompts and files, if it is there."""
    if not given.xllama.exists():
        return None
    asked = {
        "model": str(given.target), "draft": None, "most": None, "prompts": prompts, "tokens": given.tokens,
        "threads": given.threads, "rounds": given.rounds, "seconds": max(0.0, clock.left_s), **fields,
    }  # fmt: skip
    worker = Path(__file__).parent / "peers" / "llama_drafts.py"
    try:
        done = subprocess.run(
            [given.xllama, worker], input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True, timeout=300
        )
    except subprocess.SubprocessError as error:
        tell(f"{case}: llama.cpp is left out ({error})")
        return None
    found = json.loads(done.stdout.strip().splitlines()[-1])
    most = f", up to {fields['most']} drafts" if fields.get("most") else ""
    return Measured(case, f"llama.cpp{most}", per_step=None, rounds=given.rounds, **found)


def table(results: Sequence[Measured]) -> str:
    lines = [
        "| case | engine | without, tok/s | with drafts | ratio | accepted | tokens a step | same tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        step = f"{one.per_step:.2f}" if one.per_step is not None else ""
        lines.append(
            f"| {one.case} | {one.engine} | {one.plain:.1f} | {one.drafted:.1f} | {one.ratio:.2f} | {one.accepted:.0%} "
            f"| {step} | {'yes' if one.same else 'NO'} |"
        )
    return "\n".join(lines)


# The cases, each in turn as long as there is time.

Case = Iterator[Measured | None]


def edit(llm: LLM, given: argparse.Namespace, clock: Clock) -> Case:
    ask = chats(EDITS, max_tokens=given.tokens)
    yield compare("edit, prompt lookup", llm, NgramDrafter(), ask, given.rounds, clock)
    yield llama("edit, prompt lookup", asked_as_ids(llm, EDITS), given, clock)


def pair(llm: LLM, given: argparse.Namespace, clock: Clock) -> Case:
    if not given.draft.exists():
        tell(f"{given.draft} is not here: pair is left out")
        return
    with kvilt.load(given.draft, threads=given.threads, kv_memory="1G") as small:
        for heat, case in ((0.0, "code, draft model"), (0.8, "code, draft model, temperature 0.8")):
            ask = chats(TASKS, temperature=heat, seed=1, max_tokens=given.tokens)
            yield compare(case, llm, ModelDrafter(small.executor), ask, given.rounds, clock)
    for most in (None, 8):
        fields = {"draft": str(given.draft), "most": most}
        yield llama("code, draft model", asked_as_ids(llm, TASKS), given, clock, **fields)


def batch(llm: LLM, given: argparse.Namespace, clock: Clock) -> Case:
    for count in (8, 4):
        ask = together([EDITS[i % len(EDITS)] for i in range(count)], max_tokens=given.tokens)
        yield compare(f"{count} edits at once", llm, NgramDrafter(), ask, given.rounds, clock)
    ask = together([EDITS[i % 2] for i in range(8)], max_tokens=given.tokens)
    yield compare("8 renamings at once", llm, NgramDrafter(), ask, given.rounds, clock)


def nothing(llm: LLM, given: argparse.Namespace, clock: Clock) -> Case:
    ask = chats(PROSE, temperature=1.5, seed=3, ignore_eos=True, max_tokens=2 * given.tokens)
    yield compare("hot prose, prompt lookup", llm, NgramDrafter(), ask, 2 * given.rounds, clock)
    yield compare("always wrong", llm, Wrong(), ask, 2 * given.rounds, clock)


def asked_as_ids(llm: LLM, texts: Sequence[str]) -> list[list[int]]:
    return [list(llm.chat_ids([{"role": "user", "content": text}])) for text in texts]


END = object()
CASES = {"edit": edit, "pair": pair, "batch": batch, "nothing": nothing}


def measure(given: argparse.Namespace, clock: Clock) -> Iterator[Measured]:
    wanted = given.only.split(",")
    for path, names in ((given.target, ("edit", "pair", "batch")), (given.small, ("nothing",))):
        chosen = [name for name in names if name in wanted]
        if chosen and names[0] == "edit" and not given.target.exists():
            tell(f"{given.target} is not here: {', '.join(chosen)} are left out")
            continue
        if not chosen:
            continue
        with kvilt.load(path, threads=given.threads, kv_memory="1G") as llm:
            for name in chosen:
                cases = CASES[name](llm, given, clock)
                while clock.left_s > 0 and (one := next(cases, END)) is not END:
                    if isinstance(one, Measured):
                        yield one
                if clock.left_s <= 0:
                    tell(f"{name}: what was not begun is left out, the time is over")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=WEIGHTS / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
    parser.add_argument("--draft", type=Path, default=WEIGHTS / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
    parser.add_argument("--small", default="smollm2", help="for the case where nothing is accepted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="edit,pair,batch,nothing")
    parser.add_argument("--minutes", type=float, default=8.0, help="no round is begun after this long")
    parser.add_argument("--xllama", type=Path, default=XLLAMA, help="the interpreter that has xllamacpp")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    clock = Clock(time.monotonic() + 60 * given.minutes - 60)  # whoever has begun may take a minute to end
    results: list[Measured] = []
    for one in measure(given, clock):
        results.append(one)
        tell(f"{one.case}: {one.engine} x{one.ratio:.2f}, {one.accepted:.0%} accepted")
    print(table(results))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in results], indent=1))


if __name__ == "__main__":
    main()
