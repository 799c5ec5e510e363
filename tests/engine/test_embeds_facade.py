"""Embedding rows through the facades: `Inputs` is a prompt like any other, and is refused where ids are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lora_files import write_lora
from tiny import write_tiny_of_bytes

import kvilt
from kvilt import LLM, Inputs
from kvilt.errors import InputError, ParamError
from kvilt.executor.executor import ModelExecutor
from kvilt.llm.options import RequestOptions
from kvilt.llm.prompts import PromptPreparer

TEXT = "What is in this picture, and what does it say?"
FIELDS = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_of_bytes(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with kvilt.load(folder, kv_memory="4M", backend="native", threads=1) as made:
        yield made
        assert made.executor.pool.usage().used == 0


def picture(llm: LLM, seed: int = 1, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, llm.executor.spec.hidden_size, generator=torch.Generator().manual_seed(seed)) * 0.4


def mixed(llm: LLM, seed: int = 1) -> Inputs:
    ids = llm.prompt_ids(TEXT)
    return Inputs.join([ids[:20], picture(llm, seed), ids[20:]])


def alone(llm: LLM, inputs: Inputs) -> list[int]:
    with llm.executor.create_kv_cache() as kv:
        return llm.executor.sample_tokens(8, inputs, kv)[0]


def test_ids_as_rows_say_what_the_text_says(llm: LLM) -> None:
    assert isinstance(llm.executor, ModelExecutor)
    decoder, ids = llm.executor._decoder, llm.prompt_ids(TEXT)
    vectors = decoder.ops.embed(decoder.embedding, torch.tensor(ids), llm.executor.spec.embed_scale)
    expected = llm.generate(TEXT, **FIELDS)
    done = llm.generate(Inputs.join([vectors[:7], ids[7:9], vectors[9:]]), **FIELDS)
    assert done.token_ids == expected.token_ids
    assert done.usage.prompt_tokens == len(ids)


def test_prompts_of_all_kinds_in_one_call(llm: LLM) -> None:
    first, second = mixed(llm), mixed(llm, 2)
    done = llm.generate([first, TEXT, second, llm.prompt_ids(TEXT)], **FIELDS)
    assert [done[0].token_ids, done[2].token_ids] == [alone(llm, first), alone(llm, second)]
    assert done[1].token_ids == done[3].token_ids
    with llm.stream(first, **FIELDS) as stream:
        assert "".join(piece for piece in stream) == done[0].text


def test_a_prompt_goes_on_after_a_cache_with_rows(llm: LLM) -> None:
    begin, end = mixed(llm), Inputs.join([[5, 6], picture(llm, 3), [7]])
    whole = Inputs.join([begin.ids[:20], picture(llm), begin.ids[25:], [5, 6], picture(llm, 3), [7]])
    with llm.prefill(begin) as kv:
        assert kv.num_entries == len(begin)
        assert llm.generate(end, kv=kv, **FIELDS).token_ids == alone(llm, whole)
    kept = llm.generate(begin, keep_kv=True, **FIELDS)
    assert kept.kv is not None
    with kept.kv as kv:
        said = [*begin.ids[25:], *kept.token_ids[:-1]]
        after = Inputs.join([begin.ids[:20], picture(llm), said, [9, 9]])
        assert llm.generate([9, 9], kv=kv, **FIELDS).token_ids == alone(llm, after)


def test_where_ids_are_needed_rows_are_refused(llm: LLM) -> None:
    with pytest.raises(ParamError, match="documents"):
        llm.generate(mixed(llm), documents=["a page"], **FIELDS)
    with pytest.raises(InputError, match="embedding rows"):
        llm.blend(["a", mixed(llm), "b"], **FIELDS)  # type: ignore[list-item]
    with pytest.raises(InputError, match="numbers each"):
        llm.generate(Inputs([0], [0], torch.zeros(1, 3)), **FIELDS)
    with pytest.raises(InputError, match="finite"):
        llm.generate(Inputs([0], [0], torch.full((1, llm.executor.spec.hidden_size), torch.nan)), **FIELDS)


def test_a_row_switches_no_adapter_on(folder: Path, tmp_path: Path) -> None:
    """An adapter that a token switches on looks for that token, and not for the id in the place of a row."""
    with kvilt.load(folder, kv_memory="4M", backend="native", threads=1) as llm:
        path = write_lora(tmp_path / "late", 2, seed=1, alora_invocation_tokens=[0])
        llm.load_lora(path, "late")
        prompts, options = PromptPreparer(llm, llm.sessions), RequestOptions(lora="late")
        given = Inputs.join([[1, 0, 2], picture(llm), [3, 4]])
        prepared = prompts.text(given, options)
        adapter = prompts._adapter(prepared, options)
        assert adapter == llm.executor.adapters.choose("late", 1.0, [1, 0, 2, *[-1] * 5, 3, 4])
        assert adapter != llm.executor.adapters.choose("late", 1.0, given.ids)


def test_the_async_facade_takes_them_too(folder: Path) -> None:
    async def main() -> None:
        async with kvilt.load_async(folder, kv_memory="4M", backend="native", threads=1) as model:
            with kvilt.load(folder, kv_memory="4M", backend="native", threads=1) as llm:
                first, second = mixed(llm), mixed(llm, 2)
                expected = [alone(llm, first), alone(llm, second)]
                done = await model.generate([first, second], **FIELDS)
                assert [one.token_ids for one in done] == expected
                handle = await model.kv.create(TEXT)
                after = Inputs.join([llm.prompt_ids(TEXT), picture(llm)])
                answer = await model.generate(Inputs.join([picture(llm)]), kv=handle.id, **FIELDS)
                assert answer.token_ids == alone(llm, after)
            with pytest.raises(InputError, match="embedding rows"):
                await model.kv.create(first)  # type: ignore[arg-type]

    asyncio.run(main())
