"""Documents computed after what prompts begin with: which tokens that is, and what finds their chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

import kvilt
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.errors import ModelNotFound, ParamError
from kvilt.executor.protocol import Executor
from kvilt.llm import LLM, AsyncLLM
from kvilt.text.tokenizer import Tokenizer

from .drive import blended, computed, memory_store, tokens

SYSTEM = {"role": "system", "content": "Be brief."}
TEXT = "The Eiffel Tower is 330 metres tall. It stands in Paris and was finished in 1889. " * 3
OTHER = "Mount Everest is 8849 metres high. It was first climbed in 1953 by two people. " * 3
ALWAYS = Recipe(0.2, min_gain=0.0)


def begins(llm: LLM, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    """What a chat with a document begins with, up to the document."""
    pieces = llm.chat_pieces(messages, None, [TEXT], ALWAYS)
    return pieces.blend_prompt.ids[: pieces.blend_prompt.exact]


@pytest.mark.parametrize("question", ["How tall?", "A much longer question about everything, and then some?"])
def test_messages_are_rendered_up_to_the_first_document(
    tiny_executor: Executor, tokenizer: Tokenizer, question: str
) -> None:
    llm = LLM(tiny_executor, tokenizer, context_prefix=[SYSTEM])
    assert llm.documents.chunks.context_prefix == begins(llm, [SYSTEM, {"role": "user", "content": question}])
    assert LLM(tiny_executor, tokenizer, context_prefix="Be brief.").documents.context_prefix == (
        *tokenizer.head,
        *tokenizer.encode("Be brief.", add_special=False),
    )
    llm.documents.close()


def test_a_first_document_behind_just_that_is_right_already(tiny_executor: Executor, tokenizer: Tokenizer) -> None:
    """Nothing of it is computed again, and its answer is that of a whole prefill."""
    llm = LLM(tiny_executor, tokenizer, context_prefix=[SYSTEM])
    asked = [SYSTEM, {"role": "user", "content": "How tall?"}]
    plain = Recipe(0.0, "head", min_gain=0.0)
    found = llm.chat(asked, documents=[TEXT], recipe=plain, max_tokens=6)
    whole = llm.chat(asked, documents=[TEXT], recipe=Recipe(1.0, min_gain=0.0), max_tokens=6)
    assert found.token_ids == whole.token_ids
    assert found.usage.blended_reused > 0 == found.usage.blended_recomputed
    llm.documents.close()


def test_what_is_right_already_needs_no_repair(tiny_executor: Executor) -> None:
    """But for the rounding of a key that is kept before its rotation and then once more."""
    head, text, question = tokens(9, 1), tokens(40, 2), tokens(6, 3)
    blend_prompt = BlendPrompt.of([head, text, question], [False, True, False])
    with memory_store() as store:
        expected, whole = computed(tiny_executor, blend_prompt.ids)
        for context_prefix, same in ((head, True), ((), False)):
            found, kv, _ = blended(
                tiny_executor, ChunkCache(tiny_executor, store, context_prefix), blend_prompt, Recipe(0.0, "head")
            )
            assert bool(torch.allclose(found, expected, atol=0.02)) == same
            kv.close()
        whole.close()


def test_documents_behind_something_else_are_other_documents(tiny_executor: Executor, tokenizer: Tokenizer) -> None:
    with memory_store() as store:
        llms = [
            LLM(tiny_executor, tokenizer, store=store, context_prefix=one) for one in (None, [SYSTEM], [SYSTEM], "Be ")
        ]
        assert [next(iter(llm.warm([TEXT]))).found for llm in llms] == [False, False, True, False]
        for llm in llms:
            llm.documents.close()


def test_every_door_takes_it(tiny_executor: Executor, tokenizer: Tokenizer) -> None:
    llm = LLM(tiny_executor, tokenizer, context_prefix=[SYSTEM])
    asked = [SYSTEM, {"role": "user", "content": "How tall?"}]
    expected = llm.chat(asked, documents=[TEXT, OTHER], recipe=ALWAYS, max_tokens=6)
    llm.documents.close()

    async def ask() -> list[int]:
        many = AsyncLLM(tiny_executor, tokenizer, context_prefix=[SYSTEM])
        try:
            return list((await many.chat(asked, documents=[TEXT, OTHER], recipe=ALWAYS, max_tokens=6)).token_ids)
        finally:
            await asyncio.to_thread(many._driver.close)  # the executor is everybody's
            many.documents.close()

    assert asyncio.run(ask()) == list(expected.token_ids)


@pytest.mark.parametrize("context_prefix", ["", [], "word " * 5000])
def test_nothing_and_too_much_are_refused(tiny_executor: Executor, tokenizer: Tokenizer, context_prefix: str) -> None:
    with pytest.raises(ParamError, match="context_prefix"):
        LLM(tiny_executor, tokenizer, context_prefix=context_prefix)


def test_it_takes_room_that_documents_then_lack(tiny_executor: Executor, tokenizer: Tokenizer) -> None:
    llm = LLM(tiny_executor, tokenizer, context_prefix=[SYSTEM])
    most = tiny_executor.max_context - len(llm.documents.context_prefix) - 1
    llm.documents._check_alone("document", most)
    with pytest.raises(ParamError, match=f"{most} fit"):
        llm.documents._check_alone("document", most + 1)


def test_the_former_name_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="context_prefix") as warned, pytest.raises(ModelNotFound):
        kvilt.load("no-such-model", behind="Be brief.")
    assert warned[0].filename == __file__  # the line that used the old name
