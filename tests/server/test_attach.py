"""`kvilt run` and `kvilt chat` let a running server of the user answer, if it runs the same files in the same way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import kvilt
from running import KEY, Running

from kvilt import __version__
from kvilt.cli.attach import RemoteAnswer, attached
from kvilt.errors import KviltError
from kvilt.server.running import RunningServer, ServedModel, process_ticks, register
from kvilt.weights.file_identity import file_identity

USUAL: dict[str, Any] = {}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What the server says it has loaded. No test loads it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@contextmanager
def listed(server: Running, model: Path, **other: Any) -> Iterator[RunningServer]:
    served = ServedModel(("tiny",), "tiny-model", str(model), file_identity(model))
    record = RunningServer(os.getpid(), f"http://127.0.0.1:{server.port}", (served,), version=__version__)
    record = replace(record, start_ticks=process_ticks(os.getpid()), **other)
    with register(record):
        yield record


def test_run_prints_what_the_server_answers(server: Running, model: Path) -> None:
    options = ["--temperature", "0", "--max-tokens", "6", "--no-repetition-detection"]
    with listed(server, model) as record:
        done = kvilt("run", "Who is there?", "--model", str(model), "--system", "Be brief.", *options)
        raw = kvilt("run", "Once upon", "--raw", "--model", "tiny-model", *options)
    assert done.returncode == 0 and raw.returncode == 0, done.stderr + raw.stderr
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is there?"}]
    with server.http(timeout=60) as http:
        asked = {"model": "tiny", "temperature": 0, "max_tokens": 6}
        chat = http.post("/v1/chat/completions", json={**asked, "messages": messages}).json()
        plain = http.post("/v1/completions", json={**asked, "prompt": "Once upon"}).json()
    assert done.stdout == chat["choices"][0]["message"]["content"] + "\n"
    assert raw.stdout == plain["choices"][0]["text"] + "\n"
    assert f"process {record.pid}" in done.stderr and "--no-attach" in done.stderr and "6 generated" in done.stderr


def test_the_defaults_are_those_of_a_model_that_is_loaded_here(server: Running, model: Path) -> None:
    with listed(server, model):
        found = attached(str(model), USUAL)
    assert found is not None and found.max_context == server.llm.executor.max_context
    defaults = server.llm.sampling_defaults.fields
    drawn = found.sampling({"max_tokens": 5, "top_p": 0.5, "stop": ()})
    assert drawn.pop("seed") >= 0
    assert drawn == {"temperature": 1.0, **defaults, "max_tokens": 5, "top_p": 0.5}
    assert found.sampling({"temperature": 0.0, "max_tokens": 5}) == {"temperature": 0.0, "max_tokens": 5}


def test_a_chat_keeps_its_turns_on_the_server(server: Running, model: Path) -> None:
    lines = "Hello there.\nAnd now?\n/fork a\n/undo\n/stats\n/load a\n/save x\nAgain?\n"
    with listed(server, model):
        options = ["--temperature", "0", "--max-tokens", "4", "--model", str(model)]
        done = kvilt("chat", *options, stdin=lines)
    assert done.returncode == 1, "a pipe whose /save failed says so at the end"
    assert "--no-attach" in done.stderr and "/save needs the model" in done.stderr
    assert "forked a · 2 turns" in done.stderr and "1 turn left" in done.stderr and "loaded a · 2 turns" in done.stderr
    assert len(done.stdout.splitlines()) >= 3
    with server.http(timeout=60) as http:
        assert http.get("/v1/sessions").json()["data"] == [], "its session is given back"


@pytest.mark.parametrize(
    ("record", "config"),
    [
        ({"options": {"kv_dtype": "float32"}}, {}),  # computes otherwise
        ({}, {"backend": "reference"}),
        ({}, {"threads": 3}),  # asked for, and not known to be so
        ({"version": "0.0.1"}, {}),
        ({"needs_key": True}, {}),  # and no key is known
    ],
)
def test_servers_that_do_not_fit_are_left_alone(
    server: Running, model: Path, record: dict[str, Any], config: dict[str, Any]
) -> None:
    with listed(server, model, **record):
        assert attached(str(model), config) is None
    with listed(server, model):
        assert attached(str(model), USUAL) is not None


def test_options_that_decide_no_token_may_differ(server: Running, model: Path) -> None:
    with listed(server, model, options={"threads": 3, "kv_memory": "1G"}):
        assert attached(str(model), USUAL) is not None
        assert attached(str(model), {"threads": 3}) is not None


def test_other_and_changed_files_are_other_models(server: Running, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"weights")
    with listed(server, model):
        assert attached(str(other), USUAL) is None
        assert attached("tiny-model", USUAL) is not None
        assert attached("no-such-model", USUAL) is None
        model.write_bytes(b"other weights")
        assert attached(str(model), USUAL) is None
        assert attached("tiny-model", USUAL) is None


def test_the_key_of_the_environment_is_sent(server: Running, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVILT_API_KEY", KEY)
    with listed(server, model, needs_key=True):
        found = attached(str(model), USUAL)
    assert found is not None and found.api_key == KEY and KEY not in repr(found)


def test_a_refused_request_says_why_and_a_dead_server_is_passed_over(server: Running, model: Path) -> None:
    with listed(server, model) as record:
        found = attached(str(model), USUAL)
        assert found is not None
        with pytest.raises(KviltError, match=r"refuses \(400\).*temperature"):
            list(RemoteAnswer(found, "/v1/completions", {"prompt": "a", "temperature": -1}).pieces())
    with register(replace(record, url="http://127.0.0.1:1")):
        assert attached(str(model), USUAL) is None


def test_a_stopped_answer_keeps_its_text_and_ends_on_the_server(server: Running, model: Path) -> None:
    with listed(server, model):
        found = attached(str(model), USUAL)
        assert found is not None
        asked = RemoteAnswer(found, "/v1/completions", {"prompt": "Once", "max_tokens": 400, "ignore_eos": True})
        for _ in asked.pieces():
            asked.stop()
    assert asked.finish_reason == "cancelled" and asked.text


def test_an_attached_run_imports_next_to_nothing(server: Running, model: Path) -> None:
    """Its first token waits for imports more than for the server."""
    words = ["run", "Who is there?", "--model", str(model), "--max-tokens", "2"]
    code = (
        f"import sys; before = {{*sys.modules}}; sys.argv = ['kvilt', *{words!r}]\n"
        "from kvilt.cli.main import main\nmain()\nprint(*{*sys.modules} - before)"
    )
    with listed(server, model):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "answered by kvilt serve" in done.stderr, done.stderr
    modules = set(done.stdout.splitlines()[-1].split())
    assert {name.partition(".")[0] for name in modules} - sys.stdlib_module_names == {"kvilt"}
    assert {name for name in modules if name.startswith("kvilt")} == {
        *("kvilt", "kvilt.config", "kvilt.errors"),
        *("kvilt.server", "kvilt.server.running", "kvilt.weights", "kvilt.weights.file_identity", "kvilt.cli"),
        *(f"kvilt.cli.{name}" for name in ("main", "plain_args", "option_groups", "starts", "errors", "imports")),
        *(f"kvilt.cli.{name}" for name in ("attached_run", "attach", "answer_writer", "keys")),
    }


def test_an_attached_chat_of_a_pipe_imports_little(server: Running, model: Path) -> None:
    words = ["chat", "--model", str(model), "--max-tokens", "2"]
    code = f"import sys; sys.argv = ['kvilt', *{words!r}]\nfrom kvilt.cli.main import main\nmain()\nprint(*sys.modules)"
    with listed(server, model):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, input="Hello there.\n", capture_output=True, text=True, timeout=300)
    assert "answered by kvilt serve" in done.stderr, done.stderr
    heads = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert not heads & {"torch", "numpy", "typer", "pydantic", "prompt_toolkit"}
