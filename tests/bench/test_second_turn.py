"""The turns of a chat on a model with recurrent state, through the facade, as bench/second_turn.py counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvilt.executor.load import PAGE_TOKENS

BENCH = Path(__file__).parents[2] / "bench"


def test_every_turn_computes_its_new_tokens_and_at_most_a_page_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import hybrid_gguf
    import second_turn

    turns = second_turn.chat(first=100, question=20, vocab=256)
    done = second_turn.kvilt_turns(hybrid_gguf.write_hybrid(tmp_path / "model.gguf"), turns, tokens=40, threads=1)
    for turn, said in zip(turns, done, strict=True):
        new = len(turn.ids)  # states are small here, so there is one at the end of each page
        assert new <= said["computed"] <= new + PAGE_TOKENS, turn.name
    assert done[3]["answer"] == done[2]["answer"]
