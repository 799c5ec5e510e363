"""Families that kvilt writes to GGUF, read by llama.cpp: the same logits, or what differs.

    python bench/gguf_llama.py [NAME ...] [--llama PYTHON]

NAME is a configuration of `tests/models/families.py`: a small model with random weights of transformers. kvilt writes
it as float32, and both run the same tokens; the table has the largest difference of logits, relative to the largest
logit. Needs the test extra, and llama.cpp as perplexity_llama.py says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # llama.cpp's environment has no torch
    from torch import Tensor

LLAMA = Path("~/.cache/kvilt-bench/llama/bin/python").expanduser()
ROOT = Path(__file__).parent.parent
IDS = [5, 17, 40, 3, 88, 61, 9, 9, 72, 14, 30, 2, 55, 91, 6, 44]
NAMES = [
    "llama", "llama3-rope", "linear-rope", "qwen2", "qwen3", "qwen3-yarn", "phi3", "smollm3", "olmo2", "olmo3",
    "granite", "glm4", "cohere2", "command-r", "starcoder2", "gpt2", "ernie4_5", "mixtral", "qwen2-moe-plain",
    "qwen3-moe-normalized", "olmoe", "glm4-moe", "gpt-oss", "lfm2", "lfm2-moe", "granite-hybrid-moe",
    "qwen3-next-experts",
]  # fmt: skip


def llama_logits(model: str) -> list[float]:
    """Of the last token; in a process with llama_cpp."""
    import llama_cpp

    llm = llama_cpp.Llama(model, logits_all=True, n_ctx=64, n_threads=1, verbose=False)
    llm.eval(IDS)
    return [float(one) for one in llm.scores[len(IDS) - 1]]


def vocabulary(_folder: Path, rows: int) -> dict[str, Any]:
    """Some tokens, since llama.cpp wants them; no prompt here is text."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"[{i}]" for i in range(rows))][:rows]
    tokens[letters.index("Ċ") if letters.index("Ċ") < rows else rows - 1] = "Ċ"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * rows,
        "tokenizer.ggml.merges": [f"{tokens[65]} {tokens[66]}"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
    }


def write(name: str, folder: Path) -> Path:
    """A configuration as GGUF, by kvilt."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "models")]
    from families import random_model, write_checkpoint

    from kvilt.executor import gguf_view
    from kvilt.quant.formats import FORMATS
    from kvilt.quant.unpack import to_float
    from kvilt.weights.gguf_writer import PlannedTensor, write_gguf
    from kvilt.weights.source import open_checkpoint

    gguf_view.gguf_vocabulary = vocabulary
    source, out = open_checkpoint(write_checkpoint(random_model(name), folder / "model")), folder / "model.gguf"
    with source.tensors:
        view = gguf_view.gguf_tensors(source)
        plan = [PlannedTensor(one, view.shape(one), FORMATS["F32"]) for one in view.names()]
        write_gguf(out, view.raw_metadata(), plan, lambda one: to_float(view.tensor(one.name)))
    return out


def kvilt_logits(path: Path) -> Tensor:
    from kvilt.config import RunConfig
    from kvilt.executor.load import load_executor

    executor = load_executor(path, RunConfig(kv_memory=1 << 24, backend="reference", kv_dtype="float32", threads=1))
    with executor.create_kv_cache() as kv:
        made = executor.step(IDS, kv)[0].clone()
    executor.close()
    return made


def compare(name: str, python: Path) -> str:
    """One cell: how far apart the logits are, or why there are none."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = write(name, Path(folder))
        ours = kvilt_logits(path)
        done = subprocess.run([python, __file__, "--child", str(path)], capture_output=True, text=True)
        if done.returncode:
            why = [line for line in done.stderr.splitlines() if "rror" in line]
            return f"not read: {(why or ['no reason given'])[-1][:120]}"
    theirs = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    return f"{float((ours - theirs).abs().max() / ours.abs().max()):.1e}"


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return print(json.dumps(llama_logits(sys.argv[2])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--llama", type=Path, default=LLAMA, metavar="PYTHON", help="an interpreter with llama_cpp")
    options = parser.parse_args()
    print("| configuration | largest difference of logits |\n|---|---|")
    for name in options.names:
        print(f"| {name} | {compare(name, options.llama)} |", flush=True)
    return None


if __name__ == "__main__":
    main()
