"""Adapters in an executor: rows with and without them in one step, to the bit; who may use them, when they leave."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from effort import some
from lora_files import ALL, lora_tensors, write_lora
from tiny import write_tiny
from torch import Tensor

from kvilt.batch import Adapted, Adapter, Base, Batch, Hidden, HiddenOut, Ids, LayerSpan, Row
from kvilt.config import RunConfig
from kvilt.errors import AdapterUnknown, BlobError, InputError, ModelNotFound, ParamError, WeightError
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.models.step_adapters import EMBEDDING
from kvilt.ops import select
from kvilt.sampling.params import SamplingParams
from kvilt.store.store import Store
from kvilt.store.tier import Budget

KINDS = [  # name, rank, parts, dtype
    ("a", 4, ("self_attn.q_proj", "self_attn.v_proj"), torch.float32),
    ("b", 1, ("mlp.gate_proj",), torch.float16),
    ("c", 16, ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj"), torch.bfloat16),
    ("d", 9, (), torch.float32),
    ("e", 33, ("self_attn.k_proj", "lm_head"), torch.float32),
    ("f", 3, ("embed_tokens", "mlp.up_proj"), torch.float32),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_lora(root / name, rank, parts or ALL, seed, dtype)
        for seed, (name, rank, parts, dtype) in enumerate(KINDS)
    }


def opened(base: Path, backend: str = "native", threads: int = 1) -> Executor:
    return load_executor(base, RunConfig(kv_memory=1 << 22, backend=backend, threads=threads))


@pytest.fixture(params=["native", "reference"])
def executor(base: Path, request: pytest.FixtureRequest) -> Iterator[Executor]:
    executor = opened(base, request.param)
    yield executor
    executor.close()


@pytest.fixture
def native(base: Path) -> Iterator[Executor]:
    executor = opened(base, threads=2)
    yield executor
    executor.close()


def prompt(row: int, length: int) -> list[int]:
    return [int(i) for i in torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(row))]


@pytest.mark.parametrize(("dtype", "tolerance"), some([(torch.bfloat16, 0.2), (torch.float32, 1e-4)]))
def test_kernels_of_a_device_give_every_kind_of_adapter_its_logits(
    base: Path,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Rows with plain adapters, with one of the embedding, with magnitudes and with none, in one step."""
    backend = pytest.importorskip("kvilt.ops.triton.backend")
    monkeypatch.setitem(select._NAMED, "interpreted", lambda device, _: backend.TritonOps(device, dtype))
    dora = write_lora(tmp_path / "dora", 5, ("self_attn.q_proj", "mlp.down_proj"), 9, use_dora=True)
    found = []
    for name in ("reference", "interpreted"):
        with closing(opened(base, name)) as executor, executor.create_kv_cache(5) as kv:
            adapters: list[Adapter] = [executor.adapters.choose(executor.load_lora(folders[one]), 0.5) for one in "def"]
            adapters += [executor.adapters.choose(executor.load_lora(dora)), Base()]
            kv.reserve(1)
            rows = [Row(Ids(prompt(row, 1)), [0], kv, row, adapter=one) for row, one in enumerate(adapters)]
            found.append(executor.run(Batch.of(rows)).values)
    made, expected = found
    assert float((made - expected).abs().max()) < tolerance * float(expected.abs().max())


# To the bit.


def decoded(
    executor: Executor, prompts: Sequence[list[int]], adapters: Sequence[Adapter], steps: int = 4
) -> list[Tensor]:
    """All logits of some rows that are prefilled and decoded in the same steps: row n begins n steps later."""
    found: list[list[Tensor]] = [[] for _ in prompts]
    pending = [list(ids) for ids in prompts]
    with ExitStack() as held:
        caches = [held.enter_context(executor.create_kv_cache()) for _ in prompts]
        for step in range(steps + len(prompts) - 1):
            active = [i for i in range(len(prompts)) if i <= step < i + steps]
            rows = []
            for i in active:
                kv, ids = caches[i], pending[i]
                kv.reserve(len(ids))
                rows.append(Row(Ids(ids), range(kv.num_entries, kv.num_entries + len(ids)), kv, adapter=adapters[i]))
            logits = executor.run(Batch.of(rows))
            for n, i in enumerate(active):
                found[i].append(logits.of_row(n)[0].clone())
                caches[i].commit([pending[i]])
                pending[i] = [int(found[i][-1].argmax())]
    return [torch.stack(rows) for rows in found]


