"""Quality and time to first token of blended prompts against whole prefills, on a MuSiQue-format file.

    python bench/blend_quality.py --data musique.json --model smollm2 --questions 20 --out table.jsonl

Resumable: each result is one line of --out, and what is there is not measured again. The last thing printed is the
table. The file is a list of {"ctxs": [{"title", "text"}], "question", "answers"}; it is given by path and nothing here
needs it to be there.
"""

from __future__ import annotations

import argparse
import json
import re
import string
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from kvilt.batch import Batch, Ids, Last, Nothing, Row
from kvilt.blend.blender import Blending
from kvilt.blend.chunk import Chunks
from kvilt.blend.recipe import Quilt, Recipe
from kvilt.executor.executor import Executor
from kvilt.kv.cache import KVCache
from kvilt.llm import LLM, load
from kvilt.store.store import Store
from kvilt.store.tier import Budget

STEP_TOKENS = 512
ANSWER_TOKENS = 24
AGREE_TOKENS = 16
RATIOS = (0.05, 0.15, 0.30)
SYSTEM = "Answer the question with a few words, using only the passages."
FORM = "Question: {question}\nAnswer with a few words."


@dataclass(frozen=True)
class Method:
    """A way to get to the first token; no recipe: a whole prefill."""

    name: str
    recipe: Recipe | None = None
    cached: int = 0  # how much of the beginning is there: 1, all before the documents


@dataclass(frozen=True)
class Truth:
    """What a whole prefill says."""

    logprobs: Tensor  # [vocab] of the first token
    answer: list[int]


def methods(strategies: Sequence[str]) -> list[Method]:
    made = [Method("full"), Method("prefix", cached=1), Method("reuse", Recipe(0.0, "head", min_gain=0.0))]
    for strategy in strategies:
        name, *options = strategy.split(";")
        fields = {key: json.loads(value) for key, _, value in (option.partition("=") for option in options)}
        for ratio in RATIOS:
            recipe = Recipe.of(Recipe(ratio, name, min_gain=0.0), **fields)
            made.append(Method(f"{strategy} {ratio:.0%}", recipe))
    return made


def quilt_of(llm: LLM, entry: dict[str, Any], context: int) -> Quilt:
    """System text, passages and question as one chat prompt; passages are cut alike until they fit."""
    asked = FORM.format(question=entry["question"])
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
    passages = [
        llm.tokenizer.encode(f"{one['title']}\n{one['text']}".lstrip(), add_special=False) for one in entry["ctxs"]
    ]
    pieces = llm.chat_template.encode_around(llm.tokenizer, messages, len(passages))
    room = (context - sum(map(len, pieces)) - ANSWER_TOKENS - 1) // len(passages)
    return llm.documents.between(pieces, [one[:room] for one in passages], Recipe()).quilt


def prefill(executor: Executor, ids: Sequence[int], kv: KVCache) -> Tensor:
    """Logits [vocab] after the tokens of `ids` that the cache does not hold."""
    start = kv.num_entries
    kv.reserve(len(ids) - start)
    values = torch.empty(0)
    for at in range(start, len(ids), STEP_TOKENS):
        stop = min(at + STEP_TOKENS, len(ids))
        want = Last() if stop == len(ids) else Nothing()
        values = executor.run(Batch.of([Row(Ids(ids[at:stop]), range(at, stop), kv, want=want)])).values
    kv.commit([list(ids[start:])])
    return values[0]


def blend(executor: Executor, chunks: Chunks, quilt: Quilt, recipe: Recipe, kv: KVCache) -> tuple[Tensor, Blending]:
    """The same by blending; the cache holds what stands before the documents."""
    blending = Blending(executor, chunks, quilt, recipe)
    blending.begin(kv)
    values = torch.empty(0)
    while not blending.done:
        row = blending.next(STEP_TOKENS)
        logits = executor.run(Batch.of([row]))
        values = logits.values
        blending.took(row, logits, 0)
    kv.commit([list(quilt.ids[quilt.exact :])])
    return values[0], blending


def measure(llm: LLM, chunks: Chunks, quilt: Quilt, method: Method, gold: str, truth: Truth | None) -> dict[str, Any]:
    executor, ids = llm.executor, quilt.ids
    with executor.call(), executor.create_kv_cache() as kv:
        if method.recipe is not None or method.cached:
            executor.prefill(list(ids[: quilt.exact]), kv)
        began_s = time.perf_counter()
        recomputed = 0
        if method.recipe is None:
            logits = prefill(executor, ids, kv)
        else:
            logits, blending = blend(executor, chunks, quilt, method.recipe, kv)
            recomputed = blending.report().recomputed
        first_s = time.perf_counter() - began_s
        answer = greedy(llm, kv, int(logits.argmax()))
        found = {
            "first_token_s": first_s,
            "prompt": len(ids),
            "reused": quilt.reused,
            "recomputed": recomputed,
            "nll": gold_nll(llm, kv, logits, gold),
            "text": llm.tokenizer.decode([i for i in answer if i not in llm.stop_ids]),
            "answer": answer,
        }
        logprobs = logits.log_softmax(-1)
        if truth is None:
            return found | {"kl": 0.0, "agreement": 1.0, "logprobs": logprobs}
        kl = float((truth.logprobs.exp() * (truth.logprobs - logprobs)).sum())
        return found | {"kl": kl, "agreement": agreement(executor, kv, logits, truth.answer[:AGREE_TOKENS])}


