"""The scribe of the tests of KV, for indexes whose events are followed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from stores import _redis, proxy, redis_server  # noqa: F401 (fixtures)

from kvilt.text.tokenizer import Tokenizer, from_gguf

_SPEC = importlib.util.spec_from_file_location("kv_conftest", Path(__file__).parents[1] / "kv" / "conftest.py")
assert _SPEC is not None and _SPEC.loader is not None
_KV = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_KV)


@pytest.fixture
def scribe() -> Any:
    return _KV.Scribe()


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(smollm2_path)
