"""What `warm` has stored, through `llm.retriever()`: by tenant and adapter, layer by layer, as a forward makes it."""

from __future__ import annotations

from pathlib import Path

import torch
from drive import tokens
from lora_files import write_lora

from kvilt.batch import Batch, HiddenOut, Ids, LayerSpan, Row
from kvilt.blend import BlendRetriever
from kvilt.llm import LLM

DOCUMENTS = [tokens(24, 1), tokens(9, 2)]


def ask(retriever: BlendRetriever, segments: list[list[int]]) -> list[int]:
    """Which tokens of a prompt of these segments have KV."""
    prompt = torch.tensor([token for segment in segments for token in segment])
    ends = torch.tensor([len(one) for one in segments]).cumsum(0).tolist()
    found = retriever.new_request([prompt], [ends[:-1]]).result(0)
    return [int(one) for one in found.valid_mask]


def test_what_is_warm_is_found_with_the_keys_of_a_forward_before_rotation(tiny_llm: LLM) -> None:
    tiny_llm.warm(DOCUMENTS)
    segments = [[3, 4, 5], DOCUMENTS[1], DOCUMENTS[0], [7]]
    task = tiny_llm.retriever().new_request([torch.tensor([token for one in segments for token in one])], [[3, 12, 36]])
    executor, head = tiny_llm.executor, list(tiny_llm.documents.context_prefix)
    layers = len(executor.spec.layers)
    with executor.create_kv_cache() as kv:
        ids = [*head, *DOCUMENTS[0]]
        kv.reserve(len(ids))
        row = Row(Ids(ids), range(len(ids)), kv, layers=LayerSpan(), want=HiddenOut(range(layers)))
        seen = executor.run(Batch.of([row])).kv[0]
    for layer in range(layers):
        found = task.result(layer)
        assert found.rotated is False
        assert found.valid_mask.tolist() == [0] * 3 + [1] * 33 + [0]
        assert found.k is not None
        assert found.v is not None
        assert torch.equal(found.k[12:36], seen[layer].keys[len(head) :].to(found.k.dtype))
        assert torch.equal(found.v[12:36], seen[layer].values[len(head) :].to(found.v.dtype))


def test_tenants_and_adapters_find_their_own(tiny_llm: LLM, tmp_path: Path) -> None:
    tiny_llm.warm(DOCUMENTS[:1], tenant="one")
    assert not any(ask(tiny_llm.retriever(), DOCUMENTS))
    assert ask(tiny_llm.retriever(tenant="one"), DOCUMENTS) == [1] * 24 + [0] * 9
    tiny_llm.load_lora(write_lora(tmp_path / "own", 2, seed=1), "own")
    tiny_llm.warm(DOCUMENTS[1:], lora="own", lora_scale=0.5)
    assert ask(tiny_llm.retriever(lora="own", lora_scale=0.5), DOCUMENTS) == [0] * 24 + [1] * 9
    assert not any(ask(tiny_llm.retriever(lora="own"), DOCUMENTS))
    tiny_llm.unload_lora("own")


def test_tensors_are_where_the_caller_wants_them(tiny_llm: LLM) -> None:
    tiny_llm.warm(DOCUMENTS)
    prompt = [torch.tensor(DOCUMENTS[0])]
    there = tiny_llm.retriever(device="meta").new_request(prompt, [[]]).result(0)
    assert there.k is not None
    assert (there.k.device.type, there.original_positions.device.type) == ("meta", "meta")
    assert there.valid_mask.device.type == "cpu"
    here = tiny_llm.retriever().new_request(prompt, [[]]).result(0)
    assert here.k is not None
    assert here.k.device == tiny_llm.executor.pool.device
