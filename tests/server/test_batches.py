"""Batches over HTTP with the official client: files in and out, and batches that are wrong, cancelled or stopped."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from gates import Gate
from running import Running, until

from kvilt.config import EngineConfig
from kvilt.errors import QueueFull, WorkTimeout
from kvilt.executor.protocol import Executor
from kvilt.server.batches.index import BatchIndex, LineSpan
from kvilt.server.batches.lines import parse_line
from kvilt.server.batches.queue import WINDOW_S

Start = Callable[..., Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDED = ("failed", "completed", "expired", "cancelled")


def line(name: str, url: str = TEXT, **body: Any) -> str:
    given = body or {"prompt": f"Once {name}", "max_tokens": 3, "temperature": 0}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"model": "tiny", **given}})


def uploaded(client: openai.OpenAI, *lines: str | bytes) -> str:
    data = b"".join((one if isinstance(one, bytes) else one.encode()) + b"\n" for one in lines)
    return client.files.create(file=("in.jsonl", data), purpose="batch").id


def begun(client: openai.OpenAI, *lines: str | bytes, endpoint: Any = TEXT, **more: Any) -> Any:
    name = uploaded(client, *lines)
    return client.batches.create(input_file_id=name, endpoint=endpoint, completion_window="24h", **more)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    until(lambda: client.batches.retrieve(batch.id).status in ENDED, "the end of the batch")
    return client.batches.retrieve(batch.id)


def answers(client: openai.OpenAI, name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    text = client.files.content(name).text
    return {one["custom_id"]: one for one in map(json.loads, text.splitlines())}


# What a batch is for.


def test_a_batch_answers_each_line_as_the_route_does(server: Running) -> None:
    client = server.openai()
    messages = [{"role": "user", "content": "What is the capital of Germany?"}]
    asked = {"messages": messages, "max_tokens": 5, "temperature": 0}
    batch = begun(
        client,
        line("a", CHAT, **asked),
        "",
        line("wrong", CHAT, messages=messages, temperature="hot"),
        line("streamed", CHAT, **asked, stream=True),
        line("other", CHAT, messages=messages, model="gpt-9"),
        endpoint=CHAT,
        metadata={"job": "nightly"},
    )
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"job": "nightly"})
    assert batch.expires_at == batch.created_at + WINDOW_S
    done = ended(client, batch)
    assert (done.status, done.errors) == ("completed", None)
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (4, 1, 3)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    found = answers(client, done.output_file_id)
    alone = client.chat.completions.create(model="tiny", **asked)
    assert list(found) == ["a"]
    body = found["a"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert done.usage.input_tokens == body["usage"]["prompt_tokens"]
    assert done.usage.total_tokens == body["usage"]["total_tokens"]
    failed = {name: one["response"] for name, one in answers(client, done.error_file_id).items()}
    assert {name: one["status_code"] for name, one in failed.items()} == {"wrong": 400, "streamed": 400, "other": 404}
    assert failed["wrong"]["body"]["error"]["param"] == "temperature"
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert done in list(client.batches.list())


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (TEXT, {"prompt": "One, two,", "max_tokens": 3}),
        ("/v1/embeddings", {"input": ["one", "two"], "encoding_format": "base64"}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 3, "store": False}),
    ],
)
def test_every_endpoint_has_its_own_answers(server: Running, endpoint: str, body: dict[str, Any]) -> None:
    client = server.openai()
    done = ended(client, begun(client, line("a", endpoint, **body), endpoint=endpoint))
    assert done.status == "completed", done
    (found,) = answers(client, done.output_file_id).values()
    with server.http() as http:
        alone = http.post(endpoint, json={"model": "tiny", **body}).json()
    assert found["response"]["body"].keys() == alone.keys()
    assert done.usage.total_tokens == alone["usage"]["total_tokens"]


def test_shared_prompts_are_computed_once_however_the_file_is_mixed(server: Running) -> None:
    client = server.openai()
    begins = ["The mill at the river " * 12, "A street of the old town " * 12]
    lines = [line(f"{i}", prompt=begins[i % 2] + f"{i}", max_tokens=1) for i in range(8)]
    done = ended(client, begun(client, *lines))
    assert done.request_counts.completed == 8
    usage = [one["response"]["body"]["usage"] for one in answers(client, done.output_file_id).values()]
    assert done.usage.input_tokens_details.cached_tokens > 0.5 * sum(one["prompt_tokens"] for one in usage)


# What is wrong.


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["{no JSON"], "invalid_line", 1),
        ([line("a"), '{"a": 1, "a": 2}'], "invalid_line", 2),
        ([line("a"), b"\xff\xfe\x00"], "invalid_line", 2),
        (["[1]"], "invalid_line", 1),
        (["[" * 100_000], "invalid_line", 1),
        (['{"custom_id": "", "url": "/v1/completions", "body": {}}'], "invalid_line", 1),
        (['{"custom_id": "a", "url": "/v1/completions", "body": []}'], "invalid_line", 1),
        (['{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}'], "invalid_line", 1),
        ([line("a"), "", line("a")], "duplicate_custom_id", 3),
        ([line("a", CHAT)], "mismatched_endpoint", 1),
        ([line("a", "/v1/files")], "mismatched_endpoint", 1),
        ([line("a", prompt="x" * (9 << 20))], "line_too_long", 1),
        ([], "empty_file", None),
        (["", "  "], "empty_file", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_with_a_bad_line_fails_before_anything_is_computed(
    server: Running, lines: list[str], code: str, number: int | None
) -> None:
    client = server.openai()
    done = ended(client, begun(client, *lines))
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.failed_at is not None
    assert (done.errors.data[0].code, done.errors.data[0].line) == (code, number)
    assert len(json.dumps(done.errors.model_dump())) < 2000


def test_a_batch_has_so_many_lines(start: Start) -> None:
    with start(max_batch_lines=3) as server:
        client = server.openai()
        assert ended(client, begun(client, *(line(str(i)) for i in range(3)))).status == "completed"
        failed = ended(client, begun(client, *(line(str(i)) for i in range(9))))
        assert (failed.status, [one.code for one in failed.errors.data]) == ("failed", ["too_many_requests"])


def test_requests_for_batches_are_refused_by_name(server: Running) -> None:
    client = server.openai()
    name = uploaded(client, line("a"))
    good = {"input_file_id": name, "endpoint": TEXT, "completion_window": "24h"}
    for field, value in (
        ("input_file_id", "file-x"),
        ("endpoint", "/v1/images"),
        ("completion_window", "1h"),
        ("metadata", {"a": 5}),
        ("metadata", {str(i): "" for i in range(17)}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 5}),
        ("colour", "red"),
    ):
        with server.http() as http:
            refused = http.post("/v1/batches", json={**good, field: value})
        assert refused.status_code == 400, (field, value)
        assert refused.json()["error"]["param"].startswith(field)
    with pytest.raises(openai.NotFoundError) as absent:
        client.batches.create(**{**good, "input_file_id": "file-" + "0" * 32})
    assert absent.value.param == "input_file_id"


# Keys and quotas.


def test_batches_and_files_of_another_key_do_not_exist(start: Start) -> None:
    with start(api_keys=("one", "two")) as server:
        one, two = server.openai("one"), server.openai("two")
        name = uploaded(one, line("a"))
        with pytest.raises(openai.NotFoundError):
            two.batches.create(input_file_id=name, endpoint=TEXT, completion_window="24h")
        done = ended(one, one.batches.create(input_file_id=name, endpoint=TEXT, completion_window="24h"))
        for ask in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(done.id)
        with pytest.raises(openai.NotFoundError):
            two.files.content(done.output_file_id)
        assert list(two.batches.list()) == []


@pytest.fixture
def slowed(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(executor, monkeypatch)


def test_a_key_has_so_many_batches_and_one_at_a_time(start: Start, slowed: Gate) -> None:
    with start(api_keys=("one", "two"), max_batches=2) as server:
        one, two = server.openai("one"), server.openai("two")
        slowed.clear()
        first, second = begun(one, line("a")), begun(one, line("b"))
        until(lambda: one.batches.retrieve(first.id).status == "in_progress")
        assert one.batches.retrieve(second.id).status == "validating"
        with pytest.raises(openai.ConflictError) as full:
            begun(one, line("c"))
        assert full.value.code == "batch_limit"
        third = begun(two, line("d"))
        until(lambda: two.batches.retrieve(third.id).status == "in_progress", "another key's turn")
        with pytest.raises(openai.ConflictError) as used:
            one.files.delete(first.input_file_id)
        assert used.value.code == "file_in_use"
        slowed.set()
        assert [ended(one, batch).status for batch in (first, second)] == ["completed"] * 2
        begun(one, line("e"))
        assert first.id not in [batch.id for batch in one.batches.list()], "the oldest that has ended gives way"


def test_output_counts_for_the_quota(start: Start) -> None:
    with start(max_files_bytes=4000) as server:
        client = server.openai()
        done = ended(client, begun(client, *(line(str(i)) for i in range(8))))
        assert (done.status, done.errors.data[0].code) == ("failed", "files_limit")
        found = answers(client, done.output_file_id)
        assert 0 < len(found) < 8, "what was answered stays"
        assert sum(one.bytes for one in client.files.list()) <= 4000


# How batches end.


def test_a_cancelled_batch_keeps_what_it_has(start: Start, slowed: Gate) -> None:
    with start(EngineConfig(max_rows=1)) as server:
        client = server.openai()
        slowed.last = 8
        batch = begun(client, *(line(str(i)) for i in range(8)))
        until(lambda: not slowed.is_set(), "the eighth step")
        assert client.batches.cancel(batch.id).status == "cancelling"
        done = ended(client, batch)
        slowed.set()
        assert done.status == "cancelled"
        assert done.cancelling_at <= done.cancelled_at
        assert len(answers(client, done.output_file_id)) == done.request_counts.completed < 8
        assert client.batches.cancel(batch.id) == done
        until(lambda: server.llm.engine.requests == 0, "the end of its requests")


def test_a_batch_that_waits_can_be_cancelled(start: Start, slowed: Gate) -> None:
    with start() as server:
        client = server.openai()
        slowed.clear()
        first, second = begun(client, line("a")), begun(client, line("b"))
        client.batches.cancel(second.id)
        assert ended(client, second).status == "cancelled"
        slowed.set()
        assert ended(client, first).status == "completed"


def test_a_batch_expires(start: Start, slowed: Gate) -> None:
    patient = {f"{name}_timeout_s": 10.0 * WINDOW_S for name in ("header", "body", "write", "idle")}
    with start(EngineConfig(max_rows=1), **patient) as server:
        client = server.openai()
        slowed.last = 8
        batch = begun(client, *(line(str(i)) for i in range(8)))
        until(lambda: not slowed.is_set(), "the eighth step")
        server.elapse(WINDOW_S + 1)
        done = ended(client, batch)
        slowed.set()
        assert done.status == "expired"
        given, late = answers(client, done.output_file_id), answers(client, done.error_file_id)
        assert sorted([*given, *late]) == [str(i) for i in range(8)]
        assert late and {one["error"]["code"] for one in late.values()} == {"batch_expired"}


def test_lines_that_could_not_be_read_in_time_are_read_again(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, refusals = BatchIndex.line, [WorkTimeout("parse", 10.0), QueueFull(256, 256)]

    def line_of(index: BatchIndex, span: LineSpan) -> Any:
        if refusals:
            raise refusals.pop()
        return honest(index, span)

    monkeypatch.setattr(BatchIndex, "line", line_of)
    client = server.openai()
    done = ended(client, begun(client, line("a"), line("b")))
    assert (done.status, done.request_counts.completed, refusals) == ("completed", 2, [])


def test_a_full_queue_is_waited_for(start: Start) -> None:
    with start(EngineConfig(max_waiting=2, max_rows=1)) as server:
        client = server.openai()
        done = ended(client, begun(client, *(line(str(i)) for i in range(12))))
        assert (done.status, done.request_counts.completed) == ("completed", 12)


@pytest.mark.parametrize("torn", [False, True])
def test_a_batch_goes_on_after_a_restart(start: Start, slowed: Gate, tmp_path: Path, torn: bool) -> None:
    lines = [line(str(i)) for i in range(8)]
    with start(EngineConfig(max_rows=1), files_dir=tmp_path) as server:
        client = server.openai()
        slowed.last = 12
        batch = begun(client, *lines, metadata={"job": "x"})
        until(lambda: not slowed.is_set(), "the twelfth step")
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        server.end()
        until(lambda: not server.listener.batches._tasks, "the stop of its batches")
        slowed.set()
    (out,) = [path for path in tmp_path.glob("*.data") if path.stem != batch.input_file_id]
    before = out.read_text().splitlines()
    assert 0 < len(before) < 8
    if torn:
        with out.open("a") as file:
            file.write('{"custom_id": "7", "resp')  # a kill in the middle of a write
    with start(files_dir=tmp_path) as server:
        client = server.openai()
        done = ended(client, batch)
        assert (done.status, done.metadata, done.request_counts.completed) == ("completed", {"job": "x"}, 8)
        text = client.files.content(done.output_file_id).text.splitlines()
        assert text[: len(before)] == before
        assert sorted(json.loads(one)["custom_id"] for one in text) == [str(i) for i in range(8)]
    with start(files_dir=tmp_path) as server:
        assert server.openai().batches.retrieve(batch.id) == done
        assert len(answers(server.openai(), done.output_file_id)) == 8
    assert {path.stem for path in tmp_path.glob("*.data")} == {batch.input_file_id, done.output_file_id}


def test_notes_that_are_none_are_left_out(start: Start, tmp_path: Path) -> None:
    for name, text in (("batch_a", "{}"), ("batch_b", "[]"), ("batch_c", "\0"), ("file-d", '{"id": "../x"}')):
        (tmp_path / f"{name}.json").write_text(text)
    with start(files_dir=tmp_path) as server:
        assert list(server.openai().batches.list()) == []
        done = ended(server.openai(), begun(server.openai(), line("a")))
        assert done.status == "completed"


def test_a_batch_whose_disk_is_full_fails_and_says_so(
    start: Start, tmp_path: Path, slowed: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(files_dir=tmp_path) as server:
        client = server.openai()
        slowed.clear()
        batch = begun(client, line("a"))
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        honest = os.write

        def write(fd: int, data: Any) -> int:
            if b"batch_req_" in bytes(data[:40]):
                raise OSError(28, "No space left on device")
            return honest(fd, data)

        monkeypatch.setattr(os, "write", write)
        slowed.set()
        done = ended(client, batch)
        assert (done.status, done.errors.data[0].code) == ("failed", "files_dir_full")
        monkeypatch.undo()
        assert ended(client, begun(client, line("b"))).status == "completed"


# Memory.


def test_lines_are_read_when_they_are_asked(tmp_path: Path) -> None:
    """An index holds a small part of the file, and its order keeps together what begins alike."""
    begins = ["a" * 40_000, "b" * 40_000]
    texts = [line(str(i), prompt=begins[i % 2] + str(i)) for i in range(20)]
    path = tmp_path / "in"
    path.write_text("\n".join(texts))
    index = BatchIndex(path, TEXT, 100, 1 << 20)
    while index.read_slice():
        pass
    assert index.problems == []
    order = index.in_order({"3"})
    assert [int(one.custom_id) % 2 for one in order] == [0] * 10 + [1] * 9
    assert sum(len(one.order) for one in order) < path.stat().st_size / 20
    for span in order:
        assert index.line(span) == parse_line(span.number, texts[span.number - 1].encode())


def test_a_batch_holds_few_requests_at_a_time(start: Start, monkeypatch: pytest.MonkeyPatch, slowed: Gate) -> None:
    read: list[Any] = []
    honest = BatchIndex.line
    monkeypatch.setattr(BatchIndex, "line", lambda self, span: (read.append(span), honest(self, span))[1])
    with start() as server:
        client = server.openai()
        slowed.clear()
        batch = begun(client, *(line(str(i), prompt="x", max_tokens=1) for i in range(100)))
        until(lambda: len(read) >= 64)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), server.loop).result(60)
        assert len(read) <= 65
        slowed.set()
        assert ended(client, batch).request_counts.completed == 100


def test_files_given_as_objects_work_too(server: Running) -> None:
    client = server.openai()
    made = client.files.create(file=io.BytesIO(line("a").encode()), purpose="batch")  # without a last line end
    batch = client.batches.create(input_file_id=made.id, endpoint=TEXT, completion_window="24h")
    assert ended(client, batch).request_counts.completed == 1
