"""Contract F: the facade, on the default model's real weights."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvilt
from kvilt import LLM, Completion, Inputs, SamplingParams
from kvilt.batch import Batch, Logits
from kvilt.errors import (
    Cancelled,
    ContextOverflow,
    InputError,
    ModelClosed,
    ModelNotFound,
    NumericsError,
    ParamError,
    PoolExhausted,
    TemplateError,
)
from kvilt.text import stops
from kvilt.text.sandbox import CompiledTemplate

QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with kvilt.load(str(smollm2_path), kv_memory="256M", max_context=512) as model:
        yield model
        assert model.executor.pool.usage().used == 0  # nothing below leaks a page


def test_generate_continues_a_prompt(llm: LLM) -> None:
    done = llm.generate("The capital of France is", max_tokens=4)
    assert done.text.startswith(" Paris")
    assert done.finish_reason == "length"
    assert len(done.token_ids) == done.usage.completion_tokens == 4
    assert done.usage.prompt_tokens == 5
    assert done.logprobs is None
    assert 0 < done.timing.first_token_s <= done.timing.total_s


def test_a_list_of_prompts_gives_a_list(llm: LLM) -> None:
    prompts = ["The capital of France is", "Once upon a time", "2 + 2 ="]
    together = llm.generate(prompts, max_tokens=12)
    assert [one.token_ids for one in together] == [llm.generate(p, max_tokens=12).token_ids for p in prompts]
    assert llm.generate([], max_tokens=3) == []


def test_token_ids_are_a_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The capital of France is")
    assert llm.generate(ids, max_tokens=3).text == llm.generate("The capital of France is", max_tokens=3).text


def test_stream_joins_to_generate(llm: LLM) -> None:
    stream = llm.stream("Count: 1, 2, 3,", max_tokens=20)
    pieces = list(stream)
    assert len(pieces) > 5
    assert "".join(pieces) == stream.completion.text == llm.generate("Count: 1, 2, 3,", max_tokens=20).text


def test_a_stream_left_early_gives_its_pages_back(llm: LLM) -> None:
    stream = iter(llm.stream("Once upon a time", max_tokens=50))
    next(stream)
    assert llm.executor.pool.usage().used > 0
    stream.close()  # type: ignore[attr-defined]
    assert llm.executor.pool.usage().used == 0


def test_a_stream_is_closed_by_its_block_and_closing_twice_is_fine(llm: LLM) -> None:
    with llm.stream("Once upon a time", max_tokens=50) as stream:
        next(iter(stream))
        assert llm.executor.pool.usage().used > 0
    assert llm.executor.pool.usage().used == 0
    assert list(stream) == []
    stream.close()
    with pytest.raises(InputError, match="closed before its end"):
        _ = stream.completion
    with llm.stream("Once upon a time", max_tokens=3, keep_kv=True) as whole:
        list(whole)
    done = whole.completion
    assert done.kv is not None
    assert done.kv.num_entries > 0, "what was read to its end is the caller's"
    done.kv.close()


@pytest.mark.parametrize("how", ["close", "forget"])
def test_a_stream_that_was_never_read_gives_back_what_it_was_lent(llm: LLM, how: str) -> None:
    with llm.prefill("Once upon a time") as kv:
        stream = llm.stream(" there was", kv=kv, max_tokens=5)
    assert llm.executor.pool.usage().used > 0, "it holds a fork"
    if how == "close":
        stream.close()
        assert list(stream) == []
    else:
        del stream
        gc.collect()
    assert llm.executor.pool.usage().used == 0


def test_a_stream_that_another_thread_reads_is_closed_there(llm: LLM) -> None:
    """Closing from outside never waits for a step, and the reader ends after the one in progress."""
    stream, reading, closed = llm.stream("Once upon a time", max_tokens=200, ignore_eos=True), [], threading.Event()
    run = llm.executor.run

    def close_inside(batch: Batch) -> Logits:
        if len(reading) == 2 and not closed.is_set():
            closer = threading.Thread(target=stream.close)
            closer.start()
            closer.join()
            closed.set()
        return run(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.executor, "run", close_inside)
        for piece in stream:
            reading.append(piece)  # noqa: PERF402
    assert closed.is_set()
    assert 2 <= len(reading) <= 4
    assert llm.executor.pool.usage().used == 0


def test_a_stopped_stream_keeps_what_it_generated_and_its_kv(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", max_tokens=12)
    stream = llm.stream("Once upon a time", max_tokens=12, keep_kv=True)
    pieces = iter(stream)
    shown = [next(pieces), next(pieces)]
    stream.stop()
    done = stream.completion
    assert done.finish_reason == "cancelled"
    assert done.text == "".join(shown)
    assert done.token_ids == whole.token_ids[:2]
    assert done.kv is not None
    with done.kv as kv:
        assert kv.num_entries == done.usage.prompt_tokens + 1  # all but the last
        rest = llm.generate(done.token_ids[-1:], kv=kv, max_tokens=10)
    assert rest.token_ids == whole.token_ids[2:]
    stream.stop()  # too late, and no harm
    assert stream.completion.finish_reason == "cancelled"


def test_a_stop_cuts_a_step_short_but_a_stray_cancel_is_heard(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("Once upon a time", keep_kv=True)

    def cancelled(batch: Batch) -> Logits:
        stream.stop()
        raise Cancelled()

    monkeypatch.setattr(llm.executor, "run", cancelled)
    done = stream.completion
    assert (done.finish_reason, done.token_ids, done.text) == ("cancelled", [], "")
    assert done.kv is not None
    done.kv.close()
    with pytest.raises(Cancelled):
        list(llm.stream("Nobody stops this one"))


def test_chat_ends_at_the_end_of_its_turn(llm: LLM) -> None:
    done = llm.chat(QUESTION, max_tokens=60)
    assert "Berlin" in done.text
    assert done.finish_reason == "stop"
    assert "<|im_end|>" not in done.text
    assert done.token_ids[-1] in llm.tokenizer.eos_ids


def test_a_second_turn_computes_only_what_is_new(llm: LLM) -> None:
    first = llm.chat(QUESTION, max_tokens=60, keep_kv=True)
    turns = [*QUESTION, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And of Japan?"}]
    assert first.kv is not None
    with first.kv as kv:
        before = kv.serialize()
        second = llm.chat(turns, kv=kv, max_tokens=40)
        assert kv.serialize() == before  # a cache that is lent is never changed
        assert second.usage.cached_tokens == kv.num_entries
    assert second.token_ids == llm.chat(turns, max_tokens=40).token_ids


def test_generate_behind_a_cache(llm: LLM) -> None:
    with llm.prefill("The capital of") as kv:
        for rest, city in ((" France is", "Paris"), (" Germany is", "Berlin")):
            done = llm.generate(rest, kv=kv, max_tokens=3)
            assert city in done.text
            assert done.usage.cached_tokens == 3
        assert kv.num_entries == 3


def test_kept_kv_holds_prompt_and_answer(llm: LLM) -> None:
    done = llm.generate("The capital of France is", max_tokens=5, keep_kv=True)
    assert done.kv is not None
    with done.kv as kv:
        assert kv.tokens() == llm.tokenizer.encode("The capital of France is") + done.token_ids[:-1]


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    free = llm.generate("Count: 1, 2, 3,", max_tokens=20).text
    assert "6" in free
    cut = llm.generate("Count: 1, 2, 3,", max_tokens=20, stop=["6"])
    assert cut.text == free[: free.index("6")]
    assert cut.finish_reason == "stop"
    kept = llm.generate("Count: 1, 2, 3,", max_tokens=20, stop="6", include_stop_str_in_output=True)
    assert kept.text == free[: free.index("6") + 1]


def test_the_stop_strings_of_a_request_are_compiled_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    class Counted(stops.StopStrings):
        def __init__(self, words: Sequence[str]) -> None:
            super().__init__(words)
            compiled.append(words)

    monkeypatch.setattr(stops, "StopStrings", Counted)
    done = llm.generate(["One", "Two", "Three", "Four"], max_tokens=2, n=4, temperature=1.0, stop=["never", "nowhere"])
    assert len(done) == 4
    assert compiled == [("never", "nowhere")]


def test_prompts_that_cannot_fit_are_not_tokenized(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm.tokenizer.core
    assert core.sizes.min_tokens("7", 1) == 1  # known from here on
    monkeypatch.setattr(core, "core", None)  # whatever is tokenized fails
    long = "word " * 100_000
    for ask in (
        lambda: llm.generate(long),
        lambda: llm.generate(["short", long][1:]),
        lambda: llm.stream(long),
        lambda: llm.prefill(long),
        lambda: llm.chat([{"role": "user", "content": long}]),
        lambda: llm.generate([1, 2], documents=[long]),
        lambda: llm.blend([[1], long, [2]]),
    ):
        with pytest.raises(ContextOverflow, match="at least"):
            ask()


def test_stop_ids_and_ignore_eos(llm: LLM) -> None:
    free = llm.generate("Count: 1, 2, 3,", max_tokens=20)
    third = free.token_ids[2]
    stopped = llm.generate("Count: 1, 2, 3,", max_tokens=20, stop_token_ids=[third])
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(third) + 1]
    on = llm.chat(QUESTION, max_tokens=60, ignore_eos=True)
    assert on.finish_reason == "length"
    assert len(on.token_ids) == 60


def test_seeded_sampling_repeats(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_k=40, seed=3, max_tokens=12)
    once = llm.generate("Once upon a time", params)
    assert once.token_ids == llm.generate("Once upon a time", params).token_ids
    assert once.token_ids != llm.generate("Once upon a time", params, seed=4).token_ids


def test_logprobs_are_of_the_raw_logits(llm: LLM) -> None:
    done = llm.generate("The capital of France is", max_tokens=3, logprobs=2, temperature=2.0, seed=1)
    assert done.logprobs is not None
    assert [entry.token for entry in done.logprobs] == done.token_ids
    assert all(len(entry.top_ids) == 2 and entry.logprob <= 0 for entry in done.logprobs)
    greedy = llm.generate("The capital of France is", max_tokens=1, logprobs=1)
    assert greedy.logprobs is not None
    assert done.logprobs[0].top_logprobs[0] == pytest.approx(greedy.logprobs[0].logprob, abs=1e-5)


def test_a_text_can_be_scored_without_drawing_a_token(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The capital of France is Paris, and that of Germany is Berlin.")
    done = llm.generate(ids, max_tokens=0, prompt_logprobs=2)
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], "length")
    assert done.prompt_logprobs is not None
    first, *rest = done.prompt_logprobs
    assert first is None
    wanted = llm.executor.score(ids, top=2)
    assert [one.token for one in rest if one] == ids[1:]
    assert [one.logprob for one in rest if one] == wanted.logprobs.tolist()
    assert [list(one.top_ids) for one in rest if one] == wanted.top_ids.tolist()
    assert all(one is not None and (one.rank == 1) == (one.top_ids[0] == one.token) for one in rest)
    again = llm.generate([ids, ids[:4]], max_tokens=0, prompt_logprobs=2)
    assert [one.prompt_logprobs for one in again] == [done.prompt_logprobs, done.prompt_logprobs[:4]]
    assert [one.usage.cached_tokens for one in again] == [0, 0], "what is found has no logits"
    assert llm.stream(ids, max_tokens=0, prompt_logprobs=2).completion.prompt_logprobs == done.prompt_logprobs


def test_scores_of_a_prompt_are_those_of_drawing_it(llm: LLM) -> None:
    drawn = llm.generate("Once upon a time", max_tokens=12, temperature=0.9, seed=3, logprobs=3, ignore_eos=True)
    ids = llm.tokenizer.encode("Once upon a time")
    done = llm.generate([*ids, *drawn.token_ids], max_tokens=4, prompt_logprobs=3, logprobs=0)
    assert done.prompt_logprobs is not None and drawn.logprobs is not None
    for one, other in zip(done.prompt_logprobs[len(ids) :], drawn.logprobs, strict=True):
        assert one is not None
        assert (one.token, one.rank, one.top_ids) == (other.token, other.rank, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=2e-6)
    assert len(done.token_ids) == 4 and done.logprobs is not None
    assert llm.generate([*ids, *drawn.token_ids], max_tokens=4).prompt_logprobs is None


def test_behind_a_cache_a_continuation_is_scored_as_behind_its_text(llm: LLM) -> None:
    context, more = llm.tokenizer.encode("The capital of France is"), llm.tokenizer.encode(" Paris, as we know.")
    whole = llm.generate([*context, *more], max_tokens=0, prompt_logprobs=1).prompt_logprobs
    assert whole is not None
    with llm.prefill(context) as kv:
        done = llm.generate(more, kv=kv, max_tokens=0, prompt_logprobs=1)
        assert done.prompt_logprobs == [None] * len(context) + whole[len(context) :]
        ids = llm.chat_ids(QUESTION)
        chat = llm.chat(QUESTION, kv=kv, max_tokens=1, prompt_logprobs=0)
        assert chat.prompt_logprobs is not None and [one.token for one in chat.prompt_logprobs[1:] if one] == ids[1:]


def test_a_template_is_rendered_once_for_each_chat(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered, render = [], CompiledTemplate.render

    def counted(self: CompiledTemplate, values: Any) -> str:
        rendered.append(values)
        return render(self, values)

    monkeypatch.setattr(CompiledTemplate, "render", counted)
    for fields in ({}, {"documents": ["A document."]}, {"n": 2, "temperature": 1.0}):
        llm.chat(QUESTION, max_tokens=1, **fields)
        assert len(rendered) == 1, fields
        rendered.clear()
    assert [*llm.stream_chat(QUESTION, max_tokens=1)]
    assert len(rendered) == 1


def test_variables_reach_the_template_and_those_it_does_not_read_are_left_out(llm: LLM) -> None:
    own = "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}{{ reasoning_effort }}"
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{own}"
    asking = LLM(llm.executor, dataclasses.replace(llm.tokenizer, chat_template=template))
    for given, ending in (
        (None, ""),
        ({"enable_thinking": False}, "no"),
        ({"enable_thinking": True, "reasoning_effort": "high"}, "high"),
        ({"thinking_budget": 3, "unread": [1]}, ""),
    ):
        assert asking.render_chat(QUESTION, template_kwargs=given).text == QUESTION[0]["content"] + ending
        done = asking.chat(QUESTION, max_tokens=1, chat_template_kwargs=given)
        assert done.usage.prompt_tokens == len(asking.tokenizer.encode(QUESTION[0]["content"] + ending))
        stream = asking.stream_chat(QUESTION, max_tokens=1, chat_template_kwargs=given, documents=["x"])
        list(stream)
        assert stream.completion.usage.prompt_tokens >= done.usage.prompt_tokens
    for refused in ({"messages": []}, {"bos_token": "x"}, {"_x": 1}, {"a b": 1}, {1: 2}, [1]):
        with pytest.raises(ParamError, match="chat_template_kwargs"):
            asking.chat(QUESTION, max_tokens=1, chat_template_kwargs=refused)  # type: ignore[arg-type]


def test_a_rendered_chat_has_the_text_and_the_ids_of_its_template(llm: LLM) -> None:
    rendered = llm.render_chat(QUESTION)
    assert rendered.text == llm.chat_template.render(QUESTION)
    assert llm.chat_ids(rendered) == llm.chat_ids(QUESTION) == llm.chat_template.encode(llm.tokenizer, QUESTION)
    with_places = llm.render_chat(QUESTION, documents=2)
    assert len(with_places.segments) == 3
    assert with_places.text == rendered.text.replace("What", "\n\nWhat")


def test_the_context_limit_is_a_clean_finish(llm: LLM) -> None:
    ids = llm.tokenizer.encode("word " * 600)[:500]
    done = llm.generate(ids, ignore_eos=True)
    assert done.finish_reason == "length"
    assert len(done.token_ids) == 512 - 500 + 1


def test_a_prompt_that_is_too_long_is_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(ContextOverflow, match=r"513 tokens is needed and the context holds 512"):
        llm.generate([1] * 513)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"temperature": float("nan")}, ParamError),
        ({"top_pp": 1}, ParamError),
        ({"logit_bias": {10**6: 1.0}}, ParamError),
        ({"max_tokens": 0}, ParamError),
    ],
)
def test_wrong_fields_are_refused_by_name(llm: LLM, fields: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(fields))):
        llm.generate("Hello", **fields)


def test_empty_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(InputError, match="empty"):
        llm.generate("")
    with pytest.raises(TemplateError):
        llm.chat([])


def test_special_tokens_in_user_text_are_plain_text(llm: LLM) -> None:
    ids = llm.chat_template.encode(llm.tokenizer, [{"role": "user", "content": "a<|im_end|>b"}])
    assert ids.count(llm.tokenizer.id_of("<|im_end|>")) == 2  # the template's own: system and user


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_dtype": "int3"}, "kv_dtype"),
        ({"thread": 2}, "thread"),
        ({"threads": 0}, "threads"),
        ({"max_context": 10**6}, "max_context"),
        ({"kv_memory": "lots"}, "kv_memory"),
        ({"kv_memory": 10}, "kv_memory"),
        ({"backend": "magic"}, "backend"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_options_are_refused_by_name(smollm2_path: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(ParamError, match=says):
        kvilt.load(str(smollm2_path), **options)


def test_an_unknown_model_says_what_is_known() -> None:
    with pytest.raises(ModelNotFound, match="smollm2"):
        kvilt.load("no-such-model")


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_half_precision_kv_answers_the_same(smollm2_path: Path, kv_dtype: str) -> None:
    with kvilt.load(str(smollm2_path), kv_memory="64M", kv_dtype=kv_dtype) as model:
        assert model.generate("The capital of France is", max_tokens=2).text.startswith(" Paris")


STORY = SamplingParams(temperature=1.0, top_k=50, seed=7, max_tokens=5, ignore_eos=True)


class Counted:
    """Stands before the executor's run and notes the rows and tokens of every step."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[int, int]] = []
        self.pages: list[int] = []
        self._llm, self._run = llm, llm.executor.run
        monkeypatch.setattr(llm.executor, "run", self)

    def __call__(self, batch: Batch) -> Logits:
        self.steps.append((len(batch.rows), batch.num_tokens))
        self.pages.append(self._llm.executor.pool.usage().used)
        return self._run(batch)


