"""Contract F: the facade, on the default model's real weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvilt
from kvilt import LLM, SamplingParams
from kvilt.batch import Batch, Logits
from kvilt.errors import Cancelled, ContextOverflow, InputError, ModelNotFound, ParamError, TemplateError

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


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
    assert "Paris" in done.text
    assert done.finish_reason == "stop"
    assert "<|im_end|>" not in done.text
    assert done.token_ids[-1] in llm.tokenizer.eos_ids


def test_a_second_turn_computes_only_what_is_new(llm: LLM) -> None:
    first = llm.chat(QUESTION, max_tokens=60, keep_kv=True)
    turns = [*QUESTION, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And of Italy?"}]
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


def test_the_context_limit_is_a_clean_finish(llm: LLM) -> None:
    ids = llm.tokenizer.encode("word " * 600)[:500]
    done = llm.generate(ids, ignore_eos=True)
    assert done.finish_reason == "length"
    assert len(done.token_ids) == 512 - 500 + 1


def test_a_prompt_that_is_too_long_is_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(ContextOverflow, match=r"513 tokens and the context holds 512"):
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
