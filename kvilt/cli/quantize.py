"""`kvilt quantize`: a model with its weights in fewer bits, as a GGUF file."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

from ..errors import ParamError
from ..executor.gguf_view import GGUFView, gguf_tensors
from ..executor.importance import importance
from ..text.tokenizer import from_metadata
from ..weights.gguf import GGUFFile
from ..weights.hub import resolve
from ..weights.quantize import Quantized, quantize_tensors
from ..weights.source import Checkpoint, open_checkpoint
from .progress import bars, tracked


def quantize(model: str, out: Path, type_name: str, imatrix: Path | None, tokens: int) -> None:
    """Quantize a model and print what became of it."""
    if out.is_dir():
        raise ParamError("out", f"{str(out)!r} is a folder; name the file to write, such as model-{type_name}.gguf")
    with bars() as shown:
        path = resolve(model, shown.fetching)
    if out.exists() and path.is_file() and out.samefile(path):
        raise ParamError("out", "must not be the file that is read")
    source = open_checkpoint(path)
    with source.tensors:
        tensors = gguf_tensors(source)
        known = None if imatrix is None else read_importance(source, tensors, imatrix, tokens)
        with tracked("writing", 100) as show:
            done = quantize_tensors(
                tensors, out, type_name, known, lambda now, total, name: show(100 * now // total, name)
            )
    print(summary(done, out))
    for line in warnings(done):
        print(f"warning: {line}", file=sys.stderr)


def read_importance(source: Checkpoint, tensors: GGUFFile | GGUFView, path: Path, tokens: int) -> dict[str, Tensor]:
    """The importance matrix of a text, of which at most so many tokens are read."""
    text = path.read_bytes().decode("utf-8", "replace")
    ids = from_metadata(tensors.metadata).encode(text)[:tokens]
    with tracked("reading the text", len(ids)) as show:
        found = importance(source, ids, lambda now, _: show(now, "tokens"))
    return tensors.renamed(found) if isinstance(tensors, GGUFView) else found


def summary(done: Quantized, out: Path) -> str:
    """One line: the file, its size and its formats."""
    formats = ", ".join(f"{count} {name}" for name, count in sorted(done.formats.items()))
    share = done.bytes_after / done.bytes_before
    return f"{out.name}: {done.bytes_after / 1e6:.1f} MB of weights, {share:.0%} of before; tensors: {formats}"


def warnings(done: Quantized) -> list[str]:
    """What a user should know about the result."""
    found = []
    if done.packed_before:
        formats = ", ".join(done.packed_before)
        found.append(f"the source is quantized already ({formats}), so both losses add up; start from F16 or BF16")
    if done.without_importance:
        some = ", ".join(done.without_importance[:3])
        found.append(f"the importance matrix says nothing about {len(done.without_importance)} matrices ({some} ...)")
    return found