def test_sixteen_rows_with_six_adapters_are_sixteen_single_runs_to_the_bit(
    native: Executor, folders: dict[str, Path]
) -> None:
    ids = [native.load_lora(folders[name]) for name, *_ in KINDS]
    scales = (1.0, 0.5, -0.25)
    adapters: list[Adapter] = [
        Base() if row % 7 == 6 else native.adapters.choose(ids[row % 7 % len(ids)], scales[row % 3])
        for row in range(16)
    ]
    prompts = [prompt(row, 3 + 5 * row % 31) for row in range(16)]
    together = decoded(native, prompts, adapters)
    for row in range(16):
        (alone,) = decoded(native, [prompts[row]], [adapters[row]])
        assert torch.equal(alone, together[row]), f"row {row} on {adapters[row]}"
    plain = decoded(native, prompts, [Base()] * 16)
    for row, adapter in enumerate(adapters):
        assert torch.equal(plain[row], together[row]) == isinstance(adapter, Base)


def test_a_prompt_in_pieces_is_the_prompt_at_once_to_the_bit(native: Executor, folders: dict[str, Path]) -> None:
    for name in ("d", "e", "f"):
        lora = native.load_lora(folders[name])
        ids = prompt(40, 60)
        with native.create_kv_cache() as whole, native.create_kv_cache() as cut:
            native.prefill(ids[:-1], whole, lora)
            for start in range(0, 59, 13):
                native.prefill(ids[start : min(start + 13, 59)], cut, lora)
            assert torch.equal(native.step(ids[-1:], whole, lora), native.step(ids[-1:], cut, lora))


def test_steps_that_are_replayed_are_those_of_the_decoder_to_the_bit(
    native: Executor, folders: dict[str, Path]
) -> None:
    """The same recording serves other adapters of the same kind, and adapters that came after it was made."""
    first = native.load_lora(folders["d"])
    for lora in (first, native.load_lora(write_lora(folders["d"].parent / "later", 21, seed=77))):
        with native.create_kv_cache() as kv, native.create_kv_cache() as other:
            native.prefill(prompt(1, 9), kv, lora)
            native.prefill(prompt(1, 9), other, lora)
            for token in (5, 9, 33):
                replayed = native.step([token], kv, lora)
                other.reserve(1)
                row = Row(Ids([token]), [other.num_entries], other, adapter=native.adapters.choose(lora))
                batch = Batch.of([row])
                with native.adapters.step(batch.rows, batch.starts) as step_adapters, torch.no_grad():
                    direct = native._decoder(batch, lambda _: None, step_adapters)
                assert torch.equal(direct.values, replayed)
                other.commit([[token]])
                other.row(0).adapter = kv.row(0).adapter
    recorded = [shape.adapted for shape in native._replay._steps if shape.adapted]
    assert recorded == [step_adapters.parts], "one recording for both"


def test_sampling_in_native_loops_draws_what_single_steps_do(executor: Executor, folders: dict[str, Path]) -> None:
    for name in ("d", "f"):
        lora, ids = executor.load_lora(folders[name]), prompt(3, 6)
        with executor.create_kv_cache() as kv, executor.create_kv_cache() as slow:
            looped = executor.sample_tokens(40, ids, kv, lora, SamplingParams())[0]
            drawn, token = [], ids
            for _ in range(40):
                token = [int(executor.step(token, slow, lora).argmax())]
                drawn += token
            assert looped == drawn
            assert kv.maker == slow.maker != "base"
        with executor.create_kv_cache() as kv:
            assert executor.sample_tokens(40, ids, kv)[0] != looped


def test_scores_are_those_of_the_adapted_model(executor: Executor, folders: dict[str, Path]) -> None:
    lora, ids = executor.load_lora(folders["e"]), prompt(5, 20)
    scores = executor.score(ids, lora_id=lora).logprobs
    with executor.create_kv_cache() as kv:
        for i in range(19):
            row = torch.log_softmax(executor.step([ids[i]], kv, lora)[0], -1)
            assert abs(float(row[ids[i + 1]] - scores[i])) < 1e-4
    assert (executor.score(ids).logprobs - scores).abs().max() > 0.01


