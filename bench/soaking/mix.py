"""What the clients of the soak ask: one function for each kind of visit, each of one or more HTTP requests.

Answers are short and prompts begin alike, so that most of the time goes into what a server does around a model.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hostile.client import Answer, Client, read_head

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SYSTEM = (
    "You are a helpful assistant who answers every question in one short sentence and never repeats the question. "
)
_STORY = "The quick brown fox jumps over the lazy dog and runs along the river into the dark forest. "
_STEMS = [f"{_SYSTEM}Lesson {number}: " for number in range(12)]
_DOCUMENTS = [f"Document {number}. {_STORY} The answer to question {number} is {number * 7}." for number in range(10)]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"day": {"enum": ["today", "tomorrow"]}},
                "required": ["day"],
                "additionalProperties": False,
            },
        },
    }
]
_FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "regex", "regex": "[0-9]{1,3}"},
    {"type": "regex", "regex": "(yes|no)( indeed)?"},
    {"type": "choice", "choice": ["red", "green", "blue"]},
    {"type": "lark", "lark": 'start: "a" | "b" "c"'},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "minimum": 0, "maximum": 99}}},
    {"type": "json_schema", "json_schema": {"name": "b", "schema": {"enum": ["x", "y", None]}}},
)
_BAD: tuple[tuple[str, Any], ...] = (
    (COMPLETIONS, b'{"prompt": "a'),
    (COMPLETIONS, b'{"prompt": "a", "prompt": "b"}'),
    (COMPLETIONS, b"[" * 5000),
    (COMPLETIONS, {"prompt": "a", "n": 10**6}),
    (COMPLETIONS, {"prompt": "a", "colour": "red"}),
    (COMPLETIONS, {"prompt": "word " * 20_000, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [10**7], "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}),
    (COMPLETIONS, {"prompt": "a", "kv": "0" * 32}),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "regex", "regex": "("}}),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "lark", "lark": "start: nothing"}}),
    (CHAT, {"messages": [{"role": "nobody", "content": "hi"}]}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "x"}]}),
    ("/v1/kv", {"prompt": ""}),
    ("/v1/kv/unknown/fork", {}),
    ("/v1/nowhere", {}),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """A greedy answer, and the request that must give it again where nothing is known."""

    path: str
    body: dict[str, Any]
    said: Any


@dataclass
class Tally:
    """What all clients did so far."""

    limit: int  # requests after which nothing new is begun
    pace_s: float  # seconds between the beginnings of two requests, at least
    share: float  # of greedy answers that are compared
    began_s: float = field(default_factory=time.monotonic)
    sent: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # answers that no request of its kind should get
    ordinary: list[tuple[float, float]] = field(default_factory=list)  # when, seconds
    compared: list[Compared] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.sent >= self.limit

    async def begin(self, kind: str) -> None:
        """Count a request, and wait for its turn."""
        self.sent += 1
        self.kinds[kind] += 1
        wait_s = self.began_s + self.sent * self.pace_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def note(self, kind: str, answer: Answer, expected: Sequence[int] = (200,)) -> bool:
        """Count an answer; whether it was one of those that are right here."""
        self.statuses[f"{kind} {answer.status or answer.why}"] += 1
        if answer.status in expected:
            return True
        if len(self.wrong) < 200:
            self.wrong.append(f"{kind}: {answer.status or answer.why} {answer.body[:200].decode(errors='replace')}")
        return False


@dataclass
class Visitor:
    """One client after another visit, each with a key by chance."""

    clients: Sequence[Client]
    dice: random.Random
    tally: Tally
    words: Sequence[int]  # token ids to make prompts of

    async def stay(self) -> None:
        names = list(VISITS)
        weights = [VISITS[name][1] for name in names]
        while not self.tally.over:
            name = self.dice.choices(names, weights)[0]
            await VISITS[name][0](self, self.dice.choice(self.clients))

    async def ask(
        self, kind: str, client: Client, path: str, body: Any, expected: Sequence[int] = (200,)
    ) -> Answer | None:
        await self.tally.begin(kind)
        answer = await client.post(path, body)
        return answer if self.tally.note(kind, answer, expected) else None

    def number(self) -> int:
        return self.dice.randrange(1000)

    def compare(self, path: str, body: dict[str, Any], answer: Answer | None) -> None:
        """Keep some of the greedy answers for the cold run."""
        if answer is not None and body.get("temperature") == 0 and self.dice.random() < self.tally.share:
            self.tally.compared.append(Compared(path, body, said_in(answer.json)))


def said_in(answer: Any) -> Any:
    """What an answer says, without what differs each time."""
    choices = answer.get("choices") or []
    texts = []
    for choice in choices:
        message = choice.get("message") or {}
        calls = [call.get("function") for call in message.get("tool_calls") or []]
        texts.append([choice.get("text", message.get("content")), calls, choice.get("finish_reason")])
    return texts


async def chat(visitor: Visitor, client: Client, **more: Any) -> None:
    body = {
        "messages": [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": f"What is {visitor.number()} plus {visitor.dice.randrange(9)}?"},
        ],
        "max_tokens": visitor.dice.randrange(1, 6),
        "temperature": visitor.dice.choice([0, 0, 0, 0.8]),
        **more,
    }
    began_s = time.monotonic()
    answer = await visitor.ask("chat", client, CHAT, body)
    if answer is not None and not more:
        visitor.tally.ordinary.append((began_s, answer.seconds))
    visitor.compare(CHAT, body, answer)


async def completion(visitor: Visitor, client: Client) -> None:
    body = _completion(visitor)
    began_s = time.monotonic()
    answer = await visitor.ask("completion", client, COMPLETIONS, body)
    if answer is not None:
        visitor.tally.ordinary.append((began_s, answer.seconds))
    visitor.compare(COMPLETIONS, body, answer)


def _completion(visitor: Visitor) -> dict[str, Any]:
    prompt = f"{visitor.dice.choice(_STEMS)}{visitor.number()} comes after"
    temperature = visitor.dice.choice([0, 0, 0, 0.8])
    return {"prompt": prompt, "max_tokens": visitor.dice.randrange(1, 6), "temperature": temperature}


async def stream(visitor: Visitor, client: Client) -> None:
    body = {**_completion(visitor), "stream": True, "max_tokens": 4}
    began_s = time.monotonic()
    answer = await visitor.ask("stream", client, COMPLETIONS, body)
    if answer is not None:
        visitor.tally.ordinary.append((began_s, answer.seconds))
        if not answer.body.rstrip().endswith(b"data: [DONE]"):
            visitor.tally.wrong.append(f"stream: ends with {answer.body[-100:]!r}")


async def left_stream(visitor: Visitor, client: Client) -> None:
    """A stream that is left after its first words, or before them."""
    await visitor.tally.begin("left stream")
    raw = json.dumps({**_completion(visitor), "stream": True, "max_tokens": 200, "ignore_eos": True}).encode()
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        reader, writer = await client.open()
        try:
            writer.write(client.head("POST", COMPLETIONS, len(raw)) + raw)
            if visitor.dice.random() < 0.7:
                async with asyncio.timeout(30):
                    status, _ = await read_head(reader)
                    await reader.read(200)
                visitor.tally.note("left stream", Answer(status, b"", 0.0))
        finally:
            writer.transport.abort()


async def handle(visitor: Visitor, client: Client) -> None:
    """The life of a handle: made, asked behind, forked, cut, sometimes saved, and deleted."""
    first, second = visitor.dice.sample(list(visitor.words), 24), visitor.dice.sample(list(visitor.words), 4)
    made = await visitor.ask("handle", client, "/v1/kv", {"prompt": first, "ttl_s": 600})
    if made is None:
        return
    ids = [made.json["id"]]
    body = {"kv": ids[0], "prompt": second, "max_tokens": 3, "temperature": 0}
    answer = await visitor.ask("handle", client, COMPLETIONS, body)
    cold = {"prompt": first + second, "max_tokens": 3, "temperature": 0}
    visitor.compare(COMPLETIONS, cold, answer)
    if (forked := await visitor.ask("handle", client, f"/v1/kv/{ids[0]}/fork", {})) is not None:
        ids.append(forked.json["id"])
        length = visitor.dice.randrange(1, 24)
        cut = await visitor.ask("handle", client, f"/v1/kv/{ids[1]}/truncate", {"length": length})
        if cut is not None:
            answer = await visitor.ask("handle", client, COMPLETIONS, {**body, "kv": ids[1]})
            visitor.compare(COMPLETIONS, {**cold, "prompt": first[:length] + second}, answer)
    if visitor.dice.random() < 0.1:
        await _save(visitor, client, ids[0])
    for one in ids:
        await visitor.tally.begin("handle")
        visitor.tally.note("handle", await client.ask("DELETE", f"/v1/kv/{one}"))


async def _save(visitor: Visitor, client: Client, one: str) -> None:
    name = f"soak-{visitor.dice.randrange(10**9)}"
    if await visitor.ask("saved handle", client, f"/v1/kv/{one}/save", {"name": name}) is None:
        return
    restored = await visitor.ask("saved handle", client, "/v1/kv/restore", {"name": name, "ttl_s": 600})
    for path in [f"/v1/kv/saved/{name}"] + ([f"/v1/kv/{restored.json['id']}"] if restored else []):
        await visitor.tally.begin("saved handle")
        visitor.tally.note("saved handle", await client.ask("DELETE", path))


async def kept(visitor: Visitor, client: Client) -> None:
    """An answer whose KV is kept as a handle, and that handle's end."""
    answer = await visitor.ask("kept answer", client, COMPLETIONS, {**_completion(visitor), "kv_out": True})
    if answer is not None and (made := (answer.json["choices"][0].get("kv") or {}).get("id")):
        await visitor.tally.begin("kept answer")
        visitor.tally.note("kept answer", await client.ask("DELETE", f"/v1/kv/{made}"))


