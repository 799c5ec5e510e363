"""Which file or folder each runtime is given for a model, and which interpreter runs it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

DEV = Path.home() / ".cache/kvilt-dev"
BENCH = Path.home() / ".cache/kvilt-bench"
SMOLLM2, Q4_0 = "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_0.gguf"
QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"

MODELS = MappingProxyType({"smollm2-q4_1": DEV / SMOLLM2, "smollm2-q4_0": BENCH / Q4_0, "qwen-q4_k_m": DEV / QWEN})
# Runtimes with formats of their own, and the folder convert.py makes for them behind the name of the GGUF.
FOLDERS = MappingProxyType(
    {
        "onnxruntime-genai": "onnx-int4",
        "openvino-genai": "openvino-int4",
        "ctranslate2": "ct2-int8",
        "transformers": "hf",
        "transformers-bf16": "hf-bf16",
    }
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A runtime, what it reads, and the Python it lives in."""

    name: str  # as shown
    engine: str  # as in peers.engines
    model: Path
    python: str


def converted(gguf: Path, kind: str) -> Path:
    """Where the weights of a GGUF are in another format."""
    return BENCH / f"{gguf.stem}-{kind}"


def candidates(model: str, only: list[str], pythons: dict[str, str]) -> list[Candidate]:
    """Every runtime that can read the model, in the order of the tables."""
    gguf = MODELS.get(model, Path(model))
    if not gguf.is_file():
        raise SystemExit(f"there is no model {gguf}; known are {', '.join(MODELS)}, or give a .gguf file")
    found = [("kvilt", "kvilt", gguf), ("llama.cpp", "llama.cpp", gguf)]
    base = gguf
    if gguf.name == SMOLLM2:
        found.append(("llama.cpp-q4_0", "llama.cpp", BENCH / Q4_0))  # its fastest format
    if gguf.name == Q4_0:
        base = DEV / SMOLLM2
    found += [(name, name, converted(base, kind)) for name, kind in FOLDERS.items()]
    names = [name for name, _, _ in found]
    if unknown := [name for name in only if name not in names]:
        raise SystemExit(f"there is no engine {unknown[0]!r} for {model}; known are {', '.join(names)}")
    return [
        Candidate(name, engine, path, pythons.get(name) or pythons.get(engine) or _python(engine))
        for name, engine, path in found
        if not only or name in only
    ]


def _python(engine: str) -> str:
    if engine == "kvilt":
        return sys.executable
    own = BENCH / "venv/bin/python"
    return os.environ.get("KVILT_PEERS_PYTHON") or (str(own) if own.exists() else sys.executable)
