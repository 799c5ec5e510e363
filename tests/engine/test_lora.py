"""Requests on adapters beside others in the same steps: prefixes, preemption, unloading, handles, drafts, documents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from lora_files import write_lora
from small import Ear, load_small
from stores import always

from kvilt.batch import Adapter, Base
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import Recipe, Span
from kvilt.config import EngineConfig
from kvilt.engine.admission import BorrowedKV
from kvilt.engine.engine import Engine
from kvilt.engine.features.drafting import Drafting
from kvilt.engine.handles.handle import check_loan
from kvilt.engine.handles.handles import Handles
from kvilt.engine.request import Request
from kvilt.errors import AdapterUnknown, InputError
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.speculative.ngram import NgramDrafter
from kvilt.store.store import Store
from kvilt.store.tier import Budget

TEXT = [i * 5 % 61 for i in range(75)]


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    executor = load_small(tmp_path / "base", 40, backend="native")
    for seed, rank in enumerate((2, 5, 16)):
        executor.load_lora(write_lora(tmp_path / f"lora{seed}", rank, seed=seed))
    executor.load_lora(write_lora(tmp_path / "alora", 4, seed=9, alora_invocation_tokens=[TEXT[70], TEXT[71]]))
    yield executor
    executor.close()


def ask(engine: Engine, prompt: list[int], adapter: Adapter | None = None, **fields: object) -> Ear:
    params = SamplingParams(max_tokens=6, **fields.pop("params", {}))  # type: ignore[arg-type]
    ear = Ear(params.n)
    request = Request(prompt, params, adapter=adapter or Base(), **fields)  # type: ignore[arg-type]
    engine.add(engine.prepare(request, ear))
    return ear


def finish(engine: Engine, *ears: Ear) -> None:
    while not all(ear.over for ear in ears):
        assert engine.step()
    for ear in ears:
        assert ear.error is None, ear.error


def alone(executor: Executor, prompt: list[int], adapter: Adapter | None = None) -> list[int]:
    executor.prefixes.clear()
    ear = ask(engine := Engine(executor), prompt, adapter)
    finish(engine, ear)
    executor.prefixes.clear()
    return ear.tokens[0]


def choices(executor: Executor) -> list[Adapter]:
    adapters = executor.adapters
    return [
        Base(),
        *(adapters.choose(f"lora{i}") for i in range(3)),
        adapters.choose("lora1", 0.5),
        adapters.choose("alora", ids=TEXT),
    ]


def test_requests_on_different_adapters_share_steps_and_keep_their_tokens(executor: Executor) -> None:
    every = choices(executor)
    wanted = [alone(executor, TEXT, adapter) for adapter in every]
    assert len({tuple(tokens) for tokens in wanted}) == len(every)
    for step_tokens in (512, 17):
        executor.prefixes.clear()
        engine = Engine(executor, EngineConfig(step_tokens=step_tokens, max_rows=16))
        ears = [ask(engine, TEXT, adapter) for adapter in every for _ in range(2)]
        finish(engine, *ears)
        assert [ear.tokens[0] for ear in ears] == [tokens for tokens in wanted for _ in range(2)]


def test_a_prefix_is_found_by_the_same_adapter_at_the_same_scale_and_by_nobody_else(executor: Executor) -> None:
    engine, every = Engine(executor), choices(executor)
    for turn in range(2):
        for number, adapter in enumerate(every):
            ear = ask(engine, TEXT, adapter)
            finish(engine, ear)
            end = ear.ends[0]
            assert end is not None
            # 75 tokens are two whole pages; what stands before an invocation is the base model's, and is shared.
            known = 64 if turn or number == len(every) - 1 else 0
            assert end.cached == known, f"turn {turn}, adapter {number}"


def test_short_of_pages_requests_still_draw_their_own_tokens(executor: Executor) -> None:
    every = choices(executor)
    wanted = [alone(executor, TEXT, adapter) for adapter in every]
    held = [executor.create_kv_cache() for _ in range(2)]
    for kv in held:  # leave room for three requests, not for six
        kv.reserve(13 * 32)
    engine = Engine(executor)
    ears = [ask(engine, TEXT, adapter) for adapter in every]
    finish(engine, *ears)
    for kv in held:
        kv.close()
    assert [ear.tokens[0] for ear in ears] == wanted


def test_samples_of_one_prompt_run_on_its_adapter(executor: Executor) -> None:
    adapter = executor.adapters.choose("lora2")
    several = ask(engine := Engine(executor), TEXT, adapter, params={"n": 3, "temperature": 1.0, "seed": 4})
    finish(engine, several)
    executor.prefixes.clear()
    again = ask(engine, TEXT, adapter, params={"n": 3, "temperature": 1.0, "seed": 4})
    plain = ask(engine, TEXT, None, params={"n": 3, "temperature": 1.0, "seed": 4})
    finish(engine, again, plain)
    assert several.tokens == again.tokens
    assert several.tokens != plain.tokens


def test_unloading_lets_requests_in_progress_end_and_none_begin(executor: Executor) -> None:
    adapter = executor.adapters.choose("lora2")
    wanted = alone(executor, TEXT, adapter)
    engine = Engine(executor)
    running, waiting = ask(engine, TEXT, adapter), ask(engine, TEXT, adapter)
    engine.step()
    executor.unload_lora(adapter.adapter_id)
    with pytest.raises(AdapterUnknown):
        ask(engine, TEXT, adapter)
    finish(engine, running, waiting)
    assert running.tokens[0] == waiting.tokens[0] == wanted
    assert adapter.adapter_id not in [one.id for one in executor.adapters.all()]
    assert executor.adapters._loaded.get(adapter.adapter_id) is None


def test_an_adapter_that_cannot_come_back_fails_its_requests_and_no_other(executor: Executor, tmp_path: Path) -> None:
    lost = executor.adapters.choose("lora0")
    wanted = alone(executor, TEXT)
    engine = Engine(executor)
    broken, fine = ask(engine, TEXT, lost), ask(engine, TEXT)
    executor.adapters.budget_bytes = 1
    executor.adapters._evict(executor.adapters._loaded[lost.adapter_id])
    (tmp_path / "lora0" / "adapter_model.safetensors").write_bytes(b"")
    while not (broken.over and fine.over):
        assert engine.step()
    assert broken.reasons == ["error"]
    assert fine.tokens[0] == wanted


def test_aborted_and_refused_requests_let_go_of_their_adapter(executor: Executor) -> None:
    adapter = executor.adapters.choose("lora0")
    engine = Engine(executor)
    ear = Ear()
    job = engine.prepare(Request(TEXT, SamplingParams(), adapter=adapter), ear)
    engine.abort(job)
    engine.drain_inbox()
    with pytest.raises(InputError):
        engine.prepare(Request(TEXT * 100, SamplingParams(), adapter=adapter), Ear())
    running = ask(engine, TEXT, adapter)
    engine.step()
    assert executor.adapters.find("lora0").users == 1
    engine.abort(next(iter(engine._active.jobs)))
    engine.drain_inbox()
    assert running.over
    assert executor.adapters.find("lora0").users == 0


def test_a_lent_cache_must_be_the_adapters_own(executor: Executor) -> None:
    adapter, engine = executor.adapters.choose("lora0"), Engine(executor)
    with executor.create_kv_cache() as kv:
        executor.prefill(TEXT[:40], kv, adapter.adapter_id)
        for wrong in (Base(), executor.adapters.choose("lora1"), executor.adapters.choose("lora0", 2.0)):
            with pytest.raises(InputError, match="holds KV of"):
                engine.prepare(Request(TEXT, SamplingParams(), adapter=wrong), Ear(), BorrowedKV(kv.fork()))
        ear = Ear()
        request = Request(TEXT, SamplingParams(max_tokens=6), adapter=adapter, reuse=False)
        engine.add(engine.prepare(request, ear, BorrowedKV(kv.fork())))
        finish(engine, ear)
    assert ear.tokens[0] == alone(executor, TEXT, adapter)


def test_handles_remember_who_read_their_tokens(executor: Executor, tmp_path: Path) -> None:
    handles, adapter = Handles(executor), executor.adapters.choose("lora0")
    kv = executor.create_kv_cache()
    executor.prefill(TEXT, kv, adapter.adapter_id)
    info = handles.keep("me", kv)
    assert info.maker == executor.adapters.identity(adapter)
    handles.save("me", info.id, tmp_path / "handle")
    handles.evict_one(pinned=True)  # its KV is gone, its maker is not
    for handle in (info.id, handles.restore("me", tmp_path / "handle").id, handles.fork("me", info.id).id):
        loan = handles.lend("me", handle)
        if loan.kv is not None:
            loan.kv.close()
        check_loan(loan, adapter, executor.adapters)
        for wrong in (Base(), executor.adapters.choose("lora0", 0.5), executor.adapters.choose("lora1")):
            with pytest.raises(InputError, match="made with"):
                check_loan(loan, wrong, executor.adapters)
        assert handles.adapter_of(loan) == adapter
    executor.unload_lora(adapter.adapter_id)
    with pytest.raises(InputError, match="not loaded"):
        handles.adapter_of(loan)
    handles.close()


def test_a_handle_of_an_activated_adapter_is_the_base_models_before_its_invocation(executor: Executor) -> None:
    handles, adapter = Handles(executor), executor.adapters.choose("alora", ids=TEXT)
    assert adapter.begins == 70
    kv = executor.create_kv_cache()
    executor.prefill(TEXT, kv, adapter.adapter_id)
    info = handles.keep("", kv)
    assert info.maker.endswith(" from 70")
    handles.evict_one(pinned=True)
    assert handles.truncate("", info.id, 70).maker == "base"
    check_loan(handles.lend("", info.id), Base(), executor.adapters)
    handles.close()


def test_drafts_change_no_token_of_an_adapter(executor: Executor) -> None:
    loop = (TEXT[:9] * 8)[:70]
    every = [executor.adapters.choose("lora1"), Base(), executor.adapters.choose("lora2", 0.25)]
    wanted = [alone(executor, loop, adapter) for adapter in every]
    engine = Engine(executor, features=[Drafting(NgramDrafter(), executor.spec.vocab_size)])
    ears = [ask(engine, loop, adapter, params={"draft_tokens": 4}) for adapter in every]
    finish(engine, *ears)
    assert [ear.tokens[0] for ear in ears] == wanted


def test_documents_are_blended_as_their_adapter_reads_them(executor: Executor) -> None:
    """With everything computed again a blend is the whole prefill, to the token; chunks of two adapters never mix."""
    ids, documents = TEXT, (Span(8, 30), Span(30, 60))
    recipe = Recipe(ratio=1.0)
    with closing(Store(Budget(1 << 26))) as store:
        for adapter in (executor.adapters.choose("lora1"), Base(), executor.adapters.choose("lora1", 0.5)):
            wanted = alone(executor, ids, adapter)
            for _ in range(2):  # cold, then from the store
                engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
                ear = ask(engine, ids, adapter, documents=documents, recipe=recipe)
                finish(engine, ear)
                assert ear.tokens[0] == wanted
