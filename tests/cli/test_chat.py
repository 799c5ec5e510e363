"""`kvilt chat` as people use it: a real process in a real pseudo-terminal, and pipes."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import Done, kvilt
from tiny import write_tiny

from kvilt import LLM, SamplingParams
from kvilt.cli import chat, chat_session
from kvilt.cli import chat_commands as commands
from kvilt.cli.chat_input import PipeInput, is_open, unquoted
from kvilt.cli.chat_loop import parse
from kvilt.cli.chat_screen import Screen, printable
from kvilt.cli.chat_session import ChatSession
from kvilt.config import RunConfig
from kvilt.errors import BlobError, InputError, ModelNotFound, TemplateError
from kvilt.executor.load import load_executor
from kvilt.llm.generation import SamplingDefaults
from kvilt.text.tokenizer import Tokenizer, from_gguf

KVILT = [sys.executable, "-m", "kvilt.cli.main", "chat", "--temperature", "0"]
DEADLINE_S = 240  # for one thing to appear; a machine may be slow, and nothing waits this long unless it is broken
PROMPT, PROMPT_LEFT = "\x1b[?2004h", "\x1b[?2004l"  # the line editor takes over the terminal, and gives it back
CTRL_C, CTRL_D = "\x03", "\x04"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>78]")


class Terminal:
    """A process whose controlling terminal is a pseudo-terminal that we hold the other end of."""

    def __init__(self, *args: str, home: Path) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        env = {**os.environ, "KVILT_HOME": str(home), "KVILT_THREADS": "1", "TERM": "xterm"}
        env |= {"PROMPT_TOOLKIT_NO_CPR": "1"}  # nobody here answers where the cursor is
        self.process = subprocess.Popen(
            [*KVILT, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self._seen = ""

    def expect(self, pattern: str) -> re.Match[str]:
        """Read on until the pattern appears behind everything that was expected before."""
        deadline_s = time.monotonic() + DEADLINE_S
        while (found := re.search(pattern, self._seen)) is None:
            ready, _, _ = select.select([self._ours], [], [], max(0, deadline_s - time.monotonic()))
            data = self._read() if ready else b""
            if not data:
                raise AssertionError(f"{pattern!r} did not appear in {self._seen!r}")
            self._seen += data.decode("utf-8", "replace")
        self._seen = self._seen[found.end() :]
        return found

    def ready(self) -> None:
        """Wait until a line can be typed."""
        self.expect(re.escape(PROMPT))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def ask(self, line: str) -> None:
        """Type a line and wait until the line editor has handed it over."""
        self.type(f"{line}\r")
        self.expect(re.escape(PROMPT_LEFT))

    def command(self, line: str) -> str:
        """What a command says."""
        self.ask(line)
        shown = self.expect(rf"(?s)(.*?){re.escape(PROMPT)}")[1]
        return _ESCAPES.sub("", shown).strip().replace("\r\n", "\n")

    def numbers(self) -> dict[str, int]:
        """The line under an answer."""
        line = self.expect(
            r"([\d,]+) tokens? · [\d.]+ tok/s · first token [\d.]+ s · "
            r"context ([\d,]+) of ([\d,]+) · ([\d,]+) reused( · stopped)?"
        )
        self.ready()
        keys = ("tokens", "context", "limit", "reused")
        found = {key: int(text.replace(",", "")) for key, text in zip(keys, line.groups(), strict=False)}
        return {**found, "stopped": int(line[5] is not None)}

    def left(self) -> int:
        """The exit code, once the process has gone."""
        try:
            while self._read():
                pass
        finally:
            code = self.process.wait(DEADLINE_S)
        return code

    def _read(self) -> bytes:
        try:
            return os.read(self._ours, 65536)
        except OSError:  # the other end is closed
            return b""

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextmanager
def terminal(*args: str, home: Path) -> Iterator[Terminal]:
    opened = Terminal(*args, home=home)
    try:
        yield opened
    finally:
        opened.close()


def test_a_chat_in_a_real_terminal(smollm2_path: Path, tmp_path: Path) -> None:
    model = ["--model", str(smollm2_path), "--kv-memory", "256M"]
    with terminal(*model, "--max-tokens", "200", home=tmp_path) as tty:
        tty.ready()
        tty.ask("What is the capital of Germany?")
        tty.expect("Berlin")
        first = tty.numbers()
        assert (first["reused"], first["stopped"], first["limit"]) == (0, 0, 8192)

        tty.ask("Tell me a very long story about a dragon and a king.")
        tty.expect(r"[a-z]+ [a-z]+ ")  # the answer has begun
        tty.type(CTRL_C)
        stopped = tty.numbers()
        assert (stopped["stopped"], stopped["reused"]) == (1, first["context"] - 1)
        assert 1 <= stopped["tokens"] < 200

        tty.ask("What is the capital of Italy?")  # behind a story cut anywhere, so the answer may be anything
        went_on = tty.numbers()
        assert (went_on["stopped"], went_on["reused"]) == (0, stopped["context"] - 1)

        undone = tty.command("/undo")
        assert undone.startswith('took back "What is the capital')
        assert f"2 turns, {stopped['context']:,} tokens left · 0 tokens computed" in undone
        assert re.search(r"0 tokens computed · [\d.]+ ms$", undone)
        tty.command("/undo")
        stats = tty.command("/stats")
        assert f"1 turn, {first['context']} tokens of 8,192" in stats
        assert re.search(r"computed · [\d,]+ reused", stats)

        tty.type('"""What is the capital\r')
        tty.type("of Spain?\r")
        tty.ask('"""')
        tty.expect("Madrid")
        spain = tty.numbers()
        assert spain["reused"] == first["context"]

        assert re.fullmatch(rf"forked b · 2 turns, {spain['context']} tokens · 0 .*ms", tty.command("/fork b"))
        assert tty.command("/load") == "branches  b"
        assert "there is no command /sing" in tty.command("/sing")
        assert re.fullmatch(rf"saved one · 2 turns, {spain['context']} tokens, .* · 0 .*s", tty.command("/save one"))
        tty.type("never sent" + CTRL_C)
        tty.expect("Ctrl\\+D leaves")
        tty.ready()
        tty.type(CTRL_D)
        assert tty.left() == 0

    assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0
    with terminal(*model, "--max-tokens", "8", home=tmp_path) as tty:
        tty.ready()
        assert tty.command("/load") == "saved     one"
        loaded = tty.command("/load one")
        assert re.fullmatch(rf"loaded one · 2 turns, {spain['context']} tokens · 0 tokens computed · .*s", loaded)
        tty.ask("And of Portugal?")
        assert tty.numbers()["reused"] == spain["context"] - 1
        tty.type(CTRL_C)
        tty.expect("leaves")
        tty.ready()
        tty.type(CTRL_C)
        assert tty.left() == 0


