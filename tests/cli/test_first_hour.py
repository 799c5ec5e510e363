"""What a new user tries first: a bare `kvilt run`, leaving a chat, names of other programs, a port that is taken."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from commands import kvilt

from kvilt.cli import chat_commands
from kvilt.cli.app import app
from kvilt.cli.keys import client_key
from kvilt.cli.serve import check_port
from kvilt.cli.word_wrap import WordWrap
from kvilt.errors import ParamError
from kvilt.weights.suggestions import suggestion, table


def shown(columns: int, *pieces: str) -> list[str]:
    """The lines of a terminal after an answer; it obeys the movements that `WordWrap` writes."""
    wrap, lines = WordWrap(columns), [""]
    for piece in pieces:
        for part in re.split(r"(\x1b\[\d+D\x1b\[K|\n)", wrap.feed(piece)):
            if part == "\n":
                lines.append("")
            elif part.startswith("\x1b"):
                lines[-1] = lines[-1][: -int(part[2 : part.index("D")])]
            else:
                lines[-1] += part
    return lines


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_words_are_not_broken_at_the_edge(size: int) -> None:
    text = "The quick brown fox jumps over the lazy dog.\nIncomprehensibilities are long"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    lines = shown(13, *pieces)
    assert all(len(line) <= 12 for line in lines)
    assert [line.rstrip() for line in lines[:5]] == ["The quick", "brown fox", "jumps over", "the lazy", "dog."]
    assert "".join(lines[5:]).replace(" ", "") == "Incomprehensibilitiesarelong", "a word longer than a line is broken"


def test_code_and_wide_characters() -> None:
    code = "a = some_function(with_many, arguments)"
    assert code in shown(20, f"See:\n```\n{code}\n```\nDone now, as you see.")
    assert shown(9, "你好你好你好") == ["你好你好", "你好"], "eight columns are four characters"


def test_a_chat_can_be_left_by_a_command(tmp_path: Path) -> None:
    for word in ("exit", "bye", "quit"):
        with pytest.raises(EOFError):
            chat_commands.run(None, word, "")  # type: ignore[arg-type]
    assert "/bye" in chat_commands.COMMANDS["help"].run(None, "")  # type: ignore[arg-type]


def test_a_bare_run_in_a_terminal_opens_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[object, ...]] = []
    monkeypatch.setattr("kvilt.cli.run.opens_chat", lambda: True)
    monkeypatch.setattr("kvilt.cli.chat.chat", lambda *given: opened.append(given) or True)
    app(["run", "--temperature", "0"], standalone_mode=False)
    assert opened[0][0] == "smollm2"
    assert opened[0][3]["temperature"] == 0  # type: ignore[index]
    with pytest.raises(SystemExit):
        app(["run", "--raw"], standalone_mode=True)
    assert len(opened) == 1, "what a chat cannot do is not ignored"


def test_names_of_other_programs_say_what_to_write() -> None:
    done = kvilt("run", "Hi", "-m", "llama3.2")
    assert done.returncode == 1
    assert "--model hf:bartowski/Llama-3.2-1B-Instruct-GGUF" in done.stderr
    assert "Llama-3.2" in suggestion("Llama-3.2:1b")
    assert "qwen3-4b" in suggestion("qwen3-4b")
    assert "docs/models.md" in suggestion("something-else")
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert table() in page


def test_a_port_that_is_taken_is_one_line_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ParamError, match="in use by another program"):
            check_port("port", "127.0.0.1", port)
        done = kvilt("serve", "--port", str(port), "--model", "./no-model-was-looked-for.gguf")
        assert done.returncode == 2
        assert f"127.0.0.1:{port} is in use" in done.stderr
        assert done.stderr.count("\n") == 1
    check_port("port", "127.0.0.1", 0)
    with pytest.raises(ParamError, match="cannot listen"):
        check_port("metrics_port", "203.0.113.7", 9)


def test_clients_find_their_key_without_showing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVILT_API_KEY", raising=False)
    assert client_key(None, None) is None
    monkeypatch.setenv("KVILT_API_KEY", "sk-one,sk-two")
    assert client_key(None, None) == "sk-one"
    (tmp_path / "keys").write_text("# mine\nsk-three\n")
    assert client_key(None, str(tmp_path / "keys")) == "sk-three"
    assert client_key("sk-four", str(tmp_path / "keys")) == "sk-four"
