"""Tokens from rows of logits on the device: edits, argmax and draws, without a word to the host.

A row is shared out among programs, and the last of them to finish puts the shares together. Rows that draw from a part
of their vocabulary go on in `filters.py`. How rows sample stands in a `DrawTable`. A row's token depends on its own
logits and record alone: shares have a fixed size, and are put together in a fixed order.

Scores and noise are the CPU's: divisions round to the nearest, and noise is float64 from the same bits. A device's
logarithm may differ from the CPU's in the last bit of a float64; that decides a draw once in about 1e12.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import RowLogprobs
from ..draw_table import RECORD_WORDS, DrawTable, word
from . import filters
from .filters import BLOCK
from .logprobs import row_logprobs
from .overlap import await_inputs, launch_next, overlap
from .scores import (
    BEYOND,
    COPY,
    CUT,
    DRAWS,
    EDITED,
    FILTERED,
    INFINITY,
    LOWEST,
    MIN_P,
    MODE,
    NO_PEAK,
    NO_SCORE,
    NO_TOKEN,
    PARTS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    best_draw,
    is_finite,
    load_scores,
    order_key,
    read_float,
    record_of,
    scores_of,
    weight,
)

GROUP = 64  # tokens whose largest is kept: the k-th largest of these is a floor of top-k
COUNTERS = 4096  # rows at once, without new ones

_BIAS_AT, _BIASES = tl.constexpr(word("bias_at")), tl.constexpr(word("biases"))
_PENALTIES_AT, _PENALTIES = tl.constexpr(word("penalties_at")), tl.constexpr(word("penalties"))
_BANS_AT, _BANS = tl.constexpr(word("bans_at")), tl.constexpr(word("bans"))
_MASK_AT, _MASK_TOKENS = tl.constexpr(word("mask_at")), tl.constexpr(word("mask_tokens"))
_REPETITION, _FREQUENCY = tl.constexpr(word("repetition")), tl.constexpr(word("frequency"))
_PRESENCE = tl.constexpr(word("presence"))


class TritonSampling:
    """Draws on one device. Its counters are zero between launches, so a launch can be captured in a graph."""

    def __init__(self, device: torch.device) -> None:
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self._blank = torch.zeros(COUNTERS * (RECORD_WORDS + 2), dtype=torch.int32, device=device)

    def launch(self, logits: Tensor, table: DrawTable | None = None) -> Tensor:
        """The token of each row of logits [rows, vocab] and why it has none, int64 [2, rows]; see `draw_table`."""
        table = self._argmax(len(logits)) if table is None else table
        out = torch.empty((2, table.rows), dtype=torch.int64, device=logits.device)
        if table.rows > len(self._counters):
            self._counters = self._counters.new_zeros(table.rows)
        if logits.stride(1) != 1 or (table.copies and logits.dtype != torch.float32):
            logits = logits.float().contiguous()
        shares = _Shares(logits, table, self._counters)
        shares.scan(out)
        if table.filtered:
            filters.draw(logits, shares.copies, table, shares.scanned, out)
        return out

    def _argmax(self, rows: int) -> DrawTable:
        """A table of rows that take their likeliest token: records of zeros, the same for any number of rows."""
        if len(self._blank) < rows * (RECORD_WORDS + 2):
            self._blank = self._blank.new_zeros(rows * (RECORD_WORDS + 2))
        return DrawTable(self._blank, rows, draws=False, filtered=False, typical=False, copies=0)

    def logprobs(self, logits: Tensor, rows: Tensor | None, tokens: Tensor, top: int) -> RowLogprobs:
        """Of one token for each of `rows`, under the raw logits."""
        own = logits if rows is None else logits.index_select(0, rows)
        return row_logprobs(own.float(), tokens, top)


class _Shares:
    """What programs leave for each other in one launch."""

    def __init__(self, logits: Tensor, table: DrawTable, counters: Tensor) -> None:
        rows, vocab = logits.shape
        self._logits, self._table, self._counters = logits, table, counters
        self._splits, device = triton.cdiv(vocab, BLOCK), logits.device
        self.parts = torch.empty((rows, PARTS.value, self._splits), dtype=torch.float64, device=device)
        groups = self._splits * (BLOCK // GROUP) if table.filtered else 1
        self._groups = torch.empty((rows, groups), device=device)
        self.limits = torch.empty((rows, 3), dtype=torch.float64, device=device)  # floor, peak, total weight
        self.counts = torch.empty(rows, dtype=torch.int32, device=device)
        self.copies = torch.empty((table.copies, vocab), device=device) if table.copies else logits
        self._raw = torch.empty((max(table.copies, 1), self._splits), device=device)
        if table.copies:
            _edit[(self._splits, rows)](
                logits, self.copies, table.words, self._raw, counters, rows, vocab, logits.stride(0), self._splits,
                BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False, **overlap(logits),
            )  # fmt: skip

    @property
    def scanned(self) -> tuple[Tensor, Tensor, Tensor]:
        """What filters begin with."""
        return self.limits, self.parts, self.counts

    def scan(self, out: Tensor) -> None:
        logits, table = self._logits, self._table
        rows, vocab = logits.shape
        _scan[(self._splits, rows)](
            logits, self.copies, table.words, table.words.view(torch.int64), self.parts, self._groups, self._raw,
            self.limits, self.counts, self._counters, out, rows, vocab, logits.stride(0), self._splits,
            EDITS=table.copies > 0, DRAWING=table.draws, FILTERING=table.filtered, BLOCK=BLOCK, GROUP=GROUP,
            SPLITS=triton.next_power_of_2(self._splits), GROUPS=triton.next_power_of_2(self._groups.shape[1]),
            num_warps=4, enable_fp_fusion=False, **overlap(logits),
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "splits"])
def _edit(
    logits, copies, words, raw, counters, rows, vocab, stride, splits, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Copies of the rows that are edited: masked by their grammars, then with bias, penalties and bans."""
    launch_next(PDL)
    await_inputs(PDL)
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = record_of(words, row, rows)
    if (tl.load(record + MODE) & EDITED) == 0:
        return
    copy = tl.load(record + COPY).to(tl.int64)
    scores = copies + copy * vocab
    i = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=-INFINITY)
    tl.store(raw + copy * splits + split, tl.max(tl.where(x != x, INFINITY, x), 0))
    mask_at = tl.load(record + _MASK_AT)
    if mask_at >= 0:
        known = i < tl.load(record + _MASK_TOKENS)
        allowed = (tl.load(words + mask_at + i // 32, mask=known, other=0) >> (i % 32)) & 1
        x = tl.where(allowed == 1, x, -INFINITY)
    tl.store(scores + i, x, mask=i < vocab)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") < splits - 1:
        return
    tl.store(counters + row, 0)
    _edit_tokens(scores, words, record, BLOCK)


@triton.jit
def _edit_tokens(scores, words, record, BLOCK: tl.constexpr):
    """Bias, then penalties, then bans; a token may stand in all three."""
    j = tl.arange(0, BLOCK)
    at, count = tl.load(record + _BIAS_AT), tl.load(record + _BIASES)
    for start in range(0, count, BLOCK):
        there = start + j < count
        place = scores + tl.load(words + at + start + j, mask=there, other=0)
        bias = tl.load(words + at + count + start + j, mask=there, other=0).to(tl.float32, bitcast=True)
        tl.store(place, tl.load(place, mask=there, other=0.0) + bias, mask=there)
    tl.debug_barrier()
    at, count = tl.load(record + _PENALTIES_AT), tl.load(record + _PENALTIES)
    repetition, frequency = read_float(record + _REPETITION), read_float(record + _FREQUENCY)
    presence = read_float(record + _PRESENCE)
    for start in range(0, count, BLOCK):
        there = start + j < count
        place = scores + tl.load(words + at + start + j, mask=there, other=0)
        times = tl.load(words + at + count + start + j, mask=there, other=0).to(tl.float32, bitcast=True)
        old = tl.load(place, mask=there, other=0.0)
        new = tl.where(old < 0, old * repetition, tl.div_rn(old, repetition))
        new = new - times * frequency
        tl.store(place, new - tl.where(times > 0, presence, 0.0), mask=there)
    tl.debug_barrier()
    at, count = tl.load(record + _BANS_AT), tl.load(record + _BANS)
    for start in range(0, count, BLOCK):
        there = start + j < count
        banned = tl.load(words + at + start + j, mask=there, other=0)
        tl.store(scores + banned, tl.full([BLOCK], -INFINITY, tl.float32), mask=there)


@triton.jit(do_not_specialize=["rows", "splits"])
def _scan(
    logits, copies, words, words64, parts, groups, raw, limits, counts, counters, out, rows, vocab, stride, splits,
    EDITS: tl.constexpr, DRAWING: tl.constexpr, FILTERING: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The argmax of each row, the draws of rows without filters, and for the others what their filters begin with."""
    launch_next(PDL)
    await_inputs(PDL)
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    record = record_of(words, row, rows)
    mode = tl.load(record + MODE)
    i = split * BLOCK + tl.arange(0, BLOCK)
    x = load_scores(scores_of(logits, copies, record, row, mode, vocab, stride, EDITS), i, vocab)
    peak = tl.max(x, 0)
    part = parts + row * PARTS * splits + split  # peak, its place, weight, best draw, its place
    tl.store(part, peak.to(tl.float64))
    tl.store(part + splits, tl.min(tl.where(x == peak, i, BEYOND), 0).to(tl.float64))
    if DRAWING:
        if (mode & (DRAWS | FILTERED)) == DRAWS:
            best, place, _ = best_draw(x, i, tl.load(words64 + row), read_float(record + TEMPERATURE))
            tl.store(part + 3 * splits, best)
            tl.store(part + 4 * splits, place.to(tl.float64))
    if FILTERING:
        if (mode & FILTERED) != 0:
            if tl.load(record + TOP_K) > 0:
                each = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1)
                g = tl.arange(0, BLOCK // GROUP)
                tl.store(groups + (row * splits + split) * (BLOCK // GROUP) + g, each)
            elif (mode & TOP_P) != 0:
                tempered = tl.div_rn(x, read_float(record + TEMPERATURE))
                highest = tl.max(tempered, 0)
                heights = tempered - tl.where(is_finite(highest), highest, 0.0)
                tl.store(part + 2 * splits, tl.sum(weight(heights).to(tl.float64), 0))
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") < splits - 1:
        return
    tl.store(counters + row, 0)
    _merge(
        parts, groups, raw, limits, counts, out, record, mode, row, rows, vocab, splits,
        EDITS, DRAWING, FILTERING, BLOCK // GROUP, SPLITS, GROUPS,
    )  # fmt: skip


@triton.jit
def _merge(
    parts, groups, raw, limits, counts, out, record, mode, row, rows, vocab, splits,
    EDITS: tl.constexpr, DRAWING: tl.constexpr, FILTERING: tl.constexpr, EACH: tl.constexpr,
    SPLITS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The shares of a row together."""
    s = tl.arange(0, SPLITS)
    there, part = s < splits, parts + row * PARTS * splits + s
    peaks = tl.load(part, mask=there, other=-INFINITY, volatile=True)
    peak = tl.max(peaks, 0)
    places = tl.load(part + splits, mask=there, other=BEYOND, volatile=True)
    token = tl.min(tl.where(peaks == peak, places, BEYOND), 0).to(tl.int64)
    shown = peak.to(tl.float32)  # before edits
    banned = False
    if EDITS:
        if (mode & EDITED) != 0:
            copy = tl.load(record + COPY).to(tl.int64)
            shown = tl.max(tl.load(raw + copy * splits + s, mask=there, other=-INFINITY, volatile=True), 0)
            banned = peak == -INFINITY
    failed = tl.where(is_finite(shown), tl.where(banned, NO_TOKEN, 0), NO_PEAK)
    if DRAWING or FILTERING:
        temperature = read_float(record + TEMPERATURE)
        tempered = tl.div_rn(peak.to(tl.float32), temperature)
        lost = ((mode & DRAWS) != 0) & (failed == 0) & (is_finite(tempered) == 0)
        failed = tl.where(lost, NO_SCORE, failed)
    if DRAWING:
        if (mode & (DRAWS | FILTERED)) == DRAWS:
            values = tl.load(part + 3 * splits, mask=there, other=-INFINITY, volatile=True)
            drawn = tl.load(part + 4 * splits, mask=there, other=BEYOND, volatile=True)
            token = tl.min(tl.where(values == tl.max(values, 0), drawn, BEYOND), 0).to(tl.int64)
    tl.store(out + row, tl.where(failed == 0, token, 0))
    tl.store(out + rows + row, failed.to(tl.int64))
    if FILTERING:
        if ((mode & FILTERED) != 0) & (failed == 0):
            heights = tl.div_rn(peaks.to(tl.float32), temperature) - tempered
            weighed = there & ((mode & TOP_P) != 0) & (tl.load(record + TOP_K) == 0)
            shares = tl.load(part + 2 * splits, mask=weighed, other=0.0, volatile=True)
            total = tl.sum(shares * tl.exp(heights.to(tl.float64)), 0)
            g = tl.arange(0, GROUPS)
            each = tl.load(groups + row * splits * EACH + g, mask=g < splits * EACH, other=-INFINITY, volatile=True)
            floor = _floor(record, mode, each, tempered, total, temperature, vocab)
            tl.store(counts + row, 0)
            tl.store(limits + 3 * row, floor.to(tl.float64))
            tl.store(limits + 3 * row + 1, tempered.to(tl.float64))
            tl.store(limits + 3 * row + 2, total)


@triton.jit
def _floor(record, mode, groups, peak, total, temperature, vocab):
    """A score that no token is below that the filters keep.

    For top-k the k-th largest of the groups' largest. For top-p: tokens below (1 - p) / vocab cannot together reach the
    weight that is cut. For min-p its own threshold. The last two with a margin for rounding.
    """
    top_k = tl.load(record + TOP_K)
    floor = tl.full([], LOWEST, tl.float32)
    if top_k > 0:
        keys = order_key(groups)
        low, high = order_key(floor).to(tl.int64), tl.max(keys, 0).to(tl.int64) + 1
        while high - low > 1:
            middle = low + (high - low) // 2
            enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= top_k
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        # Back from its key to the number: the smallest of the groups' largest that is not below it.
        kth = tl.min(tl.where(keys >= low.to(tl.int32), groups, INFINITY), 0)
        floor = tl.where(tl.sum((groups >= kth).to(tl.int32), 0) >= top_k, tl.div_rn(kth, temperature), floor)
    else:
        if (mode & TOP_P) != 0:
            cut = read_float(record + CUT).to(tl.float64)
            floor = tl.maximum(floor, _below(peak.to(tl.float64) + tl.log(cut * total / vocab * 0.99)))
        min_p = read_float(record + MIN_P)
        if min_p > 0:
            floor = tl.maximum(floor, _below(peak.to(tl.float64) + tl.log(min_p.to(tl.float64)) - 0.01))
    return floor


@triton.jit
def _below(x):
    """A float32 that is not above x."""
    return (x - tl.abs(x) * 1.2e-7).to(tl.float32)
