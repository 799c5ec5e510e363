"""What a session with `exact: false` costs and saves where reasoning is left out: KL against a whole prefill, seconds.

    python bench/session_strip.py [--model smollm2] [--turns 30] [--runs 3] [--repairs 0,0.05,0.1,0.2] [--threads 2]

A long chat of real text: each answer begins with reasoning, four turns bring results of tools, and every fifth is a
question of the user, which leaves the reasoning of all earlier answers out. What was moved at one question is moved
again at the next, so that errors add up. At each question the distributions of the next tokens are compared
with those after a whole prefill of the same prompt, and the time to the first token with that of an exact session and
that of a whole prefill. Each run begins elsewhere in the text; medians over the runs are shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvilt
from kvilt.llm import session_use

TEXT = Path(__file__).parent / "perplexity_text.txt"
SYSTEM, RESULT, QUESTION = 400, 110, 30  # tokens
REASONING, ANSWER = 45, 15  # tokens, of the text too: what the model itself says of it soon repeats itself
PROBE = 24  # tokens behind the prompt whose distributions are compared


@dataclass(frozen=True)
class Question:
    """One question of a chat that left reasoning out."""

    number: int
    prompt: int  # tokens
    computed: int
    kl: float
    same: float  # share of tokens that both find likeliest
    took_s: float
    exact_s: float
    whole_s: float


class Chat:
    """One chat as token ids, with the text of a run."""

    def __init__(self, llm: Any, ids: list[int], begin: int) -> None:
        self.llm, self.ids, self.at = llm, ids, begin
        self.marks = {role: llm.prompt_ids(f"<|im_start|>{role}\n", begins=False) for role in ("user", "assistant")}
        self.end = llm.prompt_ids("<|im_end|>\n", begins=False)
        self.said = [self.take(SYSTEM)]  # pieces of the prompt
        self.reasoned: list[int] = []  # those that are reasoning

    def take(self, count: int) -> list[int]:
        """The next tokens of the text, which begins again at its end."""
        found = [self.ids[(self.at + i) % len(self.ids)] for i in range(count)]
        self.at += count
        return found

    def user(self, count: int) -> None:
        self.said.append([*self.marks["user"], *self.take(count), *self.end, *self.marks["assistant"]])

    def answer(self) -> None:
        self.reasoned.append(len(self.said))
        self.said += [self.take(REASONING), [*self.take(ANSWER), *self.end]]

    def leave_out(self) -> None:
        for index in self.reasoned:
            self.said[index] = []

    @property
    def prompt(self) -> list[int]:
        return [token for piece in self.said for token in piece]


def first_token(ask: Any, prompt: list[int], **fields: Any) -> tuple[Any, float]:
    """The completion of one token, and the seconds it took."""
    began_s = time.perf_counter()
    done = ask(prompt, kvilt.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), **fields)
    return done, time.perf_counter() - began_s


def distributions(llm: Any, kv: Any, prompt: list[int], probe: list[int]) -> torch.Tensor:
    """Log-probabilities behind a prompt, and behind each token of a probe, [tokens, vocab]."""
    with kv.fork_to(len(prompt) - 1) as own:
        rows = [llm.executor.step([[token]], own)[0].float().cpu() for token in [prompt[-1], *probe]]
    return torch.log_softmax(torch.stack(rows), dim=-1)


def run(llm: Any, ids: list[int], begin: int, turns: int, repair: float) -> list[Question]:
    """One chat; what each of its questions computed, and how far it is from a whole prefill."""
    session_use.REPAIR = repair
    moved = llm.session("moved", exact=False)
    exact = llm.session("exact", ttl_s=3600.0)
    chat, found = Chat(llm, ids, begin), list[Question]()
    for turn in range(turns):
        asks = turn % 5 == 0 and turn > 0
        if asks:
            chat.leave_out()
        chat.user(QUESTION if turn % 5 == 0 else RESULT)
        done, took_s = first_token(moved.generate, chat.prompt, keep_kv=True)
        _, exact_s = first_token(exact.generate, chat.prompt)
        with done.kv as kv:
            if asks:
                found.append(compared(llm, kv, chat, len(found) + 1, done.usage, (took_s, exact_s)))
        chat.answer()
        for session in (moved, exact):  # the KV of an answer is there when it ends
            first_token(session.generate, chat.prompt)
    moved.delete()
    exact.delete()
    llm.executor.prefixes.clear()
    return found


def compared(llm: Any, kv: Any, chat: Chat, number: int, usage: Any, took: tuple[float, float]) -> Question:
    prompt, probe = chat.prompt, [chat.ids[(chat.at + i) % len(chat.ids)] for i in range(PROBE)]
    whole, whole_s = first_token(llm.generate, prompt, keep_kv=True, tenant=f"whole {number}")
    assert whole.usage.computed == len(prompt)
    with whole.kv as full:
        expected = distributions(llm, full, prompt, probe)
    other = distributions(llm, kv, prompt, probe)
    kl = float((expected.exp() * (expected - other)).sum(dim=-1).mean())
    same = float((expected.argmax(-1) == other.argmax(-1)).float().mean())
    return Question(number, len(prompt), usage.computed + usage.blended_recomputed, kl, same, *took, whole_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--repairs", default="0,0.05,0.1,0.2")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    with kvilt.load(asked.model, kv_memory="1G", threads=asked.threads) as llm:
        ids = llm.prompt_ids(TEXT.read_text(encoding="utf-8"))
        for repair in map(float, asked.repairs.split(",")):
            runs = [run(llm, ids, index * len(ids) // asked.runs, asked.turns, repair) for index in range(asked.runs)]
            for same_number in zip(*runs, strict=True):
                show(repair, same_number)


def show(repair: float, found: tuple[Question, ...]) -> None:
    def median(name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in found))

    print(
        f"| {repair:g} | {found[0].number} | {median('prompt'):,.0f} | {median('computed'):,.0f} | {median('kl'):.4f} "
        f"| {median('same'):.0%} | {median('took_s'):.2f} | {median('exact_s'):.2f} | {median('whole_s'):.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