# Pipes.


def piped(*args: str, stdin: str, home: Path) -> Done:
    return kvilt("chat", *args, stdin=stdin, KVILT_HOME=str(home))


def test_a_pipe_asks_line_by_line_and_gets_only_answers(smollm2_path: Path, tmp_path: Path) -> None:
    lines = 'What is the capital of Germany?\n\n/undo\n"""What is the capital\nof Japan?"""\n'
    done = piped("--model", str(smollm2_path), "--max-tokens", "30", stdin=lines, home=tmp_path)
    assert done.returncode == 0, done.stderr
    germany, japan = done.stdout.splitlines()
    assert "Berlin" in germany
    assert "Tokyo" in japan
    assert "\x1b" not in done.stdout + done.stderr
    assert re.fullmatch(r'took back "What is the capital of…" · 0 turns, .* · 0 tokens computed .* ms\n', done.stderr)


def test_a_pipe_that_asks_too_much_hears_it_in_a_sentence_and_goes_on(smollm2_path: Path, tmp_path: Path) -> None:
    lines = "word " * 200 + "\n/save ../evil\nHi\n"
    done = piped("--model", str(smollm2_path), "--max-context", "64", "--max-tokens", "4", stdin=lines, home=tmp_path)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    overflow, name = done.stderr.splitlines()
    assert "/undo or /clear makes room" in overflow
    assert "no name for a chat" in name
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "evil.json").exists()