def samples(done: Completion) -> list[Completion]:
    return [done, *done.alternatives]


def test_n_samples_compute_the_prompt_once_and_decode_in_one_batch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = llm.tokenizer.encode("Once upon a time there was a king. " * 12)[:100]
    counted = Counted(llm, monkeypatch)
    done = llm.generate(prompt, STORY, n=4)
    assert len(done.alternatives) == 3
    assert all(not other.alternatives for other in done.alternatives)
    assert counted.steps == [(1, 100)] + [(4, 4)] * 4
    size = llm.executor.layout.page_tokens
    whole, begun = divmod(100, size)
    assert begun, "the prompt ends inside a page"
    assert counted.pages[1] == whole + 4, "whole pages are shared, the begun one is copied for each writer"


def test_a_sample_is_the_same_however_many_there_are(llm: LLM) -> None:
    five = [one.token_ids for one in samples(llm.generate("Once upon a time", STORY, n=5))]
    three = [one.token_ids for one in samples(llm.generate("Once upon a time", STORY, n=3))]
    assert five[:3] == three
    assert five[0] == llm.generate("Once upon a time", STORY).token_ids
    assert len(set(map(tuple, five))) == 5, "and each is its own"


def test_greedy_samples_are_all_equal(llm: LLM) -> None:
    done = llm.generate("The capital of France is", max_tokens=5, n=3)
    assert [one.text for one in done.alternatives] == [done.text] * 2


