"""Every shell command of the docs, run in a scratch folder: python bench/docs_shell.py [--list] [PAGE...]

Commands stand in blocks without a language, or behind `$ ` in transcripts. A server is started and asked to end;
requests go to a server with the default model. `LEFT_OUT` lists commands that cannot run here, each with the reason and
what runs them instead. The default model stands in for larger ones. The last line says when the run was.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = {"kvilt", "pip", "python", "python3", "curl", "npm", "docker", "cp", "printf", "export", "claude", "codex"}
PROGRAMS |= {"opencode", "llm", "pipx", "uvx", "auditwheel", "systemctl", "pre-commit", "echo", "caddy"}
LIMIT_S = 600

LEFT_OUT = (  # pattern, and why it does not run here
    (
        r"^pip install|^python3? -m venv|^\S*/bin/pip install",
        "installs: .ci/run and bench/new_user.py do, in new environments",
    ),
    (r"^pipx run|^uvx", "takes the package from PyPI: bench/new_user.py runs them with a built wheel"),
    (r"^python -m build|^auditwheel|bench/new_user\.py", "builds a wheel: .github/workflows/release.yml does"),
    (r"^python -m pytest|^pre-commit|^\. \.venv", ".ci/run runs the tests"),
    (r"^python -m mutation", "takes hours"),
    (
        r"^docker|deploy/\.env|^systemctl|/etc/systemd",
        "needs a docker engine or systemd: deploy/check.sh checks the files",
    ),
    (r"^KVILT_DOMAIN=|^caddy", "gets a certificate for a public name: deploy/check.sh checks the file"),
    (r"^npm install|^export|^claude|^codex|^opencode", "agents' programs: tests/server/agents runs them from npm"),
    (r"^llm ", "bench/integrations.py runs it"),
    (r"hf:", "fetches from the Hugging Face hub: tests/weights does so from a local one"),
    (r"kvilt cluster|--replicas", "needs Ray: tests/cluster runs it"),
    (r"--lora|kvilt lora", "needs an adapter: tests/adapters runs it"),
    (r"checkpoint-folder", "needs a checkpoint: tests/quant runs it"),
    (r"kvilt mcp", "waits for an agent: tests/mcp and examples/mcp_client.py run it"),
)
STAND_INS = (  # what a reader has, and what stands here in its place
    (r"\bqwen3\b", "smollm2"),
    (r"/etc/kvilt/(\w+)", r"\1"),
    (r"/var/lib/kvilt", "saved"),
    (r"~/kv\b", "kv"),
    (r"--metrics-port \d+", "--metrics-port 0"),
    (r"--rate 4 ", "--rate 4 --requests 8 "),
    (r"--requests 64", "--requests 8"),
)
RIVERS = "The Elbe flows through Hamburg. The Danube flows through Vienna. It was decided in March. " * 8
CHAT = '{"model": "smollm2", "messages": [{"role": "user", "content": "Today is %s. Who wrote the treaty?"}]}'


@dataclass(frozen=True)
class ShellCommand:
    """A command of a page, why it is left out (empty: it runs), and what is typed into it."""

    page: str
    text: str
    left_out: str
    typed: str = ""


def lines(block: str, transcript: bool) -> Iterator[tuple[str, str]]:
    """The commands of a block, without comments at their ends, and what is typed into them; continued lines are one."""
    joined = block.replace("\\\n", " ")
    prompted = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n?)*)", joined, re.MULTILINE)
    if prompted:
        yield from ((text, "\n".join(re.findall(r"^> (.*)$", below, re.MULTILINE))) for text, below in prompted)
        return
    words = [line.split() for line in joined.splitlines() if line.strip()]
    if not transcript and words and program(words[0]) in PROGRAMS:
        yield from ((re.sub(r"\s+# .*", "", line).strip(), "") for line in joined.splitlines() if line.strip())


def program(words: list[str]) -> str:
    """The program that a line runs: variables before it do not count."""
    return next((Path(word).name for word in words if not re.match(r"[A-Z_]+=", word)), "")


def commands(page: str) -> Iterator[ShellCommand]:
    """The commands of a page; those joined by && are several."""
    for block in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        if block[1] not in ("", "text"):
            continue
        for line, typed in lines(block[2], transcript=block[1] == "text"):
            for text in line.split(" && "):
                reason = next((why for pattern, why in LEFT_OUT if re.search(pattern, text)), "")
                yield ShellCommand(page, text, reason, typed)


def furnish(folder: Path) -> None:
    """What the pages take for granted: a reader's own files."""
    from kvilt.config import cache_home
    from kvilt.weights.hub import resolve

    for name in ("passages/one", "passages/two", "reports/march", "reports/april", "elbe", "danube", "text", "long"):
        path = folder / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{name.title()}. {RIVERS}")
    (folder / "more.txt").write_text("Which river flows through Vienna?\n")
    documents = '["The Elbe flows through Hamburg.", "The Danube flows through Vienna."]'
    (folder / "set.jsonl").write_text(
        f'{{"documents": {documents}, "question": "Which river flows through Vienna?"}}\n'
    )
    page = (ROOT / "docs" / "batches.md").read_text(encoding="utf-8")
    (folder / "in.jsonl").write_text(next(block[2] for block in BLOCK.finditer(page) if '"custom_id"' in block[2]))
    (folder / "earlier.json").write_text(CHAT % "Monday")
    (folder / "request.json").write_text(CHAT % "Tuesday")
    for name in ("keys", "admin"):
        (folder / name).write_text(f"sk-{name}-0123456789abcdef\n")
        (folder / name).chmod(0o600)
    (folder / "saved").mkdir()
    for name in ("served", "alone"):
        (folder / name).mkdir(mode=0o700)
    (folder / "home").mkdir()  # saved chats and history of this run alone; models are those of the user
    (folder / "home" / "models").symlink_to(cache_home() / "models")
    (folder / "model-f16.gguf").symlink_to(resolve("smollm2"))
    for name in ("examples", "bench"):
        (folder / name).symlink_to(ROOT / name)


