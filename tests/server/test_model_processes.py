"""`kvilt serve --model a --model b` as processes: one model at a time where memory has room for one, and no orphans."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from running import until
from tiny import write_tiny_of_bytes
from typer.testing import CliRunner

from kvilt.cli.app import app
from kvilt.server.running import running_servers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models."""
    made = tmp_path_factory.mktemp("models")
    for name in ("alpha", "beta"):
        write_tiny_of_bytes(made / name)
    return made


class RouterProcess:
    """A server of both models."""

    def __init__(self, folder: Path, *options: str) -> None:
        models = ["--model", str(folder / "alpha"), "--model", str(folder / "beta")]
        given = ["serve", *models, "--port", "0", "--threads", "1", "--kv-memory", "4M", *options]
        self.own = subprocess.Popen([sys.executable, "-m", "kvilt.cli.main", *given], stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        assert self.own.stderr is not None
        for line in self.own.stderr:
            self.said.append(line)
            if found := re.search(r"are served at (http://[^;\s]+)", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.said))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.own.stderr is not None
        self.said.extend(self.own.stderr)

    def ask(self, model: str) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/completions", json={"model": model, "prompt": "Hi", "max_tokens": 3}, timeout=300
        )

    def children(self) -> list[int]:
        """The processes of models."""
        path = Path(f"/proc/{self.own.pid}/task/{self.own.pid}/children")
        return [pid for pid in map(int, path.read_text().split()) if is_model(pid)]

    def loaded(self) -> list[str]:
        return [one["name"] for one in httpx.get(f"{self.url}/api/ps", timeout=60).json()["models"]]

    def wait(self) -> int:
        code = self.own.wait(120)
        self._reader.join(300)
        assert self.own.stderr is not None
        self.own.stderr.close()
        return code


def is_model(pid: int) -> bool:
    try:
        return b"model_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextmanager
def routing(folder: Path, *options: str) -> Iterator[RouterProcess]:
    one = RouterProcess(folder, *options)
    try:
        yield one
    finally:
        if one.own.poll() is None:
            one.own.send_signal(signal.SIGTERM)
        one.wait()


def test_two_models_in_the_room_of_one(folder: Path) -> None:
    with routing(folder, "--models-memory", "5M") as router:
        assert router.loaded() == []
        for name in ("alpha", "beta", "alpha"):
            assert router.ask(name).raise_for_status().json()["model"] == name
            assert router.loaded() == [name] and len(router.children()) == 1
        (server,) = [one for one in running_servers() if one.pid == router.own.pid]
        assert [model.names for model in server.models] == [("alpha",), ("beta",)]
        (child,) = router.children()
        router.own.send_signal(signal.SIGTERM)
        assert router.wait() == 0 and not is_model(child)


@pytest.mark.slow
def test_a_killed_model_comes_back_and_a_killed_router_leaves_no_model(folder: Path) -> None:
    with routing(folder) as router:
        for name in ("alpha", "beta"):
            router.ask(name).raise_for_status()
        children = router.children()
        assert len(children) == 2
        os.kill(children[0], signal.SIGKILL)
        until(lambda: not is_model(children[0]))
        for name in ("alpha", "beta"):
            router.ask(name).raise_for_status()
        left = router.children()
        router.own.kill()
        until(lambda: not any(is_model(pid) for pid in left))


@pytest.mark.slow
def test_keys_are_not_on_command_lines_and_hold_for_every_model(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-secret-0123456789\n")
    with routing(folder, "--api-key-file", str(keys)) as router:
        assert router.ask("alpha").status_code == 401 and router.children() == []
        headers = {"authorization": "Bearer sk-secret-0123456789"}
        asked = {"model": "beta", "prompt": "Hi", "max_tokens": 1}
        httpx.post(f"{router.url}/v1/completions", json=asked, headers=headers, timeout=300).raise_for_status()
        (child,) = router.children()
        assert b"sk-secret" not in Path(f"/proc/{child}/cmdline").read_bytes()
        direct = re.findall(r"Uvicorn running on (http://127.0.0.1:\d+)", "".join(router.said))[-1]
        assert httpx.post(f"{direct}/v1/completions", json=asked, timeout=60).status_code == 401


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--served-model-name", "one"], "2 models take 2 names"),
        (["--served-model-name", "one", "--served-model-name", "one"], "two models would be called 'one'"),
        (["--lora", "name=path"], "--lora is for one model"),
        (["--models-memory", "much"], "models_memory"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_what_several_models_cannot_have_is_refused_before_any_is_loaded(
    folder: Path, options: list[str], why: str
) -> None:
    given = ["serve", "--model", str(folder / "alpha"), "--model", str(folder / "beta"), "--port", "0", *options]
    found = CliRunner().invoke(app, given)
    assert found.exit_code != 0 and why in found.output.replace("\n", " ")


def test_a_damaged_model_is_refused_before_the_server_listens(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    found = CliRunner().invoke(
        app, ["serve", "--model", str(folder / "alpha"), "--model", str(tmp_path), "--port", "0"]
    )
    assert found.exit_code != 0 and "served at" not in found.output
