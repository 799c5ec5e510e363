"""`kvilt serve` as a child process with keys, limits and a memory that is watched; shared with the soak."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ADMIN = "sk-admin-of-the-bench"
_SIGN = " is served at "


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that runs."""

    pid: int
    host: str
    port: int
    folder: Path  # of its log and its saved KV

    @property
    def alive(self) -> bool:
        """Whether it runs; a child that ended and was not waited for does not."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def rss_bytes(self) -> int:
        """Memory of the server and of every process it started, pages that they share counted for each."""
        return sum(_rss(pid) for pid in family(self.pid))

    def threads(self) -> int:
        with suppress(OSError):
            return len(list(Path(f"/proc/{self.pid}/task").iterdir()))
        return 0

    def cpu_s(self) -> float:
        """Processor time of the server itself so far."""
        with suppress(OSError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def files(self) -> int:
        """Open descriptors."""
        with suppress(OSError):
            return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
        return 0


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found, left = [], [pid]
    while left:
        one = left.pop()
        found.append(one)
        with suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                left += map(int, (task / "children").read_text().split())
    return found


def _rss(pid: int) -> int:
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


@contextmanager
def serving(
    model: str, keys: Sequence[str], *, threads: int, memory_bytes: int, options: Sequence[str] = ()
) -> Iterator[Serving]:
    """A server for the length of a block, with an address space that the machine survives."""
    with tempfile.TemporaryDirectory(prefix="kvilt-hostile-") as folder:
        home = Path(folder)
        (home / "keys").write_text("".join(f"{key}\n" for key in keys))
        (home / "kv").mkdir()
        command = [sys.executable, "-m", "kvilt.cli.main", "serve", "--model", model, "--port", "0"]
        command += ["--threads", str(threads), "--log-level", "warning", "--kv-dir", str(home / "kv")]
        command += ["--api-key-file", str(home / "keys"), "--admin-key", ADMIN, *options]
        log = home / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes)),
            )
        try:
            split = urlsplit(_address(process, log))
            assert split.hostname and split.port
            yield Serving(process.pid, split.hostname, split.port, home)
        finally:
            _end(process)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    while True:
        text = log.read_text(errors="replace")
        for line in text.splitlines(keepends=True):
            if _SIGN in line and line.endswith("\n"):
                return line.partition(_SIGN)[2].strip()
        if process.poll() is not None:
            raise SystemExit(f"kvilt serve does not start: {text.strip()[-2000:] or 'it said nothing'}")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Politely, then not."""
    own = family(process.pid)[1:]
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in own:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
