"""Models of the hub that many users ask for by a short name: where they are, and what they take.

Sizes are those of the files; a run takes as much memory for the weights, and the KV pool beside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model that one command runs. Its architecture is compared with transformers by kvilt's tests."""

    name: str  # as users of other programs call it
    reference: str
    size_gb: float
    tools: bool  # whether its chat template knows tools


SUGGESTED: Sequence[HubModel] = (
    HubModel("smollm2", "smollm2", 0.1, tools=False),
    HubModel("qwen2.5", "hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q4_k_m.gguf", 0.5, tools=True),
    HubModel("qwen3", "hf:Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf", 0.6, tools=True),
    HubModel("llama3.2", "hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Llama-3.2-1B-Instruct-Q4_K_M.gguf", 0.8, tools=True),
    HubModel("smollm2-1.7b", "hf:HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", 1.1, tools=False),
    HubModel("gemma2", "hf:bartowski/gemma-2-2b-it-GGUF:gemma-2-2b-it-Q4_K_M.gguf", 1.7, tools=False),
    HubModel("qwen3-4b", "hf:Qwen/Qwen3-4B-GGUF:Qwen3-4B-Q4_K_M.gguf", 2.5, tools=True),
    HubModel(
        "mistral", "hf:bartowski/Mistral-7B-Instruct-v0.3-GGUF:Mistral-7B-Instruct-v0.3-Q4_K_M.gguf", 4.4, tools=True
    ),
    HubModel(
        "llama3.1",
        "hf:bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf",
        4.9,
        tools=True,
    ),
)


def suggestion(name: str, suggested: Sequence[HubModel] = SUGGESTED) -> str:
    """What to write in the place of a name that is no model here."""
    wanted = _letters(name)
    named = [one for one in suggested if _letters(one.name) in wanted or (wanted and wanted in _letters(one.name))]
    if not named:
        return "docs/models.md lists models to begin with"
    best = max(named, key=lambda one: len(_letters(one.name)) if _letters(one.name) in wanted else 0)
    return f"to run {best.name} ({best.size_gb} GB): pip install 'kvilt[hub]', then --model {best.reference}"


def table(suggested: Sequence[HubModel] = SUGGESTED) -> str:
    """The table of docs/models.md."""
    head = ("name elsewhere", "`--model`", "file, and memory for weights", "tools by")
    rows = [
        (one.name, f"`{one.reference}`", f"{one.size_gb} GB", "its template" if one.tools else "a prompt of kvilt")
        for one in suggested
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _letters(name: str) -> str:
    """A name without what users write differently: llama3.2:1b, Llama-3.2 and llama3-2 begin alike."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