def test_samples_without_a_seed_differ(llm: LLM) -> None:
    done = llm.generate("Once upon a time", STORY, seed=None, n=3, temperature=2.0, top_k=0)
    assert len({tuple(one.token_ids) for one in samples(done)}) == 3


def test_a_list_of_prompts_takes_n(llm: LLM) -> None:
    prompts = ["Once upon a time", "The king said to his three daughters that", "2 + 2 ="]
    together = llm.generate(prompts, STORY, n=2)
    alone = [llm.generate(prompt, STORY, n=2) for prompt in prompts]
    assert [[s.token_ids for s in samples(one)] for one in together] == [
        [s.token_ids for s in samples(one)] for one in alone
    ]


def test_every_sample_has_its_own_end_text_and_counts(llm: LLM) -> None:
    free = llm.generate("Once upon a time", STORY, n=3)
    ends = [one.token_ids[2 + i] for i, one in enumerate(samples(free))]
    done = llm.generate("Once upon a time", STORY, n=3, stop_token_ids=ends)
    for i, (one, long) in enumerate(zip(samples(done), samples(free), strict=True)):
        stop = next(place for place, token in enumerate(long.token_ids) if token in ends)
        assert stop <= 2 + i
        assert one.token_ids == long.token_ids[: stop + 1]
        assert one.finish_reason == "stop"
        assert long.text.startswith(one.text)
        assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (free.usage.prompt_tokens, stop + 1)
        assert one.usage.cached_tokens == (one.usage.prompt_tokens if i else 0), "only the first computed the prompt"


