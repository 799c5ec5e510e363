"""The page for people from other projects names commands, options and Python names that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from commands import kvilt

from kvilt import LLM, Executor, KVCache

PAGE = (Path(__file__).parent.parent / "docs" / "coming_from.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)
SPANS = sorted({span for row in ROWS for span in re.findall(r"`([^`]+)`", row[1])})
COMMANDS = [span for span in SPANS if re.match(r"kvilt [a-z]", span)]
HOMES = {"llm": LLM, "kv": KVCache, "executor": Executor}


@cache
def told(*command: str) -> str:
    """What a command says about itself."""
    done = kvilt(*command, "--help", COLUMNS="220")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_a_table_for_each_project() -> None:
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == [
        "vLLM",
        "llama.cpp",
        "Ollama",
        "LMCache",
        "Hugging Face transformers",
    ]
    assert len(ROWS) > 50
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_their_options_exist(command: str) -> None:
    words = command.split()[1:]
    name = words[:2] if words[:2] == ["bench", "serve"] else words[:1]
    shown = told(*name)
    for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", command):
        assert re.search(rf"{re.escape(option)}(?![a-z-])", shown), option


def test_python_names_exist() -> None:
    import kvilt as package

    used = re.findall(r"\b(kvilt|llm|kv|executor)\.(?!toml\b)([A-Za-z_]+)", " ".join(SPANS))  # kvilt.toml is a file
    assert len(used) > 12
    for home, name in used:
        assert hasattr(HOMES.get(home, package), name), f"{home}.{name}"


def test_options_alone_are_options_of_run_or_serve() -> None:
    alone = [option for span in SPANS if span.startswith("--") for option in re.findall(r"--[a-z][a-z-]*", span)]
    assert [option for option in alone if option not in told("run") + told("serve")] == []
