"""The text of PDFs, read in a process of its own that can be killed. Refuses to know requests."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..http.errors import HTTPError
from . import pdf_program

MEMORY_BYTES = 1 << 30
CPU_S = 30
WALL_S = 120.0  # a machine may be busy; the limit that counts is the processor's time
AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class PDFText:
    """What a PDF says."""

    text: str
    pages: int


class PDFReaders:
    """Reads PDFs, a few at a time; others wait."""

    def __init__(self, cpu_s: int = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._limits = (str(memory_bytes), str(cpu_s))
        self._turns = asyncio.Semaphore(AT_ONCE)

    @property
    def available(self) -> bool:
        """Whether the reader is installed."""
        return importlib.util.find_spec("pypdf") is not None

    async def read(self, data: bytes) -> PDFText:
        """The text of a PDF; an error of the client says why there is none."""
        found = importlib.util.find_spec("pypdf")
        if found is None or not found.submodule_search_locations:
            raise HTTPError(400, "this server reads no PDF; its owner can install kvilt[pdf]", code="pdf_off")
        folders = sorted({str(Path(place).parent) for place in found.submodule_search_locations})
        command = [sys.executable, "-I", "-S", "-X", "utf8", pdf_program.__file__, *self._limits, *folders]
        async with self._turns:
            answer = await _ran(command, data)
        try:
            said = json.loads(answer)
        except ValueError:
            raise _unreadable("takes too much time or memory") from None
        if "error" in said:
            raise _unreadable(said["error"])
        if not said["text"]:
            raise _unreadable("has no text; its pages may be pictures")
        return PDFText(said["text"], said["pages"])


async def _ran(command: list[str], data: bytes) -> bytes:
    """What a process writes; nothing where it ends early. A caller that leaves ends it."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=null, env={})
    try:
        async with asyncio.timeout(WALL_S):
            answer, _ = await process.communicate(data)
            return answer
    except TimeoutError:
        return b""
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _unreadable(why: str) -> HTTPError:
    return HTTPError(400, f"the PDF {why}", param="data", code="pdf_unreadable")
