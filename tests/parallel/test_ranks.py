"""A model that two processes share computes what one process does, token for token, and its KV is as portable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drive import blended, content, memory_store, tokens
from families import random_model, write_checkpoint
from lora_files import ALL, write_lora

from kvilt import SamplingParams
from kvilt.batch import Batch, HiddenOut, Ids, KeyMass, LayerSpan, Row
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.errors import BlobError, ParamError, Unsupported
from kvilt.executor.executor import ModelExecutor

from .conftest import load_ranks

PROMPTS = [tokens(70, 1), tokens(3, 2), tokens(41, 3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=24)


def answers(executor: ModelExecutor, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    with executor.create_kv_cache(len(prompts)) as kv:
        return executor.sample_tokens(24, prompts, kv, params=params)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_batch_gets_the_tokens_of_one_process(one: ModelExecutor, two: ModelExecutor, params: SamplingParams) -> None:
    assert two.ranks == 2
    assert answers(two, PROMPTS, params) == answers(one, PROMPTS, params)


def test_chunks_and_batches_change_no_bit(two: ModelExecutor) -> None:
    """Law 5: neighbours and cuts of a prompt leave a row's logits as they are."""
    ids = PROMPTS[0]
    with two.create_kv_cache() as whole, two.create_kv_cache() as cut, two.create_kv_cache(2) as beside:
        alone = two.step(ids, whole)
        for start in range(0, 60, 20):
            two.prefill(ids[start : start + 20], cut)
        assert torch.equal(two.step(ids[60:], cut), alone)
        assert torch.equal(two.step([ids, PROMPTS[2]], beside)[:1], alone)


def test_scores_embeddings_and_hidden_states(one: ModelExecutor, two: ModelExecutor) -> None:
    ids = PROMPTS[2]
    found, wanted = two.score(ids, top=3), one.score(ids, top=3)
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.top_ids, wanted.top_ids)
    assert torch.equal(two.embed(ids), one.embed(ids))
    seen = []
    for executor in (one, two):
        with executor.create_kv_cache() as kv:
            kv.reserve(len(ids))
            first = Row(Ids(ids), range(len(ids)), kv, layers=LayerSpan(0, 2), want=HiddenOut([0, 1], [1]))
            out = executor.run(Batch.of([first]))
            mass = executor.run(Batch.of([Row(Ids(ids), range(len(ids)), kv, want=KeyMass(last=5))])).mass[0]
            kept = [out.kv[0][layer] for layer in (0, 1)]
            seen.append([out.hidden[0], out.queries[0][1], mass, *(x for k in kept for x in (k.keys, k.values))])
    for own, other in zip(*seen, strict=True):
        assert own.shape == other.shape
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


def test_forks_and_truncations_are_those_of_one_process(one: ModelExecutor, two: ModelExecutor) -> None:
    said = []
    for executor in (one, two):
        with executor.create_kv_cache() as kv:
            executor.prefill(PROMPTS[0], kv)
            with kv.fork() as child:  # the next write copies the page that both see
                first = executor.sample_tokens(9, [5], child, params=GREEDY)
                child.truncate(61)
                again = executor.sample_tokens(9, [6], child, params=GREEDY)
            said.append((first, again, executor.sample_tokens(9, [5], kv, params=GREEDY)))
    assert said[0] == said[1]


def test_saved_kv_goes_both_ways(one: ModelExecutor, two: ModelExecutor, tmp_path: Path) -> None:
    """Bytes are in the order of one process, whoever wrote them; numerics keep them apart unless that is accepted."""
    wanted = answers(one, [PROMPTS[0]], GREEDY)
    for writer, reader in ((one, two), (two, one)):
        path = tmp_path / f"{writer.ranks}.kv"
        with writer.create_kv_cache() as kv:
            writer.prefill(PROMPTS[0][:-1], kv)
            kv.save(path)
            with writer.create_kv_cache() as twin:
                twin.load(path.read_bytes())
                assert twin.serialize() == path.read_bytes()
        with reader.create_kv_cache() as other, pytest.raises(BlobError, match="numerics"):
            other.load(path.read_bytes())
        for accept in (True, False):  # taken as it is, and computed again
            with reader.open_kv_cache(path, accept_numerics=accept) as opened:
                assert opened.lengths == (len(PROMPTS[0]) - 1,)
                assert reader.sample_tokens(24, PROMPTS[0][-1:], opened, params=GREEDY) == wanted