def greedy(llm: LLM, kv: KVCache, first: int) -> list[int]:
    answer = [first]
    with kv.fork() as own:
        while len(answer) < ANSWER_TOKENS and answer[-1] not in llm.stop_ids:
            answer.append(int(llm.executor.step([answer[-1]], own)[0].argmax()))
    return answer


def gold_nll(llm: LLM, kv: KVCache, logits: Tensor, gold: str) -> float:
    """Mean negative log-probability of the tokens of the gold answer."""
    ids = llm.tokenizer.encode(gold, add_special=False)
    found = [float(logits.log_softmax(-1)[ids[0]])]
    if len(ids) > 1:
        found += llm.executor.score(ids, kv).logprobs.tolist()
    return -mean(found)


def agreement(executor: Executor, kv: KVCache, logits: Tensor, answer: Sequence[int]) -> float:
    """How often the likeliest token is that of the whole prefill, when led along its answer."""
    with kv.fork() as own:
        tops = [int(logits.argmax())]
        if len(answer) > 1:
            start, count = own.num_entries, len(answer) - 1
            own.reserve(count)
            row = Row(Ids(answer[:-1]), range(start, start + count), own, want=Last(count))
            tops += executor.run(Batch.of([row])).values.argmax(-1).tolist()
    return mean(a == b for a, b in zip(tops, answer, strict=True))


def f1(text: str, answers: Sequence[str]) -> float:
    """Word-level F1 against the best of the answers: lower case, no punctuation, no articles."""

    def words(raw: str) -> list[str]:
        plain = "".join(c for c in raw.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", plain).split()

    def one(gold: str) -> float:
        mine, theirs = words(text), words(gold)
        same = sum((Counter(mine) & Counter(theirs)).values())
        return 2 * same / (len(mine) + len(theirs)) if same else 0.0

    return max(map(one, answers))


def results(llm: LLM, entries: Sequence[dict[str, Any]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every question with every method that --out does not have yet."""
    done = {(line["question"], line["method"]) for line in read(args.out)}
    for number, entry in enumerate(entries):
        waiting = [one for one in methods(args.strategies) if (number, one.name) not in done]
        if not waiting:
            continue
        quilt, gold = quilt_of(llm, entry, args.context), entry["answers"][0]
        with Store(Budget(4 << 30)) as store:
            chunks = Chunks(llm.executor, store, args.behind)
            whole = measure(llm, chunks, quilt, Method("full"), gold, None)
            truth = Truth(whole.pop("logprobs"), whole["answer"])
            warm(llm.executor, chunks, quilt)
            for method in waiting:
                found = whole if method.name == "full" else measure(llm, chunks, quilt, method, gold, truth)
                found["f1"] = f1(found["text"], entry["answers"])
                yield {"question": number, "method": method.name, **found}


def warm(executor: Executor, chunks: Chunks, quilt: Quilt) -> None:
    """Every document into the store."""
    with executor.create_kv_cache() as kv:
        executor.prefill(list(quilt.ids[: quilt.exact]), kv)
        blend(executor, chunks, quilt, Recipe(0.0, "head", min_gain=0.0), kv)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(lines: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(line["method"] for line in lines))
    by_name = {name: [line for line in lines if line["method"] == name] for name in names}
    times = {(line["question"]): line["first_token_s"] for line in by_name.get("full", [])}
    reuse = mean(line["kl"] for line in by_name["reuse"]) if "reuse" in by_name else 0.0
    head = ("method", "n", "TTFT s", "speedup", "recomputed", "KL", "KL/reuse", "agree 16", "NLL gold", "F1")
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, mine in by_name.items():
        kl = mean(line["kl"] for line in mine)
        speedups = [times[line["question"]] / line["first_token_s"] for line in mine if line["question"] in times]
        cells = (
            name,
            str(len(mine)),
            f"{median(line['first_token_s'] for line in mine):.2f}",
            f"{median(speedups):.2f}x" if speedups else "",
            f"{mean(line['recomputed'] / line['reused'] for line in mine):.1%}",
            f"{kl:.3f}",
            f"{kl / reuse:.2f}" if reuse else "",
            f"{mean(line['agreement'] for line in mine):.1%}",
            f"{mean(line['nll'] for line in mine):.3f}",
            f"{mean(line['f1'] for line in mine):.3f}",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=75)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--strategies", nargs="*", default=["deviation", "head", "query"])
    parser.add_argument("--behind", nargs="*", type=int, default=[], help="tokens before each document")
    args = parser.parse_args()
    entries = json.loads(args.data.read_text())[: args.questions]
    with load(args.model, threads=args.threads, max_context=args.context, kv_memory="1G") as llm:
        for line in results(llm, entries, args):
            with args.out.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(f"{line['question']:3} {line['method']:28} {line['first_token_s']:.2f} s  KL {line['kl']:.3f}")
    print(table([line for line in read(args.out) if line["question"] < args.questions]))


if __name__ == "__main__":
    main()
