"""The table of formats in docs/models.md, from the formats and the backends there are.

`python -m tests.quant.format_table` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from kvilt.ops.reference import ReferenceOps
from kvilt.ops.select import BACKENDS, CPU
from kvilt.ops.triton.packed import packs
from kvilt.quant.formats import FLOAT8, FORMATS, Format
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import UNPACKED_FORMATS, dequantize

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- formats: python -m tests.quant.format_table -->", "<!-- end of formats -->"
HEADINGS = ("container", "kind", "bits a weight", "CPU", "weights on a CPU", "GPU")
SAFETENSORS = ("F32", "F16", "BF16")
# Kinds of safetensors that are read as blocks of a GGML format: docs/quantize.md says when as which.
READ_AS = {
    "GPTQ, 4 bits": ("Q4_0", "Q4_1"),
    "GPTQ, 8 bits": ("Q8_0",),
    "GPTQ with act-order": ("F16",),
    "AWQ, 4 bits": ("Q4_0", "Q4_1"),
    "compressed-tensors, 4 bits": ("Q4_0", "Q4_1"),
    "compressed-tensors, 8 bits": ("Q8_0",),
}
# Where blocks hold float16; random bytes there would be no numbers now and then.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)} | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
ROWS, COLUMNS = 64, 512


def random_weight(format_: Format) -> QuantTensor:
    """Random codes with scales of a usual size."""
    random = torch.Generator().manual_seed(0)
    if format_.name == FLOAT8:
        numbers = torch.randn(ROWS, COLUMNS, generator=random) * 100
        return QuantTensor.of_float8(numbers.to(torch.float8_e4m3fn), torch.full((1, 4), 2e-4))
    shape = (ROWS, COLUMNS // format_.block_elements, format_.block_bytes)
    blocks = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    if format_.name == "MXFP4":
        blocks[..., 0] = 115 + blocks[..., 0] % 10
    elif format_.packed:
        for at in HALVES.get(format_.name, (0,)):
            scales = torch.rand(*shape[:2], 1, generator=random) * 0.01 + 0.001
            blocks[..., at : at + 2] = scales.half().view(torch.uint8)
    elif format_.name != "F32":
        blocks[..., -1] &= 0xBF  # a bit of the exponent: every number is finite
    return QuantTensor.of_blocks(format_, (ROWS, COLUMNS), blocks.view(ROWS, -1))


def rounding(format_: Format) -> str:
    """What native kernels make of weights: themselves, or numbers that are off by so much of the usual one."""
    if format_.name == "F32":
        return "exact"
    native, weight = BACKENDS["native"](CPU, 1), random_weight(format_)
    truth = dequantize(weight)
    found = native.embed(native.prepare(weight), torch.arange(ROWS))
    if torch.equal(found, truth):
        return "exact"
    return f"off by {float((found - truth).norm() / truth.norm()):.1%}"


def bits(format_: Format) -> str:
    each = 8 if format_.name == FLOAT8 else 8 * format_.block_bytes / format_.block_elements
    return f"{each:.4g}"


def gpu_kernel(format_: Format) -> str:
    """What the backend for GPUs says, which cannot be made without one."""
    return "packed codes" if packs(format_) else ReferenceOps(CPU, torch.bfloat16).kernel(format_)


def rows() -> Iterator[tuple[str, ...]]:
    native = BACKENDS["native"](CPU, 1)
    for name in UNPACKED_FORMATS:
        format_ = FORMATS[name]
        container = "safetensors" if name == FLOAT8 else "GGUF"
        container = "GGUF, safetensors" if name in (*SAFETENSORS, "MXFP4") else container
        yield container, name, bits(format_), native.kernel(format_), rounding(format_), gpu_kernel(format_)
    for kind, names in READ_AS.items():
        each = [FORMATS[name] for name in names]
        on_cpu, on_gpu = (", ".join(dict.fromkeys(map(kernel, each))) for kernel in (native.kernel, gpu_kernel))
        exact = "exact" if names[0] != "Q4_0" else "exact as Q4_0; as Q4_1 minimums of 16 bits"
        yield "safetensors", kind, bits(each[0]), on_cpu, exact, on_gpu


def table() -> str:
    """In Markdown."""
    refused = [name for name, format_ in FORMATS.items() if format_.packed and format_.dequantize is None]
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows()]
    made = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{made}\n\nRefused by name: {', '.join(refused)}; bitsandbytes."


def with_table(page: str) -> str:
    """The page with the table of today between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
