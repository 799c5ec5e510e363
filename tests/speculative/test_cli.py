"""Drafts on the command line: what is shown of them, and what is refused."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvilt.cli.app import app
from kvilt.cli.chat_screen import Screen
from kvilt.cli.run import drafts
from kvilt.llm import Completion, Timing, Usage

TEXT = "One, two, three, four, five. One, two, three, four, five. One, two,"


def test_run_says_what_became_of_drafts(smollm2_path: Path) -> None:
    given = ["run", TEXT, "--raw", "-m", str(smollm2_path), "--draft", "ngram", "--draft-tokens", "3", "--verbose"]
    done = CliRunner().invoke(app, [*given, "--max-tokens", "16", "--kv-memory", "64M", "--threads", "1"])
    assert done.exit_code == 0
    assert "drafts: " in done.stderr
    assert "tokens accepted" in done.stderr


def test_counts_of_several_samples_are_added_up() -> None:
    def sample(drafted: int, places: tuple[int, ...], *others: Completion) -> Completion:
        usage = Usage(1, 5, 1, drafted_tokens=drafted, accepted_tokens=sum(places), accepted_places=places)
        return Completion("", [], "stop", usage, None, Timing(0.1, 0.2), None, others)

    assert drafts(sample(0, ())) == ""
    shown = drafts(sample(6, (2, 1), sample(4, (1, 0, 1))))
    assert shown == "drafts: 5 of 10 tokens accepted (50%), by place 3 1 1"


@pytest.mark.parametrize(("show", "shown"), [(True, "a\x1b[32mb\x1b[39m"), (False, "ab")])
def test_a_terminal_shows_drafts_in_green(monkeypatch: pytest.MonkeyPatch, show: bool, shown: str) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    screen = Screen(show)
    screen.piece("a")
    screen.piece("b", drafted=True)
    assert terminal.getvalue() == shown


def test_a_pipe_gets_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    Screen(True).piece("b", drafted=True)
    assert pipe.getvalue() == "b"


@pytest.mark.parametrize("given", [["chat", "--show-drafts"], ["run", "hello", "--draft-tokens", "4"]])
def test_options_without_a_drafter_are_refused(given: list[str]) -> None:
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2
    assert "draft" in done.stderr
