"""Command lines that are read without typer: they mean the same, and whatever could mean something else is typer's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import kvilt_process
from typer.testing import CliRunner

from kvilt.cli import answer_app, starts
from kvilt.cli.app import app
from kvilt.cli.plain_args import COMMANDS, plain_start

ROOT: Any = typer.main.get_command(app)


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without settings, and none in the environment; the user's file would be at the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("KVILT_THREADS", "KVILT_HOME", "KVILT_OFFLINE"):
        monkeypatch.setenv(name, "1")  # these are no settings
    return tmp_path / "config" / "kvilt" / "kvilt.toml"


def by_typer(words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any] | None:
    """What typer passes to the command's function; None where it refuses or shows help."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(answer_app, f"start_{words[0]}", lambda **values: calls.append(values))
    CliRunner().invoke(app, words)
    return calls[0] if calls else None


def plainly(words: list[str]) -> dict[str, Any] | None:
    """What is passed without typer, with the defaults of the function."""
    values = COMMANDS[words[0]].read(words[1:])
    if values is None:
        return None
    bound = inspect.signature(getattr(starts, f"start_{words[0]}")).bind(**values)
    bound.apply_defaults()
    return dict(bound.arguments)


PLAIN = [
    ["run", "Hello"],
    ["run"],
    ["run", ""],
    ["run", "Hello there = x", "--model", "", "--system="],
    ["run", "--max-tokens", "4", "Hello", "--model", "smollm2", "--no-attach"],
    ["run", "Hello", "-m", "a.gguf", "--temperature=0", "--seed", " 7 ", "--top-p", "1e-3", "--max-tokens", "1_000"],
    ["run", "Hello", "--raw", "--json", "-v", "--no-repetition-detection", "--no-numa", "--deterministic", "-n", "2"],
    ["run", "Hello", "--system", "a=b", "--kv-memory=1G", "--draft", "ngram", "--context-prefix", "x", "--json-object"],
    ["run", "Hällo \udcff"],
    ["chat"],
    ["chat", "--model", "x", "--system", "Be brief.", "--temperature", "0.5", "--attach", "--device", "cpu"],
]


@pytest.mark.parametrize("words", PLAIN, ids=" ".join)
def test_plain_words_mean_what_they_mean_to_typer(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = plainly(words)
    assert found is not None and found == by_typer(words, monkeypatch)
    assert plain_start(words) is not None


def spellings(command: str) -> list[list[str]]:
    """Every flag of a command in several ways, right and wrong."""
    made = []
    for option in ROOT.commands[command].params:
        if option.param_type_name != "option":
            continue
        for flag in (*option.opts, *option.secondary_opts):
            values = ["3", "0.5", "some text", "-1", ""]
            made += [[command, flag], [command, "Hello", flag], [command, flag, "Hello", flag]]
            made += [[command, flag, value] for value in values] + [[command, f"{flag}={value}"] for value in values]
            made += [[command, flag, "3", flag, "4"], [command, f"{flag}3"]]
    return made


@pytest.mark.parametrize("command", ["run", "chat"])
def test_every_flag_means_the_same_or_is_left_to_typer(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = spellings(command)
    plain = [each for each in words if plainly(each) is not None]
    for each in plain:
        assert plainly(each) == by_typer(each, monkeypatch), each
    assert len(plain) > 50, "most flags are plain"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--version"],
        ["--help"],
        ["serve"],
        ["ps"],
        ["run", "--help"],
        ["run", "-h"],
        ["run", "two", "prompts"],
        ["run", "-"],
        ["run", "--", "-v"],
        ["run", "Hello", "--unknown"],
        ["run", "Hello", "--max-tok", "4"],
        ["run", "Hello", "--max-tokens", "four"],
        ["run", "Hello", "--max-tokens"],
        ["run", "Hello", "--seed", "1", "--seed", "2"],
        ["run", "Hello", "--raw=1"],
        ["run", "Hello", "-m=x"],
        ["run", "Hello", "-n2"],
        ["run", "Hello", "--stop", "x"],
        ["run", "Hello", "--document", "x"],
        ["chat", "Hello"],
        ["chat", "--raw"],
    ],
    ids=" ".join,
)
def test_other_words_are_left_to_typer(words: list[str]) -> None:
    assert plain_start(words) is None


def test_settings_are_left_to_typer(no_settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain_start(["run", "Hello"]) is not None
    for option in ROOT.commands["run"].params:
        name = f"KVILT_{option.name.upper()}"
        if option.name not in ("threads", "store_redis"):  # whose variables are read when the model is loaded
            with monkeypatch.context() as patch:
                patch.setenv(name, "1")
                assert plain_start(["run", "Hello"]) is None, name
    for path in (no_settings, tmp_path / "kvilt.toml"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("max_tokens = 1\n")
        assert plain_start(["run", "Hello"]) is None, path
        path.unlink()
    assert plain_start(["run", "Hello"]) is not None


def test_errors_and_exit_codes_are_those_of_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sentence and code from a plain command line and from one with a flag twice, which typer reads."""
    monkeypatch.delenv("KVILT_HOME")
    words = ["run", "Hello", "--no-attach", "--model", "/no/such.gguf"]
    plain, typers = kvilt_process(*words), kvilt_process(*words, "--no-attach")
    assert plain == typers and plain.returncode == 1 and plain.stderr.startswith("kvilt: ")
    words = ["run", "Hello", "--top-p", "7"]
    plain, typers = kvilt_process(*words), kvilt_process(*words, "--top-p", "7")
    assert plain == typers and plain.returncode == 2 and plain.stderr.startswith("kvilt: ")
