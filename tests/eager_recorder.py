"""Captured steps on a machine without a GPU: what a graph does, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvilt.ops.triton import graphs
from kvilt.ops.triton.backend import TritonOps


@dataclass
class EagerGraph:
    """What a captured graph does, without a device: the step again, its results in the same places."""

    step: Callable[[], Tensor]
    recorder: Any
    result: Tensor
    drawn: Tensor | None

    def replay(self) -> None:
        self.result.copy_(self.step())
        if self.drawn is not None:
            self.drawn.copy_(self.recorder._drawn)


class EagerRecorder(graphs.GraphRecorder):
    """Records steps on a machine without a GPU."""

    def record(self, step: Callable[[], Tensor]) -> Any:
        self._drawn = None
        result = step()
        graph = EagerGraph(step, self, result, self._drawn)
        return graphs.CapturedStep(graph, result, self._drawn, lambda: self._stopped)


def recording_ops(device: torch.device, _threads: int | None) -> TritonOps:
    """The CUDA backend in float32, interpreted, with steps that are recorded."""
    ops = TritonOps(device, torch.float32)
    ops._recorder = EagerRecorder(ops._sampling)
    return ops
