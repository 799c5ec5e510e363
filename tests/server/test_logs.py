"""The logs of a server: one line for each record in both forms, with the cost of each request; and `kvilt top`."""

from __future__ import annotations

import json
import logging
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from running import Running, until

from kvilt.cli import top
from kvilt.cli.top import Rates, picture, rates_between, states
from kvilt.errors import KviltError, ParamError
from kvilt.server.logs import FIELDS, JSONLines, TextLines, configure_logs, one_line, usage_fields

HOSTILE = "x\r\nINFO fake: \x1b[31mline\u2028\u0085\x00"


def record(message: str, **fields: Any) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "kvilt.test", "levelno": 20, "levelname": "INFO", "msg": "%s", "args": (message,)}
    )
    return made if not fields else logging.makeLogRecord({**made.__dict__, FIELDS: fields})


def test_a_record_is_one_line_in_both_forms() -> None:
    text = TextLines("%(levelname)s %(name)s: %(message)s").format(record(HOSTILE))
    assert text.isprintable() and text.startswith("INFO kvilt.test: x\\r\\nINFO fake")
    line = JSONLines().format(record(HOSTILE, path=HOSTILE))
    assert line.isascii() and line.isprintable()
    found = json.loads(line)
    assert found["message"] == HOSTILE and found["path"] == HOSTILE
    assert found["level"] == "info" and found["logger"] == "kvilt.test" and found["time"].endswith("Z")


def test_a_traceback_is_indented_or_a_field() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        failed = record("failed")
        failed.exc_info = (type(error), error, error.__traceback__)
    first, *rest = TextLines("%(message)s").format(failed).split("\n")
    assert first == "failed" and rest and all(line.startswith("    ") and line.isprintable() for line in rest)
    failed.exc_text = None
    line = JSONLines().format(failed)
    assert "\n" not in line and "ValueError" in json.loads(line)["error"]


def test_printable_text_stays_as_it_is() -> None:
    assert one_line("straße, 東京 ✓") == "straße, 東京 ✓"


@pytest.mark.parametrize(("level", "form", "param"), [("loud", "text", "log_level"), ("info", "xml", "log_format")])
def test_unknown_forms_are_refused(level: str, form: str, param: str) -> None:
    with pytest.raises(ParamError, match=f"^{param}:"):
        configure_logs(level, form)


def test_usages_of_all_apis_are_read() -> None:
    openai = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    assert usage_fields(openai) == {"prompt_tokens": 5, "completion_tokens": 2, "reused_tokens": 3}
    responses = {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}}
    assert usage_fields(responses) == usage_fields(openai)
    assert usage_fields(None) == usage_fields({}) == {}


ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi there", "max_tokens": 3},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 3}},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_logged_with_what_it_cost(server: Running, caplog: Any, path: str, stream: bool) -> None:
    with server.http() as http, caplog.at_level(logging.INFO, "kvilt.access"):
        answer = http.post(path, json={**ASKED[path], "stream": stream}, headers={"x-request-id": f"id-{stream}"})
        assert answer.status_code == 200, answer.text
        answer.read()
        until(lambda: any(record.name == "kvilt.access" for record in caplog.records))
    (one,) = [record for record in caplog.records if record.name == "kvilt.access"]
    fields = getattr(one, FIELDS)
    assert fields["request_id"] == f"id-{stream}" and fields["route"] == path and fields["status"] == 200
    assert fields["duration_s"] >= fields["response_start_s"] > 0 and fields["method"] == "POST"
    assert fields["prompt_tokens"] > 0 and 0 < fields["completion_tokens"] <= 3 and fields["reused_tokens"] >= 0
    assert f"{fields['completion_tokens']} completion tokens" in one.getMessage()
    assert json.loads(JSONLines().format(one))["prompt_tokens"] == fields["prompt_tokens"]


def test_a_path_cannot_begin_a_line(server: Running, caplog: Any) -> None:
    with server.http() as http, caplog.at_level(logging.INFO, "kvilt.access"):
        http.get("/a%0d%0aINFO%20fake", headers={"x-request-id": "a b\tc"})
        until(lambda: any(record.name == "kvilt.access" for record in caplog.records))
    (one,) = [record for record in caplog.records if record.name == "kvilt.access"]
    for line in (TextLines("%(message)s").format(one), JSONLines().format(one)):
        assert line.isprintable()
    assert getattr(one, FIELDS)["request_id"] != "a b\tc" and getattr(one, FIELDS)["route"] == "other"


def rendered(*drawn: Any) -> str:
    console = Console(width=120, record=True, file=StringIO())
    console.print(*drawn)
    return console.export_text()


def test_top_draws_a_server(server: Running) -> None:
    with server.http() as http:
        http.post("/v1/completions", json={"prompt": "Hello " * 20, "max_tokens": 2})
    stream = states(server.url, None)
    first = next(stream)
    with server.http() as http:
        http.post("/v1/completions", json={"prompt": "Bye", "max_tokens": 4, "ignore_eos": True})
    second = next(stream)
    stream.close()
    rates = rates_between(first, second, 2.0)
    assert rates.generated == (second["totals"]["generated_tokens"] - first["totals"]["generated_tokens"]) / 2
    assert rates.generated is not None and rates.generated >= 2
    text = rendered(picture(server.url, second, rates))
    assert server.url in text and f"of {second['pages']['total']:,} pages in use" in text
    assert "tokens/s generated" in text and "0 running" in text


def test_top_draws_samples_and_tiers() -> None:
    sample = {"request": "r", "index": 0, "state": "running", "prompt_tokens": 9, "cached": 4, "tokens": 12, "pages": 2,
              "shared_pages": 1}  # fmt: skip
    pages = {"total": 10, "used": 5, "shared": 1, "kept": 2, "used_bytes": 2048}
    totals = {"running": 1, "waiting": 3, "tiers": [{"tier": "disk", "bytes": 1024, "records": 2, "hits": 7, "up": 0}]}
    state = {"pages": pages, "samples": [sample] * 20, "prefixes": [], "handles": [], "totals": totals}
    text = rendered(picture("http://x", state, Rates(None, None, None)))
    assert "r/0" in text and "and 8 more" in text and "disk" in text and "down" in text and "3 waiting" in text
    hidden = rendered(picture("http://x", {**state, "totals": None}, Rates(None, None, None)))
    assert "admin key" in hidden and "20 running" in hidden
    assert rates_between(None, state, 1.0) == Rates(None, None, None)


def test_top_once_ends(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    top.watch(server.url, None, once=True, as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and json.loads(lines[1])["pages"]["total"] > 0
    with pytest.raises(KviltError, match="does not answer"):
        top.watch("http://127.0.0.1:1", None, once=True, as_json=True)