async def documents(visitor: Visitor, client: Client) -> None:
    chosen = visitor.dice.sample(_DOCUMENTS, 2)
    question = f"Question {visitor.number()}: which answer?"
    body = {"prompt": question, "documents": chosen, "blend": {"ratio": 0.2}, "max_tokens": 3, "temperature": 0}
    visitor.compare(COMPLETIONS, body, await visitor.ask("documents", client, COMPLETIONS, body))


async def tools(visitor: Visitor, client: Client) -> None:
    text = f"Look up the weather of day {visitor.number()}."
    body = {"messages": [{"role": "user", "content": text}], "tools": _TOOLS, "tool_choice": "required"}
    body |= {"max_tokens": 60, "temperature": 0, "parallel_tool_calls": False}
    visitor.compare(CHAT, body, await visitor.ask("tools", client, CHAT, body))


async def grammar(visitor: Visitor, client: Client) -> None:
    body = {**_completion(visitor), "response_format": visitor.dice.choice(_FORMATS), "max_tokens": 6}
    visitor.compare(COMPLETIONS, body, await visitor.ask("grammar", client, COMPLETIONS, body))


async def samples(visitor: Visitor, client: Client) -> None:
    body = {**_completion(visitor), "n": 3, "logprobs": 2, "stop": ["\n", "."], "seed": visitor.number()}
    visitor.compare(COMPLETIONS, body, await visitor.ask("samples", client, COMPLETIONS, body))


