"""`kvilt quantize` beside llama.cpp's own quantizer: sizes and perplexities of the same model in the same types.

    python bench/quantize_llama.py MODEL.gguf [--types Q8_0,Q6_K,Q5_K,Q4_K,Q4_0] [--chunks 7] [--expand]
                                   [--llama PYTHON]

`--expand` begins with the model's weights in float32 (needs gguf), for both quantizers: for a model of which there is
only a quantized file. All files are read by kvilt, over the same tokens of `perplexity_text.txt`; llama.cpp then reads
one chunk of each of our files. The importance matrix is that of another text, `everyday_questions.tsv`. For llama.cpp
see perplexity_llama.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from perplexity_llama import CHUNK_TOKENS, LLAMA, TEXT, llama_side

if TYPE_CHECKING:  # llama.cpp's environment has no torch
    from torch import Tensor

HERE = Path(__file__).parent
QUESTIONS = HERE / "everyday_questions.tsv"
IMATRIX_TOKENS = 16384
FILE_TYPES = {"Q8_0": 7, "Q6_K": 18, "Q5_K": 16, "Q4_K": 14, "Q4_0": 2}  # of llama.cpp, the S variants


def llama_quantize(source: str, out: str, file_type: int) -> None:
    """In a process with llama_cpp."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = file_type, True, 2
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), params):
        raise SystemExit("llama.cpp could not quantize the model")


def in_llama(python: Path, call: str, *given: object) -> str:
    """What a function of this module returns in llama.cpp's environment, as JSON."""
    code = f"import json, quantize_llama as q; print(json.dumps(q.{call}(*json.loads(r'''{json.dumps(given)}'''))))"
    run = subprocess.run([python, "-c", code], cwd=HERE, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr[-2000:])
    return run.stdout.strip().splitlines()[-1]


def perplexity(path: Path, chunks: int) -> float:
    """In kvilt."""
    import kvilt
    from kvilt.bench.perplexity import measure

    with kvilt.load(path, kv_memory="512M", max_context=CHUNK_TOKENS) as llm:
        ids = llm.tokenizer.encode(TEXT.read_text(), add_special=False)[: chunks * CHUNK_TOKENS]
        return measure(llm.executor, ids, CHUNK_TOKENS, head=llm.tokenizer.head).perplexity


def quantize(source: Path, kinds: dict[str, Path], name: str, known: dict[str, Tensor]) -> None:
    """In kvilt, without and with an importance matrix."""
    from kvilt.executor.gguf_view import gguf_tensors
    from kvilt.weights.quantize import quantize_tensors
    from kvilt.weights.source import open_checkpoint

    checkpoint = open_checkpoint(source)
    with checkpoint.tensors:
        for kind, file in kinds.items():
            quantize_tensors(gguf_tensors(checkpoint), file, name, known if "imatrix" in kind else None)


def importances(source: Path) -> dict[str, Tensor]:
    """The importance matrix of the questions, once for all types."""
    from kvilt.cli.quantize import read_importance
    from kvilt.executor.gguf_view import gguf_tensors
    from kvilt.weights.source import open_checkpoint

    checkpoint = open_checkpoint(source)
    with checkpoint.tensors:
        return read_importance(checkpoint, gguf_tensors(checkpoint), QUESTIONS, IMATRIX_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--types", default=",".join(FILE_TYPES))
    parser.add_argument("--chunks", type=int, default=7)
    parser.add_argument("--llama", type=Path, default=LLAMA)
    parser.add_argument("--expand", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = options.model
        if options.expand:
            from peers.make_q4_0 import dequantize

            dequantize(options.model, source := Path(folder) / "float32.gguf")
        print(f"{options.model.name}: perplexity {perplexity(source, options.chunks):.4f}", flush=True)
        known = importances(source)
        for name in options.types.split(","):
            files = {kind: Path(folder) / f"{kind}.gguf" for kind in ("llama.cpp", "kvilt", "kvilt, imatrix")}
            in_llama(options.llama, "llama_quantize", str(source), str(files["llama.cpp"]), FILE_TYPES[name])
            quantize(source, {kind: file for kind, file in files.items() if kind != "llama.cpp"}, name, known)
            theirs = None
            for kind, file in files.items():
                found = perplexity(file, options.chunks)
                theirs = theirs or found
                read = ""
                if kind != "llama.cpp":
                    loss = json.loads(in_llama(options.llama, "llama_side", str(file), 2, 1))["losses"][0]
                    read = f", llama.cpp reads it (loss of a chunk {loss:.4f})"
                size = file.stat().st_size / 1e6
                print(
                    f"{name}, {kind}: {size:.1f} MB, perplexity {found:.4f} ({found / theirs - 1:+.2%}){read}",
                    flush=True,
                )
                file.unlink()


__all__ = ["llama_quantize", "llama_side"]

if __name__ == "__main__":
    main()
