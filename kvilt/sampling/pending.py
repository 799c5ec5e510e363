"""A sample in progress: tokens that a device draws while the host does something else, and reads when it needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import NoTokenLeft, NumericsError
from ..ops.contract import RowLogprobs, SamplingKernels
from ..ops.draw_table import NO_PEAK, NO_SCORE, NO_TOKEN
from .output import SamplerOutput, TokenLogprobs, logprob_entries
from .prepare import PreparedDraws


class PendingSample:
    """One token per row: `tokens` on the device at once, everything on the host after `wait`."""

    __slots__ = ("_read", "tokens")

    def __init__(self, tokens: Tensor, read: Callable[[], SamplerOutput]) -> None:
        self.tokens = tokens  # [rows] int64 where the logits are; an id also where `wait` will raise
        self._read = read

    @staticmethod
    def of(output: SamplerOutput) -> PendingSample:
        """One that is complete."""
        return PendingSample(output.tokens, lambda: output)

    @staticmethod
    def launch(
        kernels: SamplingKernels, logits: Tensor, prepared: PreparedDraws, tops: Sequence[int | None]
    ) -> PendingSample:
        """Draw on the device of the logits; `tops` are the log-probabilities that rows ask for."""
        table = prepared.table
        drawn = kernels.launch(logits, None if table is None else table.to(logits.device))
        rows = [row for row, top in enumerate(tops) if top is not None]
        found = [drawn]
        if rows:
            most = min(max(top for top in tops if top is not None), logits.shape[-1])
            at = None  # all of them
            if len(rows) < len(tops):
                at = torch.tensor(rows, pin_memory=drawn.is_cuda).to(drawn.device, non_blocking=True)
            made = kernels.logprobs(logits, at, drawn[0] if at is None else drawn[0].index_select(0, at), most)
            found += [made.logprobs, made.ranks, made.top_ids, made.top_logprobs]
        fetch = _HostCopy(found)

        def read() -> SamplerOutput:
            host = fetch.wait()
            _raise_failed(host[0][1].tolist(), prepared)
            return SamplerOutput(host[0][0], _logprobs(host[0][0], host[1:], rows, tops))

        return PendingSample(drawn[0], read)

    def wait(self) -> SamplerOutput:
        """The tokens on the host; raises what `sample` raises."""
        return self._read()


class _HostCopy:
    """Tensors on their way to the host. The copies are queued now, so that `wait` waits for no later work."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._done: torch.cuda.Event | None = None
        self._host = list(tensors)
        if tensors[0].is_cuda:
            self._host = [torch.empty_like(one, device="cpu", pin_memory=True) for one in tensors]
            for there, one in zip(self._host, tensors, strict=True):
                there.copy_(one, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> list[Tensor]:
        if self._done is not None:
            self._done.synchronize()
        return self._host


def _raise_failed(codes: Sequence[int], prepared: PreparedDraws) -> None:
    """Raise for rows without a token, in the order in which a sample on the CPU meets them."""
    rows = {code: [row for row, own in enumerate(codes) if own == code] for code in set(codes)}
    if NO_PEAK in rows:
        raise NumericsError(rows[NO_PEAK])
    if prepared.failure is not None:
        raise prepared.failure
    if NO_TOKEN in rows:
        raise NoTokenLeft(rows[NO_TOKEN])
    if NO_SCORE in rows:
        raise NumericsError(rows[NO_SCORE])


def _logprobs(
    tokens: Tensor, found: Sequence[Tensor], rows: Sequence[int], tops: Sequence[int | None]
) -> tuple[TokenLogprobs | None, ...]:
    if not rows:
        return (None,) * len(tops)
    wanted = [top for top in tops if top is not None]
    entries = logprob_entries(RowLogprobs(*found), tokens[rows].tolist(), wanted)
    each = dict(zip(rows, entries, strict=True))
    return tuple(each.get(row) for row in range(len(tops)))
