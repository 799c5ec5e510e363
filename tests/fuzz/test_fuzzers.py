"""The fuzzers still run: a few hundred inputs of each by a fixed seed have no finding, and a planted bug is found."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # the fuzzers are scripts beside the package, not part of it

from fuzz.driver import fuzz  # noqa: E402
from fuzz.target import Finding, Target, TooSlow  # noqa: E402
from fuzz.worker import Trial, import_target, inputs, search  # noqa: E402

RUNS = {"gguf": 300, "safetensors": 300, "blobs": 120, "records": 300, "notes": 300}
RUNS |= {"bodies": 200, "templates": 150, "grammars": 80, "http_bytes": 150}


def tried(target: Target, folder: Path, runs: int, corpus: Path | None = None) -> Trial:
    trial = Trial(target, folder)
    start = inputs(target, corpus)
    search(trial, start, 1, lambda: trial.tried < runs + len(start))
    return trial


@pytest.mark.parametrize("name", RUNS)
def test_a_short_run_has_no_finding(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = tried(import_target(name, guided=False), tmp_path, RUNS[name], ROOT / "fuzz" / "corpus" / name)
    assert not trial.found, capsys.readouterr().out
    assert len(trial.outcomes) > 5  # the inputs reach more than the first check


@pytest.mark.parametrize("name", RUNS)
def test_sound_inputs_are_read(name: str, tmp_path: Path) -> None:
    """A fuzzer whose seeds are all refused would test nothing."""
    target = import_target(name, guided=False)
    outcome = target.check(target.seeds()[0])
    assert any(word in outcome for word in ("read", "loaded", "served", "rendered, the same", "followed", "as h11"))


def test_what_escapes_is_kept_and_can_be_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(data: bytes) -> str:
        if data.count(b"x") > 2:
            raise KeyError("x")
        return str(data.count(b"x"))

    target = Target("planted", check, lambda: [b"x"], words=(b"x",))
    trial = tried(target, tmp_path, 500)
    (kept, *_) = sorted(tmp_path.iterdir())
    assert "KeyError" in next(iter(trial.found))
    assert f"--replay {kept.parent}" in capsys.readouterr().out
    with pytest.raises(KeyError):
        check(kept.read_bytes())


def test_what_a_target_cannot_change_is_changed_as_bytes(tmp_path: Path) -> None:
    """A value nested too deeply to be copied must not end the worker."""

    def mutate(data: bytes, dice: random.Random) -> bytes:
        raise RecursionError

    target = Target("deep", lambda data: str(len(data)), lambda: [b"[[1]]"], mutate=mutate)
    assert len(tried(target, tmp_path, 50).outcomes) > 1


def test_an_input_that_takes_too_long_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.target.FREE_S", 0.05)

    def check(_data: bytes) -> str:
        while True:
            pass

    trial = Trial(Target("endless", check, lambda: [b""]), tmp_path)
    trial.run(b"a")
    assert [TooSlow.__name__ in kind for kind in trial.found] == [True]


def test_an_oracle_that_disagrees_is_a_finding(tmp_path: Path) -> None:
    def check(_data: bytes) -> str:
        raise Finding("no")

    trial = Trial(Target("wrong", check, lambda: [b""]), tmp_path)
    trial.run(b"a")
    assert trial.found.total() == 1
    assert trial.outcomes.total() == 0


def test_the_command_line_runs_and_sums_up() -> None:
    command = [sys.executable, "-m", "fuzz.notes", "--runs", "300", "--engine", "own", "--minutes", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "notes: 300 inputs" in done.stdout
    assert "findings: none" in done.stdout


def test_a_worker_that_dies_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = argparse.Namespace(minutes=1.0, runs=0, seed=1, engine="own", findings=tmp_path, corpus=tmp_path)
    done = fuzz(Target("absent", lambda _data: "", lambda: [b""]), asked)
    assert dict(done.found) == {"the process ended with status 1": 1}
    assert "python -m fuzz.absent --replay" in capsys.readouterr().out


def test_a_seed_gives_the_same_inputs_again(tmp_path: Path) -> None:
    def notes() -> tuple[list[bytes], Target]:
        seen: list[bytes] = []
        return seen, Target("same", lambda data: str(seen.append(data) or len(data)), lambda: [b"abc", b"{}"])

    (first, one), (second, two) = notes(), notes()
    tried(one, tmp_path, 300), tried(two, tmp_path, 300)
    assert first == second
    assert len(set(first)) > 200
