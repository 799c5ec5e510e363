"""The public interfaces of blending, each sentence of their contract beside the test that proves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvilt.blend import (
    BlendOutput,
    BlendRetrieverResult,
    BlendRetrieverTask,
    KeyRotation,
    SelectiveBlend,
    StoreRetriever,
)
from kvilt.errors import InputError, ParamError, StoreMiss
from kvilt.kv.identity import Identity
from kvilt.models.spec import NoRope, RopeSpec, YarnScaling
from kvilt.store.address import LayerForm
from kvilt.store.store import Store
from kvilt.store.tier import Budget

ROPE = RopeSpec(theta=10000.0, dims=8)
HEADS, DIM, LAYERS = 2, 8, 4
IDENTITY = Identity("model", "numerics")
FORM = (LayerForm(HEADS, DIM, DIM, "float32"),) * LAYERS


def numbers(tokens: int, seed: int) -> Tensor:
    return torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def layers(tokens: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    return [(numbers(tokens, seed + i), numbers(tokens, seed + 100 + i)) for i in range(LAYERS)]


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(Budget(1 << 24)) as made:
        yield made


class Asking:
    """A caller of `blend` that keeps to the contract."""

    def __init__(self, blend: SelectiveBlend, positions: Tensor, starts: list[int]) -> None:
        self.executor = blend
        self.positions = positions
        self.starts = torch.tensor(starts)

    def layer(self, index: int, k: Tensor | None, v: Tensor | None, fresh: Tensor, **changes: Tensor) -> BlendOutput:
        tokens = int(self.starts[-1])
        valid = changes.get("valid", torch.ones(tokens, dtype=torch.uint8))
        original = changes.get("original", torch.zeros(tokens, dtype=torch.int64))
        out = self.executor.blend(
            index,
            k,
            v,
            valid,
            original,
            changes.get("q", fresh),
            changes.get("fresh_k", fresh),
            fresh,
            self.positions,
            self.starts,
            0,
        )
        self.positions = out.positions
        return out


# "[The executor] blends the retrieved KV with fresh KVs, and returns the short Q + long KV (blended) + positions of the
# tokens in Q."


def test_the_known_numeric_case() -> None:
    fresh = torch.ones(10, HEADS, DIM)
    fresh[[2, 6]] = 0
    fresh_k, stored = numbers(10, 1), torch.ones(10, HEADS, DIM)
    asking = Asking(SelectiveBlend([NoRope()] * 3, ratio=0.2), torch.arange(10, 20), [0, 10])

    first = asking.layer(0, stored, stored, fresh, fresh_k=fresh_k)
    assert first.positions.tolist() == list(range(10, 20))
    assert first.query_start_loc is None

    check = asking.layer(1, stored, stored, fresh, fresh_k=fresh_k, q=fresh_k)
    assert check.positions.tolist() == [12, 16]
    assert check.local_indices.tolist() == [2, 6]
    assert check.query_start_loc is not None
    assert check.query_start_loc.tolist() == [0, 2]
    assert torch.equal(check.q, fresh_k[[2, 6]])
    assert torch.equal(check.k, fresh_k)
    assert torch.equal(check.v, fresh)

    short_k = numbers(2, 3)
    after = asking.layer(2, stored, stored, torch.zeros(2, HEADS, DIM), fresh_k=short_k)
    assert after.positions.tolist() == [12, 16]
    assert after.query_start_loc is None
    assert torch.equal(after.k[[2, 6]], short_k)
    assert torch.equal(after.v[[2, 6]], torch.zeros(2, HEADS, DIM))
    rest = [0, 1, 3, 4, 5, 7, 8, 9]
    assert torch.equal(after.k[rest], stored[rest])
    assert torch.equal(after.v[rest], stored[rest])


def test_positions_that_start_above_zero_keep_their_offset() -> None:
    """A prefix hit stands before the batch: retrieved keys are brought to where the tokens stand, not to 0."""
    turn, keys, values = KeyRotation(ROPE), numbers(6, 5), numbers(6, 6)
    places, origins = torch.arange(40, 46), torch.arange(6)
    rotated = turn.place(keys, origins)
    asking = Asking(SelectiveBlend([ROPE] * 3, ratio=0.0), places, [0, 6])
    for layer in (0, 1):
        asking.layer(layer, rotated, values, values, original=origins)
    out = asking.layer(2, rotated, values, values[:0], original=origins)
    torch.testing.assert_close(out.k, turn.place(keys, places), rtol=0, atol=1e-5)


def test_unrotated_keys_are_turned_once() -> None:
    keys, values, places = numbers(6, 5), numbers(6, 6), torch.arange(3, 9)
    asking = Asking(SelectiveBlend([ROPE] * 3, ratio=0.0, unrotated=True), places, [0, 6])
    for layer in (0, 1):
        asking.layer(layer, keys, values, values)
    assert torch.equal(asking.layer(2, keys, values, values[:0]).k, KeyRotation(ROPE).place(keys, places))


YARN = RopeSpec(10000.0, 8, scaling=YarnScaling(4.0, 64, 1.1386))


def results(keys: Tensor, values: Tensor, rotated: bool | None, original: Tensor | None = None) -> BlendRetrieverResult:
    origins = torch.zeros(len(keys), dtype=torch.int64) if original is None else original
    return BlendRetrieverResult(keys, values, torch.ones(len(keys)), origins, rotated)


def blend_results(executor: SelectiveBlend, found: BlendRetrieverResult, places: Tensor) -> Tensor:
    """The keys of the layer after the check layer, at ratio 0."""
    starts, out = torch.tensor([0, len(places)]), None
    for layer in range(3):
        assert found.v is not None
        fresh = found.v if layer < 2 else found.v[:0]
        at = places if out is None else out.positions
        out = executor.blend_result(layer, found, fresh, fresh, fresh, at, starts, 0)
    assert out is not None
    return out.k


@pytest.mark.parametrize("rope", [ROPE, YARN], ids=["plain", "yarn"])
def test_the_result_says_whether_keys_are_rotated(rope: RopeSpec) -> None:
    """Keys that were never rotated get YaRN's magnitude, keys that were rotated have it already."""
    keys, values, places, origins = numbers(6, 5), numbers(6, 6), torch.arange(3, 9), torch.arange(6)
    turn = KeyRotation(rope)
    expected = turn.place(keys, places)
    never = results(keys, values, rotated=False)
    assert torch.equal(blend_results(SelectiveBlend([rope] * 3, 0.0), never, places), expected)
    once = results(turn.place(keys, origins), values, rotated=True, original=origins)
    moved = blend_results(SelectiveBlend([rope] * 3, 0.0), once, places)
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-5)