def test_many_more_adapters_than_the_first_table_has_room_for(native: Executor, tmp_path: Path) -> None:
    ids = [native.load_lora(write_lora(tmp_path / f"{i}", 2, seed=i)) for i in range(40)]
    adapters = [native.adapters.choose(i) for i in ids]
    together = decoded(native, [prompt(7, 5)] * 40, adapters, steps=2)
    assert len({tuple(rows.flatten().tolist()) for rows in together}) == 40
    assert torch.equal(decoded(native, [prompt(7, 5)], [adapters[31]], steps=2)[0], together[31])


# Who may use them.


def test_an_unknown_adapter_is_an_error_and_never_the_base_model(executor: Executor, folders: dict[str, Path]) -> None:
    gone = executor.load_lora(folders["a"])
    executor.unload_lora(gone)
    for lora in (gone, 99, -1, True, "a", 1.0):
        with executor.create_kv_cache() as kv, pytest.raises(AdapterUnknown):
            executor.prefill([1, 2], kv, lora)  # type: ignore[arg-type]
    for lora in (gone, 99):
        with pytest.raises(AdapterUnknown):
            executor.unload_lora(lora)
    with executor.create_kv_cache() as kv:
        kv.reserve(2)
        with pytest.raises(AdapterUnknown):
            executor.run(Batch.of([Row(Ids([1, 2]), range(2), kv, adapter=Adapted(gone))]))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1", None, True])
def test_a_scale_is_a_finite_number(native: Executor, folders: dict[str, Path], scale: float) -> None:
    lora = native.load_lora(folders["a"])
    with native.create_kv_cache() as kv, pytest.raises(ParamError, match="lora_scale"):
        native.prefill([1], kv, lora, lora_scale=scale)


def test_names_are_given_once(native: Executor, folders: dict[str, Path]) -> None:
    first = native.load_lora(folders["a"])
    assert native.adapters.find("a").id == first
    with pytest.raises(InputError, match="loaded already"):
        native.load_lora(folders["a"])
    second = native.load_lora(folders["a"], "again")
    assert [one.name for one in native.adapters.all()] == ["a", "again"]
    assert native.adapters.find(second).content == native.adapters.find(first).content
    for name in ("", "x" * 257, "new\nline", 7):
        with pytest.raises(ParamError, match="name"):
            native.load_lora(folders["b"], name)  # type: ignore[arg-type]


def test_an_adapter_in_use_leaves_when_its_last_user_is_gone(native: Executor, folders: dict[str, Path]) -> None:
    lora = native.load_lora(folders["d"])
    adapter = native.adapters.choose(lora)
    hold = native.adapters.hold(adapter)
    assert hold is not None
    (before,) = decoded(native, [prompt(2, 5)], [adapter])
    native.unload_lora(lora)
    with pytest.raises(AdapterUnknown):
        native.adapters.choose(lora)
    again = native.load_lora(write_lora(folders["d"].parent / "changed", 5, seed=99), "d")  # the name is free at once
    (after,) = decoded(native, [prompt(2, 5)], [adapter])
    assert torch.equal(before, after)
    hold.release()
    hold.release()
    with pytest.raises(AdapterUnknown):
        decoded(native, [prompt(2, 5)], [adapter])
    assert [one.id for one in native.adapters.all()] == [again]
    native.unload_lora(again)
    assert native.lora_metrics_snapshot()["bytes"] == 0


def test_unloading_while_a_step_runs_neither_stops_nor_changes_it(base: Path, folders: dict[str, Path]) -> None:
    executor = opened(base, "reference")
    lora = executor.load_lora(folders["d"])
    adapter = executor.adapters.choose(lora)
    (wanted,) = decoded(executor, [prompt(2, 5)], [adapter], steps=1)
    inside, go_on = threading.Event(), threading.Event()
    real = executor.pool.ops.attention

    def slow(*args: object) -> Tensor:
        inside.set()
        assert go_on.wait(60)
        return real(*args)  # type: ignore[arg-type]

    executor.pool.ops.attention = slow  # type: ignore[method-assign]
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(decoded(executor, [prompt(2, 5)], [adapter], steps=1)))
    thread.start()
    assert inside.wait(60)
    nbytes = executor.adapters.find(lora).nbytes
    executor.unload_lora(lora)
    kinds = ("loaded", "unloading", "active", "resident", "bytes")
    during = executor.lora_metrics_snapshot()
    assert [during[kind] for kind in kinds] == [0, 1, 1, 1, nbytes], "it is still used and still in memory"
    go_on.set()
    thread.join()
    assert torch.equal(found[0], wanted)
    after = executor.lora_metrics_snapshot()
    assert [after[kind] for kind in kinds] == [0, 0, 0, 0, 0]
    executor.close()


