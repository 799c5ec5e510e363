"""A sample that repeats itself ends with a reason, for every way of asking and whatever else is in the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import write_tiny_of_bytes
from typer.testing import CliRunner

import kvilt
from kvilt import LLM, AsyncLLM, Completion, SamplingParams
from kvilt.cli.app import app
from kvilt.sampling.repetition import RepetitionDetection

DETECTION = RepetitionDetection()
A = ord("A") - 33  # the id of a byte in the tiny tokenizer
STUCK = SamplingParams(logit_bias={A: 100.0}, max_tokens=90, repetition_detection=True)
OTHERS = ["one", "a longer prompt than the others", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_of_bytes(tmp_path_factory.mktemp("bytes"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')  # grammars need a token that ends a text
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with kvilt.load(folder, kv_memory="16M", threads=1, draft="ngram") as model:
        yield model
        model.executor.prefixes.clear()
        assert model.executor.pool.usage().used == 0


def samples(done: Completion) -> list[Completion]:
    return [done, *done.alternatives]


def test_a_loop_ends_a_sample_with_a_reason(llm: LLM) -> None:
    done = llm.generate("go", STUCK)
    assert done.finish_reason == "repetition"
    assert done.token_ids == [A] * DETECTION.needed(1)
    assert done.text == "A" * DETECTION.needed(1)


def test_it_is_off_unless_it_is_asked_for(llm: LLM) -> None:
    done = llm.generate("go", STUCK, repetition_detection=False)
    assert (done.finish_reason, len(done.token_ids)) == ("length", 90)


def test_nothing_ends_before_min_tokens(llm: LLM) -> None:
    """As for stop strings: the first token behind them may be the last."""
    done = llm.generate("go", STUCK, min_tokens=80)
    assert (done.finish_reason, len(done.token_ids)) == ("repetition", 81)


def test_a_limit_and_a_stop_string_have_reasons_of_their_own(llm: LLM) -> None:
    needed = DETECTION.needed(1)
    assert llm.generate("go", STUCK, max_tokens=needed - 1).finish_reason == "length"
    assert llm.generate("go", STUCK, stop="A" * needed).finish_reason == "stop"
    assert llm.generate("go", STUCK, stop="A" * (needed + 1)).finish_reason == "repetition"


def test_the_last_token_does_not_depend_on_the_batch_or_on_drafts(llm: LLM) -> None:
    alone = llm.generate("go", STUCK)
    assert llm.generate("go", STUCK, draft_tokens=0).token_ids == alone.token_ids
    together = llm.generate(["go", *OTHERS], STUCK)
    assert [(one.finish_reason, one.token_ids) for one in together] == [("repetition", alone.token_ids)] * 4
    many = llm.generate("go", STUCK, n=3)
    assert [one.finish_reason for one in samples(many)] == ["repetition"] * 3


def test_a_stream_says_the_same_and_keeps_its_kv(llm: LLM) -> None:
    stream = llm.stream("go", STUCK, keep_kv=True)
    assert "".join(stream) == "A" * DETECTION.needed(1)
    assert stream.completion.finish_reason == "repetition"
    kv = stream.completion.kv
    assert kv is not None
    with kv:
        assert kv.num_entries == len("go") + DETECTION.needed(1) - 1


def test_deltas_say_the_same(folder: Path) -> None:
    async def whole() -> None:
        async with kvilt.load_async(folder, kv_memory="16M", threads=1) as model:
            assert isinstance(model, AsyncLLM)
            stream = await model.stream("go", STUCK)
            ends = [delta.finish_reason async for delta in stream if delta.finish_reason is not None]
            assert ends == ["repetition"]

    asyncio.run(whole())


@pytest.mark.parametrize(("temperature", "helps"), [("0", "--temperature above 0"), ("1", "ask again")])
def test_run_says_why_the_answer_ended_and_what_helps(folder: Path, temperature: str, helps: str) -> None:
    asked = ["run", "go", "--raw", "--model", str(folder), "--threads", "1", "--kv-memory", "4M", "--max-tokens", "90"]
    stuck = [*asked, "--regex", "A{100}", "--temperature", temperature]
    done = CliRunner().invoke(app, stuck)
    assert done.exit_code == 0, done.output
    assert done.stdout == "A" * DETECTION.needed(1) + "\n"
    numbers, why = done.stderr.splitlines()
    assert numbers.endswith("· repetition")
    assert why.startswith("the answer repeated itself and was ended; ")
    assert helps in why and "--no-repetition-detection" in why
    on = CliRunner().invoke(app, [*stuck, "--no-repetition-detection"])
    assert (on.stdout, len(on.stderr.splitlines())) == ("A" * 90 + "\n", 1)
