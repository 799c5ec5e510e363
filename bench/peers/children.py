"""The processes of the runtimes as the driver sees them: asked over pipes, or started once for a cold start."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from .models import Candidate
from .noise import RETRIES, Watch, wait_quiet
from .workloads import Workload

HERE = Path(__file__).resolve().parent.parent


class Missing(Exception):
    """A runtime cannot be measured; the message says why."""


def _environment(engine: str) -> dict[str, str]:
    # A path set for kvilt's own build must not reach the peers, whose Python may be another one.
    return {name: value for name, value in os.environ.items() if engine == "kvilt" or name != "PYTHONPATH"}


def _command(candidate: Candidate, mode: str, threads: int, *more: int) -> list[str]:
    where = [candidate.python, "-m", "peers.worker", mode, candidate.engine, str(candidate.model.resolve())]
    return [*where, *map(str, (threads, *more))]


class Server:
    """A runtime with its model loaded, ready for requests."""

    def __init__(self, candidate: Candidate, threads: int) -> None:
        if not candidate.model.exists():
            raise Missing(f"there is no {candidate.model}")
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process; a pipe could fill up and stop it)
        self._process = subprocess.Popen(
            _command(candidate, "serve", threads),
            cwd=HERE,
            env=_environment(candidate.engine),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            self.about: str = self._answer()["about"]
        except Missing:
            self._process.wait()
            errors.seek(0)
            said = errors.read().strip().splitlines()
            raise Missing(said[-1] if said else f"its process ended with {self._process.returncode}") from None

    def ask(self, workload: Workload) -> dict[str, Any]:
        """One sample."""
        stdin = _pipe(self._process.stdin)
        stdin.write(json.dumps(asdict(workload)) + "\n")
        stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise Missing(answer["error"])
        return answer

    def _answer(self) -> dict[str, Any]:
        for line in _pipe(self._process.stdout):
            if line.startswith("RESULT "):
                found: dict[str, Any] = json.loads(line[7:])
                return found
        raise Missing("its process ended")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _timed(command: list[str], engine: str) -> dict[str, Any]:
    """One process from start to end, again if others disturbed it."""
    tries = 0
    while True:
        watch, started = Watch(), time.time()
        answer = _run(command, engine)
        noise = watch.noise()
        tries += 1
        if not noise.disturbed or tries > RETRIES:
            break
        wait_quiet(patience_s=10)
    first_s = answer["first"] - started
    return {**answer, "first_s": first_s, "noise": asdict(noise), "disturbed": noise.disturbed, "tries": tries}


def _run(command: list[str], engine: str) -> dict[str, Any]:
    done = subprocess.run(command, cwd=HERE, env=_environment(engine), capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            answer: dict[str, Any] = json.loads(line[7:])
            return answer
    said = done.stderr.strip().splitlines()
    raise Missing(said[-1] if said else f"its process ended with {done.returncode}")


def once(candidate: Candidate, threads: int, prompt: int, new: int) -> dict[str, Any]:
    """A fresh process up to its last token: seconds to the first one, and its peak memory."""
    return _timed(_command(candidate, "once", threads, prompt, new), candidate.engine)


def long(candidate: Candidate, threads: int, prompt: int, new: int) -> dict[str, Any]:
    """A fresh process with one long prompt: seconds to the first token and to the last, after loading."""
    return _run(_command(candidate, "long", threads, prompt, new), candidate.engine)


def torch_alone(python: str) -> dict[str, Any]:
    """The same for a process that only imports torch."""
    return _timed([python, "-m", "peers.worker", "torch"], "kvilt")


def limits(python: str, threads: int, size: int) -> dict[str, float] | None:
    """Bytes and int8 operations per second that the machine can do now, if kvilt there has its extension."""
    found: dict[str, float] | None
    try:
        found = _run([python, "-m", "peers.worker", "limits", str(threads), str(size)], "kvilt")["limits"]
    except Missing:
        return None
    return found
