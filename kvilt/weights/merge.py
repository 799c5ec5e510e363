"""A checkpoint's weights with an adapter added to them: another checkpoint that needs no adapter.

For safetensors of floats. Packed weights cannot take an adapter without being packed
again, with other errors than before.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, Unsupported, WeightError
from .peft import ModuleTensors, PeftFolder
from .safetensors import SafetensorsFiles
from .source import Checkpoint

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_KEPT = ("*.json", "*.jinja", "*.model", "*.txt")
MERGED = "model.safetensors"


def merge(checkpoint: Checkpoint, adapter: PeftFolder, target: Path, scale: float = 1.0) -> int:
    """Write the merged checkpoint into a new folder; how many of its tensors changed."""
    if checkpoint.kind != "hf" or not isinstance(checkpoint.tensors, SafetensorsFiles):
        raise Unsupported(
            "an adapter is merged into safetensors of floats; a packed GGUF would have to be packed again: merge into "
            "the original checkpoint and convert that, or run the GGUF with the adapter beside it"
        )
    if adapter.config.invocation:
        raise Unsupported("an adapter that tokens switch on cannot be merged: before them the model is as it was")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{str(target)!r} is there already; name a new folder")
    places = _places(checkpoint.tensors, adapter)
    target.mkdir(parents=True, exist_ok=True)
    try:
        _write(checkpoint.tensors, adapter, places, scale, target / MERGED)
        _copy_rest(checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent, target)
    except BaseException:
        shutil.rmtree(target)
        raise
    return len(places)


def _places(tensors: SafetensorsFiles, adapter: PeftFolder) -> dict[str, str]:
    """For each weight that changes, the module that changes it; every shape is checked before anything is written."""
    held, found = frozenset(tensors.names()), {}
    for module, parts in adapter.modules.items():
        name = f"{module}.weight"
        if name not in held:
            tied = " (its head is its embedding)" if module == "lm_head" else ""
            raise WeightError("target_modules", f"{module!r} is no weight of this checkpoint{tied}")
        if parts.embedding and "lm_head.weight" not in held:
            raise Unsupported(f"{module}: the model's head is its embedding, which the adapter would change as well")
        down, up, shape = adapter.shape(parts.down), adapter.shape(parts.up), tensors.shape(name)
        wanted = (up[0], down[1]) if not parts.embedding else (down[1], up[0])
        if len(down) != 2 or len(up) != 2 or down[0] != up[1] or shape != wanted:
            raise WeightError(
                name, f"is {list(shape)} and the adapter's product {list(wanted)}; it is for another model"
            )
        if parts.magnitude is not None and adapter.shape(parts.magnitude) != up[:1]:
            raise WeightError(parts.magnitude, f"is {list(adapter.shape(parts.magnitude))} instead of {[up[0]]}")
        if down[0] != adapter.config.rank_of(module):
            raise WeightError(parts.down, f"has rank {down[0]}, and its configuration says otherwise")
        found[name] = module
    for module, copy in adapter.copies.items():
        name = f"{module}.weight"
        if name not in held or not torch.equal(adapter.tensor(copy), tensors.floats(name)):
            raise Unsupported(f"{copy}: the adapter holds weights unlike this checkpoint's own")
    return found


def _write(tensors: SafetensorsFiles, adapter: PeftFolder, places: Mapping[str, str], scale: float, path: Path) -> None:
    """One safetensors file, tensor by tensor, so that a model is never in memory as a whole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in tensors.names():
        stored = tensors.storage(name)
        header[name] = {"dtype": stored.format, "shape": list(tensors.shape(name))}
        header[name]["data_offsets"] = [at, at := at + stored.nbytes]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in _merged(tensors, adapter, places, scale):
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _merged(
    tensors: SafetensorsFiles, adapter: PeftFolder, places: Mapping[str, str], scale: float
) -> Iterator[Tensor]:
    for name in tensors.names():
        tensor = tensors.floats(name)
        if name in places:
            module = places[name]
            parts, own = adapter.modules[module], adapter.config.scale_of(module)
            tensor = _with(tensor, parts, adapter, own, scale)
            if not bool(tensor.isfinite().all()):
                raise WeightError(name, f"is no longer finite as {_NAMES[tensor.dtype]} with the adapter in it")
        yield tensor
        tensors.forget(name)


def _with(tensor: Tensor, parts: ModuleTensors, adapter: PeftFolder, own: float, scale: float) -> Tensor:
    """A weight with its adapter's product added."""
    weight = tensor.float()
    product = adapter.tensor(parts.up).float() @ adapter.tensor(parts.down).float() * own
    if parts.magnitude is not None:  # each output then has the length that was learnt for it
        whole = weight + product
        lengths = torch.linalg.vector_norm(whole, dim=1)
        product = whole * (adapter.tensor(parts.magnitude).float() / lengths)[:, None] - weight
    return (weight + scale * (product.T if parts.embedding else product)).to(tensor.dtype)


def _copy_rest(source: Path, target: Path) -> None:
    """Copy configuration, tokenizer and templates; a single file needs no index of shards."""
    for pattern in _KEPT:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)
