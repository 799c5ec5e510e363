"""Every format of packed weights on one model: speed beside Q4_0 and Q8_0 in one run, and what the kernels round.

    python bench/formats.py MODEL.gguf [--formats GPTQ,AWQ,...] [--rounds 7] [--threads 2] [--chunks 1] [--cpu-time]

The matrices of the layers are packed anew in each format, by the plainest rounding; embedding and head stay as they are
in the file, the same for all. All models are in memory, and each round times a prompt of 512 tokens and 64 steps of
decoding of each, one after the other. Ratios are medians over the rounds of a round's own ratio. The last column is the
perplexity by native kernels over that by float32 on the same weights (`--chunks` of 512 tokens; 0: not measured).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvilt
from kvilt.bench.perplexity import measure
from kvilt.config import RunConfig
from kvilt.executor.load import build_executor
from kvilt.executor.protocol import Executor
from kvilt.quant.encode import nibble_pairs, quantize
from kvilt.quant.formats import FORMATS
from kvilt.quant.int_groups import blocks_of
from kvilt.quant.tensor import QuantTensor, Weight
from kvilt.quant.unpack import to_float
from kvilt.text.tokenizer import Tokenizer
from kvilt.weights.source import open_checkpoint
from kvilt.weights.tensor_storage import TensorStorage

TEXT = Path(__file__).parent / "perplexity_text.txt"
PROMPT_TOKENS, STEPS = 512, 64
FP4_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def of_ggml(name: str) -> Callable[[Tensor], Weight]:
    return lambda x: QuantTensor.of_blocks(FORMATS[name], (x.shape[0], x.shape[1]), quantize(x, name))


def groups_of(x: Tensor) -> Tensor:
    """[outputs, groups, inputs of a group]: 128, or what divides the inputs."""
    size = next(size for size in (128, 64, 32) if x.shape[1] % size == 0)
    return x.view(len(x), -1, size)


def gptq(x: Tensor) -> Weight:
    """Zeros in the middle, as `sym` has them."""
    parts = groups_of(x)
    scales = (parts.abs().amax(-1) / 7).half().clamp(min=1e-7)
    codes = (parts / scales.float()[..., None]).round().clamp(-8, 7) + 8
    return blocks_of(codes.to(torch.uint8).view(x.shape), scales, torch.full(scales.shape, 8, dtype=torch.int32), 4)


def awq(x: Tensor) -> Weight:
    """Zeros anywhere."""
    parts = groups_of(x)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().clamp(min=1e-7)
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    return blocks_of(codes.to(torch.uint8).view(x.shape), scales, zeros.int(), 4)


def float8(kind: str) -> Callable[[Tensor], Weight]:
    def pack(x: Tensor) -> Weight:
        rows, columns = x.shape
        if kind == "tensor":
            scales = x.abs().amax().view(1) / 448
        elif kind == "channel":
            scales = x.abs().amax(1, keepdim=True) / 448
        else:
            padded = torch.nn.functional.pad(x, (0, -columns % 128, 0, -rows % 128))
            scales = padded.view(-(-rows // 128), 128, -1, 128).abs().amax((1, 3)) / 448
        wide = scales
        if kind == "block":
            wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return QuantTensor.of_float8((x / wide).clamp(-448, 448).to(torch.float8_e4m3fn), scales)

    return pack


def mxfp4(x: Tensor) -> Weight:
    parts = x.view(-1, 32)
    exponents = (torch.frexp(parts.abs().amax(1).clamp(min=1e-30)).exponent - 3).clamp(-126, 127)
    sizes = parts.abs() / torch.ldexp(torch.ones(()).expand(len(parts)), exponents)[:, None]
    codes = (sizes[..., None] - FP4_LEVELS).abs().argmin(-1) | ((parts < 0).long() << 3)
    packed = torch.cat(((exponents + 127)[:, None].to(torch.uint8), nibble_pairs(codes.to(torch.uint8))), 1)
    return QuantTensor.of_blocks(FORMATS["MXFP4"], (x.shape[0], x.shape[1]), packed.view(len(x), -1))


PACKERS: dict[str, Callable[[Tensor], Weight]] = {
    "Q4_0": of_ggml("Q4_0"),
    "GPTQ": gptq,
    "AWQ": awq,
    "Q8_0": of_ggml("Q8_0"),
    "FP8 tensor": float8("tensor"),
    "FP8 channel": float8("channel"),
    "FP8 block": float8("block"),
    "MXFP4": mxfp4,
}
BASES = {"GPTQ": "Q4_0", "AWQ": "Q4_0", "FP8 tensor": "Q8_0", "FP8 channel": "Q8_0", "FP8 block": "Q8_0"}


class Repacked:
    """A checkpoint's tensors, with the matrices of its layers in another format."""

    def __init__(self, source: Any, pack: Callable[[Tensor], Weight]) -> None:
        self._source, self._pack = source, pack

    def tensor(self, name: str) -> Weight:
        found = self._source.tensor(name)
        layer = name.startswith("blk.") and len(self._source.shape(name)) == 2
        return self._pack(to_float(found)) if layer else found

    def storage(self, name: str) -> TensorStorage:
        found: TensorStorage = self._source.storage(name)
        return found

    def digest(self) -> str:
        return f"{id(self)}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def build(model: Path, name: str, backend: str, threads: int) -> Executor:
    checkpoint = open_checkpoint(model)
    repacked = replace(checkpoint, tensors=Repacked(checkpoint.tensors, PACKERS[name]))
    return build_executor(repacked, RunConfig(backend=backend, threads=threads, kv_memory=256 << 20, max_context=2048))


