"""The list of this user's running servers: what is in it, what is swept, and what is not trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvilt.config import run_home
from kvilt.server.running import RunningServer, ServedModel, is_running, process_ticks, register, running_servers, stop
from kvilt.weights.file_identity import file_identity

MODEL = ServedModel(("tiny", "small"), "hf:org/tiny", "/models/tiny", "abc")
OWN = RunningServer(
    os.getpid(), "http://127.0.0.1:8000", (MODEL,), needs_key=True, version="1", options={"device": "cpu"},
    start_ticks=process_ticks(os.getpid()),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_server_is_listed_while_it_runs(folder: Path) -> None:
    assert running_servers(folder) == []
    with register(OWN, folder):
        assert running_servers(folder) == [OWN]
        with register(replace(OWN, url="http://127.0.0.1:9000", started_s=OWN.started_s - 1), folder):
            assert [one.url[-4:] for one in running_servers(folder)] == ["9000", "8000"]
        (file,) = folder.iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
    assert running_servers(folder) == [] and not list(folder.iterdir())


def test_a_model_is_found_by_the_identity_of_its_files(folder: Path) -> None:
    with register(OWN, folder):
        (server,) = running_servers(folder)
    assert server.model_with("abc") == MODEL and server.model_with("other") is None


LEFT = """
import os, sys
from pathlib import Path
from kvilt.server.running import RunningServer, process_ticks, register
own = RunningServer(os.getpid(), "http://127.0.0.1:1", (), start_ticks=process_ticks(os.getpid()))
with register(own, Path(sys.argv[1])):
    print("listed", flush=True)
    sys.stdin.read()
    os._exit(1)
"""


def test_the_file_of_a_killed_server_is_swept(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEFT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdin is not None and other.stdout.readline() == b"listed\n"
        (server,) = running_servers(folder)
        assert server.pid == other.pid and is_running(server)
        other.kill()
        other.wait()
        assert len(list(folder.iterdir())) == 1, "it had no time to remove its file"
        assert not is_running(server) and not stop(server)
        assert running_servers(folder) == [] and not list(folder.iterdir())


def test_a_later_process_with_the_same_pid_is_not_stopped() -> None:
    assert not stop(replace(OWN, start_ticks=(OWN.start_ticks or 0) + 1)), "this test still runs"


def test_files_that_others_may_write_are_not_trusted(folder: Path, tmp_path: Path) -> None:
    with register(OWN, folder):
        (file,) = folder.iterdir()
        for mode in (0o640, 0o620, 0o604, 0o666):
            file.chmod(mode)
            assert running_servers(folder) == [] and file.exists()
        file.chmod(0o600)
        (folder / "link.json").symlink_to(file)
        os.mkfifo(folder / "pipe.json", 0o600)
        assert running_servers(folder) == [OWN]
        folder.chmod(0o755)
        assert running_servers(folder) == []
        folder.chmod(0o700)
        linked = tmp_path / "linked"
        linked.symlink_to(folder)
        assert running_servers(linked) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.privileged
def test_files_of_other_users_are_not_trusted(folder: Path) -> None:
    with register(OWN, folder):
        (file,) = folder.iterdir()
        os.chown(file, 12345, -1)
        assert running_servers(folder) == [] and file.exists()
        os.chown(file, 0, -1)
        os.chown(folder, 12345, -1)
        assert running_servers(folder) == []
        os.chown(folder, 0, -1)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 2}', '{"format": 1}', '{"format": 1, "models": [1]}'])
def test_a_damaged_file_is_passed_over(folder: Path, text: str) -> None:
    with register(OWN, folder):
        (file,) = folder.iterdir()
        file.write_text(text)
        assert running_servers(folder) == []


@pytest.mark.parametrize("wrong", [{"pid": 0}, {"pid": -1}, {"pid": "1"}, {"url": None}])
def test_a_file_with_a_wrong_field_is_passed_over(folder: Path, wrong: dict[str, object]) -> None:
    with register(OWN, folder):
        (file,) = folder.iterdir()
        file.write_text(json.dumps({**json.loads(file.read_text()), **wrong}))
        assert running_servers(folder) == []


def test_a_file_of_another_version_is_passed_over(folder: Path) -> None:
    with register(OWN, folder):
        (file,) = folder.iterdir()
        file.write_text(json.dumps({**json.loads(file.read_text()), "later": 1}))
        assert running_servers(folder) == []


def test_a_server_runs_where_it_cannot_be_listed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with register(OWN, folder):
        assert not list(folder.iterdir())
    assert "chmod it to 700" in caplog.text


def test_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_home() == tmp_path / "kvilt"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("KVILT_HOME", str(tmp_path / "home"))
    assert run_home() == tmp_path / "home" / "run"


def test_an_identity_changes_with_the_files_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = file_identity(tmp_path)
    assert file_identity(tmp_path / ".." / tmp_path.name) == before
    (tmp_path / "notes.txt").write_text("not read")
    assert file_identity(tmp_path) == before
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    changed = file_identity(tmp_path)
    assert changed != before
    (tmp_path / "config.json").write_text("{}")
    assert file_identity(tmp_path) != changed
    one = file_identity(tmp_path / "model.safetensors")
    assert one not in (before, changed)
