"""One conversation through every API: the same tokens and the same reuse of KV. And the page with all fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from field_table import DOORS, PAGE, REFUSED, fields, listed, page, status
from running import Running

from kvilt.executor.protocol import Executor

Start = Callable[..., Any]
SYSTEM = "You are brief. " * 20
FIRST = "What is the capital of Germany? Think of rivers. " * 4
SECOND = "And of France?"
TOKENS = 6


@dataclass(frozen=True)
class Turn:
    """What an API says of one answer."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int


def chat(server: Running, stream: bool, turns: list[dict[str, str]]) -> Turn:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "messages": turns}
    client = server.openai()
    if stream:
        chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
    else:
        done = client.chat.completions.create(**fields)
        text, usage = done.choices[0].message.content or "", done.usage
    return Turn(text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)


def messages(server: Running, stream: bool, turns: list[dict[str, str]]) -> Turn:
    system, *others = turns
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS, "system": system["content"], "messages": others}
    fields["extra_body"] = {"temperature": 0}
    if stream:
        with server.anthropic().messages.stream(**fields) as streamed:
            done = streamed.get_final_message()
    else:
        done = server.anthropic().messages.create(**fields)
    usage = done.usage
    read = usage.cache_read_input_tokens or 0
    prompt = usage.input_tokens + read + (usage.cache_creation_input_tokens or 0)
    return Turn("".join(block.text for block in done.content), prompt, read, usage.output_tokens)


def responses(server: Running, stream: bool, turns: list[dict[str, str]]) -> Turn:
    system, *others = turns
    fields: dict[str, Any] = {"model": "tiny", "max_output_tokens": TOKENS, "temperature": 0, "store": False}
    fields |= {"instructions": system["content"], "input": others}
    if stream:
        done = list(server.openai().responses.create(**fields, stream=True))[-1].response
    else:
        done = server.openai().responses.create(**fields)
    usage = done.usage
    return Turn(done.output_text, usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens)


def ollama(server: Running, stream: bool, turns: list[dict[str, str]]) -> Turn:
    options = {"temperature": 0, "num_predict": TOKENS, "repeat_penalty": 1.0, "top_p": 1.0}
    body = {"model": "tiny", "messages": turns, "options": options, "stream": stream}
    with server.http() as http:
        lines = [json.loads(line) for line in http.post("/api/chat", json=body).text.splitlines()]
    text = "".join(line["message"]["content"] for line in lines)
    last = lines[-1]
    return Turn(text, last["prompt_eval_count"], last["kvilt"]["prefix_hit"], last["eval_count"])


@pytest.mark.parametrize("stream", [False, True])
def test_one_conversation_through_all_doors(
    start: Start, executor: Executor, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[list[int]]] = {}
    told: dict[str, list[Turn]] = {}
    for ask in (chat, messages, responses, ollama):
        executor.prefixes.clear()
        with start() as server:
            prompts: list[list[int]] = []
            honest = server.llm.engine.prepare
            monkeypatch.setattr(
                server.llm.engine,
                "prepare",
                lambda request, *given, kept=prompts, honest=honest: (
                    kept.append(list(request.prompt)) or honest(request, *given)  # type: ignore[func-returns-value]
                ),
            )
            turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]
            first = ask(server, stream, turns)
            turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": SECOND}]
            told[ask.__name__] = [first, ask(server, stream, turns)]
            seen[ask.__name__] = prompts
    expected = told["chat"]
    assert expected[0].cached_tokens == 0 < 64 < expected[1].cached_tokens
    assert [turn.tokens for turn in expected] == [TOKENS, TOKENS]
    for name in told:
        assert seen[name] == seen["chat"], name
        assert told[name] == expected, name


# The page.


def test_the_page_has_every_field() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(listed(text)), "run: python -m tests.server.field_table"
    assert set(listed(text)) <= set(DOORS)


def test_fields_are_what_the_page_says(server: Running) -> None:
    """What is refused is refused by its name, and no supported field is unknown."""
    text = PAGE.read_text(encoding="utf-8")
    with server.http() as http:
        for door, model in DOORS.items():
            path = door.partition(" ")[2]
            refused = [name for name, field in fields(model) if status(field) == REFUSED and "." not in name]
            for name in (*refused, *listed(text).get(door, ())):
                answer = http.post(path, json={name: [{"x": 1}]})
                assert answer.status_code == 400
            for name in listed(text).get(door, ()):
                only = http.post(path, json={**MINIMAL[door], name: 1})
                assert only.status_code == 400
                assert name in only.text


ASK = [{"role": "user", "content": "x"}]
MINIMAL: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"messages": ASK},
    "POST /v1/completions": {"prompt": "x"},
    "POST /v1/responses": {"input": "x"},
    "POST /v1/responses/input_tokens": {"input": "x"},
    "POST /v1/embeddings": {"input": "x"},
    "POST /v1/score": {"text_1": "x", "text_2": "y"},
    "POST /v1/rerank": {"query": "x", "documents": ["y"]},
    "POST /v1/messages": {"model": "tiny", "max_tokens": 1, "messages": ASK},
    "POST /v1/messages/count_tokens": {"model": "tiny", "messages": ASK},
    "POST /api/chat": {"model": "tiny", "messages": ASK},
    "POST /api/generate": {"model": "tiny", "prompt": "x"},
    "POST /api/embed": {"model": "tiny", "input": "x"},
    "POST /api/embeddings": {"model": "tiny", "prompt": "x"},
    "POST /api/show": {"model": "tiny"},
}
