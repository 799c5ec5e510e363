"""The example inside Hugging Face transformers, run as it stands, with a tiny model in the place of SmolLM2."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny_of_bytes

from kvilt.llm import LLM

# It fetches its model from the Hub; here a tiny one stands in for it.
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "hub" / "transformers_blend.py"


def test_generate_of_transformers_has_the_numbers_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers, hub = pytest.importorskip("transformers"), pytest.importorskip("huggingface_hub")
    config = write_tiny_of_bytes(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "mistral"}))
    monkeypatch.setattr(hub, "snapshot_download", lambda _name: str(tmp_path))
    seen: dict[str, Any] = {}
    generation = transformers.MistralForCausalLM

    def watch(model: Any, *args: Any, **kwargs: Any) -> Any:
        out = generate(model, *args, **kwargs, return_dict_in_generate=True, output_logits=True)
        seen["theirs"] = out.logits[0][0].log_softmax(-1).topk(5)
        return out.sequences

    def asked(llm: Any, *args: Any, **kwargs: Any) -> Any:
        done = blend(llm, *args, **kwargs, logprobs=5)
        seen["ours"], seen["recomputed"] = done.logprobs[0], done.usage.blended_recomputed
        return done

    generate, blend = generation.generate, LLM.blend
    monkeypatch.setattr(generation, "generate", watch)
    monkeypatch.setattr(LLM, "blend", asked)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    theirs, ours = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()[:2]]
    assert theirs == ours != ""
    assert seen["recomputed"] > 10
    assert list(seen["ours"].top_ids) == seen["theirs"].indices.tolist()
    torch.testing.assert_close(torch.tensor(seen["ours"].top_logprobs), seen["theirs"].values, rtol=0, atol=1e-4)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
