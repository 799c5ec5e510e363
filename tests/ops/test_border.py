"""No tensor of another dtype, shape, layout or device reaches the native kernels: each entry is tried with each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import _kvilt_native
import pytest
import torch
from torch import Tensor

from kvilt.errors import InputError
from kvilt.ops.contract import (
    AttentionMask,
    Draws,
    Interpolation,
    KeysValues,
    PageShape,
    Paging,
    Rotation,
    RowLengths,
    TemperatureScaling,
)
from kvilt.ops.kv_dtypes import FLOAT16
from kvilt.ops.lowrank import AdapterSlots, LowRank
from kvilt.ops.native.backend import NativeOps
from kvilt.ops.native.border import checked, f32, floats, i64
from kvilt.ops.native.lora import NativeTable
from kvilt.ops.native.record import NativeRecorded

SHAPE = PageShape(2, 4, 2, 8, 8, FLOAT16)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """An operation on tensors by name; those that it may copy or convert are listed."""

    call: Callable[[Any, Tensors], Any]
    tensors: Tensors
    copies: str = ""  # made contiguous
    converts: str = ""  # made floats
    free: str = ""  # any shape of as many dimensions will do


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def paging(t: Tensors) -> Paging:
    return Paging(t["tables"], longs(0, 1), RowLengths.of((0, 2), [0, 1]), t["positions"])


def cut(paging: Paging, starts: tuple[int, ...]) -> Paging:
    return replace(paging, lengths=replace(paging.lengths, starts=starts))


def rotation(t: Tensors) -> Rotation:
    return Rotation(t["cos"], t["sin"], "half")


DRAWS = Draws([0], [1], [1.0], [0], [1.0], [0.0], [1.0])
TURN = {"cos": torch.ones(2, 4), "sin": torch.zeros(2, 4)}
HEADS = {"slots": longs(0, 1), "keys": torch.ones(2, 2, 8), "values": torch.ones(2, 2, 8)}


def adapt(c: Any, t: Tensors) -> None:
    table = NativeTable(5, 6, 2)
    c.ops.adapt(t["x"], [table], [t["out"]], AdapterSlots(t["slots"], t["scales"]))


def put(_c: Any, t: Tensors) -> None:
    NativeTable(5, 6, 2).put(0, LowRank(t["down"], t["up"], 1.0))


def interpolate(c: Any, t: Tensors) -> None:
    who = Interpolation(t["tokens"], t["anchors"], t["weights"])
    c.ops.interpolate(c.pages, 0, t["slots"], who, (t["old_k"], t["old_v"]), (t["new_k"], t["new_v"]), rotation(t))


def write_slots(c: Any, t: Tensors) -> None:
    c.ops.write_slots(c.pages, t["slots"], KeysValues(t["keys"], t["values"]))


def recorded(c: Any, t: Tensors) -> None:
    paging = Paging(t["tables"], t["slots"], RowLengths.of((0, 1, 2), [0, 0]), t["positions"])
    c.ops.recorder().advance(t["logits"], t["ids"], [paging], 4)


def loop(c: Any, t: Tensors) -> None:
    NativeRecorded(c.ops._runner, None, None).loop(1, t["ids"], [[]])  # type: ignore[arg-type]


KV = {"keys": torch.ones(2, 2, 2, 8, dtype=torch.float16), "values": torch.ones(2, 2, 2, 8, dtype=torch.float16)}
FOLLOW = {
    "slots": longs(0, 1),
    "tokens": longs(0, 1),
    "anchors": longs(2),
    "weights": torch.ones(2, 1),
    **{name: torch.ones(3, 2, 8) for name in ("old_k", "old_v")},
    **{name: torch.ones(1, 2, 8) for name in ("new_k", "new_v")},
    **TURN,
}
ENTRIES = {
    "embed": Entry(lambda c, t: c.ops.embed(c.weight, t["ids"]), {"ids": longs(1, 2)}, "ids", free="ids"),
    "linear": Entry(
        lambda c, t: c.ops.linear(t["x"], c.weight, t["bias"], t["residual"]),
        {"x": torch.ones(2, 6), "bias": torch.ones(5), "residual": torch.ones(2, 5)},
        "x residual",
    ),
    "linears": Entry(
        lambda c, t: c.ops.linears(t["x"], [(c.weight, t["bias"]), (c.weight, None)]),
        {"x": torch.ones(2, 6), "bias": torch.ones(5)},
        "x",
    ),
    "gate_up": Entry(
        lambda c, t: c.ops.gate_up(t["x"], (c.weight, t["a"]), (c.weight, t["b"]), "silu"),
        {"x": torch.ones(2, 6), "a": torch.ones(5), "b": torch.ones(5)},
        "x",
    ),
    "act_mul": Entry(
        lambda c, t: c.ops.act_mul(t["gate"], t["up"], "silu"), {"gate": torch.ones(2, 5), "up": torch.ones(2, 5)}
    ),
    "adapt": Entry(
        adapt,
        {"x": torch.ones(2, 6), "out": torch.ones(2, 5), "slots": longs(-1, -1), "scales": torch.ones(2)},
        "x",
    ),
    "put": Entry(put, {"down": torch.ones(2, 16), "up": torch.ones(2, 16)}),
    "add": Entry(lambda c, t: c.ops.add(t["x"], t["y"]), {"x": torch.ones(2, 5), "y": torch.ones(2, 5)}, "x y"),
    "rms_norm": Entry(
        lambda c, t: c.ops.rms_norm(t["x"], t["weight"], 1e-6), {"x": torch.ones(2, 5), "weight": torch.ones(5)}, "x"
    ),
    "layer_norm": Entry(
        lambda c, t: c.ops.layer_norm(t["x"], t["weight"], t["bias"], 1e-6),
        {"x": torch.ones(2, 5), "weight": torch.ones(5), "bias": torch.ones(5)},
        "x",
    ),
    "activate": Entry(lambda c, t: c.ops.activate(t["x"], "silu"), {"x": torch.ones(2, 5)}, free="x"),
    "add_scaled": Entry(
        lambda c, t: c.ops.add(t["x"], t["y"], 0.5), {"x": torch.ones(2, 5), "y": torch.ones(2, 5)}, "x y"
    ),
    "scale_queries": Entry(
        lambda c, t: c.ops.scale_queries(t["query"], t["positions"], TemperatureScaling(0.1, 4)),
        {"query": torch.ones(2, 3, 8), "positions": longs(0, 1)},
        "query positions",
    ),
    "rotation": Entry(
        lambda c, t: c.ops.rotation(t["positions"], t["inv_freq"], 1.0, "half"),
        {"positions": longs(0, 1), "inv_freq": torch.ones(4)},
        "positions",
        free="positions radians",
    ),
    "rotate": Entry(
        lambda c, t: c.ops.rotate(t["x"], rotation(t)), {"x": torch.ones(2, 3, 8), **TURN}, "x", free="x"
    ),
    "soft_cap": Entry(lambda c, t: c.ops.soft_cap(t["x"], 2.0), {"x": torch.ones(2, 5)}, free="x"),
    "attention": Entry(
        lambda c, t: c.ops.attention(t["query"], c.pages, 0, paging(t), AttentionMask(1.0, sinks=t["sinks"])),
        {
            "query": torch.ones(2, 4, 8),
            "tables": longs(0, 1).view(1, 2),
            "positions": longs(0, 1),
            "sinks": torch.ones(4),
        },
        "query tables positions",
    ),
    "write": Entry(
        lambda c, t: c.ops.write(c.pages, 0, t["slots"], t["keys"], t["values"], rotation(t)),
        {**HEADS, **TURN},
        "slots keys values",
        "keys values",
    ),
    "interpolate": Entry(
        interpolate,
        FOLLOW,
        "slots tokens leaders weights old_k old_v new_k new_v",
        "weights old_v new_k new_v",
    ),
    "read_slots": Entry(
        lambda c, t: c.ops.read_slots(c.pages, t["slots"]), {"slots": longs(0, 1)}, "slots", free="slots"
    ),
    "write_slots": Entry(write_slots, {"slots": longs(0, 1), **KV}, "slots keys values"),
    "argmax": Entry(lambda c, t: c.ops.reductions.argmax(t["logits"]), {"logits": torch.ones(2, 9)}, free="logits"),
    "draw": Entry(lambda c, t: c.ops.reductions.draw(t["logits"], DRAWS), {"logits": torch.ones(2, 9)}, free="logits"),
    "kept": Entry(lambda c, t: c.ops.reductions.kept(t["logits"], DRAWS), {"logits": torch.ones(2, 9)}, free="logits"),
    "logprobs": Entry(
        lambda c, t: c.ops.reductions.logprobs(t["logits"], [0], [1], 2), {"logits": torch.ones(2, 9)}, free="logits"
    ),
    "recorded": Entry(
        recorded,
        {"logits": torch.ones(2, 9), "ids": longs(0, 0), "tables": longs(0, 1).view(2, 1), "slots": longs(0, 4),
         "positions": longs(0, 0)},
    ),
    "loop": Entry(loop, {"ids": longs(0, 0)}, free="ids"),
}  # fmt: skip
PLACES = [(name, tensor) for name, entry in ENTRIES.items() for tensor in entry.tensors]


class SpyRunner:
    """Stands where the kernels are, and counts the calls that would have reached them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_args: Any) -> int:
            self.calls.append(name)
            return 0

        return call