async def bad(visitor: Visitor, client: Client) -> None:
    path, body = visitor.dice.choice(_BAD)
    await visitor.ask("bad input", client, path, body, expected=(400, 404, 413))


async def stranger(visitor: Visitor, client: Client) -> None:
    """A key that nobody has."""
    await visitor.tally.begin("unknown key")
    own = Client(client.host, client.port, "sk-unknown")
    visitor.tally.note("unknown key", await own.post(COMPLETIONS, {"prompt": "a"}), expected=(401,))
    own.close()


async def look(visitor: Visitor, client: Client) -> None:
    await visitor.tally.begin("look")
    path = visitor.dice.choice(["/v1/models", "/v1/kv", "/v1/kv/state", "/health"])
    visitor.tally.note("look", await client.get(path))


Visit = Callable[[Visitor, Client], Awaitable[None]]
VISITS: dict[str, tuple[Visit, float]] = {
    "chat": (chat, 24),
    "completion": (completion, 24),
    "stream": (stream, 10),
    "left stream": (left_stream, 6),
    "handle": (handle, 3),
    "kept answer": (kept, 2),
    "documents": (documents, 3),
    "tools": (tools, 1),
    "grammar": (grammar, 6),
    "samples": (samples, 2),
    "bad input": (bad, 8),
    "unknown key": (stranger, 1),
    "look": (look, 3),
}