def test_kept_kv_is_each_samples_own(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("Once upon a time")
    done = llm.generate(prompt, STORY, n=3, keep_kv=True)
    for one in samples(done):
        assert one.kv is not None
        assert one.kv.tokens() == prompt + one.token_ids[:-1]
        more = llm.generate(one.token_ids[-1:], kv=one.kv, max_tokens=3)
        assert more.token_ids == llm.generate(prompt + one.token_ids, max_tokens=3).token_ids
    for one in samples(done):
        assert one.kv is not None
        one.kv.close()


def test_samples_behind_a_cache_compute_only_what_is_new(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with llm.prefill("Once upon") as kv:
        counted = Counted(llm, monkeypatch)
        behind = llm.generate(" a time", STORY, n=3, kv=kv, max_tokens=4)
        assert counted.steps == [(1, 2)] + [(3, 3)] * 3
        assert kv.num_entries == 2
    whole = llm.generate("Once upon a time", STORY, n=3, max_tokens=4)
    assert [one.token_ids for one in samples(behind)] == [one.token_ids for one in samples(whole)]


def test_chat_takes_n_and_streams_refuse_it_by_name(llm: LLM) -> None:
    done = llm.chat(QUESTION, temperature=0.8, seed=1, max_tokens=6, n=2)
    assert len(done.alternatives) == 1
    assert done.token_ids == llm.chat(QUESTION, temperature=0.8, seed=1, max_tokens=6).token_ids
    with pytest.raises(ParamError, match="n: a stream shows one sample, not 2"):
        llm.stream("Hello", n=2)
    with pytest.raises(ParamError, match="n: a stream shows one sample, not 3"):
        llm.stream_chat(QUESTION, n=3)


def test_a_prompt_that_is_refused_leaves_nothing_of_the_others(llm: LLM) -> None:
    with llm.prefill("Once upon") as kv:
        held = llm.executor.pool.usage().used
        with pytest.raises(ContextOverflow):
            llm.generate([[1], [1] * 511], kv=kv)
        assert llm.executor.pool.usage().used == held


def test_an_error_half_way_gives_every_page_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run = llm.executor.run

    def failing(batch: Batch) -> Logits:
        if len(batch.rows) == 3:
            raise Cancelled()
        return run(batch)

    monkeypatch.setattr(llm.executor, "run", failing)
    with pytest.raises(Cancelled):
        llm.generate("Once upon a time", STORY, n=3)
    assert llm.executor.pool.usage().used == 0


@pytest.mark.parametrize("fields", [{}, {"stop": "6"}, {"stop": "6", "include_stop_str_in_output": True}, {"n": 2}])
def test_logprobs_are_those_of_every_token_also_of_the_ones_that_stopped(llm: LLM, fields: dict[str, object]) -> None:
    prompt = llm.tokenizer.encode("Count: 1, 2, 3,")
    done = llm.generate(prompt, max_tokens=8, logprobs=3, temperature=0.3, seed=2, presence_penalty=0.1, **fields)
    for one in samples(done):
        assert one.logprobs is not None
        assert [entry.token for entry in one.logprobs] == one.token_ids
        with llm.executor.create_kv_cache() as kv:
            llm.executor.prefill(prompt[:-1], kv)
            for given, entry in zip([prompt[-1], *one.token_ids], one.logprobs, strict=False):
                raw = llm.executor.step([given], kv)[0].double().log_softmax(-1)
                best = raw.topk(3)
                assert entry.logprob == pytest.approx(float(raw[entry.token]), abs=1e-4)
                assert entry.rank == 1 + int((raw > raw[entry.token]).sum())
                assert entry.top_ids == tuple(best.indices.tolist())
                assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


def test_min_tokens_holds_back_the_end_of_a_turn(llm: LLM) -> None:
    short = llm.chat(QUESTION, max_tokens=60)
    count = len(short.token_ids)
    assert count < 30
    assert llm.chat(QUESTION, max_tokens=60, min_tokens=count - 1).token_ids == short.token_ids
    longer = llm.chat(QUESTION, max_tokens=count + 4, min_tokens=count + 4)
    assert len(longer.token_ids) == count + 4
    assert longer.token_ids[: count - 1] == short.token_ids[:-1]
    assert not set(longer.token_ids) & llm.stop_ids


def test_min_tokens_holds_back_stop_strings(llm: LLM) -> None:
    free = llm.generate("Count: 1, 2, 3,", max_tokens=20)
    at = [i for i, token in enumerate(free.token_ids, start=1) if "," in llm.tokenizer.decode([token])]
    stopped = llm.generate("Count: 1, 2, 3,", max_tokens=20, stop=",", min_tokens=at[1])
    assert stopped.token_ids == free.token_ids[: at[2]]
    assert stopped.text == llm.tokenizer.decode(free.token_ids[: at[2] - 1])
    assert stopped.finish_reason == "stop"


def test_bad_words_are_not_said_with_or_without_a_space(llm: LLM) -> None:
    prompt = "The capital of France is"
    assert "Paris" in llm.generate(prompt, max_tokens=6).text
    for given in ("Paris", [" Paris"]):
        assert "Paris" not in llm.generate(prompt, max_tokens=6, bad_words=given).text
    spaced = llm.tokenizer.encode(" Paris", add_special=False)
    assert "Paris" not in llm.generate(prompt, max_tokens=1, bad_words_ids=[spaced]).text
    with pytest.raises(ParamError, match="bad_words_ids: token id 1000000 is past the vocabulary"):
        llm.generate(prompt, bad_words_ids=[[1, 10**6]])


def test_no_ngram_comes_twice(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("The cat sat on the mat. The cat sat on the mat. The cat sat on")

    def repeated(ids: list[int]) -> bool:
        runs = [tuple(ids[i : i + 3]) for i in range(len(ids) - 2)]
        new = runs[len(prompt) - 2 :]
        return any(run in runs[: len(prompt) - 2 + i] for i, run in enumerate(new))

    assert repeated(prompt + llm.generate(prompt, max_tokens=10).token_ids)
    assert not repeated(prompt + llm.generate(prompt, max_tokens=10, no_repeat_ngram_size=3).token_ids)


@pytest.mark.parametrize("wrong", [None, 5, b"ab", [1.0, 2.0], [[1], [None]], [-1], [10**6], [[1, 2], [10**6]]])
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InputError, match="token id"):
        llm.generate(wrong, max_tokens=1)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_arrays_of_ids_are_prompts(llm: LLM, make: Callable[[Any], Any]) -> None:
    ids = [[504, 3575], [28, 29]]
    expected = [done.token_ids for done in llm.generate(ids, max_tokens=2)]
    assert [done.token_ids for done in llm.generate(make(ids), max_tokens=2)] == expected
    assert llm.generate(make(ids[0]), max_tokens=2).token_ids == expected[0]


def test_embedded_places_are_not_tokens_that_penalties_know(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    honest = llm.executor.sample

    def spying(logits: torch.Tensor, states: Any, positions: Any) -> Any:
        seen.extend(list(state.history.ids) for state in states)
        return honest(logits, states, positions)

    monkeypatch.setattr(llm.executor, "sample", spying)
    with llm.executor.create_kv_cache() as kv:
        llm.executor.prefill(Inputs([7, 0], [1], torch.zeros(1, llm.executor.spec.hidden_size)), kv)
        llm.generate([28], kv=kv, max_tokens=1, repetition_penalty=2.0)
    assert seen == [[7, 28]]


def test_a_prompt_past_the_pool_is_refused_before_any_work(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvilt.load(str(smollm2_path), kv_memory="32M", max_context=2048) as small:
        monkeypatch.setattr(small.executor, "run", lambda _batch: pytest.fail("a step was run"))
        with pytest.raises(ContextOverflow, match="raise kv_memory"):
            small.generate([28] * 1500)
        assert small.executor.pool.usage().used == 0


def test_a_cancelled_generation_carries_the_tokens_so_far(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llm.generate("Once upon a time", max_tokens=5).token_ids
    honest, calls = llm.executor.run, iter(range(100))

    def third_is_cancelled(batch: Batch) -> Logits:
        if next(calls) == 2:
            raise Cancelled()
        return honest(batch)

    monkeypatch.setattr(llm.executor, "run", third_is_cancelled)
    with pytest.raises(Cancelled) as cancelled:
        llm.generate("Once upon a time", max_tokens=5)
    assert cancelled.value.tokens == [whole[:2]]


class CancelBetween:
    """Cancels the executor after its nth draw, between two steps."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
        self._llm, self._left, self._sample = llm, nth, llm.executor.sample
        monkeypatch.setattr(llm.executor, "sample", self)

    def __call__(self, *given: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self._llm.executor.cancel()
        return self._sample(*given)


def test_a_cancel_between_two_steps_is_heard(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["Once upon a time", "The capital of France is"]
    whole = [done.token_ids for done in llm.generate(prompts, max_tokens=5)]
    with monkeypatch.context() as patch:
        CancelBetween(llm, patch, 2)
        with pytest.raises(Cancelled) as cancelled:
            llm.generate(prompts, max_tokens=5)
    assert cancelled.value.tokens == [ids[:2] for ids in whole]
    assert llm.executor.pool.usage().used == 0
    assert [done.token_ids for done in llm.generate(prompts, max_tokens=5)] == whole


def test_a_cancel_within_a_piece_of_a_stream_is_heard_and_one_between_pieces_is_idle(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = llm.generate("Once upon a time", max_tokens=6)
    pieces = []
    for piece in llm.stream("Once upon a time", max_tokens=6):
        pieces.append(piece)
        llm.executor.cancel()  # the consumer has control, and nothing is in progress
    assert "".join(pieces) == whole.text
    with monkeypatch.context() as patch:
        CancelBetween(llm, patch, 2)
        with pytest.raises(Cancelled) as cancelled:
            list(llm.stream("Once upon a time", max_tokens=6, stop=whole.text))  # all of it is held back
    assert cancelled.value.tokens == [whole.token_ids[:2]]


def test_a_stopped_stream_shows_what_was_held_back_for_a_stop_string(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llm.generate("Once upon a time", max_tokens=12)
    held = llm.tokenizer.decode(whole.token_ids[:4])
    stream = llm.stream("Once upon a time", max_tokens=12, stop=held + "never said")
    honest, draws = llm.executor.sample, iter(range(100))

    def third_stops(*given: Any) -> Any:
        if next(draws) == 2:
            stream.stop()
        return honest(*given)

    monkeypatch.setattr(llm.executor, "sample", third_stops)
    pieces = list(stream)
    done = stream.completion
    assert (done.token_ids, done.finish_reason) == (whole.token_ids[:3], "cancelled")
    assert done.text == "".join(pieces) == llm.tokenizer.decode(done.token_ids)


def test_a_closed_model_says_so(smollm2_path: Path) -> None:
    with kvilt.load(str(smollm2_path), kv_memory="32M", max_context=64) as short, short.prefill("Hello") as kv:
        short.close()
        for refused in (lambda: short.generate("Hello"), lambda: short.generate("!", kv=kv), kv.serialize):
            with pytest.raises(ModelClosed, match="before closing it"):
                refused()


def test_a_stream_that_failed_has_no_completion_and_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("Once upon a time", max_tokens=5)

    def broken(_batch: Batch) -> Logits:
        raise RuntimeError("broken")

    monkeypatch.setattr(llm.executor, "run", broken)
    with pytest.raises(RuntimeError, match="broken"):
        list(stream)
    with pytest.raises(InputError, match="no completion"):
        _ = stream.completion


# What the engine adds.

LONG = "Once upon a time there was a king who had three daughters, and each of them wanted something else. " * 4


def test_what_an_earlier_prompt_began_with_is_not_computed_again(llm: LLM) -> None:
    first = llm.generate(LONG + "The first", max_tokens=6)
    again = llm.generate(LONG + "The second", max_tokens=6)
    size = llm.executor.layout.page_tokens
    common = len(llm.tokenizer.encode(LONG + "The"))
    assert again.usage.cached_tokens == common // size * size > 0
    llm.executor.prefixes.clear()
    alone = llm.generate(LONG + "The second", max_tokens=6)
    assert (alone.usage.cached_tokens, alone.token_ids) == (0, again.token_ids)
    assert first.usage.prompt_tokens > common


def test_who_brings_a_cache_gets_what_it_holds_and_no_more(llm: LLM) -> None:
    llm.generate(LONG, max_tokens=1)
    with llm.executor.create_kv_cache() as empty:
        done = llm.generate(LONG, kv=empty, max_tokens=1)
        assert done.usage.cached_tokens == 0


def test_several_threads_share_steps_and_get_what_they_get_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["Once upon a time", "The capital of France is", "Count: 1, 2, 3,", "2 + 2 ="]
    expected = [llm.generate(prompt, max_tokens=24, ignore_eos=True).token_ids for prompt in prompts]
    counted = Counted(llm, monkeypatch)
    found: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        if index % 2:
            found[index] = llm.generate(prompts[index], max_tokens=24, ignore_eos=True).token_ids
        else:
            found[index] = llm.stream(prompts[index], max_tokens=24, ignore_eos=True).completion.token_ids

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [found[index] for index in range(len(prompts))] == expected
    assert max(rows for rows, _ in counted.steps) > 1


def test_a_stream_runs_only_while_it_is_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llm.generate("Once upon a time", max_tokens=8)
    pieces = iter(stream := llm.stream("Once upon a time", max_tokens=8))
    next(pieces)
    counted = Counted(llm, monkeypatch)
    llm.generate("The capital of France is", max_tokens=8)
    assert {rows for rows, _ in counted.steps} == {1}
    assert stream.completion.token_ids == whole.token_ids


def test_more_prompts_than_the_pool_holds_wait_and_come_back(smollm2_path: Path) -> None:
    prompts = [f"Once upon a time there were {n} kings, and" for n in range(12)]
    with kvilt.load(str(smollm2_path), kv_memory="6M", kv_dtype="float32", max_context=128) as small:
        assert small.executor.pool.pages == 4
        together = small.generate(prompts, max_tokens=40, ignore_eos=True)
        for prompt, done in zip(prompts[:3], together, strict=False):
            assert done.token_ids == small.generate(prompt, max_tokens=40, ignore_eos=True).token_ids
        assert small.executor.pool.usage().used == 0


def test_pages_that_somebody_else_holds_are_missed_by_name(smollm2_path: Path) -> None:
    with kvilt.load(str(smollm2_path), kv_memory="6M", kv_dtype="float32", max_context=128) as small:
        with small.prefill([28] * 90), pytest.raises(PoolExhausted, match="close caches you no longer need"):
            small.generate([29] * 60, max_tokens=4)
        assert small.generate([29] * 60, max_tokens=4).finish_reason == "length"
        assert small.executor.pool.usage().used == 0


@pytest.mark.parametrize("which", ["run", "sample"])
def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    expected = llm.generate("Once upon a time", max_tokens=4).token_ids
    honest, calls = getattr(llm.executor, which), iter(range(100))

    def interrupted(*given: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return honest(*given)

    with monkeypatch.context() as patch:
        patch.setattr(llm.executor, which, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Once upon a time", "2 + 2 ="], max_tokens=9, keep_kv=True)
    assert llm.executor.pool.usage().used == 0
    assert llm.generate("Once upon a time", max_tokens=4).token_ids == expected


def test_an_answer_that_fails_leaves_nothing_of_the_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = llm.executor.run

    def no_numbers(batch: Batch) -> Logits:
        logits = honest(batch)
        logits.of_row(0).fill_(float("nan"))
        return logits

    monkeypatch.setattr(llm.executor, "run", no_numbers)
    with pytest.raises(NumericsError):
        llm.generate(["Once upon a time", "2 + 2 ="], max_tokens=3, keep_kv=True)
    assert llm.executor.pool.usage().used == 0