def timed(executor: Executor, prompt: list[int], now: Callable[[], float]) -> tuple[float, float]:
    """Tokens per second of the prompt and of decoding."""
    greedy = kvilt.SamplingParams(temperature=0.0)
    with executor.create_kv_cache() as kv:
        began_s = now()
        first = int(executor.step([prompt], kv).argmax())
        read_s = now()
        executor.sample_tokens(STEPS, [[first]], kv, params=greedy)
        return len(prompt) / (read_s - began_s), STEPS / (now() - read_s)


def perplexities(model: Path, name: str, native: Executor, ids: list[int], head: Any) -> tuple[float, float]:
    """By native kernels, and by float32 on the same weights."""
    exact = build(model, name, "reference", 2)
    try:
        found = [measure(one, ids, PROMPT_TOKENS, head=head).perplexity for one in (native, exact)]
        return found[0], found[1]
    finally:
        exact.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", default=",".join(PACKERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds: a busy machine, --threads 1")
    options = parser.parse_args()
    now = time.process_time if options.cpu_time else time.perf_counter
    with kvilt.load(options.model, kv_memory="64M", max_context=PROMPT_TOKENS) as llm:
        tokenizer: Tokenizer = llm.tokenizer
        ids = tokenizer.encode(TEXT.read_text(), add_special=False)[: PROMPT_TOKENS * max(1, options.chunks)]
    executors = {name: build(options.model, name, "native", options.threads) for name in options.formats.split(",")}
    for executor in executors.values():
        timed(executor, ids[:PROMPT_TOKENS], now)  # records the steps
    prompt = ids[:PROMPT_TOKENS]
    rounds = [{name: timed(one, prompt, now) for name, one in executors.items()} for _ in range(options.rounds)]
    for name, executor in executors.items():
        base = BASES.get(name, "Q8_0" if name == "MXFP4" else name)
        cells = [name]
        for which, label in enumerate(("prefill", "decode")):
            own = statistics.median(one[name][which] for one in rounds)
            ratio = statistics.median(one[name][which] / one[base][which] for one in rounds)
            cells.append(f"{label} {own:,.0f} tokens/s, {ratio:.2f} of {base}")
        if options.chunks:
            by_native, exact = perplexities(options.model, name, executor, ids, tokenizer.head)
            cells.append(f"perplexity {by_native:.3f}, {by_native / exact - 1:+.2%} of float32's")
        print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
