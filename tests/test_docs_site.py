"""The docs as a site: pages have a place, public names a reference, and shell commands options that exist."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from commands import kvilt

import kvilt as package

HERE = Path(__file__).parent.parent
DOCS = HERE / "docs"


def _bench(name: str) -> ModuleType:
    spec = spec_from_file_location(name, HERE / "bench" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SHELL = _bench("docs_shell")
COMMANDS = [command for page in SHELL.PAGES for command in SHELL.commands(page)]
OURS = sorted({command.text for command in COMMANDS if re.match(r"kvilt [a-z]", command.text)})
SUBCOMMANDS = {("bench", "serve"), ("lora", "merge"), ("cluster", "up"), ("cluster", "down"), ("cluster", "status")}


def pages(nav: Any) -> Iterator[str]:
    match nav:
        case str():
            yield nav
        case dict():
            for below in nav.values():
                yield from pages(below)
        case list():
            for below in nav:
                yield from pages(below)


def test_every_page_has_one_place_in_the_navigation() -> None:
    text = (HERE / "mkdocs.yml").read_text(encoding="utf-8")
    placed = sorted(pages(yaml.safe_load(text)["nav"]))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert placed == sorted(page for page in there if not page.startswith("notebooks/"))  # those are opened in Jupyter


def test_every_public_name_is_in_the_reference() -> None:
    shown = " ".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    assert set(re.findall(r"^::: kvilt\.(\w+)$", shown, re.MULTILINE)) == set(package.__all__)


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    missing = []
    for path, anchor in re.findall(r"\]\(((?:docs|examples)[^)#]*)(?:#([^)]*))?\)", text):
        target = HERE / path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(f"{path}#{anchor}")
    assert missing == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@cache
def told(command: tuple[str, ...]) -> str:
    done = kvilt(*command, "--help", COLUMNS="220")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("text", OURS)
def test_commands_of_the_docs_have_options_that_exist(text: str) -> None:
    words = tuple(text.split()[1:])
    shown = told(words[:2] if words[:2] in SUBCOMMANDS else words[:1])
    for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", text):
        assert re.search(rf"{re.escape(option)}(?![a-z-])", shown), option


def test_programs_that_the_docs_run_are_there() -> None:
    named = {
        path for command in COMMANDS for path in re.findall(r"\b(?:bench|examples|deploy)/[\w./]+\w", command.text)
    }
    assert [path for path in sorted(named - {"deploy/.env"}) if not (HERE / path).exists()] == []


def test_every_reason_to_leave_a_command_out_is_needed() -> None:
    unused = [why for pattern, why in SHELL.LEFT_OUT if not any(re.search(pattern, one.text) for one in COMMANDS)]
    assert unused == []
    assert len([one for one in COMMANDS if not one.left_out]) > 30
