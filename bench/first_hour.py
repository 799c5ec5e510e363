"""The first hour of a new user, as commands with what they print: python bench/first_hour.py [--here]

Installs kvilt from this folder into a fresh environment (`--here`: uses the running one), then: a first answer, a chat
with fork and undo, a blended answer over own files, a verdict on the ratio, and a first tool call. Stops at the first
failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTES = {
    "elbe.txt": "The Elbe rises in the Giant Mountains, flows through Hamburg, and ends in the North Sea.\n",
    "danube.txt": "The Danube rises in the Black Forest, flows through Vienna, and ends in the Black Sea.\n",
}
CHAT = "What is the capital of Germany?\n/fork berlin\nTell me more.\n/undo\n/load berlin\n/bye\n"
QUESTION = "Which river flows through Vienna?"


@dataclass(frozen=True)
class Step:
    """A command, what is typed into it, and a text that a user must see."""

    title: str
    command: Sequence[str]
    sees: str
    typed: str = ""


def steps(python: str, folder: Path) -> Iterator[Step]:
    kvilt = (python, "-m", "kvilt")
    files = [str(folder / name) for name in NOTES]
    documents = [part for path in files for part in ("--document", path)]
    yield Step("a first answer", (*kvilt, "run", "Why is the sky blue?", "--max-tokens", "40"), "tok/s")
    yield Step("a chat with fork and undo", (*kvilt, "chat", "--temperature", "0"), "0 tokens computed", CHAT)
    asked = ("run", QUESTION, "--temperature", "0", "--max-tokens", "40")
    yield Step("an answer over own files", (*kvilt, *asked, *documents), "computed again")
    report = ("blend-report", *files, "--question", QUESTION, "--strategies", "query", "--ratios", "15")
    yield Step("which ratio is safe for them", (*kvilt, *report), "safe")
    yield Step("a first tool call", (python, str(ROOT / "examples" / "agent.py")), "weather(")


def installed(folder: Path) -> str:
    """The python of a fresh environment with kvilt in it, as docs/first_steps.md installs it."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = str(folder / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "-c", "constraints.txt", ".[server,grammar]"]
    subprocess.run(install, cwd=ROOT, check=True)
    return python


def show(step: Step, folder: Path) -> bool:
    """Run a step as a user would, and print what it says; whether the user sees what they should."""
    started_s = time.perf_counter()
    print(f"\n== {step.title}\n$ {' '.join(step.command)}", flush=True)
    done = subprocess.run(step.command, input=step.typed, capture_output=True, text=True, cwd=folder)
    said = done.stdout + done.stderr
    print(said.rstrip(), f"({time.perf_counter() - started_s:.1f} s)", sep="\n", flush=True)
    return done.returncode == 0 and step.sees in said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--here", action="store_true", help="use the running environment")
    here = parser.parse_args().here
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in NOTES.items():
            (folder / file).write_text(text * 6)
        python = sys.executable if here else installed(folder)
        for step in steps(python, folder):
            if not show(step, folder):
                sys.exit(f"the user does not see {step.sees!r}")


if __name__ == "__main__":
    main()
