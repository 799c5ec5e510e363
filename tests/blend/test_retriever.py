"""The retriever over a tier that takes its time: nobody waits who only asks, and layers are served as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stores import Shelfware

from kvilt.blend import StoreRetriever
from kvilt.kv.identity import Identity
from kvilt.store.layer import LayerKV
from kvilt.store.loading import Loading
from kvilt.store.store import Store, StoreLimits

IDENTITY, LAYERS = Identity("model", "numerics"), 4
LIMITS = StoreLimits(lookup_s=20, layer_s=20, close_s=20, readers=1)


WAITS: list[tuple[Any, str]] = [
    (time, "sleep"),
    (threading.Event, "wait"),
    (threading.Condition, "wait"),
    (threading.Condition, "wait_for"),
    (threading.Thread, "join"),
    *((Loading, name) for name in ("settle", "hit", "layer", "layers", "wait")),
]


def layers(tokens: int) -> list[LayerKV]:
    made = torch.Generator().manual_seed(tokens)
    return [LayerKV(*torch.randn(2, tokens, 2, 8, generator=made)) for _ in range(LAYERS)]


def test_asking_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "It may launch async tasks in the background": the thread of the caller neither waits nor sleeps."""
    fake, kept, me = Shelfware(), layers(3), threading.get_ident()

    def only_elsewhere(waits: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*given: Any, **named: Any) -> Any:
            assert threading.get_ident() != me, f"new_request called {waits.__qualname__}"
            return waits(*given, **named)

        return checked

    with Store(None, [fake], limits=LIMITS) as store:
        for ids in ([1, 2, 3], [4, 5, 6]):
            store.put_chunk(IDENTITY, ids, kept)
        store.flush()
        fake.reads.clear()
        retriever = StoreRetriever(store, IDENTITY, tuple(one.form for one in kept))
        prompt = torch.tensor([1, 2, 3, 4, 5, 6])
        with monkeypatch.context() as patch:
            for owner, name in WAITS:
                patch.setattr(owner, name, only_elsewhere(getattr(owner, name)))
            began_s = time.monotonic()
            try:
                task = retriever.new_request([prompt], [[3]])
            finally:
                fake.reads.set()
            took_s = time.monotonic() - began_s
        assert took_s < LIMITS.lookup_s / 4
        assert task.result(0).valid_mask.tolist() == [1] * 6


def test_asking_waits_for_nothing_and_a_layer_for_none_behind_it() -> None:
    fake, kept = Shelfware(), layers(3)
    with Store(None, [fake], limits=LIMITS) as store:
        store.put_chunk(IDENTITY, [1, 2, 3], kept)
        store.flush()
        fake.reads.clear()
        retriever = StoreRetriever(store, IDENTITY, tuple(one.form for one in kept))
        task = retriever.new_request([torch.tensor([1, 2, 3])], [[]])  # nothing can be read yet
        gate, reads = threading.Event(), [0]

        def later() -> None:
            reads[0] += 1
            if reads[0] > 3:  # the header, the tokens, the first layer
                gate.wait()

        fake.each_read = later
        fake.reads.set()
        first = task.result(0)
        assert reads[0] <= 4  # whoever reads stands before the second layer
        assert first.k is not None
        assert torch.equal(first.k, kept[0].keys)
        gate.set()
        for index in range(1, LAYERS):
            found = task.result(index)
            assert found.v is not None
            assert torch.equal(found.v, kept[index].values)
            assert found.valid_mask.tolist() == [1, 1, 1]