@dataclass
class Border:
    ops: NativeOps
    weight: Any
    pages: Any
    spy: SpyRunner


@pytest.fixture
def border() -> Border:
    ops = NativeOps(1)
    weight, pages, spy = ops.prepare(torch.ones(5, 6)), ops.new_pages(SHAPE, 4, torch.device("cpu")), SpyRunner()
    ops._runner = ops.reductions._runner = ops._recorder._runner = spy
    return Border(ops, weight, pages, spy)


def gapped(tensor: Tensor) -> Tensor:
    """The same numbers, with gaps between them."""
    wide = torch.stack([tensor, tensor], dim=-1)
    return wide[..., 0]


def refused(border: Border, name: str, tensors: Tensors) -> None:
    with pytest.raises(InputError):
        ENTRIES[name].call(border, tensors)
    assert border.spy.calls == [], "the kernels were called"


@pytest.mark.parametrize("name", ENTRIES)
def test_what_fits_goes_through(border: Border, name: str) -> None:
    ENTRIES[name].call(border, ENTRIES[name].tensors)
    assert border.spy.calls or name == "put"


@pytest.mark.parametrize(("name", "tensor"), PLACES)
def test_another_dtype_is_refused(border: Border, name: str, tensor: str) -> None:
    entry = ENTRIES[name]
    own = entry.tensors[tensor]
    for dtype in {torch.float16, torch.float64, torch.int32, torch.int8} - {own.dtype}:
        tensors = {**entry.tensors, tensor: own.to(dtype)}
        if tensor in entry.converts.split():
            entry.call(border, tensors)
            border.spy.calls.clear()
        elif (name, tensor) != ("interpolate", "old_k") or dtype not in (torch.float16,):
            refused(border, name, tensors)