def stood_in(text: str) -> str:
    for pattern, instead in STAND_INS:
        text = re.sub(pattern, instead, text)
    return text


@contextmanager
def served(words: list[str], folder: Path) -> Iterator[str]:
    """The address of a server that was started by `words`, on a free port; it must listen, and end when asked to."""
    words = [word for place, word in enumerate(words) if word != "--port" and words[place - 1] != "--port"]
    process = subprocess.Popen([*words, "--port", "0"], cwd=folder, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if found := re.search(r"is served at (http://\S+)", line):
                yield found[1]
                break
        else:
            raise RuntimeError(said)
    finally:
        process.send_signal(signal.SIGTERM)
        said += process.stderr.read()
        process.stderr.close()
        status = process.wait(120)
    if status != 0:
        raise RuntimeError(f"the server ended with {status}:\n{said}")


def run(command: ShellCommand, folder: Path, url: str) -> str:
    """Run a command; an empty text, or what went wrong."""
    text = stood_in(command.text)
    if re.match(r"kvilt serve\b", text):
        try:
            with served(shlex.split(text), folder):
                return ""
        except RuntimeError as error:
            return str(error)
    text = re.sub(r"http://127\.0\.0\.1:\d+", url, text)
    if "kvilt bench serve" in text and "--url" not in text:
        text += f" --url {url}"
    if text.startswith("curl"):
        text = text.replace("curl ", "curl --fail-with-body --silent --show-error ", 1)
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, input=command.typed
    )
    return "" if done.returncode == 0 else f"status {done.returncode}\n{done.stdout}{done.stderr}"


def shown(command: ShellCommand, folder: Path, url: str) -> bool:
    started_s = time.perf_counter()
    wrong = run(command, folder, url)
    print(f"{'failed' if wrong else 'ok':7} {time.perf_counter() - started_s:6.1f} s  {command.page}: {command.text}")
    if wrong:
        print(wrong)
    sys.stdout.flush()
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the commands, and why some are left out")
    parser.add_argument("pages", nargs="*", default=PAGES, help="which pages; all by default")
    given = parser.parse_args()
    found = [command for page in given.pages for command in commands(page)]
    if given.list:
        for command in found:
            print(f"{command.page}: {command.text}{f'   [{command.left_out}]' if command.left_out else ''}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers that were started end with this program
    running = list({command.text: command for command in found if not command.left_out}.values())
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        furnish(folder)
        os.environ["KVILT_HOME"] = str(folder / "home")
        os.environ["XDG_RUNTIME_DIR"] = str(folder / "served")  # so that `kvilt run` does not find this server
        with served(["kvilt", "serve", "--max-context", "4096", "--kv-memory", "512M"], folder) as url:
            os.environ["XDG_RUNTIME_DIR"] = str(folder / "alone")
            failed = [command for command in running if not shown(command, folder, url)]
    left_out = len({command.text for command in found if command.left_out})
    told = f"{len(running)} commands of the docs ran, {left_out} were left out"
    print(f"{told}, {len(failed)} failed: {datetime.now(UTC):%Y-%m-%d}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
