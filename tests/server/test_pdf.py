"""PDFs as documents: read by a process of its own, within limits, and refused with the reason."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import sys
from typing import Any

import pytest
from pdf_file import one_page
from running import Running

from kvilt.server.documents import pdf, pdf_program
from kvilt.server.documents.pdf import PDFReaders
from kvilt.server.http.errors import HTTPError

SAYS = "The Elbe ends in the North Sea."


def ask(server: Running, data: bytes | str) -> Any:
    sent = data if isinstance(data, str) else base64.b64encode(data).decode()
    return server.http().post("/v1/documents/text", json={"data": sent})


def test_a_pdf_is_text(server: Running) -> None:
    assert ask(server, one_page(SAYS)).json() == {"text": SAYS, "pages": 1}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"no PDF at all", "no PDF"),
        ("***", "no base64"),
        ("Ä", "no base64"),
        (b"%PDF-1.4\n" + bytes(2000), "cannot be read"),
        (one_page(SAYS)[:200], "cannot be read"),
        (one_page(""), "has no text"),
    ],
)
def test_what_is_none_is_refused_with_the_reason(server: Running, data: bytes | str, says: str) -> None:
    refused = ask(server, data)
    assert refused.status_code == 400
    assert says in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "data"


def test_a_reader_over_its_limits_is_an_error_of_the_file() -> None:
    async def read(**limits: int) -> None:
        await PDFReaders(**limits).read(one_page(SAYS))

    with pytest.raises(HTTPError, match="too much"):
        asyncio.run(read(memory_bytes=32 << 20))


def test_a_reader_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(pdf, "WALL_S", 0.5)
    assert asyncio.run(pdf._ran(waits, b"")) == b""


def test_without_the_extra_it_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "pypdf" else honest(name, *more)
    )
    refused = ask(server, one_page(SAYS))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "pdf_off")


def test_long_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_program, "MAX_CHARACTERS", 5)
    assert "more than 5 characters" in str(pdf_program._text(one_page(SAYS))["error"])
    monkeypatch.setattr(pdf_program, "MAX_PAGES", 0)
    assert "more than 0 pages" in str(pdf_program._text(one_page(SAYS))["error"])
