"""Completions through the real openai client, and lm-eval's protocol against the executor's own scores."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import openai
import pytest
from running import Running, until

from kvilt import LLM
from kvilt.executor.protocol import Executor
from kvilt.server.openai import completions
from kvilt.text.tokenizer import Tokenizer

STORY = "Once upon a time"
SHORT = {"model": "tiny", "prompt": STORY, "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def llm(executor: Executor, tokenizer: Tokenizer) -> LLM:
    return LLM(executor, tokenizer)


def test_prompts_in_every_form(server: Running, llm: LLM, tokenizer: Tokenizer) -> None:
    texts = [STORY, "The capital of France is"]
    ids = [tokenizer.encode(text) for text in texts]
    expected = [one.text for one in llm.generate(texts, max_tokens=6)]
    for prompt, count in ((STORY, 1), (ids[0], 1), (texts, 2), (ids, 2)):
        done = server.openai().completions.create(**{**SHORT, "prompt": prompt})
        assert [choice.text for choice in done.choices] == expected[:count]
        assert [choice.index for choice in done.choices] == list(range(count))
        assert done.object == "text_completion"
        assert done.usage is not None
        assert done.usage.prompt_tokens == sum(map(len, ids[:count]))
        texts_streamed = [""] * count
        for chunk in server.openai().completions.create(**{**SHORT, "prompt": prompt}, stream=True):
            texts_streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert texts_streamed == expected[:count]


def test_a_long_list_of_prompts_goes_through_the_engine_in_parts(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, real = 0, 0, server.llm.generate

    async def counted(*given: Any, **fields: Any) -> Any:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        try:
            return await real(*given, **fields)
        finally:
            running -= 1

    monkeypatch.setattr(server.llm, "generate", counted)
    done = server.openai().completions.create(**{**SHORT, "prompt": [STORY] * 200, "max_tokens": 1})
    assert [choice.index for choice in done.choices] == list(range(200))
    assert most == completions._PROMPTS_AT_ONCE < 200


def test_prompts_times_samples(server: Running, llm: LLM) -> None:
    texts = [STORY, "The capital of France is"]
    params = {"max_tokens": 5, "temperature": 1.0, "seed": 5, "n": 3}
    expected = [sample.text for one in llm.generate(texts, **params) for sample in (one, *one.alternatives)]
    done = server.openai().completions.create(model="tiny", prompt=texts, **params)
    assert [choice.text for choice in done.choices] == expected
    assert [choice.index for choice in done.choices] == list(range(6))
    streamed = [""] * 6
    ends = []
    options = {"include_usage": True}
    for chunk in server.openai().completions.create(
        model="tiny", prompt=texts, **params, stream=True, stream_options=options
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
        last = chunk
    assert streamed == expected
    assert sorted(ends) == list(range(6))
    assert last.usage is not None
    assert last.usage.completion_tokens == done.usage.completion_tokens  # type: ignore[union-attr]


def test_sixteen_tokens_by_default(server: Running) -> None:
    done = server.openai().completions.create(model="tiny", prompt=STORY, extra_body={"ignore_eos": True})
    assert done.usage is not None
    assert done.usage.completion_tokens == 16


def test_echo(server: Running, llm: LLM, tokenizer: Tokenizer) -> None:
    expected = STORY + llm.generate(STORY, max_tokens=6).text
    for prompt in (STORY, tokenizer.encode(STORY)):
        fields = {**SHORT, "prompt": prompt, "echo": True}
        assert server.openai().completions.create(**fields).choices[0].text == expected
        chunks = list(server.openai().completions.create(**fields, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_echo_with_logprobs_whole_and_streamed(server: Running, llm: LLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(STORY)
    fields = {**SHORT, "echo": True, "logprobs": 2}
    (choice,) = server.openai().completions.create(**fields).choices
    given = choice.logprobs
    assert given is not None
    assert given.tokens is not None
    assert given.token_logprobs is not None
    assert given.text_offset is not None
    assert "".join(given.tokens) == choice.text
    assert given.token_logprobs[0] is None
    assert (given.top_logprobs or [1])[0] is None
    assert len(given.tokens) == len(ids) + 6
    for (start, stop), token in zip(pairwise(given.text_offset), given.tokens, strict=False):
        assert choice.text[start:stop] == token
    for logprob, top in list(zip(given.token_logprobs, given.top_logprobs or (), strict=True))[1:]:
        assert logprob in top.values()
        assert len(top) in (2, 3), "the likeliest, and the token itself"
        assert max(top.values()) >= logprob
    joined: dict[str, list[Any]] = {}
    for chunk in server.openai().completions.create(**fields, stream=True):
        for name, values in (chunk.choices[0].logprobs.model_dump() if chunk.choices[0].logprobs else {}).items():
            joined.setdefault(name, []).extend(values)
    assert joined == given.model_dump()


# lm-eval's `local-completions`: log-likelihoods by echo, as its model class asks for and reads them.


def loglikelihood(answer: Any, contexts: list[int]) -> list[tuple[float, bool]]:
    """What lm-eval's TemplateAPI makes of an answer."""
    found = []
    for choice, context in zip(sorted(answer.choices, key=lambda one: one.index), contexts, strict=True):
        logprobs = choice.logprobs.token_logprobs[context:-1]
        tops = choice.logprobs.top_logprobs[context:-1]
        greedy = all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))
        found.append((sum(logprobs), greedy))
    return found