@pytest.mark.parametrize(("name", "tensor"), PLACES)
def test_another_shape_is_refused(border: Border, name: str, tensor: str) -> None:
    entry = ENTRIES[name]
    own = entry.tensors[tensor]
    shapes = [own.unsqueeze(0), own.flatten()[:0]] if own.dim() else []
    if tensor not in entry.free.split():
        shapes += [torch.cat([own, own], dim=axis) for axis in range(own.dim())]
    # Of any number of rows.
    lenient = {(one, "x") for one in ("rms_norm", "layer_norm", "activate", "add", "add_scaled", "soft_cap")}
    lenient.add(("act_mul", "gate"))
    for other in shapes:
        if tensor in entry.free.split() and other.dim() == own.dim():
            continue
        if (name, tensor) in lenient and other.dim() != own.dim():
            continue
        if other.shape != own.shape and not _fits(name, tensor, other):
            refused(border, name, {**entry.tensors, tensor: other})


def _fits(name: str, tensor: str, other: Tensor) -> bool:
    """Shapes that are right too: more rows where every other tensor follows, more heads of a query, a longer table."""
    match name, tensor:
        case ("linears", "x") | ("gate_up", "x") | ("rms_norm", "x") | ("layer_norm", "x"):
            return other.dim() == 2 and other.shape[1] == ENTRIES[name].tensors["x"].shape[1]
        case "scale_queries", "query":
            return other.dim() == 3 and other.shape[0] == 2
        case "attention", "query":
            return other.dim() == 3 and other.shape[0] == 2 and other.shape[2] == 8
        case "attention", "tables":
            return other.dim() == 2 and other.shape[0] == 1
        case "recorded", "tables":
            return other.dim() == 2 and other.shape[0] == 2
        case "recorded", "logits":
            return other.dim() == 2 and other.shape[0] == 2
        case "embed" | "rotation" | "read_slots" | "loop", _:
            return other.dim() == 1
    return False