def test_keys_of_which_nothing_is_said_are_refused_where_it_makes_a_difference() -> None:
    keys, values, places = numbers(6, 5), numbers(6, 6), torch.arange(3, 9)
    unsaid = results(keys, values, rotated=None)
    plain = blend_results(SelectiveBlend([ROPE] * 3, 0.0), unsaid, places)
    torch.testing.assert_close(plain, KeyRotation(ROPE).place(keys, places), rtol=0, atol=1e-5)
    with pytest.raises(InputError, match="say whether retrieved keys are rotated"):
        blend_results(SelectiveBlend([YARN] * 3, 0.0), unsaid, places)
    told = blend_results(SelectiveBlend([YARN] * 3, 0.0, unrotated=True), unsaid, places)
    assert torch.equal(told, KeyRotation(YARN).place(keys, places))
    for rotated in (True, False):
        with pytest.raises(InputError, match="told otherwise"):
            blend_results(SelectiveBlend([YARN] * 3, 0.0, unrotated=rotated), results(keys, values, rotated), places)


def test_selection_is_per_request_and_takes_every_token_without_kv() -> None:
    fresh, stored = numbers(12, 1), numbers(12, 1)
    fresh[[1, 7, 8, 9]] += torch.tensor([4.0, 3.0, 2.0, 9.0]).view(4, 1, 1)
    valid = torch.ones(12, dtype=torch.uint8)
    valid[3], stored[3] = 0, torch.nan  # undefined, and never in a score
    asking = Asking(SelectiveBlend([NoRope()] * 2, ratio=0.34), torch.arange(12), [0, 5, 12])
    asking.layer(0, stored, stored, fresh, valid=valid)
    out = asking.layer(1, stored, stored, fresh, valid=valid)
    # floor(0.34 * 4) of the first request and its token without KV; floor(0.34 * 7) of the second
    assert out.positions.tolist() == [1, 3, 7, 9]
    assert out.query_start_loc is not None
    assert out.query_start_loc.tolist() == [0, 2, 4]