def test_an_adapter_of_the_embedding_has_no_part_in_rows_that_start_later(
    native: Executor, folders: dict[str, Path]
) -> None:
    """A row in two spans is the row in one, to the bit, also beside a row that begins with its ids."""
    adapter, ids = native.adapters.choose(native.load_lora(folders["f"])), [5, 17, 3]
    with native.create_kv_cache() as kv, native.create_kv_cache() as beside:
        kv.reserve(len(ids))
        beside.reserve(2)
        whole = native.run(Batch.of([Row(Ids(ids), range(3), kv, adapter=adapter)]))
        first = Row(Ids(ids), range(3), kv, layers=LayerSpan(0, 1), want=HiddenOut(), adapter=adapter)
        (states,) = native.run(Batch.of([first])).hidden.values()
        later = Row(Hidden(states), range(3), kv, layers=LayerSpan(1), adapter=adapter)
        neighbour = Row(Ids([8, 9]), range(2), beside, adapter=adapter)
        assert torch.equal(native.run(Batch.of([later])).values, whole.values)
        assert torch.equal(native.run(Batch.of([neighbour, later])).of_row(1), whole.values)


# The budget.


def test_the_least_recently_used_leave_memory_and_come_back(base: Path, tmp_path: Path) -> None:
    executor = opened(base)
    one = executor.load_lora(write_lora(tmp_path / "0", 4, seed=0))
    nbytes = executor.adapters.find(one).nbytes
    executor.adapters.budget_bytes = 3 * nbytes
    ids = [one, *(executor.load_lora(write_lora(tmp_path / f"{i}", 4, seed=i)) for i in range(1, 5))]
    assert [info.resident for info in executor.adapters.all()] == [False, False, True, True, True]
    adapters = [executor.adapters.choose(i) for i in ids]
    fresh = opened(base)
    wanted = [
        decoded(fresh, [prompt(1, 4)], [fresh.adapters.choose(fresh.load_lora(tmp_path / f"{i}"))])[0] for i in range(5)
    ]
    used = [2, 3, 4]
    for turn in (0, 3, 1, 4, 0, 2):
        assert torch.equal(decoded(executor, [prompt(1, 4)], [adapters[turn]])[0], wanted[turn])
        used = [*(one for one in used if one != turn), turn][-3:]
        assert [i for i, info in enumerate(executor.adapters.all()) if info.resident] == sorted(used)
        assert executor.adapters.resident_bytes == 3 * nbytes
    assert executor.adapters.evictions >= 4
    # A step that needs more than the budget has them all, for as long as it runs.
    together = decoded(executor, [prompt(1, 4)] * 5, adapters)
    assert all(torch.equal(a, b) for a, b in zip(together, wanted, strict=True))
    executor.close()
    fresh.close()


def test_an_adapter_whose_files_changed_while_it_was_out_is_refused(base: Path, tmp_path: Path) -> None:
    executor = opened(base)
    lora = executor.load_lora(write_lora(tmp_path / "a", 4, seed=0))
    executor.adapters.budget_bytes = executor.adapters.find(lora).nbytes
    executor.load_lora(write_lora(tmp_path / "b", 4, seed=1))
    write_lora(tmp_path / "a", 4, seed=2)
    with executor.create_kv_cache() as kv, pytest.raises(WeightError, match="changed since"):
        executor.prefill([1, 2], kv, lora)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with executor.create_kv_cache() as kv, pytest.raises(WeightError, match="missing"):
        executor.prefill([1, 2], kv, lora)
    executor.close()


def test_an_adapter_larger_than_the_budget_is_refused(native: Executor, folders: dict[str, Path]) -> None:
    native.adapters.budget_bytes = 1000
    with pytest.raises(ParamError, match="lora_memory"):
        native.load_lora(folders["d"])
    assert native.lora_metrics_snapshot()["loaded"] == 0


