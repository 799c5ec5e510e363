"""`kvilt explain`: requests of every API compared offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvilt.cli.app import app
from kvilt.cli.explain import compared
from kvilt.errors import InputError
from kvilt.server.request_prompt import api_of, request_prompt
from kvilt.text.tokenizer import Tokenizer, from_gguf
from kvilt.text.volatile_lines import volatile_lines

RULES = "You answer with care, and you never forget what was said before. " * 3


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(smollm2_path)


def chat(system: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]}


REQUESTS: dict[str, dict[str, Any]] = {
    "chat": chat("SYSTEM"),
    "completions": {"prompt": "SYSTEM hi"},
    "responses": {"instructions": "SYSTEM", "input": "hi"},
    "messages": {"model": "m", "max_tokens": 5, "system": "SYSTEM", "messages": [{"role": "user", "content": "hi"}]},
    "ollama": {"model": "m", "options": {}, **chat("SYSTEM")},
}


@pytest.mark.parametrize("api", REQUESTS)
def test_requests_of_every_api_are_compared(api: str, tokenizer: Tokenizer) -> None:
    text = json.dumps(REQUESTS[api])
    assert api_of(REQUESTS[api]) == api
    one, other = (
        request_prompt(json.loads(text.replace("SYSTEM", f"It is {day}. {RULES}")), tokenizer) for day in ("1", "2")
    )
    found = compared(other, one, tokenizer)
    assert found.reason == "tokens_differ"
    assert (found.earlier[:2], found.now[:2]) == ("1.", "2.")
    assert found.before.endswith("It is ")
    assert found.expected == len(other.ids) - 1 and found.reusable == 0
    same = compared(one, one, tokenizer)
    assert same.first_different_token is None and same.reusable % 32 == 0


def test_other_models_and_salts_are_named_first(tokenizer: Tokenizer) -> None:
    one = request_prompt({**chat(RULES), "model": "a"}, tokenizer)
    assert compared(request_prompt({**chat(RULES), "model": "b"}, tokenizer), one, tokenizer).reason == "other_adapter"
    salted = request_prompt({**chat(RULES), "model": "a", "cache_salt": "x"}, tokenizer)
    assert compared(salted, one, tokenizer).reason == "other_salt"


@pytest.mark.parametrize(
    "body", [[], {"messages": "x"}, {"prompt": {}}, {"messages": [{"role": "poet"}]}, {"input": 5}]
)
def test_what_no_api_takes_is_refused(body: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError):
        request_prompt(body, tokenizer)


def test_the_command_prints_a_diff(tmp_path: Path, smollm2_path: Path) -> None:
    for name, day in (("a", "Monday"), ("b", "Friday")):
        (tmp_path / f"{name}.json").write_text(json.dumps(chat(f"Today is {day}.\n{RULES}")))
    run = CliRunner()
    args = ["explain", str(tmp_path / "b.json"), "--model", str(smollm2_path)]
    done = run.invoke(app, [*args, "--against", str(tmp_path / "a.json")])
    assert done.exit_code == 0, done.output
    assert "tokens_differ" in done.output
    assert "-Today is Monday." in done.output and "+Today is Friday." in done.output
    alone = run.invoke(app, [*args, "--json"])
    assert [one["kind"] for one in json.loads(alone.output)["volatile_lines"]] == ["date"]
    (tmp_path / "b.json").write_text("{")
    assert run.invoke(app, args).exit_code == 2


def test_lines_that_change_are_recognised() -> None:
    lines = [
        "x-anthropic-billing-header: cc_version=2.0; cch=1f2e",
        "Today's date: 2026-11-16",
        "It is 14:03",
        "Session 123e4567-e89b-12d3-a456-426614174000",
        "Monday, November 16",
        "commit 0123456789abcdef0123",
    ]
    plain = ["You are an agent.", "Use 3 tools at most.", "See section 4.2 of the manual.", "Be kind in any case."]
    found = volatile_lines("\n".join([*lines, *plain]))
    assert [one.number for one in found] == list(range(len(lines)))
    assert [one.kind for one in found] == ["header", "date", "time", "id", "date", "id"]
