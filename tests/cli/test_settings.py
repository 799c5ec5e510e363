"""Settings from files and the environment: one precedence, every setting shown with its source; shell completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import kvilt
from tiny import write_tiny_of_bytes

from kvilt.cli.app import app
from kvilt.cli.settings import commands_of, default_map

ROOT = typer.main.get_command(app)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The user's file and the folder's, neither of which is there yet."""
    folder, user = tmp_path / "folder", tmp_path / "config" / "kvilt"
    folder.mkdir()
    user.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return user / "kvilt.toml", folder / "kvilt.toml"


def shown(command: str, **env: str) -> dict[str, tuple[Any, str]]:
    done = kvilt("config", command, "--json", **env)
    assert done.returncode == 0, done.stderr
    return {one["name"]: (one["value"], one["source"]) for one in json.loads(done.stdout)}


def test_the_nearest_source_wins(places: tuple[Path, Path]) -> None:
    user, folder = places
    assert shown("serve")["port"] == (8000, "default")
    user.write_text("port = 1\nthreads = 3\n[serve]\nhost = '0.0.0.0'\n")
    assert shown("serve")["port"] == (1, str(user))
    folder.write_text("[serve]\nport = 2\n")
    found = shown("serve")
    assert found["port"] == (2, str(folder)) and found["host"] == ("0.0.0.0", str(user))
    assert shown("serve", KVILT_PORT="3")["port"] == ("3", "environment")
    assert shown("cluster up")["port"] == (1, str(user)), "the folder's table is for another command"
    assert shown("run")["threads"] == (None, "environment"), "tests set KVILT_THREADS, which load reads itself"


def tokens(*args: str, **env: str) -> int:
    count = json.loads(kvilt("run", "--raw", "Hi", *args, **env).stdout)["usage"]["completion_tokens"]
    assert isinstance(count, int)
    return count


def test_values_reach_the_command_and_flags_win(places: tuple[Path, Path], tmp_path: Path) -> None:
    model = str(write_tiny_of_bytes(tmp_path))
    places[1].write_text(f"model = '{model}'\n[run]\nmax-tokens = 3\nmin-tokens = 3\njson = true\n")
    assert tokens() == 3
    assert tokens(KVILT_MAX_TOKENS="4") == 4
    assert tokens("--max-tokens", "5", "--min-tokens", "5", KVILT_MAX_TOKENS="4") == 5


def test_options_that_repeat_take_lists(places: tuple[Path, Path]) -> None:
    places[1].write_text("[serve]\nlora = ['a=b']\nalias = 'one'\n")
    made = default_map(ROOT)["serve"]
    assert made["lora"] == ["a=b"] and made["alias"] == ["one"]
    assert shown("serve", KVILT_ALIAS="x, y")["alias"] == (["x", "y"], "environment")


def test_a_wrong_value_is_refused_as_a_flag_is(places: tuple[Path, Path]) -> None:
    places[1].write_text("[serve]\nport = 'many'\n")
    done = kvilt("serve")
    assert done.returncode == 2 and "--port" in done.stderr and "integer" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "prot is no setting"),
        ("[serve]\nmax_tokens = 1", "[serve] max_tokens is no setting"),
        ("[server]\nport = 1", "[server] is no command"),
        ("port = ", "cannot be read"),
    ],
)
def test_what_is_not_known_is_refused_by_name(places: tuple[Path, Path], text: str, said: str) -> None:
    places[1].write_text(text)
    done = kvilt("list")
    assert done.returncode == 2 and said in done.stderr and str(places[1]) in done.stderr


def test_secrets_are_not_shown(places: tuple[Path, Path]) -> None:
    places[1].write_text("[serve]\nadmin_key = 'hidden'\napi_key = ['hidden']\n")
    done = kvilt("config", KVILT_STORE_REDIS="redis://:hidden@host")
    assert done.returncode == 0 and "hidden" not in done.stdout and "(set)" in done.stdout


def test_a_key_of_the_environment_goes_before_one_of_a_file(places: tuple[Path, Path]) -> None:
    places[1].write_text("[serve]\nadmin_key = 'a'\n")
    assert default_map(ROOT)["serve"]["admin_key"] == "a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVILT_ADMIN_KEY", "b")
        assert "admin_key" not in default_map(ROOT)["serve"], "serve reads the variable itself"


def test_config_shows_every_option_of_every_command(places: tuple[Path, Path]) -> None:
    listed = {(one["command"], one["name"]) for one in json.loads(kvilt("config", "--json").stdout)}
    assert listed == {(name, option.name) for name, options in commands_of(ROOT).items() for option in options}
    assert {("serve", "port"), ("cluster up", "replicas"), ("bench serve", "rate"), ("run", "model")} <= listed
    assert json.loads(kvilt("config", "--changed", "--json", KVILT_PORT="1").stdout) != []
    assert kvilt("config", "nothing").returncode == 2
    assert "8000" in kvilt("config", "serve").stdout


COMMAND = str(Path(sys.executable).parent / "kvilt")


def completions(shell: str, *words: str) -> list[str]:
    line = " ".join(["kvilt", *words])
    asked = {"bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words))}, "zsh": {"_TYPER_COMPLETE_ARGS": line},
             "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}}[shell]  # fmt: skip
    env = {**os.environ, "_KVILT_COMPLETE": f"complete_{shell}", **asked}
    done = subprocess.run([COMMAND], env=env, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    assert any("serve" in word for word in completions(shell, "ser"))
    script = kvilt("completion", shell).stdout
    assert f"complete_{shell}" in script and "_KVILT_COMPLETE" in script


def test_bash_completes_options_and_models() -> None:
    assert "--kv-memory" in completions("bash", "serve", "--kv-m")
    assert "smollm2" in completions("bash", "run", "--model", "smol")


def test_bash_takes_the_script() -> None:
    script = kvilt("completion", "bash").stdout
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\ncomplete -p kvilt"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "_kvilt_completion" in done.stdout


def test_other_shells_are_refused() -> None:
    assert "bash, zsh or fish" in kvilt("completion", "tcsh").stderr
