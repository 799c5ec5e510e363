"""The page about interfaces: every example runs, in order, with a tiny model in the place of the default one."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from tiny import write_tiny_of_bytes

import kvilt

PAGE = Path(__file__).parents[2] / "docs" / "compat.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, load = write_tiny_of_bytes(tmp_path / "model"), kvilt.load
    monkeypatch.setattr(kvilt, "load", lambda _name: load(folder, kv_memory=1 << 22, threads=1), raising=False)
    names: dict[str, object] = {}
    assert len(BLOCKS) > 8
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"compat.md, example {number}", "exec"), names)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


def test_every_interface_has_an_example() -> None:
    text = "\n".join(BLOCKS)
    for name in kvilt.__all__:
        if name.endswith("Interface") and name != "ModelExecutorInterface":
            assert name in text
    for name in ("LlmExecutor(", "AsyncLlmExecutor(", "(DecoderOnlyLLM)", "ModelInfo", "UnifiedItem", "embed("):
        assert name in text


def test_the_page_names_what_is_exported() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(named) == 6
    assert named <= set(kvilt.__all__)