@pytest.mark.parametrize(("name", "tensor"), PLACES)
def test_gaps_are_copied_away_or_refused(border: Border, name: str, tensor: str) -> None:
    entry = ENTRIES[name]
    own = gapped(entry.tensors[tensor])
    assert not own.is_contiguous() or own.numel() < 2
    if own.is_contiguous():
        return
    tensors = {**entry.tensors, tensor: own}
    if tensor in entry.copies.split():
        entry.call(border, tensors)
    else:
        refused(border, name, tensors)


@pytest.mark.parametrize(("name", "tensor"), PLACES)
def test_another_device_is_refused(border: Border, name: str, tensor: str) -> None:
    refused(border, name, {**ENTRIES[name].tensors, tensor: ENTRIES[name].tensors[tensor].to("meta")})


def test_sizes_that_must_fit_each_other(border: Border) -> None:
    attention = ENTRIES["attention"].tensors
    for starts in ((0, 1), (0, 2, 2), (1, 2), (0, 3), (0,)):
        with pytest.raises(InputError):
            border.ops.attention(
                attention["query"], border.pages, 0, cut(paging(attention), starts), AttentionMask(1.0)
            )
    with pytest.raises(InputError):
        border.ops.attention(torch.ones(2, 3, 8), border.pages, 0, paging(attention), AttentionMask(1.0))
    with pytest.raises(InputError):
        border.ops.rotate(torch.ones(2, 3, 8), Rotation(torch.ones(2, 5), torch.ones(2, 5), "half"))
    wide = NativeOps(1).prepare(torch.ones(5, 7))
    with pytest.raises(InputError):
        border.ops.linears(torch.ones(2, 6), [(border.weight, None), (wide, None)])
    with pytest.raises(InputError):
        border.ops.gate_up(torch.ones(2, 6), (border.weight, None), (wide, None), "silu")
    assert border.spy.calls == []


def test_the_extension_refuses_arrays_by_itself() -> None:
    """Where it takes arrays, a copy in the right dtype would do for what is read, and lose what is written."""
    runner, logits = _kvilt_native.KernelRunner(1, "generic", []), torch.rand(2, 9)
    ids, values = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    runner.argmax_with_values(logits, ids, values)
    assert torch.equal(ids, logits.argmax(-1)) and torch.equal(values, logits.amax(-1))
    for wrong in (
        (logits.double(), ids, values),
        (logits, ids.int(), values),
        (logits, ids, values.double()),
        (gapped(logits), ids, values),
        (logits[0], ids, values),
        (logits, gapped(ids), values),
    ):
        with pytest.raises(TypeError):
            runner.argmax_with_values(*wrong)
    with pytest.raises(ValueError, match="one id and one value"):
        runner.argmax_with_values(logits, ids[:1], values)
    with pytest.raises(ValueError, match="sizes of pages"):
        _kvilt_native.PageLayer(_kvilt_native.KVDtype.int8, torch.zeros(4, 99, dtype=torch.uint8), 4, 2, 8, 8, 2, 0)


def test_an_address_is_of_a_checked_tensor() -> None:
    for wrong in (torch.ones(3).double(), gapped(torch.ones(3)), torch.ones(3, device="meta")):
        with pytest.raises(InputError):
            f32(wrong)
    for wrong in (torch.ones(3), gapped(longs(1, 2)), longs(1).to("meta")):
        with pytest.raises(InputError):
            i64(wrong)
    for wrong in (longs(1), gapped(torch.ones(3)), torch.ones(3, device="meta")):
        with pytest.raises(InputError):
            floats(wrong)
    x = torch.ones(3)
    assert f32(x) == floats(x) == x.data_ptr() and f32(None) == 0


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(InputError, match="sparse"):
        checked("x", torch.ones(2, 2).to_sparse(), (2, 2))


def test_a_weight_elsewhere_is_not_packed() -> None:
    with pytest.raises(InputError):
        NativeOps(1).prepare(torch.ones(5, 6, device="meta"))