def test_adapters_of_every_map(one: ModelExecutor, two: ModelExecutor, tmp_path: Path) -> None:
    wide = write_lora(tmp_path / "wide", 5, (*ALL, "embed_tokens", "lm_head"), seed=4)
    plain = write_lora(tmp_path / "plain", 2, seed=5)
    said = []
    for executor in (one, two):
        ids = [executor.load_lora(folder) for folder in (wide, plain)]
        with executor.create_kv_cache(2) as kv:
            first = executor.sample_tokens(12, PROMPTS[:2], kv, lora_id=ids[0], params=GREEDY)
        executor.unload_lora(ids[0])
        with executor.create_kv_cache() as kv:
            second = executor.sample_tokens(12, PROMPTS[2], kv, lora_id=ids[1], lora_scale=0.5, params=SEEDED)
        executor.unload_lora(ids[1])
        said.append((first, second))
    assert said[0] == said[1]
    with pytest.raises(Unsupported, match="tensor_parallel"):
        two.load_lora(write_lora(tmp_path / "dora", 3, use_dora=True))


@pytest.mark.parametrize("strategy", ["deviation", "query", "head:0.3+query:0.7"])
def test_blending_chooses_the_tokens_of_one_process(one: ModelExecutor, two: ModelExecutor, strategy: str) -> None:
    """Scores are those of all heads, so ranks compute the same tokens again; and repairs move the same KV."""
    parts = [tokens(5, 1), tokens(40, 2), tokens(17, 3), tokens(40, 2), tokens(8, 4)]
    prompt = BlendPrompt.of(parts, [False, True, True, True, False])
    recipe = Recipe.of(Recipe(0.3, strategy, check_layer=0, min_gain=0.0))
    found = []
    for executor in (one, two):
        with memory_store() as store:
            chunks = ChunkCache(executor, store)
            for _ in range(2):  # cold, then from the store
                logits, kv, blending = blended(executor, chunks, prompt, recipe)
                found.append((blending.report().recomputed, [logits, *content(kv)]))
                kv.close()
    for chosen, numbers in found[1:]:
        assert chosen == found[0][0]
        for own, wanted in zip(numbers, found[0][1], strict=True):
            torch.testing.assert_close(own, wanted, atol=2e-4, rtol=2e-4)


FAMILIES = {"llama": 1, "qwen3-moe": 2, "gemma2": 2}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    """One KV head for two ranks; experts; windows and soft caps."""
    model = random_model(name)
    if name == "llama":
        model = one_kv_head()
    path = write_checkpoint(model, tmp_path)
    check_family(path, 2)


def one_kv_head() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=1, max_position_embeddings=256,
        )
    ).eval()  # fmt: skip


def check_family(path: Path, ranks: int, **fields: object) -> ModelExecutor:
    """The same tokens, greedy and drawn, after prompts in chunks."""
    said = []
    for count in (1, ranks):
        executor = load_ranks(path, count, backend="reference", **fields)
        vocab = executor.spec.vocab_size
        prompts = [tokens(45, 1, vocab), tokens(7, 2, vocab)]
        with executor.create_kv_cache(2) as kv:
            executor.prefill([prompt[:-2] for prompt in prompts], kv)
            first = executor.sample_tokens(12, [prompt[-2:] for prompt in prompts], kv, params=GREEDY)
            said.append((first, executor.sample_tokens(12, [[1], [2]], kv, params=SEEDED)))
        executor.close()
    assert said[0] == said[1]
    return executor


def test_a_wrong_number_is_refused(folder: Path) -> None:
    with pytest.raises(ParamError, match="tensor_parallel"):
        load_ranks(folder, 0)
