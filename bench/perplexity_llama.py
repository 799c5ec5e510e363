"""Perplexity in kvilt and in llama.cpp on the same GGUF files, over the same tokens of one fixed text.

    python bench/perplexity_llama.py MODEL.gguf ... [--chunks 4] [--backend native] [--threads 2] [--llama PYTHON]
                                     [--expand] [--keep]

The text is the beginning of `perplexity_text.txt`, in chunks of 512 tokens that start with the model's BOS where it has
one; all other tokens are scored. Both sides tokenize the text, and different tokens are an error. `--keep` writes
llama.cpp's mean negative log-probability of each chunk to `perplexity_llama.json`, with which the tests compare kvilt.
`--expand` gives llama.cpp the weights in float32, so that it rounds no activations to 8 bits (needs gguf).

llama.cpp comes as the package llama-cpp-python in a virtual environment of its own:

    python -m venv ~/.cache/kvilt-bench/llama && ~/.cache/kvilt-bench/llama/bin/pip install llama-cpp-python numpy
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TEXT = Path(__file__).with_name("perplexity_text.txt")
KEPT = Path(__file__).with_name("perplexity_llama.json")
LLAMA = Path("~/.cache/kvilt-bench/llama/bin/python").expanduser()
CHUNK_TOKENS = 512
SCORED_AT_ONCE = 64  # positions whose logits are in memory


def llama_side(model: str, threads: int, count: int) -> dict[str, Any]:
    """The text's tokens, the tokens before a text, and the mean loss of each chunk; in a process with llama_cpp."""
    import llama_cpp

    sizes = {"n_ctx": CHUNK_TOKENS, "n_batch": SCORED_AT_ONCE, "n_threads": threads, "n_threads_batch": threads}
    llm = llama_cpp.Llama(model, logits_all=True, verbose=False, **sizes)
    text = TEXT.read_bytes()
    ids = llm.tokenize(text, add_bos=False)
    added = llm.tokenize(text, add_bos=True)
    head = added[: len(added) - len(ids)]
    chunks = [head + part for part in parts(ids, len(head), count)]
    return {"ids": ids, "head": head, "losses": [mean_loss(llm, chunk) for chunk in chunks]}


def parts(ids: list[int], head: int, count: int) -> list[list[int]]:
    """The text of each chunk, which has `head` tokens before it."""
    size = CHUNK_TOKENS - head
    if len(ids) < count * size:
        raise SystemExit(f"the text has {len(ids) // size} chunks, not {count}")
    return [ids[start : start + size] for start in range(0, count * size, size)]


def mean_loss(llm: Any, chunk: list[int]) -> float:
    """Negative log-probability of a token of the chunk, without its first."""
    import numpy as np

    llm.reset()
    llm.eval(chunk)
    total = 0.0
    for logits, token in zip(llm.scores, chunk[1:], strict=False):
        high = logits.max()
        total += float(np.log(np.exp(logits - high).sum(dtype=np.float64)) + high - logits[token])
    return total / (len(chunk) - 1)


def kvilt_losses(model: str, options: argparse.Namespace, found: dict[str, Any]) -> list[float]:
    """The mean loss of each chunk."""
    import kvilt
    from kvilt.bench.perplexity import measure

    with kvilt.load(model, backend=options.backend, threads=options.threads, kv_memory="512M") as llm:
        head, ids = list(llm.tokenizer.head), llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special=False)
        if ids != found["ids"] or head != found["head"]:
            raise SystemExit(f"{model}: kvilt and llama.cpp read different tokens")
        texts = parts(ids, len(head), options.chunks)
        return [math.log(measure(llm.executor, text, CHUNK_TOKENS, head=head).perplexity) for text in texts]


def in_llama(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the other interpreter finds for a file, or for a copy of it in float32."""
    with tempfile.TemporaryDirectory() as folder:
        if options.expand:
            from peers.make_q4_0 import dequantize

            dequantize(model, expanded := Path(folder) / "float32.gguf")
            model = expanded
        child = [str(options.llama), __file__, "--child", str(model), str(options.threads), str(options.chunks)]
        done = subprocess.run(child, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return print(json.dumps(llama_side(sys.argv[2], *map(int, sys.argv[3:]))))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama", type=Path, default=LLAMA, metavar="PYTHON", help="an interpreter with llama_cpp")
    parser.add_argument("--expand", action="store_true")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    print("| file | kvilt | llama.cpp | difference |\n|---|---|---|---|", flush=True)
    for model in options.models:
        found = in_llama(model, options)
        ours = kvilt_losses(str(model), options, found)
        mine, theirs = (math.exp(sum(losses) / len(losses)) for losses in (ours, found["losses"]))
        print(f"| {model.stem} | {mine:.4f} | {theirs:.4f} | {100 * (mine / theirs - 1):+.2f} % |", flush=True)
        kept[f"{model.name}, float32" if options.expand else model.name] = [round(loss, 6) for loss in found["losses"]]
    if options.keep:
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
