"""Share of short everyday questions that a small model answers rightly, and share of answers that loop, by setting.

    python bench/everyday_questions.py [--model smollm2] [--backend auto] [--system TEXT] [--seeds 4] [--first-seeds 40]
                                       [--only "NAME;NAME"] [--questions 100] [--max-tokens 128] [--threads 2]
                                       [--json FILE]

The questions stand in everyday_questions.tsv: a question, then what counts as a right answer. Each is asked as `kvilt
run` asks it, with the chat template, once for each seed; greedy once. The first question is the one that new users try:
it is asked with more seeds, and the shares of these have a column of their own. An answer is right if an accepted word
stands in its first 200 characters. It loops if one pattern of tokens fills at least 24 tokens and came six times, or
fills 128. It is cut if it reaches --max-tokens. All answers of a setting share the engine's steps. A line comes as each
setting ends, and the table in Markdown at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

import kvilt
from kvilt.llm import AsyncLLM
from kvilt.sampling.repetition import RepetitionDetection

QUESTIONS = Path(__file__).with_suffix(".tsv")
FIRST_CHARS = 200
LOOP = RepetitionDetection(max_pattern_size=64, min_count=6, min_tokens=24, enough_tokens=128)

SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalty 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
    "t 0.2": {"temperature": 0.2},
    "t 0.2, top-p 0.9": {"temperature": 0.2, "top_p": 0.9},
    "t 0.2, top-p 0.9, penalty 1.05": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05},
    "t 0.2, top-p 0.9, penalty 1.1": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1},
    "t 0.4, top-p 0.9": {"temperature": 0.4, "top_p": 0.9},
    "t 0.4, min-p 0.1": {"temperature": 0.4, "min_p": 0.1},
    "t 0.4, min-p 0.1, penalty 1.1": {"temperature": 0.4, "min_p": 0.1, "repetition_penalty": 1.1},
    "t 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "t 0.7, min-p 0.1": {"temperature": 0.7, "min_p": 0.1},
    "t 0.7, min-p 0.2": {"temperature": 0.7, "min_p": 0.2},
    "t 0.7, top-p 0.9, penalty 1.1": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
}


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    accepted: tuple[str, ...]

    def right(self, answer: str) -> bool:
        """Whether an accepted word stands where a reader sees it first."""
        words = "|".join(re.escape(word) for word in self.accepted)
        return re.search(rf"(?<![\w.])(?:{words})(?!\w|\.\d)", answer[:FIRST_CHARS], re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class Score:
    """What became of one setting; shares of all answers."""

    setting: str
    answers: int
    right: float
    looped: float
    cut: float
    tokens: float  # of a mean answer
    first: float  # right answers, of those to the first question


def read_questions(path: Path) -> list[Question]:
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [Question(text, tuple(accepted)) for text, *accepted in rows]


def plan(fields: dict[str, float], questions: int, options: argparse.Namespace) -> list[tuple[int, int]]:
    """Which question is asked with which seed; greedy answers are all alike, so one is enough."""
    if not fields["temperature"]:
        return [(index, 0) for index in range(questions)]
    every = [(index, seed) for seed in range(options.seeds) for index in range(questions)]
    return every + [(0, seed) for seed in range(options.seeds, options.first_seeds)]


async def ask(
    llm: AsyncLLM, questions: Sequence[Question], name: str, options: argparse.Namespace, bar: Progress, task: TaskID
) -> tuple[Score, list[dict[str, Any]]]:
    """All questions with one setting, in one batch."""
    fields = SETTINGS[name]

    async def one(index: int, seed: int) -> dict[str, Any]:
        # Draws depend on the seed and the place: with a seed of its own, an answer says nothing of the next.
        own = {"seed": seed * len(questions) + index, "max_tokens": options.max_tokens, "repetition_detection": LOOP}
        system = [{"role": "system", "content": options.system}] if options.system else []
        question = questions[index]
        done = await llm.chat([*system, {"role": "user", "content": question.text}], **fields, **own)
        bar.advance(task)
        return {
            "question": index,
            "seed": seed,
            "right": question.right(done.text),
            "ended": done.finish_reason,
            "tokens": len(done.token_ids),
            "text": done.text,
        }

    said = await asyncio.gather(*(one(*each) for each in plan(fields, len(questions), options)))
    counted = [each for each in said if each["seed"] < options.seeds]
    score = Score(
        name,
        len(counted),
        share(each["right"] for each in counted),
        share(each["ended"] == "repetition" for each in counted),
        share(each["ended"] == "length" for each in counted),
        sum(each["tokens"] for each in counted) / len(counted),
        share(each["right"] for each in said if each["question"] == 0),
    )
    return score, said


def share(flags: Any) -> float:
    every = [bool(flag) for flag in flags]
    return sum(every) / len(every)


def line(score: Score) -> str:
    shares = " | ".join(f"{value:.1%}" for value in (score.right, score.looped, score.cut, score.first))
    return f"| {score.setting} | {score.answers} | {shares} | {score.tokens:.0f} |"


async def measure(options: argparse.Namespace) -> None:
    questions = read_questions(QUESTIONS)[: options.questions]
    names = options.only.split(";") if options.only else list(SETTINGS)
    results: list[dict[str, Any]] = []
    scores: list[Score] = []
    llm = kvilt.load_async(options.model, backend=options.backend, threads=options.threads)
    async with llm:
        with Progress() as bar:
            total = sum(len(plan(SETTINGS[name], len(questions), options)) for name in names)
            task = bar.add_task("answers", total=total)
            for name in names:
                score, said = await ask(llm, questions, name, options, bar, task)
                bar.console.print(line(score), highlight=False)
                scores.append(score)
                results.append({**asdict(score), "said": said})
        numerics = llm.executor.pool.ops.numerics
    print(f"\n{options.model}, {numerics}, {len(questions)} questions, {options.seeds} seeds\n")
    print("| setting | answers | right | loop | cut | first question right | tokens |\n|---|---|---|---|---|---|---|")
    print("\n".join(map(line, scores)))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seeds", type=int, default=40, help="seeds of the first question")
    parser.add_argument("--system", help="a system message instead of the template's own")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--only", help="settings, separated by semicolons: " + "; ".join(SETTINGS))
    parser.add_argument("--json", metavar="FILE", help="keep every answer")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
