"""The tokenizer's routes."""

from __future__ import annotations

import pytest
from running import QUESTION, Running

from kvilt import LLM
from kvilt.executor.protocol import Executor
from kvilt.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def llm(executor: Executor, tokenizer: Tokenizer) -> LLM:
    return LLM(executor, tokenizer)


def test_texts_and_conversations(server: Running, llm: LLM, tokenizer: Tokenizer) -> None:
    with server.http() as http:
        got = http.post("/tokenize", json={"prompt": "Hello wörld", "return_token_strs": True}).json()
        assert got["tokens"] == tokenizer.encode("Hello wörld")
        assert got["count"] == len(got["tokens"])
        assert got["max_model_len"] == 1024
        assert got["token_strs"][0] == "Hello"
        assert len(got["token_strs"]) == got["count"]
        assert http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": "Hello wörld"}
        chat = http.post("/tokenize", json={"messages": QUESTION}).json()
        assert chat["tokens"] == llm.chat_ids(QUESTION)
        begun = http.post("/tokenize", json={"messages": QUESTION, "add_generation_prompt": False}).json()
        assert begun["tokens"] == llm.chat_ids(QUESTION, answers=False)
        bare = http.post("/tokenize", json={"prompt": "a", "add_special_tokens": False, "model": "tiny"}).json()
        assert bare["tokens"] == tokenizer.encode("a", add_special=False)
        special = http.post("/detokenize", json={"tokens": [tokenizer.special["<|im_start|>"]]}).json()
        assert special == {"prompt": "<|im_start|>"}


def test_what_there_is_to_know(server: Running, tokenizer: Tokenizer) -> None:
    with server.http() as http:
        info = http.get("/tokenizer_info").json()
    assert info["vocab_size"] == tokenizer.vocab_size
    assert info["chat_template"] == tokenizer.chat_template
    assert (info["bos_token"], info["eos_token"]) == (tokenizer.named["bos_token"], tokenizer.named["eos_token"])
    assert info["special_tokens"]["<|im_end|>"] in info["eos_token_ids"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": QUESTION}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "a", "x": 1}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_what_is_wrong_is_refused(server: Running, route: str, body: dict[str, object]) -> None:
    with server.http() as http:
        assert http.post(route, json=body).status_code == 400


def test_another_model_is_not_here(server: Running) -> None:
    with server.http() as http:
        assert http.post("/tokenize", json={"prompt": "a", "model": "other"}).status_code == 404
        assert http.post("/detokenize", json={"tokens": [1], "model": "other"}).status_code == 404


def test_long_texts_are_cut_while_others_are_served(server: Running) -> None:
    """A long text is read in a thread; the event loop answers meanwhile."""
    import threading

    answers: list[int] = []
    with server.http() as http:
        slow = threading.Thread(
            target=lambda: answers.append(http.post("/tokenize", json={"prompt": "a " * 500_000}).status_code)
        )
        slow.start()
        with server.http() as other:
            for _ in range(20):
                assert other.get("/health").status_code == 200
        slow.join(300)
    assert answers == [400]  # it cannot fit


def test_more_tokens_than_fit_are_not_put_together(server: Running) -> None:
    with server.http() as http:
        assert http.post("/detokenize", json={"tokens": [5] * 1024}).status_code == 200
        refused = http.post("/detokenize", json={"tokens": [5] * 1025})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