def scored(executor: Executor, ids: list[int], context: int) -> tuple[float, bool]:
    """The same from the model itself: every position's logits, in float64."""
    with executor.create_kv_cache() as kv:
        total, greedy = 0.0, True
        for place in range(len(ids) - 1):
            logits = executor.step(ids[place : place + 1], kv).double().flatten()
            if place + 1 >= context:
                target = ids[place + 1]
                total += float(logits.log_softmax(-1)[target])
                greedy &= int(logits.argmax()) == target
        return total, greedy


def test_log_likelihoods_by_lm_evals_protocol(server: Running, executor: Executor, llm: LLM) -> None:
    pairs = [
        ("The capital of France is", " Paris"),
        (STORY, " there was a king who had three daughters"),
        ("2 + 2 =", " 4"),
    ]
    tokens = [(llm.tokenizer.encode(a), llm.tokenizer.encode(b, add_special=False)) for a, b in pairs]
    greedy = llm.generate(STORY, max_tokens=3).token_ids
    tokens.append((llm.tokenizer.encode(STORY), greedy))
    prompts, contexts = [[*a, *b] for a, b in tokens], [len(a) for a, _ in tokens]
    asked = {"model": "tiny", "prompt": prompts, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    answer = server.openai().completions.create(**asked, max_tokens=1)
    expected = [scored(executor, ids, context) for ids, context in zip(prompts, contexts, strict=True)]
    for (got, is_greedy), (want, was_greedy) in zip(loglikelihood(answer, contexts), expected, strict=True):
        assert got == pytest.approx(want, abs=2e-3)
        assert is_greedy == was_greedy
    assert expected[-1][1], "one of them is greedy"
    none = server.openai().completions.create(**asked, max_tokens=0)
    for one, zero in zip(answer.choices, none.choices, strict=True):
        assert one.logprobs is not None
        assert zero.logprobs is not None
        assert one.logprobs.token_logprobs[:-1] == zero.logprobs.token_logprobs  # type: ignore[index]
    assert none.usage is not None
    assert none.usage.completion_tokens == 0


def test_scoring_ignores_what_is_cached(server: Running) -> None:
    fields = {"model": "tiny", "prompt": "word " * 100, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    first, second = (server.openai().completions.create(**fields) for _ in range(2))
    assert first.choices[0].logprobs == second.choices[0].logprobs
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ""},
        {"prompt": [""]},
        {"prompt": ["a", [1]]},
        {"prompt": [1, "a"]},
        {"prompt": [10**7]},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": [True]},
        {"prompt": None},
        {"prompt": {"a": 1}},
        {"prompt": ["x"] * 1025},
        {"prompt": ["x"] * 20, "n": 128},
        {"prompt": [5] * 2000},
        {"best_of": 2},
        {"suffix": "x"},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"logprobs": 10**6},
        {"logprobs": True},
        {"echo": "yes"},
        {"kv_out": True, "prompt": ["a", "b"]},
        {"messages": []},
    ],
)
def test_what_is_wrong_is_refused(server: Running, change: dict[str, Any]) -> None:
    for stream in (False, True):
        with server.http() as http:
            refused = http.post("/v1/completions", json={**SHORT, **change, "stream": stream})
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        counts = {"tokens", "limit"} if error["code"] == "context_length_exceeded" else set()
        assert set(error) == {"message", "type", "param", "code"} | counts


def test_one_bad_prompt_of_many_fails_the_request(server: Running) -> None:
    with pytest.raises(openai.BadRequestError):
        server.openai().completions.create(model="tiny", prompt=[[5], [6], [5] * 3000])
    until(lambda: server.llm.engine.requests == 0)
