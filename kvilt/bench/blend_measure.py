"""One question about documents, prefilled whole and blended: time to first token, and how far the answers differ."""

from __future__ import annotations

import hashlib
import json
import math
import re
import string
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from ..batch import Batch, Ids, Last, Nothing, Row
from ..blend import quality_gate
from ..blend.blender import Blending
from ..blend.chunk import ChunkCache
from ..blend.recipe import REPAIR, BlendPrompt, Recipe
from ..errors import InputError
from ..executor.protocol import Executor
from ..kv.cache import KVCache
from ..llm import LLM

STEP_TOKENS = 512
ANSWER_TOKENS = 24
AGREE_TOKENS = 16
SYSTEM = "Answer the question with a few words, using only the passages."
FORM = "Question: {question}\nAnswer with a few words."


@dataclass(frozen=True, slots=True)
class BlendCase:
    """A question, its documents, and the right answers if they are known."""

    question: str
    documents: tuple[str, ...]
    answers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A hash of the question and its documents."""
        return hashlib.sha256(json.dumps([self.question, self.documents]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class BlendMethod:
    """A way to compute the prompt; without a recipe, a prefill. `cached`: the text before the documents is cached."""

    name: str
    recipe: Recipe | None = None
    cached: bool = True


FULL, PREFIX = BlendMethod("full", cached=False), BlendMethod("prefix")
REUSE = BlendMethod("reuse", Recipe(0.0, "head", min_gain=0.0))


@dataclass(frozen=True, slots=True)
class BlendOutcome:
    """The result of one method for one question. `kl` and `agreement` compare with the whole prefill."""

    method: str
    first_token_s: float
    prompt: int
    reused: int
    recomputed: int
    kl: float
    agreement: float
    text: str
    nll: float | None = None  # of the right answer, where it is known
    f1: float | None = None


@dataclass(frozen=True, slots=True)
class _Truth:
    """The result of the whole prefill."""

    logits: Tensor  # [vocab]
    answer: list[int]


def methods(strategies: Sequence[str], ratios: Sequence[float], repair: float = REPAIR) -> list[BlendMethod]:
    """A whole prefill, a cached prefix, plain reuse, and every strategy at every ratio."""
    recipes = [Recipe(ratio, name, repair=repair, min_gain=0.0) for name in strategies for ratio in ratios]
    return [FULL, PREFIX, REUSE, *(BlendMethod(f"{one.strategy} {one.ratio:.0%}", one) for one in recipes)]


def blend_prompt_of(llm: LLM, case: BlendCase, context: int) -> BlendPrompt:
    """System text, documents and question as one chat prompt; all documents are cut to one length that fits."""
    asked = FORM.format(question=case.question)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
    documents = [llm.tokenizer.encode(one, add_special=False) for one in case.documents]
    pieces = llm.chat_template.encode_around(llm.tokenizer, messages, len(documents))
    room = (context - sum(map(len, pieces)) - ANSWER_TOKENS - 1) // len(documents)
    if room < 1:
        raise InputError(f"{len(documents)} documents and a question do not fit into {context} tokens")
    return llm.documents.between(pieces, [one[:room] for one in documents], Recipe()).blend_prompt


def compare(
    llm: LLM, chunks: ChunkCache, case: BlendCase, context: int, wanted: Sequence[BlendMethod]
) -> Iterator[BlendOutcome]:
    """The outcome of every method. The whole prefill always runs first, because all methods are compared with it."""
    blend_prompt = blend_prompt_of(llm, case, context)
    whole, truth = _measure(llm, chunks, blend_prompt, FULL, case, None)
    warm(llm.executor, chunks, blend_prompt)
    for method in wanted:
        yield whole if method == FULL else _measure(llm, chunks, blend_prompt, method, case, truth)[0]


def warm(executor: Executor, chunks: ChunkCache, blend_prompt: BlendPrompt) -> None:
    """Compute and store every document."""
    with executor.call(), executor.create_kv_cache() as kv:
        executor.prefill(list(blend_prompt.ids[: blend_prompt.exact]), kv)
        assert REUSE.recipe is not None
        blend(executor, chunks, blend_prompt, REUSE.recipe, kv)


def prefill(executor: Executor, ids: Sequence[int], kv: KVCache) -> Tensor:
    """Compute the tokens of `ids` that the cache does not hold; returns the logits [vocab] of the last one."""
    start, values = kv.num_entries, torch.empty(0)
    kv.reserve(len(ids) - start)
    for at in range(start, len(ids), STEP_TOKENS):
        stop = min(at + STEP_TOKENS, len(ids))
        want = Last() if stop == len(ids) else Nothing()
        values = executor.run(Batch.of([Row(Ids(ids[at:stop]), range(at, stop), kv, want=want)])).values
    kv.commit([list(ids[start:])])
    return values[0]


def blend(
    executor: Executor, chunks: ChunkCache, blend_prompt: BlendPrompt, recipe: Recipe, kv: KVCache
) -> tuple[Tensor, int]:
    """The same by blending, and the number of recomputed tokens. The cache holds the text before the documents."""
    blending = Blending(executor, chunks, blend_prompt, recipe)
    blending.begin(kv)
    values = torch.empty(0)
    while not blending.done:
        row = blending.next(STEP_TOKENS)
        logits = executor.run(Batch.of([row]))
        values = logits.values
        blending.took(row, logits, 0)
    kv.commit([list(blend_prompt.ids[blend_prompt.exact :])])
    return values[0], blending.report().recomputed


def _measure(
    llm: LLM, chunks: ChunkCache, blend_prompt: BlendPrompt, method: BlendMethod, case: BlendCase, truth: _Truth | None
) -> tuple[BlendOutcome, _Truth]:
    executor, recomputed = llm.executor, 0
    with executor.call(), executor.create_kv_cache() as kv:
        if method.cached:
            executor.prefill(list(blend_prompt.ids[: blend_prompt.exact]), kv)
        began_s = time.perf_counter()
        if method.recipe is None:
            logits = prefill(executor, blend_prompt.ids, kv)
        else:
            logits, recomputed = blend(executor, chunks, blend_prompt, method.recipe, kv)
        first_token_s = time.perf_counter() - began_s
        mine = _Truth(logits, _greedy(llm, kv, int(logits.argmax())))
        truth = truth or mine
        text = llm.tokenizer.decode([i for i in mine.answer if i not in llm.stop_ids])
        found = BlendOutcome(
            method=method.name,
            first_token_s=first_token_s,
            prompt=len(blend_prompt.ids),
            reused=blend_prompt.reused,
            recomputed=recomputed,
            kl=seen.kl if (seen := quality_gate.compare(truth.logits, logits)) is not None else math.nan,
            agreement=_agreement(executor, kv, logits, truth.answer[:AGREE_TOKENS]),
            text=text,
        )
        if case.answers:
            nll = _nll(llm, kv, logits, case.answers[0])
            found = replace(found, nll=nll, f1=f1(text, case.answers))
        return found, truth


def _greedy(llm: LLM, kv: KVCache, first: int) -> list[int]:
    answer = [first]
    with kv.fork() as own:
        while len(answer) < ANSWER_TOKENS and answer[-1] not in llm.stop_ids:
            answer.append(int(llm.executor.step([answer[-1]], own)[0].argmax()))
    return answer


def _agreement(executor: Executor, kv: KVCache, logits: Tensor, answer: Sequence[int]) -> float:
    """The share of positions with the same top token as the whole prefill, along the whole prefill's answer."""
    tops = [int(logits.argmax())]
    with kv.fork() as own:
        if len(answer) > 1:
            start, count = own.num_entries, len(answer) - 1
            own.reserve(count)
            row = Row(Ids(answer[:-1]), range(start, start + count), own, want=Last(count))
            tops += executor.run(Batch.of([row])).values.argmax(-1).tolist()
    return fmean(a == b for a, b in zip(tops, answer, strict=True))


def _nll(llm: LLM, kv: KVCache, logits: Tensor, gold: str) -> float:
    """Mean negative log-probability of the tokens of the right answer."""
    ids = llm.tokenizer.encode(gold, add_special=False)
    found = [float(logits.log_softmax(-1)[ids[0]])]
    if len(ids) > 1:
        found += llm.executor.score(ids, kv).logprobs.tolist()
    return -fmean(found)


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