def test_a_chat_that_is_not_there_is_an_error_at_once(smollm2_path: Path, tmp_path: Path) -> None:
    done = piped("--model", str(smollm2_path), "--load", "nothing", stdin="Hi\n", home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvilt: there is no saved chat 'nothing'\n"


# The parts.


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(smollm2_path)


@pytest.fixture
def session(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatSession]:
    """A session with a tiny random model, whose home is a new folder; other models fail as they do in real life."""
    monkeypatch.setenv("KVILT_HOME", str(tmp_path / "home"))

    def load(model: str, **_: Any) -> LLM:
        if model not in ("tiny", "window"):
            raise ModelNotFound(f"there is no model {model!r}")
        window = 9 if model == "window" else None
        folder = write_tiny(tmp_path / model, sliding_window=window, vocab_size=tokenizer.vocab_size)
        return LLM(load_executor(folder, RunConfig(kv_memory=1 << 22)), tokenizer)

    monkeypatch.setattr(chat_session, "load", load)
    opened = ChatSession.open("tiny", {"max_tokens": 6, "temperature": 0.0}, {}, "")
    yield opened
    opened.close()
    assert opened.llm.executor.pool.usage().used == 0


def talk(session: ChatSession, *lines: str) -> bool:
    return chat._converse(session, Screen(), PipeInput([line.encode() for line in lines]))


Do = Callable[[str], str]


@pytest.fixture
def do(session: ChatSession) -> Do:
    def run(line: str) -> str:
        command = parse(line)
        assert command is not None
        return commands.run(session, *command)

    return run


def test_branches_are_gone_back_to_and_stay(session: ChatSession, do: Do) -> None:
    assert talk(session, "one")
    answer = session.conversation.turns
    assert "0 tokens computed" in do("/fork a")
    assert talk(session, "two")
    assert len(session.conversation.turns) == 2
    for _ in range(2):  # going back takes a fork of the fork
        assert do("/load a").startswith("loaded a · 1 turn")
        assert session.conversation.turns == answer
        assert talk(session, "three")
    do("/fork a")
    assert do("/load") == "branches  a"
    do("/clear")
    assert do("/load a").startswith("loaded a · 2 turns")


def test_a_branch_comes_before_a_saved_chat_of_the_same_name(session: ChatSession, do: Do) -> None:
    talk(session, "one")
    do("/save a")
    talk(session, "two")
    do("/fork a")
    assert do("/load") == "branches  a\nsaved     a"
    do("/clear")
    assert do("/load a").startswith("loaded a · 2 turns")


def test_saved_chats_lie_in_a_folder_of_their_owner(session: ChatSession, do: Do, tmp_path: Path) -> None:
    talk(session, "one")
    do("/save a")
    folder = tmp_path / "home" / "chats"
    assert folder.stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.iterdir())


def test_a_damaged_chat_leaves_the_current_one_alone(session: ChatSession, do: Do, tmp_path: Path) -> None:
    talk(session, "one")
    do("/save a")
    (tmp_path / "home" / "chats" / "a.json").write_text("{}")
    talk(session, "two")
    with pytest.raises(BlobError):
        do("/load a")
    assert len(session.conversation.turns) == 2
    assert not talk(session, "/load a", "three")
    assert len(session.conversation.turns) == 3


def test_the_system_message_begins_a_new_chat(session: ChatSession, do: Do) -> None:
    assert "/system TEXT" in do("/system")
    talk(session, "one")
    do("/system Answer in rhymes.\nAlways.")
    assert session.conversation.messages == [{"role": "system", "content": "Answer in rhymes.\nAlways."}]
    assert do("/system") == "Answer in rhymes.\nAlways."
    talk(session, "one")
    assert do("/clear") == "a new chat with the same system message"
    assert len(session.conversation.messages) == 1
    do("/system -")
    assert session.conversation.messages == []


def test_another_model_begins_a_new_chat_and_a_wrong_name_changes_nothing(session: ChatSession, do: Do) -> None:
    do("/system Be kind.")
    talk(session, "one")
    do("/fork a")
    assert do("/model") == "tiny · llama, 3 layers"
    with pytest.raises(ModelNotFound):
        do("/model enormous")
    assert len(session.conversation.turns) == 1
    before = session.llm
    assert do("/model window").startswith("window · llama")
    assert before.executor.pool.usage().used == 0
    assert session.conversation.messages == [{"role": "system", "content": "Be kind."}]
    assert not session.branches
    assert talk(session, "two")