# Whose KV it is.


def test_kv_of_another_maker_is_refused(executor: Executor, folders: dict[str, Path]) -> None:
    a, d = executor.load_lora(folders["a"]), executor.load_lora(folders["d"])
    with executor.create_kv_cache() as kv:
        executor.prefill([1, 2, 3], kv, a)
        for lora, scale in ((None, 1.0), (d, 1.0), (a, 0.5)):
            with pytest.raises(InputError, match="holds KV of"):
                executor.step([4], kv, lora, lora_scale=scale)
            assert kv.lengths == (3,)
        executor.step([4], kv, a)
        kv.truncate(0)
        executor.step([4], kv)  # an empty cache is nobody's
        assert kv.maker == "base"
        with pytest.raises(InputError, match="holds KV of"):
            executor.step([4], kv, a)


def test_a_changed_adapter_under_the_same_name_never_meets_old_kv(
    executor: Executor, tmp_path: Path, folders: dict[str, Path]
) -> None:
    first = executor.load_lora(write_lora(tmp_path / "mine", 4, seed=1))
    with executor.create_kv_cache() as kv:
        executor.prefill([1, 2, 3], kv, first)
        kv.save(tmp_path / "kv")
        executor.unload_lora(first)
        second = executor.load_lora(write_lora(tmp_path / "mine", 4, seed=2))
        with pytest.raises(InputError, match="holds KV of"):
            executor.step([4], kv, second)
    for lora, scale in ((None, 1.0), (second, 1.0)):
        with pytest.raises(BlobError, match=r"identity\.adapter"):
            executor.open_kv_cache(tmp_path / "kv", lora_id=lora, lora_scale=scale)
    executor.unload_lora(second)
    third = executor.load_lora(write_lora(tmp_path / "elsewhere", 4, seed=1))  # the same content by another name
    with pytest.raises(BlobError, match=r"identity\.adapter"):
        executor.open_kv_cache(tmp_path / "kv", lora_id=third, lora_scale=0.5)
    with executor.open_kv_cache(tmp_path / "kv", lora_id=third) as kv, executor.create_kv_cache() as fresh:
        executor.prefill([1, 2, 3], fresh, third)
        assert torch.equal(executor.step([4], kv, third), executor.step([4], fresh, third))


def test_forks_copies_and_selections_remember_their_maker(executor: Executor, folders: dict[str, Path]) -> None:
    lora = executor.load_lora(folders["a"])
    with executor.create_kv_cache() as kv, executor.create_kv_cache(2) as wide, executor.create_kv_cache() as one:
        executor.prefill([1, 2, 3], kv, lora)
        wide.broadcast_and_copy_from(kv)
        one.select_and_copy_from(wide, 1)
        with kv.fork() as forked, kv.deep_copy() as copied:
            assert {kv.maker, wide.maker, one.maker, forked.maker, copied.maker} == {kv.maker}
            assert kv.maker == f"{executor.adapters.find(lora).content}@1.0"
    with executor.create_kv_cache(2) as mixed:
        executor.step([[1, 2], []], mixed)
        executor.step([[], [3]], mixed, lora)
        assert mixed.maker == f"base | {executor.adapters.find(lora).content}@1.0"


# Adapters that tokens switch on.


def test_an_activated_adapter_stands_behind_kv_of_the_base_model(executor: Executor, tmp_path: Path) -> None:
    lora = executor.load_lora(write_lora(tmp_path / "alora", 4, seed=3, alora_invocation_tokens=[7, 8]))
    plain = executor.load_lora(write_lora(tmp_path / "lora", 4, seed=3))
    ids = [1, 7, 8, 2, 3, 7, 8, 4]  # the last invocation counts: position 5
    with executor.create_kv_cache() as kv, executor.create_kv_cache() as other:
        executor.prefill(ids[:5], kv)  # by the base model
        found = executor.step(ids[5:], kv, lora)
        assert kv.maker.endswith(" from 5")
        executor.prefill(ids[:-1], other, lora)
        again = executor.step(ids[-1:], other, lora)
        assert torch.allclose(again, found, atol=1e-4)
        assert torch.equal(again, found) or executor.pool.ops.name != "native"
        kv.truncate(5)
        assert kv.maker == "base"
        assert not torch.allclose(executor.step(ids[5:], kv), found)
    with executor.create_kv_cache() as kv:
        assert not torch.allclose(executor.step(ids, kv, plain), found)
    with executor.create_kv_cache() as kv, pytest.raises(InputError, match="switched on"):
        executor.prefill([1, 7, 3, 8], kv, lora)
    with executor.create_kv_cache() as kv:
        executor.prefill(ids[:5], kv, plain)
        with pytest.raises(InputError, match="'base' is needed"):
            executor.step(ids[5:], kv, lora)


