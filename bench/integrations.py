"""Every example of examples/integrations against one server: python bench/integrations.py [--python PATH] [NAME...]

Starts `kvilt serve` with the default model on a free port of this machine, and runs the examples with the python that
has their packages (examples/integrations/requirements.txt). An example fails if it ends with an error, or if it does
not print what a user must see. The last line says when the run was.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples" / "integrations"
LIMIT_S = 300
SEES = {  # what a user must see, as a pattern: from the server, not from the words of a small model
    "anthropic_sdk": r"\[[1-9]\d+ tokens reused, \d+ computed\]",
    "instructor_model": r"Review\(feeling='(good|bad)', stars=[1-5]\)",
    "langchain_chat": r"\w",
    "litellm_completion": r"\[\d+ tokens in, \d+ out\]",
    "llama_index_llm": r"\w",
    "llm_command": r"\w",
    "openai_sdk": r"\[[1-9]\d+ tokens of documents reused\]",
    "pydantic_ai_agent": r"Route\(department='(billing|shipping|technical)', urgent=(True|False)\)",
}


@contextmanager
def server() -> Iterator[str]:
    """The address of `kvilt serve` with the default model."""
    command = [sys.executable, "-m", "kvilt", "serve", "--port", "0", "--max-context", "4096"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"is served at (http://\S+)", line):
                break
        else:
            sys.exit(f"kvilt serve ended:\n{said}")
        yield found[1]
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(60)


def run(python: str, name: str, url: str) -> bool:
    """Run an example as a user would; whether the user sees what they should."""
    started_s = time.perf_counter()
    print(f"-- {name}", flush=True)
    command = [python, str(EXAMPLES / f"{name}.py")]
    settings = os.environ | {"KVILT_URL": url}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=settings)
    print(done.stdout.rstrip(), f"({time.perf_counter() - started_s:.1f} s)", sep="\n", flush=True)
    if done.returncode != 0 or not re.search(SEES[name], done.stdout):
        print(done.stderr, f"{name}: failed", sep="\n", flush=True)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the python that has the packages of the examples")
    parser.add_argument("names", nargs="*", help="which examples; all by default")
    given = parser.parse_args()
    present = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    if present != sorted(SEES):
        sys.exit(f"examples without a pattern, or patterns without an example: {set(present) ^ set(SEES)}")
    with server() as url:
        failed = [name for name in given.names or present if not run(given.python, name, url)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    print(f"all examples of integrations ran on {datetime.now(UTC):%Y-%m-%d}")


if __name__ == "__main__":
    main()
