"""The pages about the server name tests, routes and fields that are there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from running import Running

from kvilt.cli.options import DRAFTS, ENGINE, RUNTIME, SERVER, STORE
from kvilt.cli.serve_app import serve
from kvilt.server.openai.schema import ChatRequest, CompletionRequest

HERE = Path(__file__).parents[2]
DOCS = {name: (HERE / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("serving", "security")}


def test_every_test_that_is_named_exists() -> None:
    there = {
        name for path in (HERE / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", DOCS["security"]))
    assert len(named) > 40
    assert named <= there
    for path in re.findall(r"`(tests/\S+\.py)`", DOCS["security"]):
        assert (HERE / path).exists()


def test_every_option_that_is_named_exists() -> None:
    groups = (SERVER, ENGINE, STORE, DRAFTS, RUNTIME)
    known = {f"--{name.replace('_', '-')}" for group in groups for name in group.options}
    known |= {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}
    flags = [name for name, option in SERVER.options.items() if option.type is bool]
    known |= {f"--no-{name.replace('_', '-')}" for name in flags}
    text = re.sub(r"`python [^`]*`", "", DOCS["security"] + DOCS["serving"])  # programs have options of their own
    named = set(re.findall(r"(--[a-z][a-z-]+)", text)) - {"--help"}
    assert named <= known, named - known


def test_every_route_is_told_of(server: Running) -> None:
    with server.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
    for path in paths:
        parts = path.replace("{name}", "{id}").replace("{handle}", "{id}")
        assert parts in DOCS["serving"] or f"/{parts.rpartition('/')[2]}`" in DOCS["serving"], path


def test_every_field_is_told_of() -> None:
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    missing = {name for name in fields if f"`{name}" not in DOCS["serving"]}
    assert missing == set()
