"""Embeddings, scores and reranking through the real clients."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch
from running import Running

from kvilt.batch import Batch, Ids, Pooled, Row
from kvilt.executor.protocol import Executor

Start = Callable[..., Any]
TEXTS = ["What is the capital of Germany?", "A king and a queen.", "x"]


def expected(server: Running, executor: Executor, text: str | list[int], last: bool = False) -> torch.Tensor:
    """By one row of the executor."""
    ids = server.llm.prompt_ids(text)
    with executor.create_kv_cache() as kv:
        kv.reserve(len(ids))
        row = Row(Ids(ids), range(len(ids)), kv, want=Pooled(last))
        pooled = executor.run(Batch.of([row])).hidden[0]
    return pooled / pooled.norm()


def close(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_models_pooled_states(server: Running, executor: Executor, pooling: str) -> None:
    done = server.openai().embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": pooling})
    assert [one.index for one in done.data] == [0, 1, 2]
    for one, text in zip(done.data, TEXTS, strict=True):
        close(one.embedding, expected(server, executor, text, pooling == "last"))
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-5)
    tokens = sum(len(server.llm.prompt_ids(text)) for text in TEXTS)
    assert (done.usage.prompt_tokens, done.usage.total_tokens, done.model) == (tokens, tokens, "tiny")


def test_input_takes_every_form(server: Running, executor: Executor) -> None:
    create = server.openai().embeddings.create
    for given, each in (
        ("x", ["x"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ):
        for form in ("float", "base64"):
            done = create(model="tiny", input=given, encoding_format=form)
            for one, text in zip(done.data, each, strict=True):
                values = one.embedding
                if isinstance(values, str):
                    values = torch.frombuffer(bytearray(base64.b64decode(values)), dtype=torch.float32).tolist()
                close(values, expected(server, executor, text))


def test_fewer_dimensions_have_length_one_again(server: Running, executor: Executor) -> None:
    done = server.openai().embeddings.create(model="tiny", input="x", dimensions=5)
    wanted = expected(server, executor, "x")[:5]
    close(done.data[0].embedding, wanted / wanted.norm())


def test_scores_are_cosines_and_rerank_orders_by_them(server: Running, executor: Executor) -> None:
    first, second, third = (expected(server, executor, text) for text in TEXTS)
    with server.http() as http:
        many = http.post("/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS}).json()
        found = [one["score"] for one in many["data"]]
        assert found == pytest.approx([1.0, float(first @ second), float(first @ third)], abs=1e-5)
        pairs = http.post("/v1/score", json={"text_1": TEXTS[:2], "text_2": TEXTS[1:]}).json()
        scores = [one["score"] for one in pairs["data"]]
        assert scores == pytest.approx([float(first @ second), float(second @ third)], abs=1e-5)
        asked = {"query": TEXTS[0], "documents": [TEXTS[2], {"text": TEXTS[0]}, TEXTS[1]]}
        ranked = http.post("/v1/rerank", json=asked).json()["results"]
        assert ranked[0]["index"] == 1
        assert ranked[0]["document"] == {"text": TEXTS[0]}
        order = [one["relevance_score"] for one in ranked]
        assert order == sorted(order, reverse=True)
        few = http.post("/v1/rerank", json={**asked, "top_n": 2, "return_documents": False}).json()["results"]
        assert [one["index"] for one in few] == [one["index"] for one in ranked[:2]]
        assert "document" not in few[0]


def test_ollama_embeds_and_cuts_what_is_too_long(server: Running, executor: Executor) -> None:
    done = server.ollama().embed(model="tiny", input=TEXTS)
    for values, text in zip(done.embeddings, TEXTS, strict=True):
        close(values, expected(server, executor, text))
    close(server.ollama().embeddings(model="tiny", prompt="x").embedding, expected(server, executor, "x"))
    assert len(server.ollama().embed(model="tiny", input="word " * 3000).embeddings) == 1
    with server.http() as http:
        refused = http.post("/api/embed", json={"model": "tiny", "input": "word " * 3000, "truncate": False})
        assert (refused.status_code, list(refused.json())) == (400, ["error"])


def test_texts_share_steps_and_leave_no_page(start: Start, executor: Executor) -> None:
    executor.prefixes.clear()
    with start() as server:

        async def many() -> list[Any]:
            return await asyncio.gather(*(server.llm.embed([5, 6, 7, i]) for i in range(40)))

        found = asyncio.run_coroutine_threadsafe(many(), server.loop).result(120)
        for i, one in enumerate(found):
            close(one.values, expected(server, executor, [5, 6, 7, i]))
        assert executor.pool.usage().used == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input.1"),
        ("/v1/embeddings", {"input": [[5], [10**6]]}, "input.1"),
        ("/v1/embeddings", {"input": "word " * 3000}, "input"),
        ("/v1/embeddings", {"input": ["x"] * 1025}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 10**5}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, "pooling"),
        ("/v1/embeddings", {"input": "x", "unheard_of": 1}, "unheard_of"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["a", {"title": "b"}]}, "documents.1.text"),
    ],
)
def test_what_is_wrong_is_refused_by_name(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    with server.http() as http:
        refused = http.post(path, json=body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


def test_another_model_is_not_here(server: Running) -> None:
    with pytest.raises(openai.NotFoundError):
        server.openai().embeddings.create(model="other", input="x")