# Bad input.


def test_nothing_is_half_loaded(native: Executor, tmp_path: Path) -> None:
    tensors = lora_tensors(4)
    last = list(tensors)[-1]
    tensors[last][0, 0] = float("nan")
    with pytest.raises(WeightError, match="NaN"):
        native.load_lora(write_lora(tmp_path / "nan", 4, tensors=tensors))
    assert native.lora_metrics_snapshot()["loaded"] == 0
    assert native.adapters.resident_bytes == 0
    for assets in (tmp_path / "nowhere", b"bytes", 5, None, "nul\0"):
        with pytest.raises((ModelNotFound, InputError)):
            native.load_lora(assets)  # type: ignore[arg-type]


def test_metrics_count_adapters_rows_and_bytes(native: Executor, folders: dict[str, Path]) -> None:
    nothing = dict.fromkeys(("loaded", "unloading", "active", "resident", "bytes", "loads", "evictions"), 0)
    fresh = {**nothing, "budget_bytes": native.adapters.budget_bytes, "rows": {}}
    assert native.lora_metrics_snapshot() == fresh
    lora = native.load_lora(folders["a"], "counted")
    with native.create_kv_cache() as kv:
        native.prefill([1, 2, 3], kv, lora)
        native.step([4], kv, lora)
    found = native.lora_metrics_snapshot()
    assert (found["loaded"], found["active"], found["resident"], found["loads"]) == (1, 0, 1, 1)
    assert EMBEDDING not in native.adapters.find(lora).parts
    assert EMBEDDING in native.adapters.find(native.load_lora(folders["f"], "of the embedding")).parts
    native.unload_lora(native.adapters.find("of the embedding").id)
    assert found["rows"]["counted"] == 2
    assert found["bytes"] == native.adapters.find(lora).nbytes > 0
    hold = native.adapters.hold(native.adapters.choose(lora))
    assert hold is not None
    assert native.lora_metrics_snapshot()["active"] == 1
    hold.release()
    assert native.lora_metrics_snapshot()["active"] == 0


def test_a_store_keeps_an_adapters_kv_apart(executor: Executor, folders: dict[str, Path]) -> None:
    lora = executor.load_lora(folders["d"])
    identity, ids = executor.pool.identity(), [1, 2, 3, 4]
    with closing(Store(Budget(1 << 24))) as store, executor.create_kv_cache() as kv:
        executor.prefill(ids, kv, lora)
        store.put_cache(kv)
        assert not store.open_row(identity, kv.layout, ids).hit()
        own = replace(identity, adapter=kv.maker)
        image = store.open_row(own, kv.layout, ids).image(kv.layout)
        with KVCache.of_images(executor.pool, [image], 100) as again:
            assert again.maker == kv.maker
            assert torch.equal(executor.step([5], again, lora), executor.step([5], kv, lora))


def test_dora_is_loaded_while_others_run(native: Executor, tmp_path: Path) -> None:
    """Its lengths are measured on the model's own weights, and neither the steps nor it may notice each other."""
    folder = write_lora(tmp_path / "dora", 4, seed=2, use_dora=True)
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3)

    def said(lora: int | None = None) -> list[list[int]]:
        with native.create_kv_cache() as kv:
            return native.sample_tokens(60, prompt(1, 20), kv, lora, params)

    plain = said()
    first = native.load_lora(folder)
    adapted = said(first)
    native.unload_lora(first)
    assert adapted != plain
    failed: list[BaseException] = []

    def load_often() -> None:
        try:
            for _ in range(15):
                native.unload_lora(native.load_lora(folder))
        except BaseException as error:
            failed.append(error)

    other = threading.Thread(target=load_often)
    other.start()
    while other.is_alive():
        assert said() == plain
    other.join()
    assert not failed
    assert said(native.load_lora(folder)) == adapted
