"""Contracts D and E: `LlmExecutor` over a decoder-only model that others wrote, without any kvilt inside."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from third_party import ToyModel

from kvilt import CacheHandle, DecodeInput, LlmExecutor, ModelInfo, PrefillInput, UnifiedBatch, UnifiedItem
from kvilt.batch import Batch
from kvilt.errors import Cancelled, ContextOverflow, InputError, TruncateError, Unsupported

A, B, C = [5, 17, 3, 44], [1, 2, 3], [40] * 33
INFO = ModelInfo(
    model_id="toy/one", model_type="toy", hidden_size=8, num_layers=1, num_kv_heads=1, vocab_size=61,
    max_sequence_length=256, device="toy:0", dtype="int7",
)  # fmt: skip


class Batching(ToyModel):
    """A model that decodes several sequences at once."""

    def decode_batch(self, batch: Any) -> list[torch.Tensor]:
        self.calls.append(f"decode_batch {len(batch)}")
        return [torch.tensor(ToyModel.decode(self, *one)) for one in batch]


class Unified(Batching):
    """A model with a forward for any mix of chunks and decodes, and with a truncate."""

    def unified_forward(self, batch: UnifiedBatch) -> list[Any]:
        self.calls.append(f"unified {len(batch.items)}")
        if any(item.tokens[0] == 60 for item in batch.items):
            raise Unsupported("not this token")
        out = []
        for item in batch.items:
            held = self.caches.setdefault(item.cache_id, [])
            assert item.position == len(held)
            held += item.tokens
            out.append(self.logits(held) if item.is_final_chunk else None)
        return out

    def truncate(self, cache_id: str, length: int) -> None:
        self.calls.append(f"truncate {cache_id} {length}")
        del self.caches[cache_id][length:]


@pytest.fixture(params=[ToyModel, Batching, Unified])
def model(request: pytest.FixtureRequest) -> ToyModel:
    made: ToyModel = request.param()
    return made


@pytest.fixture
def served(model: ToyModel) -> LlmExecutor:
    return LlmExecutor(model, INFO)


def same(ours: torch.Tensor | None, model: ToyModel, tokens: list[int]) -> None:
    assert ours is not None
    assert ours.dtype == torch.float32
    assert torch.equal(ours, torch.tensor(model.logits(tokens)))


def test_prompts_and_decodes(model: ToyModel, served: LlmExecutor) -> None:
    outputs = served.batch_prefill([PrefillInput("a", A), PrefillInput("b", B)])
    for output, prompt, name in zip(outputs, (A, B), "ab", strict=True):
        same(output.logits, model, prompt)
        assert output.cache == CacheHandle(name, len(prompt))
    decoded = served.batch_decode([DecodeInput("b", 7), DecodeInput("a", 8)])
    same(decoded[0].logits, model, [*B, 7])
    same(decoded[1].logits, model, [*A, 8])
    assert [one.cache.length for one in decoded] == [4, 5]
    same(served.prefill(PrefillInput("a", C)).logits, model, C)  # a prompt begins its sequence anew
    same(served.decode(DecodeInput("a", 1)).logits, model, [*C, 1])
    assert model.caches == {"a": [*C, 1], "b": [*B, 7]}


def test_decodes_use_what_the_model_has() -> None:
    for kind, expected in (
        (ToyModel, ["decode a 4", "decode b 3"]),
        (Batching, ["decode_batch 2", "decode a 4", "decode b 3"]),
        (Unified, ["unified 2"]),
    ):
        model = kind()
        served = LlmExecutor(model)
        served.batch_prefill([PrefillInput("a", A), PrefillInput("b", B)])
        model.calls.clear()
        served.batch_decode([DecodeInput("a", 1), DecodeInput("b", 2)])
        assert model.calls == expected


def test_a_model_that_does_not_take_a_mixture_is_asked_for_its_parts() -> None:
    """ "Falls back to the trait default (serial per-item) when the model returns Err(unsupported)" """
    model = Unified()
    served = LlmExecutor(model)
    same(served.batch_prefill([PrefillInput("a", A), PrefillInput("b", [60, 1])])[1].logits, model, [60, 1])
    assert model.calls == ["unified 2", "prefill a 4", "prefill b 2"]


def test_chunks_mixed_with_decodes(model: ToyModel, served: LlmExecutor) -> None:
    """ "prefill items go through model.prefill(seq_id, &q_tokens) ..., decode items (q_len == 1 && is_final_chunk) are
    grouped into a single model.decode_batch(...) call." """
    served.prefill(PrefillInput("d", B))
    first = served.unified_decode(
        UnifiedBatch(
            [
                UnifiedItem("c", C[:20], 0, is_final_chunk=False),
                UnifiedItem("d", [8], 3),
                UnifiedItem("a", A, 0),
            ]
        )
    )
    assert [one is None for one in first] == [True, False, False]
    same(first[1], model, [*B, 8])
    same(first[2], model, A)
    assert served.status().tokens == 20 + 4 + len(A)
    second = served.unified_decode(UnifiedBatch([UnifiedItem("d", [9], 4), UnifiedItem("c", C[20:], 20)]))
    same(second[0], model, [*B, 8, 9])
    same(second[1], model, C)
    same(served.decode(DecodeInput("c", 1)).logits, model, [*C, 1])
    more = served.unified_decode(UnifiedBatch([UnifiedItem("c", [4, 5, 6], 34)]))  # a second turn
    same(more[0], model, [*C, 1, 4, 5, 6])
    with pytest.raises(InputError, match="holds 4 tokens"):
        served.unified_decode(UnifiedBatch([UnifiedItem("a", [1], 3)]))


