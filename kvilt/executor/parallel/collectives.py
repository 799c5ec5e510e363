"""Sums and gathers over the ranks that share a model, by torch.distributed. Refuses to know models and steps.

A sum adds ranks in ascending order whatever the size of a tensor, so that a row's bits do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ...errors import RankFailed

LOOPBACK = "127.0.0.1"


class ProcessRanks:
    """The ranks of one model, each a process of this machine. A group of its own: two models do not share one."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self._rank, self.size, self._timeout_s = rank, size, timeout_s
        self._group: Any = None  # torch's annotations of its groups lack their methods

    @property
    def rank(self) -> int:
        return self._rank

    def connect(self, meeting: str) -> None:
        """Meet the other ranks at a file in a folder of this user; waits for them."""
        import torch.distributed as dist  # takes a while, and one process does not need it

        torch_dist: Any = dist
        gloo = torch_dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        with self._failing():
            self._group = gloo(torch_dist.FileStore(meeting, self.size), self._rank, self.size, options)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on every rank. May use the memory of `x`."""
        group = self._connected()
        with self._failing():
            if self.size == 2:  # a + b is b + a: no order to keep
                group.allreduce([x]).wait()
                return x
            parts = [torch.empty_like(x) for _ in range(self.size)]
            group.allgather([parts], [x]).wait()
        whole = parts[0]
        for part in parts[1:]:
            whole += part
        return whole

    def gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor] | None:
        """All ranks' tensors on rank 0; None on the others."""
        group = self._connected()
        with self._failing():
            if self._rank:
                group.send([x.reshape(-1)], 0, 0).wait()
                return None
            others = [x.new_empty(shape) for shape in shapes[1:]]
            for work in [group.recv([part.view(-1)], rank, 0) for rank, part in enumerate(others, 1)]:
                work.wait()
        return [x, *others]

    def _connected(self) -> Any:
        assert self._group is not None, "ranks meet before they compute"
        return self._group

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What torch raises where a rank is gone or late, as an error of our own."""
        try:
            yield
        except RuntimeError as error:
            first, late = str(error).strip().partition("\n")[0][:200], f"late by {self._timeout_s:g} s"
            raise RankFailed(f"another rank of the model is gone, or {late}: {first}") from error