def test_nothing_retrieved_computes_everything() -> None:
    """ "The K tensor of a single layer, will be None if nothing is retrieved"."""
    fresh, nothing = numbers(5, 1), torch.zeros(5, dtype=torch.uint8)
    asking = Asking(SelectiveBlend([ROPE] * 3), torch.arange(5), [0, 5])
    for layer in range(3):
        out = asking.layer(layer, None, None, fresh, valid=nothing)
        assert out.positions.tolist() == [0, 1, 2, 3, 4]
        assert torch.equal(out.k, fresh)
        assert torch.equal(out.v, fresh)


@pytest.mark.parametrize("token_dim", [0, 1])
def test_the_token_dimension_may_be_any(token_dim: int) -> None:
    """ ":param int token_dim: The token dimension" of fresh q, k and v."""
    fresh, stored, starts = numbers(8, 1), numbers(8, 2), torch.tensor([0, 8])
    given = fresh.movedim(0, token_dim)
    executor = SelectiveBlend([NoRope()] * 3, ratio=0.5)
    common = (torch.ones(8), torch.zeros(8, dtype=torch.int64))
    executor.blend(0, stored, stored, *common, given, given, given, torch.arange(8), starts, token_dim)
    out = executor.blend(1, stored, stored, *common, given, given, given, torch.arange(8), starts, token_dim)
    assert out.q.shape[token_dim] == 4
    short = given.index_select(token_dim, out.local_indices)
    last = executor.blend(2, stored, stored, *common, short, short, short, out.positions, starts, token_dim)
    long = last.v.movedim(token_dim, 0)
    assert torch.equal(long[out.local_indices], fresh[out.local_indices])
    others = [i for i in range(8) if i not in out.local_indices.tolist()]
    assert torch.equal(long[others], stored[others])


PARTIAL = KeyRotation(RopeSpec(theta=10000.0, dims=4), head_dim=DIM)


def blended_keys(
    rotation: KeyRotation | RopeSpec | NoRope, stored: Tensor, fresh: Tensor, device: str = "cpu"
) -> list[BlendOutput]:
    """All outputs of three layers at half the tokens; `stored` and `fresh` are keys, values and queries alike."""
    stored, fresh = stored.to(device), fresh.to(device)
    executor, tokens = SelectiveBlend([rotation] * 3, ratio=0.5), len(fresh)
    at, starts = torch.arange(7, 7 + tokens, device=device), torch.tensor([0, tokens], device=device)
    found = BlendRetrieverResult(stored, stored, torch.ones(tokens), torch.zeros_like(at), rotated=False)
    outputs = []
    for layer in range(3):
        rows = fresh if layer < 2 else fresh[outputs[1].local_indices]
        outputs.append(executor.blend_result(layer, found, rows, rows, rows, at, starts, 0))
        at = outputs[-1].positions
    return outputs


# ":param torch.Tensor fresh_q: The fresh Q tensor from QKV split": [tokens, heads * dim], as it comes from there.


