"""Documents in Python as over HTTP: texts, token ids, or a title and a text. Saved KV opens through the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvilt
from kvilt import LLM
from kvilt.errors import ParamError

TITLE, TEXT = "The Elbe", "The Elbe rises in the Giant Mountains and ends in the North Sea."
QUESTION = [{"role": "user", "content": "Where does it end?"}]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with kvilt.load(str(smollm2_path), kv_memory="64M", max_context=512) as model:
        yield model


def test_a_title_is_the_first_line(llm: LLM) -> None:
    (stored,) = llm.warm([{"title": TITLE, "text": TEXT}])
    (same,) = llm.warm([f"{TITLE}\n{TEXT}"])
    assert same.found
    assert same.id == stored.id
    plain, titled = (
        llm.chat(QUESTION, documents=[one], max_tokens=1).usage.prompt_tokens
        for one in (TEXT, {"title": TITLE, "text": TEXT})
    )
    assert titled > plain
    ids = llm.tokenizer.encode(TEXT, add_special=False)
    assert llm.generate("So", documents=[ids, {"content": TEXT}], max_tokens=1).usage.prompt_tokens > 2 * len(ids)


@pytest.mark.parametrize("document", [{}, {"title": TITLE}, {"text": 3}, {"text": TEXT, "url": "x"}])
def test_what_is_no_document_is_refused(llm: LLM, document: dict[str, object]) -> None:
    with pytest.raises(ParamError, match="documents"):
        llm.chat(QUESTION, documents=[document])  # type: ignore[list-item]


def test_saved_kv_is_opened_by_the_model(llm: LLM, tmp_path: Path) -> None:
    with llm.prefill("Once upon a time") as kv:
        kv.save(tmp_path / "story.kv")
    with llm.open(tmp_path / "story.kv") as again:
        assert llm.generate(" there", kv=again, max_tokens=2).usage.prefix_hit == again.num_entries
