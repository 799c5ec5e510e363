"""`kvilt batch`: every line gets an answer of its own, what was answered stays, shared prompts are computed once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import kvilt

from kvilt.cli.batch import BatchCounts, finished_ids
from kvilt.errors import InputError
from kvilt.server.batches.lines import BatchLine, read_lines

GUIDE = "You are a guide to the old town. " * 6


def request(name: str, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": GUIDE}, {"role": "user", "content": text}]
    body = {"model": "gpt-4o-mini", "messages": messages, "max_tokens": 4, "temperature": 0, **more}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = {"custom_id": "text", "url": "/v1/completions", "body": {"prompt": "One, two,", "max_tokens": 3}}
    return written(
        tmp_path_factory.mktemp("batch") / "in.jsonl",
        request("a", "Where is the mill?"),
        "",
        text,
        request("b", "Where is the mill, and since when?"),
        request("wrong", "x", temperature="hot"),
        request("streamed", "x", stream=True),
        {"custom_id": "lost", "url": "/v1/nowhere", "body": {}},
        request("a", "again"),
        "{no JSON",
        {"custom_id": "", "url": "/v1/completions", "body": {}},
        {"custom_id": "odd", "method": "GET", "url": "/v1/completions", "body": {}},
    )


@pytest.fixture(scope="module")
def first(asked: Path, smollm2_path: Path) -> Any:
    done = kvilt("batch", str(asked), str(asked.with_name("out.jsonl")), "--model", str(smollm2_path))
    return done, answers(asked.with_name("out.jsonl"))


def test_every_line_is_answered_by_itself(first: Any) -> None:
    done, found = first
    assert done.returncode == 1, "some of them failed"
    assert "3 answered, 7 failed" in done.stderr
    for name in ("a", "b", "text"):
        response = found[name]["response"]
        assert (response["status_code"], found[name]["error"]) == (200, None)
        assert response["body"]["usage"]["completion_tokens"] in (3, 4)
    assert found["wrong"]["response"]["status_code"] == 400
    assert found["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["streamed"]["response"]["body"]["error"]["param"] == "stream"
    assert found["lost"]["response"]["status_code"] == 404
    problems = {name: line["error"]["message"] for name, line in found.items() if line["error"]}
    assert "was used before" in problems["line-8"]
    assert "not JSON" in problems["line-9"]
    assert "custom_id" in problems["line-10"]
    assert "POST" in problems["odd"]


def test_prompts_that_begin_alike_are_computed_once(first: Any) -> None:
    _, found = first
    used = [found[name]["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] for name in ("a", "b")]
    assert sorted(used)[0] == 0 < sorted(used)[1]


def test_answers_are_those_of_the_model_alone(first: Any, smollm2_path: Path) -> None:
    _, found = first
    greedy = ("--temperature", "0", "--max-tokens", "4", "--repetition-penalty", "1")
    alone = kvilt("run", "Where is the mill?", "--system", GUIDE, "--model", str(smollm2_path), *greedy)
    assert found["a"]["response"]["body"]["choices"][0]["message"]["content"].strip() == alone.stdout.strip()


def test_a_run_goes_on_where_another_ended(first: Any, asked: Path, tmp_path: Path, smollm2_path: Path) -> None:
    _, found = first
    out = tmp_path / "out.jsonl"
    out.write_text(json.dumps(found["a"]) + "\n" + json.dumps(found["b"])[:40])
    done = kvilt("batch", str(asked), str(out), "--model", str(smollm2_path))
    assert "2 answered, 7 failed, 1 answered before" in done.stderr
    assert answers(out).keys() == found.keys()
    assert answers(out)["a"] == found["a"]
    again = kvilt("batch", str(asked), str(out), "--model", str(smollm2_path))
    assert (again.returncode, "are answered" in again.stderr) == (0, True)


def test_files_that_are_not_what_they_should_be_are_refused(tmp_path: Path) -> None:
    absent = kvilt("batch", str(tmp_path / "absent.jsonl"), str(tmp_path / "out.jsonl"))
    assert absent.returncode == 2 and "absent.jsonl" in absent.stderr
    other = written(tmp_path / "notes.txt", "my notes")
    with pytest.raises(InputError, match="no output of kvilt batch"):
        finished_ids(other)
    assert other.read_text() == "my notes\n"


def test_lines_with_shared_prompts_are_neighbours() -> None:
    texts = [request(str(i), f"{'ab'[i % 2] * 20} {i}") for i in range(6)]
    lines = sorted(read_lines(map(json.dumps, texts)), key=lambda line: line.order)
    assert [int(line.custom_id) % 2 for line in lines] == [0, 0, 0, 1, 1, 1]
    assert BatchLine(1, "x", problem="odd").order


def test_counts_of_an_answer_without_usage() -> None:
    counts = BatchCounts()
    counts.add({"response": None})
    assert (counts.answered, counts.failed) == (0, 1)