def test_heads_and_dimensions_may_be_one_axis() -> None:
    stored, fresh = numbers(8, 1), numbers(8, 2)
    expected = blended_keys(PARTIAL, stored, fresh)
    for flat_stored, flat_fresh in ((True, True), (True, False), (False, True)):
        outputs = blended_keys(
            PARTIAL, stored.flatten(1) if flat_stored else stored, fresh.flatten(1) if flat_fresh else fresh
        )
        for out, same in zip(outputs, expected, strict=True):
            assert out.k.shape == ((8, HEADS * DIM) if flat_fresh else (8, HEADS, DIM))
            assert torch.equal(out.k.flatten(1), same.k.flatten(1))
            assert torch.equal(out.v.flatten(1), same.v.flatten(1))
            assert torch.equal(out.q.flatten(1), same.q.flatten(1))
            assert torch.equal(out.positions, same.positions)


def test_shapes_that_cannot_be_understood_are_refused() -> None:
    stored, fresh = numbers(8, 1), numbers(8, 2)
    assert len(blended_keys(NoRope(), stored.flatten(1), fresh)) == 3  # nothing is rotated: heads need not be known
    with pytest.raises(InputError, match="cut into heads"):
        blended_keys(ROPE, stored.flatten(1), fresh.flatten(1))
    with pytest.raises(InputError, match="cut into heads"):
        blended_keys(KeyRotation(ROPE, head_dim=5), stored.flatten(1), fresh.flatten(1))
    for wrong in (stored[:7], stored[:, :1], stored[None], stored.flatten(1)[:, :3], stored.flatten()):
        with pytest.raises(InputError, match="retrieved tensors must be"):
            blended_keys(PARTIAL, wrong, fresh)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_stay_on_their_device(device: str) -> None:
    expected = blended_keys(PARTIAL, numbers(8, 1), numbers(8, 2))
    for out, same in zip(blended_keys(PARTIAL, numbers(8, 1), numbers(8, 2), device), expected, strict=True):
        for name in ("q", "k", "v", "positions", "local_indices"):
            assert getattr(out, name).device.type == device
            torch.testing.assert_close(getattr(out, name).cpu(), getattr(same, name), rtol=0, atol=1e-5)
        assert out.query_start_loc is None or out.query_start_loc.device.type == device


def test_no_keys_or_values_leave_their_device() -> None:
    """Also where there is but one: only scores and indices of tokens are asked to come to the CPU."""

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            moves = function in (Tensor.cpu, Tensor.numpy, Tensor.tolist)
            assert not (moves and args[0].dim() > 1), "a tensor of more than tokens was moved"
            return function(*args, **(kwargs or {}))

    with Watch():
        blended_keys(PARTIAL, numbers(8, 1), numbers(8, 2))


def test_layers_and_positions_out_of_order_are_refused() -> None:
    fresh = numbers(4, 1)
    asking = Asking(SelectiveBlend([NoRope()] * 3, ratio=0.5), torch.arange(4), [0, 4])
    with pytest.raises(InputError, match="in order"):
        asking.layer(1, fresh, fresh, fresh)
    for layer in (0, 1):
        asking.layer(layer, fresh, fresh, fresh)
    asking.positions = torch.arange(2) + 7
    with pytest.raises(InputError, match="handed out"):
        asking.layer(2, fresh, fresh, fresh[:2])


def test_kv_that_disappears_behind_the_check_layer_is_refused() -> None:
    fresh, gone = numbers(4, 1), torch.tensor([1, 1, 0, 1])
    asking = Asking(SelectiveBlend([NoRope()] * 3, ratio=0.0), torch.arange(4), [0, 4])
    for layer in (0, 1):
        asking.layer(layer, fresh, fresh, fresh)
    with pytest.raises(InputError, match="lacks KV"):
        asking.layer(2, fresh, fresh, fresh[:0], valid=gone)


def test_a_ratio_that_is_none_is_refused() -> None:
    with pytest.raises(ParamError, match="ratio"):
        SelectiveBlend([NoRope()], ratio=1.5, check_layer=0)
    with pytest.raises(ParamError, match="check_layer"):
        SelectiveBlend([NoRope()], check_layer=1)


# "Create a new BlendRetrieverTask to retrieve the KV caches. It may launch async tasks in the background."


def ask(store: Store, prompts: list[list[int]], indices: list[list[int]]) -> BlendRetrieverTask:
    tensors = [torch.tensor(ids, dtype=torch.int64) for ids in prompts]
    return StoreRetriever(store, IDENTITY, FORM).new_request(tensors, indices)