def test_a_model_without_a_chat_template_is_refused(
    session: ChatSession, do: Do, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    plain = LLM(session.llm.executor, tokenizer)
    monkeypatch.setattr(plain, "_template", None)
    monkeypatch.setattr(type(plain), "chat_template", property(_no_template))
    monkeypatch.setattr(plain, "close", lambda: closed.append("closed"))
    monkeypatch.setattr(chat_session, "load", lambda *_, **__: plain)
    with pytest.raises(TemplateError):
        do("/model plain")
    assert closed == ["closed"]


def _no_template(_: LLM) -> None:
    raise TemplateError("this model has no chat template")


def test_where_kv_cannot_be_kept_the_chat_says_what_it_costs(session: ChatSession, do: Do) -> None:
    do("/model window")
    session.sampling |= {"max_tokens": 80, "ignore_eos": True}
    talk(session, "one", "two")
    undone = do("/undo")
    lost = len(session.conversation.ids)
    assert undone.endswith(f"its KV could not be kept: the next answer computes {lost} tokens again")


def test_a_full_context_and_a_cut_answer_are_named(session: ChatSession, do: Do) -> None:
    session.sampling |= {"max_tokens": 3, "ignore_eos": True}
    talk(session, "one")
    assert chat_session.numbers(session).endswith("cut off by --max-tokens")
    session.sampling |= {"max_tokens": 1000, "ignore_eos": True}
    talk(session, "two")
    assert "context 256 of 256" in chat_session.numbers(session)
    assert chat_session.numbers(session).endswith("the context is full: /undo or /clear")
    assert not talk(session, "three")
    do("/undo")
    session.sampling |= {"max_tokens": 3, "ignore_eos": False}
    assert talk(session, "three")


@pytest.mark.parametrize("command", ["/save", "/fork", "/save a/b", "/fork ..", "/load .x", "/undo", "/save one", "/x"])
def test_a_command_that_cannot_be_done_is_refused_in_a_sentence(session: ChatSession, do: Do, command: str) -> None:
    with pytest.raises(InputError):
        do(command)


def test_help_names_every_command(do: Do) -> None:
    assert all(f"/{name}" in do("/help") for name in commands.COMMANDS)


def test_a_slash_makes_a_command_only_before_a_word() -> None:
    assert parse(" /save  a b ") == ("save", "a b")
    assert parse("/usr/bin/env does what?") is None
    assert parse("/ what?") is None
    assert parse("what is /save?") is None


@pytest.mark.parametrize(
    ("text", "still_open", "inside"),
    [
        ("hello", False, None),
        ('"""', True, ""),
        ('"""one', True, "one"),
        ('"""one"""', False, "one"),
        ('"""one\n two\n"""', False, "one\n two"),
        ('""""', True, '"'),
        ('""""""', False, ""),
        ('one """', False, None),
    ],
)
def test_three_quotes_hold_lines_together(text: str, still_open: bool, inside: str | None) -> None:
    assert is_open(text) == still_open
    assert unquoted(text) == inside


def test_a_pipe_brings_lines_whatever_bytes_they_are() -> None:
    pipe = PipeInput([b"one\r\n", b'"""two\n', b"three\n", b'"""\n', b"f\xffr\n", b'"""open'])
    assert [pipe.read() for _ in range(4)] == ["one", '"""two\nthree\n"""', "f\ufffdr", '"""open']
    with pytest.raises(EOFError):
        pipe.read()


def test_an_answer_cannot_command_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\x9b2J\r\nc\td é") == "a\ufffd]0;title\ufffdb\ufffd2J\nc\td é"


def test_ctrl_c_during_an_answer_calls_stop_and_is_itself_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, stopped = Screen(), []
    screen.interactive = True
    before = signal.getsignal(signal.SIGINT)
    with screen.interruptible(lambda: stopped.append(1)):
        signal.raise_signal(signal.SIGINT)
    assert stopped == [1]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loop_is_ended_and_the_line_below_says_so(session: ChatSession) -> None:
    session.sampling = {"logit_bias": {100: 100.0}, "temperature": 0.0, "max_tokens": 90, "repetition_detection": True}
    assert talk(session, "one")
    assert session.conversation.last is not None
    assert session.conversation.last.finish_reason == "repetition"
    assert "the answer repeated itself and was ended" in chat_session.numbers(session)


def test_another_model_draws_by_its_own_settings(session: ChatSession, do: Do) -> None:
    session.sampling = {"max_tokens": 6}
    assert "kvilt's defaults" in do("/stats")
    do("/model window")
    session.llm.sampling_defaults = SamplingDefaults(SamplingParams(temperature=0.5), "the model's own settings")
    assert "draws   temperature 0.5 (the model's own settings)" in do("/stats")