def test_drafts_are_verified_and_taken_back(model: ToyModel, served: LlmExecutor) -> None:
    served.batch_prefill([PrefillInput("a", A), PrefillInput("b", B)])
    drafts = [DecodeInput("a", 1), DecodeInput("b", 9), DecodeInput("a", 2), DecodeInput("a", 3)]
    outputs = served.forward_verify(drafts)
    for output, tokens in zip(outputs, ([*A, 1], [*B, 9], [*A, 1, 2], [*A, 1, 2, 3]), strict=True):
        same(output.logits, model, tokens)
        assert output.cache.length == len(tokens)
    with pytest.raises(InputError, match="says 5 tokens and the cache holds 7"):
        served.truncate_kv(outputs[0].cache, 5)
    assert served.truncate_kv(outputs[3].cache, 5) == CacheHandle("a", 5)
    same(served.decode(DecodeInput("a", 30)).logits, model, [*A, 1, 30])
    served.truncate_kv_for_cache_id("a", 2)
    found = served.forward_verify([DecodeInput("a", 6), DecodeInput("a", 7)])
    same(found[0].logits, model, [*A[:2], 6])
    same(found[1].logits, model, [*A[:2], 6, 7])
    for length in (-1, 5):
        with pytest.raises(TruncateError):
            served.truncate_kv_for_cache_id("a", length)
    served.truncate_kv_for_cache_id("a", 0)
    found = served.forward_verify([DecodeInput("a", 6), DecodeInput("a", 7)])
    same(found[1].logits, model, [6, 7])
    assert model.caches["a"] == [6, 7]


def test_a_model_that_can_truncate_is_asked_to_and_computes_nothing_again() -> None:
    model = Unified()
    served = LlmExecutor(model)
    served.prefill(PrefillInput("a", A))
    model.calls.clear()
    served.truncate_kv_for_cache_id("a", len(A))
    assert model.calls == [], "there is nothing to take back"
    served.truncate_kv_for_cache_id("a", 2)
    same(served.decode(DecodeInput("a", 9)).logits, model, [*A[:2], 9])
    assert model.calls == ["truncate a 2", "unified 1"]


def test_a_model_is_asked_to_release_only_what_it_has() -> None:
    class Counting(ToyModel):
        def release(self, cache_id: str) -> None:
            self.calls.append(f"release {cache_id}")
            super().release(cache_id)

    model = Counting()
    served = LlmExecutor(model)
    served.prefill(PrefillInput("a", A))
    served.truncate_kv_for_cache_id("a", 2)  # this model cannot, so it begins again when it goes on
    served.decode(DecodeInput("a", 1))
    served.prefill(PrefillInput("a", B))
    served.release_cache("a")
    served.release_cache("a")
    assert model.calls == ["prefill a 4", "release a", "prefill a 3", "release a", "prefill a 3", "release a"]


@pytest.mark.parametrize("name", ["create_kv_cache", "prefixes"])
def test_a_model_with_a_name_of_kvilts_executors_is_still_a_model(name: str) -> None:
    model = ToyModel()
    setattr(model, name, None)
    same(LlmExecutor(model).prefill(PrefillInput("a", A)).logits, model, A)


def test_a_chunk_that_waited_runs_with_the_final_one(model: ToyModel, served: LlmExecutor) -> None:
    """Also where that is a single token, which is no decode then."""
    assert served.unified_decode(UnifiedBatch([UnifiedItem("a", A, 0, is_final_chunk=False)])) == [None]
    (found,) = served.unified_decode(UnifiedBatch([UnifiedItem("a", [7], 4)]))
    same(found, model, [*A, 7])
    assert model.caches == {"a": [*A, 7]}


def test_chunks_go_on_in_a_model_that_takes_them() -> None:
    model = Unified()
    served = LlmExecutor(model)
    for start in (0, 10, 20):
        served.unified_decode(UnifiedBatch([UnifiedItem("c", C[start : start + 10], start, is_final_chunk=False)]))
    (found,) = served.unified_decode(UnifiedBatch([UnifiedItem("c", C[30:], 30)]))
    same(found, model, C)
    assert model.calls == ["unified 1"] * 4, "nothing was computed twice"


def test_a_sequence_may_be_as_long_as_the_model_says(model: ToyModel, served: LlmExecutor) -> None:
    same(served.prefill(PrefillInput("a", [1] * 255)).logits, model, [1] * 255)
    same(served.decode(DecodeInput("a", 2)).logits, model, [*[1] * 255, 2])
    with pytest.raises(ContextOverflow):
        served.decode(DecodeInput("a", 3))


