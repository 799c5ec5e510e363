"""`kvilt doctor`: its findings, its exit code, and that no check takes the others down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import kvilt

from kvilt.cli import doctor
from kvilt.cli.doctor import Finding, findings


def found(topic: str) -> list[Finding]:
    return [one for one in findings() if one.topic == topic]


def test_a_sound_machine_passes() -> None:
    done = kvilt("doctor", "--json")
    report = json.loads(done.stdout)
    broken = [one for one in report["findings"] if one["state"] == "broken"]
    assert done.returncode == (1 if broken else 0) and report["ok"] is not bool(broken)
    topics = {one["topic"] for one in report["findings"]}
    assert topics >= {"kvilt", "processor", "memory", "torch", "CPU kernels", "GPU", "compiler", "packages", "Redis"}
    assert not [one for one in broken if one["topic"] in ("CPU kernels", "settings", "folder", "Redis")]
    text = kvilt("doctor").stdout
    assert "CPU kernels" in text and "native" in text


def test_a_redis_that_does_not_answer_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVILT_STORE_REDIS", "redis://:secret@127.0.0.1:1/0")
    (one,) = found("Redis")
    assert one.state == "broken" and one.advice and "secret" not in one.text + one.advice
    assert kvilt("doctor").returncode == 1


def test_a_wrong_settings_file_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvilt.toml").write_text("prot = 1")
    monkeypatch.chdir(tmp_path)
    (one,) = found("settings")
    assert one.state == "broken" and "prot" in one.text


def test_the_kernels_of_larger_models_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvilt.ops import select

    monkeypatch.setattr(select, "native_isas", lambda: ("amx", "amx-bf16"))
    assert "native/amx-bf16 for weights of 512.0 MiB and more" in found("CPU kernels")[0].text
    monkeypatch.setattr(select, "native_isas", lambda: ("avx2",))
    assert "amx-bf16" not in found("CPU kernels")[0].text


def test_missing_kernels_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvilt.ops import select
    from kvilt.ops.reference import ReferenceOps

    monkeypatch.setattr(select, "select", lambda: ReferenceOps())
    (one,) = found("CPU kernels")
    assert one.state == "broken" and "compiler" in one.advice


def test_missing_packages_are_notes_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "llguidance" else "1")
    notes = [one for one in found("packages") if one.state == "note"]
    assert [one.advice for one in notes] == ["pip install 'kvilt[grammar]'"]


def test_the_extras_it_names_exist() -> None:
    import tomllib

    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    for package, (_, extra) in doctor._OPTIONAL.items():
        named = {"zmq": "pyzmq"}.get(package, package)
        assert any(one.split("[")[0].split(">")[0] == named for one in extras[extra]), package


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _odd() -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(doctor, "CHECKS", (_odd, *doctor.CHECKS[:1]))
    assert [(one.topic, one.state) for one in findings()] == [("odd", "broken"), ("kvilt", "ok")]


def test_a_folder_that_cannot_be_written_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    (one,) = found("folder")
    assert one.state == "broken" and "KVILT_HOME" in one.advice
