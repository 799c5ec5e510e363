"""How much each input of a weight matters: the mean square of what a text puts there.

An error of a weight is multiplied by its inputs, so a quantizer spends its precision where inputs are large. Known as
an importance matrix. Runs the reference operations on weights that stay as they lie in the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..batch import Batch, Ids, Last, Row
from ..config import RunConfig
from ..errors import InputError
from ..models.assemble import read_spec
from ..ops.contract import Prepared
from ..ops.reference import ReferenceOps
from ..quant.tensor import QuantTensor, Weight
from ..quant.unpack import to_float
from ..weights.source import Checkpoint
from .load import build_executor

CHUNK_TOKENS = 512
_KV_BYTES = 1 << 30  # more than the KV of a chunk
_HEAD_TOKENS = 64  # of a chunk, whose logits are computed: the head has inputs too

OnChunk = Callable[[int, int], None]  # tokens that are done, of all


@dataclass(slots=True)
class _Inputs:
    """Sums of squares of the inputs of one matrix."""

    squares: Tensor  # [columns] float64
    tokens: int = 0


@dataclass(slots=True)
class InputSums:
    """The inputs of all matrices, by the place in memory where a matrix begins."""

    by_address: dict[int, _Inputs] = field(default_factory=dict)

    def add(self, weight: Weight, x: Tensor) -> None:
        found = self.by_address.setdefault(_address(weight), _Inputs(torch.zeros(x.shape[-1], dtype=torch.float64)))
        found.squares += x.double().square().sum(0)
        found.tokens += len(x)


class ImportanceOps(ReferenceOps):
    """The reference, with weights that are unpacked when they are used, and notes of what they are multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = InputSums()

    def prepare(self, weight: Weight) -> Prepared:  # type: ignore[override]
        return weight

    def embed(self, table: Prepared, ids: Tensor, scale: float = 1.0) -> Tensor:
        assert isinstance(table, Tensor | QuantTensor)
        rows = table.take(ids) if isinstance(table, QuantTensor) else table[ids]
        return to_float(rows) * scale

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        assert isinstance(weight, Tensor | QuantTensor)
        self.sums.add(weight, x)
        return super().linear(x, to_float(weight), bias, residual)


def importance(checkpoint: Checkpoint, ids: Sequence[int], on_chunk: OnChunk | None = None) -> dict[str, Tensor]:
    """By the checkpoint's names, for each matrix the mean squares of its inputs [matrices, columns].

    A tensor that holds several matrices, such as all experts of a layer, has a row for each; an expert that no token
    chose has zeros. Tensors that are copied in loading, and so not found again, are left out.
    """
    if len(ids) < 2:
        raise InputError("the text has fewer than two tokens, which say nothing about a model; give a longer one")
    ops = ImportanceOps()
    chunk = min(CHUNK_TOKENS, read_spec(checkpoint).context)
    executor = build_executor(checkpoint, RunConfig(device="cpu", max_context=chunk, kv_memory=_KV_BYTES), ops=ops)
    for start in range(0, len(ids), chunk):
        part = list(ids[start : start + chunk])
        with executor.create_kv_cache(1, len(part)) as kv:
            kv.reserve(len(part))
            row = Row(Ids(part), range(len(part)), kv, want=Last(min(_HEAD_TOKENS, len(part))))
            batch = Batch.of([row])
            executor.run(replace(batch, step=batch.step.of_all_tokens()))
        if on_chunk is not None:
            on_chunk(start + len(part), len(ids))
    return _by_name(checkpoint, ops.sums)


def _by_name(checkpoint: Checkpoint, sums: InputSums) -> dict[str, Tensor]:
    tensors = checkpoint.tensors
    held = {_address(tensor): (name, tensor) for name in tensors.names() if _is_matrix(tensor := tensors.tensor(name))}
    addresses = sorted(held)
    found: dict[str, Tensor] = {}
    for address, inputs in sums.by_address.items():
        at = bisect_right(addresses, address) - 1
        if at < 0:
            continue
        name, tensor = held[addresses[at]]
        matrices, each = _matrices(tensor)
        index = (address - addresses[at]) // each
        if index < matrices and inputs.squares.numel() == tensor.shape[-1]:
            rows = found.setdefault(name, torch.zeros(matrices, tensor.shape[-1]))
            rows[index] = (inputs.squares / max(1, inputs.tokens)).float()
    return found


def _is_matrix(tensor: Weight) -> bool:
    return len(tensor.shape) > 1


def _matrices(tensor: Weight) -> tuple[int, int]:
    """The matrices of a tensor, and the bytes of each."""
    matrices = int(torch.Size(tensor.shape[:-2]).numel())
    return matrices, tensor.nbytes // matrices


def _address(weight: Weight) -> int:
    return weight.blocks.data_ptr() if isinstance(weight, QuantTensor) else weight.data_ptr()
