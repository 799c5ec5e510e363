"""Loading a large model from a file that is not in the system's cache: seconds beside a plain read, and memory.

    python bench/cold_load.py [--shape 8b] [--format Q4_0] [--folder /tmp] [--rounds 2] [--layers N]

Writes a GGUF file with random weights in the shape of Llama-3.1-8B, Qwen3-30B-A3B or SmolLM2-135M (with the gguf
package of the test extra; --keep leaves it there). A round reads the file from beginning to end, and then loads it with
kvilt in a process of its own, each time after the system was asked to forget the file. Memory is the largest of all
private memory of that process (its mapped file is not counted), beside the bytes of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.memory import status_bytes

from kvilt.quant.encode import quantize

VOCABULARY = 49152
LLAMA_8B = {"width": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "head": 128, "experts": 0}
QWEN3_30B = {"width": 2048, "inner": 768, "layers": 48, "heads": 32, "kv_heads": 4, "head": 128, "experts": 128}
SMOLLM2 = {"width": 576, "inner": 1536, "layers": 30, "heads": 9, "kv_heads": 3, "head": 64, "experts": 0}
SHAPES = {"8b": ("llama", LLAMA_8B), "30b-a3b": ("qwen3moe", QWEN3_30B), "135m": ("llama", SMOLLM2)}
PIECE = 8 << 20


def tensors(arch: str, of: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes; those with one dimension are norms."""
    width, queries, keys = of["width"], of["heads"] * of["head"], of["kv_heads"] * of["head"]
    yield "token_embd.weight", (VOCABULARY, width)
    yield "output.weight", (VOCABULARY, width)
    yield "output_norm.weight", (width,)
    for layer in range(of["layers"]):
        at = f"blk.{layer}."
        yield at + "attn_norm.weight", (width,)
        yield at + "ffn_norm.weight", (width,)
        if arch == "qwen3moe":
            yield at + "attn_q_norm.weight", (of["head"],)
            yield at + "attn_k_norm.weight", (of["head"],)
            yield at + "ffn_gate_inp.weight", (of["experts"], width)
        yield at + "attn_q.weight", (queries, width)
        yield at + "attn_k.weight", (keys, width)
        yield at + "attn_v.weight", (keys, width)
        yield at + "attn_output.weight", (width, queries)
        several, end = ((of["experts"],), "_exps") if of["experts"] else ((), "")
        yield f"{at}ffn_gate{end}.weight", (*several, of["inner"], width)
        yield f"{at}ffn_up{end}.weight", (*several, of["inner"], width)
        yield f"{at}ffn_down{end}.weight", (*several, width, of["inner"])


def write(path: Path, arch: str, of: dict[str, int], kind: str) -> None:
    """A file of random codes with ordinary scales."""
    import gguf

    out = gguf.GGUFWriter(path, arch)
    out.add_context_length(4096)
    out.add_embedding_length(of["width"])
    out.add_block_count(of["layers"])
    out.add_feed_forward_length(of["inner"])
    out.add_head_count(of["heads"])
    out.add_head_count_kv(of["kv_heads"])
    out.add_key_length(of["head"])
    out.add_value_length(of["head"])
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(500000.0)
    if of["experts"]:
        out.add_expert_count(of["experts"])
        out.add_expert_used_count(8)
        out.add_expert_feed_forward_length(of["inner"])
    bytes_ = [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]  # as GPT-2 writes them
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([*map(chr, bytes_), "th", *(f"<{i}>" for i in range(len(bytes_) + 1, VOCABULARY))])
    out.add_token_merges(["t h"])
    out.add_token_types([1] * VOCABULARY)
    out.add_eos_token_id(0)
    type_ = gguf.GGMLQuantizationType[kind]
    elements, nbytes = gguf.GGML_QUANT_SIZES[type_]
    some = quantize(torch.randn(256, 4096, generator=torch.manual_seed(0)) * 0.02, kind).numpy().reshape(-1)
    names = list(tensors(arch, of))
    for name, shape in names:
        if len(shape) == 1 or "gate_inp" in name:
            out.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            stored = (*shape[:-1], shape[-1] // elements * nbytes)
            out.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), type_)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    for name, shape in names:
        if len(shape) == 1 or "gate_inp" in name:
            out.write_tensor_data(np.ones(shape, np.float32))
        else:
            out.write_tensor_data(np.resize(some, int(np.prod(shape)) // elements * nbytes))
    out.close()


def forget(path: Path) -> None:
    """Ask the system to drop the file's pages."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read_s(path: Path) -> float:
    started_s = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        room = bytearray(PIECE)
        while file.readinto(room):
            pass
    return time.perf_counter() - started_s


def load(path: Path) -> dict[str, Any]:
    """In a process of its own: seconds after the imports, and the largest private memory."""
    from kvilt.config import RunConfig
    from kvilt.executor.load import load_executor

    most, done = [status_bytes("RssAnon")], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            most.append(status_bytes("RssAnon"))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    before, started_s = status_bytes("RssAnon"), time.perf_counter()
    executor = load_executor(path, RunConfig(kv_memory=1 << 28, max_context=1024))
    seconds = time.perf_counter() - started_s
    done.set()
    watching.join()
    return {"seconds": seconds, "bytes": max(most) - before, "weights": executor.weight_bytes}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return print(json.dumps(load(Path(sys.argv[2]))))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--format", default="Q4_0")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the shape has")
    parser.add_argument("--keep", action="store_true", help="leave the file there")
    options = parser.parse_args()
    arch, of = SHAPES[options.shape]
    of = {**of, "layers": options.layers or of["layers"]}
    path = options.folder / f"kvilt-random-{options.shape}-{options.format}-{of['layers']}.gguf"
    if not path.exists():
        write(path, arch, of, options.format)
    size = path.stat().st_size
    reads, loads = [], []
    for _ in range(options.rounds):
        forget(path)
        reads.append(read_s(path))
        forget(path)
        child = subprocess.run([sys.executable, __file__, "--child", str(path)], check=True, capture_output=True)
        loads.append(json.loads(child.stdout.splitlines()[-1]))
    read, loaded = statistics.median(reads), statistics.median(one["seconds"] for one in loads)
    print(f"{path.name}: {size / 1e9:.2f} GB, {loads[0]['weights'] / 1e9:.2f} GB of packed weights")
    print(f"plain read  {read:6.1f} s  {size / read / 1e6:6.0f} MB/s")
    print(f"kvilt load  {loaded:6.1f} s  {size / loaded / 1e6:6.0f} MB/s  ({loaded / read:.2f} times the read)")
    most = max(one["bytes"] for one in loads)
    print(f"largest private memory {most / 1e9:.2f} GB, {most / size:.2f} times the file")
    if not options.keep:
        path.unlink()
    return None


if __name__ == "__main__":
    main()
