"""A new user's path from a built wheel, without a compiler: python bench/new_user.py WHEEL [--pipx PATH] [--uvx PATH]

Makes a fresh environment whose PATH has no compiler and no build tool, installs the wheel from binaries only, and runs
what a user types: a first answer, and in two more commands an answer over own files whose KV is blended. `--pipx` and
`--uvx` run the first answer by those programs too. `--fetch` starts with an empty folder of models. Prints every
command, what it says and how long it took; stops at the first that does not show what it should. The last line says
when the run was.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from first_hour import NOTES, QUESTION

ROOT = Path(__file__).parent.parent
BUILD_TOOLS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make")
SMALL_TOOLS = ("sh", "env", "dirname", "realpath", "uname", "cat", "ls")  # which scripts of uvx and pipx call
NATIVE = "import _kvilt_native as native; print('instruction sets of the kernels:', *native.available_isas())"


@dataclass(frozen=True)
class Command:
    """What a user types, and a text that they must see."""

    title: str
    words: Sequence[str]
    sees: str


def commands(wheel: Path, home: Path) -> Iterator[Command]:
    python, kvilt = str(home / "venv/bin/python"), str(home / "venv/bin/kvilt")
    pinned = ("--only-binary", ":all:", "-c", str(ROOT / "constraints.txt"))
    yield Command("an environment", (sys.executable, "-m", "venv", str(home / "venv")), "")
    yield Command("install", (python, "-m", "pip", "install", "--quiet", *pinned, str(wheel)), "")
    yield Command("the kernels of the wheel", (python, "-c", NATIVE), "generic")
    yield Command("a first answer", (kvilt, "run", "Why is the sky blue?", "--max-tokens", "40"), "tok/s")
    files = [str(home / name) for name in NOTES]
    documents = [word for path in files for word in ("--document", path)]
    store = ("--store", str(home / "notes"))
    yield Command("own files: compute them once", (kvilt, "warm", *files, *store), "tokens")
    asked = ("run", QUESTION, *documents, *store, "--temperature", "0", "--max-tokens", "40")
    yield Command("own files: ask", (kvilt, *asked), "reused")


def by_tools(wheel: Path, pipx: str | None, uvx: str | None) -> Iterator[Command]:
    answer = ("run", "Why is the sky blue?", "--max-tokens", "20")
    if pipx:
        yield Command("pipx run", (pipx, "run", "--spec", str(wheel), "kvilt", *answer), "tok/s")
    if uvx:
        yield Command("uvx", (uvx, "--from", str(wheel), "kvilt", *answer), "tok/s")


def clean(home: Path, fetch: bool) -> dict[str, str]:
    """A user's variables: the environment's programs and a few small ones on the PATH, and folders in `home`."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_", "LANG"))}
    kept |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    tools = home / "tools"
    tools.mkdir()
    for tool in SMALL_TOOLS:
        if path := shutil.which(tool):
            (tools / tool).symlink_to(path)
    own = {"PATH": f"{home / 'venv/bin'}{os.pathsep}{tools}", "HOME": str(home), "TMPDIR": str(home)}
    constraints = str(ROOT / "constraints.txt")
    own |= {"PIP_CONSTRAINT": constraints, "UV_CONSTRAINT": constraints, "UV_PYTHON": sys.executable}
    models = os.environ.get("KVILT_HOME", str(Path("~/.cache/kvilt").expanduser()))
    own["KVILT_HOME"] = str(home / "models") if fetch else models
    found = [tool for tool in BUILD_TOOLS if shutil.which(tool, path=own["PATH"])]
    if found:
        sys.exit(f"the environment has {', '.join(found)}")
    return kept | own


def show(command: Command, home: Path, settings: Mapping[str, str]) -> float:
    """Run a command as the user would, and print what it says; how many seconds it took."""
    print(f"\n== {command.title}\n$ {' '.join(command.words)}", flush=True)
    started_s = time.perf_counter()
    done = subprocess.run(command.words, capture_output=True, text=True, cwd=home, env=settings)
    took_s = time.perf_counter() - started_s
    said = done.stdout + done.stderr
    print(said.rstrip(), f"({took_s:.1f} s)", sep="\n", flush=True)
    if done.returncode != 0 or command.sees not in said:
        sys.exit(f"{command.title}: status {done.returncode}; the user should see {command.sees!r}")
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="a built wheel of kvilt")
    parser.add_argument("--pipx", help="the program pipx, to run the first answer with")
    parser.add_argument("--uvx", help="the program uvx, to run the first answer with")
    parser.add_argument("--fetch", action="store_true", help="start with an empty folder of models")
    given = parser.parse_args()
    wheel = given.wheel.resolve(strict=True)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        for file, text in NOTES.items():
            (home / file).write_text(text * 6)
        settings = clean(home, given.fetch)
        took_s = [show(command, home, settings) for command in commands(wheel, home)]
        for command in by_tools(wheel, given.pipx, given.uvx):
            show(command, home, settings)
    _, install_s, _, answer_s, warm_s, ask_s = took_s
    print(f"\n{wheel.name}, {datetime.now(UTC):%Y-%m-%d}: install {install_s:.0f} s, first answer {answer_s:.1f} s,")
    print(f"a blended answer over own files in two more commands, {warm_s + ask_s:.1f} s")


if __name__ == "__main__":
    main()
