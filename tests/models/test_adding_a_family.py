"""The worked example of adding a family runs, and the page quotes it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from kvilt.models.families import registry

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "add_a_family.py"


def test_the_example_adds_a_family(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", registry.FAMILIES)  # taken back at the end
    spec = importlib.util.spec_from_file_location("add_a_family", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert "differ by" in capsys.readouterr().out


def test_the_example_is_short_and_the_page_quotes_it() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 120
    (quoted,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding_a_family.md").read_text(), re.S)
    assert quoted in source