def test_segments_are_found_wherever_they_stand(store: Store) -> None:
    """ "The returned K and V tensor should match the length of the input tokens"."""
    one, two = layers(3, 1), layers(2, 50)
    store.put_chunk(IDENTITY, [1, 2, 3], one)
    store.put_chunk(IDENTITY, [8, 9], two)
    task = ask(store, [[8, 9, 5, 1, 2, 3], [1, 2, 3]], [[2, 3], []])
    for layer in range(LAYERS):
        found = task.result(layer)
        assert found.k is not None
        assert found.v is not None
        assert found.valid_mask.tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 1]
        assert found.valid_mask.device.type == "cpu"
        # "If the corresponding KV is not valid, the position will be 0"; ours are unrotated, so they are all 0.
        assert found.original_positions.tolist() == [0] * 9
        assert found.rotated is False
        for start, stored in ((0, two), (3, one), (6, one)):
            stop = start + len(stored[layer][0])
            assert torch.equal(found.k[start:stop], stored[layer][0])
            assert torch.equal(found.v[start:stop], stored[layer][1])


def test_nothing_there_is_none(store: Store) -> None:
    found = ask(store, [[1, 2], []], [[1], []]).result(0)
    assert found.k is None
    assert found.v is None
    assert found.valid_mask.tolist() == [0, 0]


def test_the_same_tokens_cut_elsewhere_are_other_segments(store: Store) -> None:
    store.put_chunk(IDENTITY, [1, 2, 3], layers(3, 1))
    assert ask(store, [[1, 2, 3]], [[1]]).result(0).k is None
    assert ask(store, [[1], [2, 3]], [[], []]).result(0).k is None


def test_retriever_and_executor_together(store: Store) -> None:
    """A batch of two requests, all layers: what is not selected is the store's, turned to its place."""
    stored = layers(4, 1)
    store.put_chunk(IDENTITY, [1, 2, 3, 4], stored)
    task = ask(store, [[7, 1, 2, 3, 4], [1, 2, 3, 4]], [[1], []])
    places = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])
    asking = Asking(SelectiveBlend([ROPE] * LAYERS, 0.5, unrotated=True), places, [0, 5, 9])
    chosen: list[int] = []
    for layer in range(LAYERS):
        found = task.result(layer)
        fresh = numbers(len(asking.positions), 70 + layer)
        out = asking.layer(layer, found.k, found.v, fresh, valid=found.valid_mask)
        chosen = chosen if out.query_start_loc is None else out.local_indices.tolist()
        if layer > 1:
            rest = [i for i in range(9) if i not in chosen]
            assert found.k is not None
            assert torch.equal(out.k[chosen], fresh)
            assert torch.equal(out.k[rest], KeyRotation(ROPE).place(found.k, places)[rest])
    assert len(chosen) == 1 + 2 + 2
    assert chosen[0] == 0  # it has no KV


def test_bad_requests_are_refused(store: Store) -> None:
    retriever = StoreRetriever(store, IDENTITY, FORM)
    with pytest.raises(InputError, match="indices"):
        retriever.new_request([torch.tensor([1])], [])
    with pytest.raises(InputError, match="in order"):
        retriever.new_request([torch.tensor([1, 2])], [[2, 1]])
    with pytest.raises(InputError, match="token ids"):
        retriever.new_request([torch.tensor([1.0])], [[]])
    with pytest.raises(InputError, match="layer 9"):
        retriever.new_request([torch.tensor([1])], [[]]).result(9)


def test_a_segment_that_fails_half_way_is_a_miss_and_not_noise(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = store.put_chunk(IDENTITY, [1, 2], layers(2, 1))
    task = ask(store, [[1, 2]], [[]])
    assert task.result(0).k is not None

    def damaged(_self: object, _index: int) -> None:
        raise StoreMiss("checksum")

    monkeypatch.setattr(type(loading), "layer", damaged)
    with pytest.raises(StoreMiss):
        task.result(1)