def test_a_failure_leaves_every_sequence_as_it_was(model: ToyModel, served: LlmExecutor) -> None:
    served.batch_prefill([PrefillInput("a", A), PrefillInput("b", B)])
    logits = model.logits

    def broken(tokens: Any) -> list[float]:
        if tokens[-1] == 33:
            raise RuntimeError("a kernel broke")
        return logits(tokens)

    model.logits = broken  # type: ignore[method-assign]
    before = served.status()
    for call in (
        lambda: served.batch_decode([DecodeInput("a", 1), DecodeInput("b", 33)]),
        lambda: served.batch_prefill([PrefillInput("a", [9]), PrefillInput("b", [33]), PrefillInput("c", [1])]),
        lambda: served.forward_verify([DecodeInput("a", 2), DecodeInput("a", 33)]),
        lambda: served.unified_decode(UnifiedBatch([UnifiedItem("c", [1], 0), UnifiedItem("a", [1, 33], 4)])),
    ):
        with pytest.raises(RuntimeError):
            call()
        assert served.status() == before
    decoded = served.batch_decode([DecodeInput("a", 6), DecodeInput("b", 7)])
    same(decoded[0].logits, model, [*A, 6])
    same(decoded[1].logits, model, [*B, 7])


def test_cancel_is_seen_between_calls_of_the_model() -> None:
    model = ToyModel()
    served = LlmExecutor(model)
    served.prefill(PrefillInput("a", A))
    call, decode = served.call(), model.decode

    def then_cancel(*args: Any) -> list[float]:
        call.cancel()
        return decode(*args)

    model.decode = then_cancel  # type: ignore[method-assign]
    with pytest.raises(Cancelled), call:
        served.forward_verify([DecodeInput("a", token) for token in (1, 2, 3)])
    assert model.calls[-1] == "decode a 4", "the second draft was not run"
    model.decode = decode  # type: ignore[method-assign]
    assert served.status().tokens == len(A)
    same(served.decode(DecodeInput("a", 9)).logits, model, [*A, 9])


def test_release(model: ToyModel, served: LlmExecutor) -> None:
    served.prefill(PrefillInput("a", A))
    served.release_cache("a")
    served.release_cache("a")
    assert model.caches == {}
    with pytest.raises(InputError, match="prefill it first"):
        served.decode(DecodeInput("a", 1))
    assert served.status().caches == 0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda served: served.prefill(PrefillInput("a", [])), InputError),
        (lambda served: served.prefill(PrefillInput("a", [61])), InputError),
        (lambda served: served.prefill(PrefillInput("a", [1] * 257)), ContextOverflow),
        (lambda served: served.prefill(PrefillInput("a", [1], lora_id=1)), Unsupported),
        (lambda served: served.batch_prefill([PrefillInput("a", [1]), PrefillInput("a", [2])]), InputError),
        (lambda served: served.decode(DecodeInput("a", -1)), InputError),
        (lambda served: served.decode(DecodeInput("x", 1)), InputError),
    ],
)
def test_wrong_input_is_refused_before_the_model_sees_it(
    model: ToyModel, served: LlmExecutor, wrong: Any, error: type
) -> None:
    served.prefill(PrefillInput("a", A))
    model.calls.clear()
    with pytest.raises(error):
        wrong(served)
    assert model.calls == []
    assert model.caches == {"a": A}


def test_what_it_says_of_the_model(model: ToyModel, served: LlmExecutor) -> None:
    assert served.info() is INFO
    can = served.capabilities()
    assert (can.family, can.devices, can.kv_dtype, can.max_context) == ("toy", ("toy:0",), "int7", 256)
    assert (can.lora, can.drafts, can.blending, can.closed) == (False, False, False, False)
    assert served.kv_capacity() is None
    assert served.cache_metrics_snapshot() is None and served.lora_metrics_snapshot() is None
    with pytest.raises(Unsupported, match="forward"):
        served.forward(Batch.__new__(Batch))
    guessed = LlmExecutor(model).info()
    assert (guessed.vocab_size, guessed.max_sequence_length) == (61, 256)
    seen = []
    logits = model.logits
    model.logits = lambda tokens: seen.append(served.status().busy) or logits(tokens)  # type: ignore[method-assign]
    served.prefill(PrefillInput("a", A))
    assert seen == [True] and not served.status().busy


def test_what_contradicts_the_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"vocab_size 62 and the model's config.* 61"):
        LlmExecutor(ToyModel(), dataclasses.replace(INFO, vocab_size=62))

    class Short(ToyModel):
        def logits(self, tokens: Any) -> list[float]:
            return super().logits(tokens)[:-1]

    with pytest.raises(InputError, match=r"logits \[60\]"):
        LlmExecutor(Short()).prefill(PrefillInput("a", A))
    for nothing in (object(), {}, None):
        with pytest.raises(InputError, match="no DecoderOnlyLLM: it has no config and no prefill"):
            LlmExecutor(nothing)  # type: ignore[arg-type]
