"""`kvilt list`, `show` and `rm`, and the commands on running servers, `ps` and `stop`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import kvilt
from fake_hub import cached_repository
from tiny import write_tiny_of_bytes

from kvilt.cli.models import age, parameters
from kvilt.cli.servers import list_servers
from kvilt.server.running import RunningServer, ServedModel, process_ticks, register, running_servers
from kvilt.weights.hub import MODELS

FILE = MODELS["smollm2"].file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of models with two files, and a hub's cache with two models in one repository."""
    monkeypatch.setenv("KVILT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    models = tmp_path / "home" / "models"
    models.mkdir(parents=True)
    (models / FILE).write_bytes(b"x" * 2048)
    (models / "own.gguf").write_bytes(b"x" * 10)
    (models / f".{FILE}.lock").touch()
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    cached_repository(hub, "org/small", {"a.gguf": b"1" * 100, "b.gguf": b"2" * 200})
    cached_repository(hub, "org/whole", {"model.safetensors": b"3" * 300, "config.json": b"{}"})
    return tmp_path


def listed() -> dict[str, int]:
    return {one["name"]: one["size_bytes"] for one in json.loads(kvilt("list", "--json").stdout)}


def test_list_shows_what_was_fetched(home: Path) -> None:
    own = str(home / "home" / "models" / "own.gguf")
    assert listed() == {
        "smollm2": 2048, own: 10, "hf:org/small:a.gguf": 100, "hf:org/small:b.gguf": 200, "hf:org/whole": 302
    }  # fmt: skip
    text = kvilt("list").stdout
    assert "smollm2" in text and "2.0 KiB" in text and "hf:org/whole" in text and "seconds ago" in text


def test_list_of_nothing_says_how_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    done = kvilt("list", KVILT_HOME=str(tmp_path / "home"))
    assert done.returncode == 0 and "kvilt pull" in done.stderr
    assert json.loads(kvilt("list", "--json", KVILT_HOME=str(tmp_path / "home")).stdout) == []


def test_rm_asks_and_deletes_only_what_was_named(home: Path) -> None:
    assert kvilt("rm", "smollm2").returncode == 2, "there is no terminal to ask on"
    assert "smollm2" in listed()
    done = kvilt("rm", "--yes", "smollm2", "hf:org/small:a.gguf")
    assert done.returncode == 0 and "deleted smollm2, 2.0 KiB" in done.stdout
    assert set(listed()) == {str(home / "home" / "models" / "own.gguf"), "hf:org/small:b.gguf", "hf:org/whole"}
    repository = home / "hub" / "models--org--small"
    assert repository.exists()
    assert kvilt("rm", "--yes", "hf:org/small:b.gguf").returncode == 0
    assert not repository.exists(), "its last model is gone"
    assert kvilt("rm", "--yes", "hf:org/whole").returncode == 0
    assert not (home / "hub" / "models--org--whole").exists()


def test_rm_with_a_terminal_keeps_what_is_not_confirmed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvilt.cli import models

    monkeypatch.setattr(models.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(models.typer, "confirm", lambda question: "smollm2" not in question)
    models.remove(["smollm2", "hf:org/whole"], yes=False)
    assert "smollm2" in listed() and "hf:org/whole" not in listed()


def test_rm_of_an_unknown_model_names_those_there_are(home: Path) -> None:
    done = kvilt("rm", "--yes", "smollm2", "smollm3")
    assert done.returncode == 1 and "hf:org/whole" in done.stderr
    assert "smollm2" in listed(), "nothing is deleted where one name is wrong"


def record(path: Path, source: str = "smollm2", port: int = 1, key: bool = False) -> RunningServer:
    model = ServedModel((source,), source, str(path.resolve()), "identity")
    ticks = process_ticks(os.getpid())
    return RunningServer(os.getpid(), f"http://127.0.0.1:{port}", (model,), needs_key=key, start_ticks=ticks)


def test_rm_refuses_what_a_server_has_loaded(home: Path) -> None:
    with register(record(home / "home" / "models" / FILE)):
        done = kvilt("rm", "--yes", "smollm2")
        assert done.returncode == 1 and f"kvilt stop {os.getpid()}" in done.stderr
        assert "smollm2" in listed()


def test_show_is_short(tmp_path: Path) -> None:
    model = str(write_tiny_of_bytes(tmp_path))
    shown = kvilt("show", model).stdout
    assert "architecture   llama" in shown and "context" in shown and len(shown.splitlines()) < 14
    fields = json.loads(kvilt("show", model, "--json").stdout)
    assert fields["architecture"] == "llama" and fields["problem"] is None and fields["kv_bytes_per_token"] > 0


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (135_000_000, "135M"), (8_030_000_000, "8.03B"), (1_500, "1.5K")]
)
def test_parameters_are_rounded(number: int, text: str) -> None:
    assert parameters(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 seconds"), (59, "59 seconds"), (60, "1 minute"), (7200, "2 hours"), (9e5, "10 days")]
)
def test_ages_have_one_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_ps_says_why_it_knows_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with register(record(home, "quiet", 1)), register(record(home, "keyed", 1, key=True)):
        list_servers(None, as_json=True)
    states = {one["model"]: one["state"] for one in json.loads(capsys.readouterr().out)}
    assert states == {"quiet": "does not answer", "keyed": "needs a key: set KVILT_API_KEY"}
    assert "kvilt serve" in kvilt("ps").stderr


def test_stop_names_the_servers_there_are(home: Path) -> None:
    assert "no server" in kvilt("stop").stderr
    with register(record(home, "one", 1)), register(record(home, "two", 2)):
        for asked in ([], ["three"], [str(os.getpid())]):
            done = kvilt("stop", *asked)
            assert done.returncode == 2 and "one at http://127.0.0.1:1" in done.stderr and "two" in done.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A real server, and the folder that it is listed in."""
    folder = tmp_path_factory.mktemp("listed")
    model = write_tiny_of_bytes(tmp_path_factory.mktemp("model"))
    command = [sys.executable, "-m", "kvilt", "serve", "--model", str(model), "--served-model-name", "tiny"]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    process = subprocess.Popen(
        [*command, "--port", "0", "--threads", "1"], stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    assert process.stderr is not None
    assert any("is served at" in line for line in process.stderr)
    yield process, str(folder)
    process.kill()
    process.wait()
    process.stderr.close()


def test_ps_and_stop_of_a_real_server(served: tuple[subprocess.Popen[str], str]) -> None:
    process, folder = served
    (use,) = json.loads(kvilt("ps", "--json", XDG_RUNTIME_DIR=folder).stdout)
    assert (use["model"], use["pid"], use["state"], use["requests"]) == ("tiny", process.pid, "loaded", 0)
    assert use["weight_bytes"] > 0 and use["kv_bytes"] > use["kv_used_bytes"] >= 0
    text = kvilt("ps", XDG_RUNTIME_DIR=folder).stdout
    assert "tiny" in text and use["url"] in text and "loaded" in text
    done = kvilt("stop", "tiny", XDG_RUNTIME_DIR=folder)
    assert done.stdout == f"stopped tiny (process {process.pid})\n", done.stderr
    assert process.wait(60) == 0 and running_servers(Path(folder) / "kvilt") == []
