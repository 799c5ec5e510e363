"""The Python of pages for newcomers runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import _kvilt_native
import pytest
from commands import kvilt

from kvilt import Conversation, load

HERE = Path(__file__).parent.parent
ISAS = _kvilt_native.available_isas()


def blocks(page: str, language: str = "python") -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", (HERE / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def test_the_page_about_tools_runs(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec("\n".join(blocks("docs/tools.md")), {"__name__": "tools"})
    said = capsys.readouterr().out
    assert '(ParsedToolCall(name=\'weather\', arguments=\'{"city": "Paris"' in said
    assert "CallStart(index=0, name='weather')" in said


def test_the_page_about_chats_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(blocks("docs/chat.md")), {"__name__": "chat"})
    assert (tmp_path / "berlin.json").exists()


def test_the_first_steps_run(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del smollm2_path
    (program,) = blocks("docs/first_steps.md")
    exec(program, {"__name__": "first_steps"})
    said = capsys.readouterr().out
    assert re.search(r"Who writes the parser\? .* [1-9]\d*\n", said)  # tokens that came from the cache


def test_the_first_example_of_the_readme_is_a_program_that_runs_in_ci() -> None:
    program = (HERE / "examples" / "fork.py").read_text(encoding="utf-8")
    assert program.endswith(f'"""\n\n{blocks("README.md")[0]}')


def test_the_page_about_models_shows_what_inspect_prints(smollm2_path: Path) -> None:
    del smollm2_path
    printed = {line.rstrip() for line in kvilt("inspect", "smollm2").stdout.splitlines()}
    (block,) = [one for one in blocks("docs/models.md", "") if one.startswith("$ kvilt inspect smollm2")]
    shown = [line for line in block.splitlines()[1:] if line.strip() not in ("", "...")]
    missing = [line for line in shown if line not in printed]
    assert missing == []


@pytest.mark.parametrize("isa", ISAS)
def test_the_transcript_of_a_chat_holds_on_every_instruction_set(smollm2_path: Path, isa: str) -> None:
    (transcript,) = [one for one in blocks("docs/chat.md", "text") if one.startswith("$ kvilt chat --temperature 0\n")]
    question, answer = re.findall(r"^> (What .*)\n(.*)$", transcript, re.MULTILINE)[0]
    model = load(str(smollm2_path), backend=f"native/{isa}", kv_memory="64M", max_context=512)
    with model as llm, Conversation(llm) as chat:
        assert "".join(chat.say(question)) == answer
