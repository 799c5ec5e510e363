"""A real server over a tiny model that answers by a script, and that keeps the requests it gets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from running import Running, running

from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.server import listener
from kvilt.server.openai import chat
from kvilt.server.openai.schema import ChatRequest
from kvilt.text.tokenizer import Tokenizer

CONTEXT = 131_072  # clients expect room
TITLE = "A title"
# A prompt lists tools, and shows calls as the model writes them.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{%- if messages and messages[0].role == 'system' %}
{{ messages[0].content }}
{%- endif %}
Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (loop.first and tools and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
Script = Callable[[ChatRequest], str]


def tool_call(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def steps(*answers: str) -> Script:
    """Answers by the number of tool results in the conversation. Requests without tools, such as for a title, get one
    answer of their own."""

    def answer(body: ChatRequest) -> str:
        if not body.tools:
            return TITLE
        done = sum(message.role == "tool" for message in body.messages)
        return answers[min(done, len(answers) - 1)]

    return answer


@dataclass
class ReceivedRequest:
    """A request, and the status of its response."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    data: bytes = b""
    status: int = 0

    @property
    def body(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.data or b"{}")
        return parsed


@dataclass
class Recorder:
    """The server's application, which keeps requests."""

    app: Any
    received: list[ReceivedRequest] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        one = ReceivedRequest(scope["method"], scope["path"], query, headers)
        self.received.append(one)

        async def read() -> Any:
            message = await receive()
            one.data += message.get("body", b"")
            return message

        async def write(message: Any) -> None:
            one.status = message.get("status", one.status)
            await send(message)

        await self.app(scope, read, write)


@dataclass
class ScriptedServer:
    """A server that runs, and its requests."""

    server: Running
    recorder: Recorder

    @property
    def received(self) -> Sequence[ReceivedRequest]:
        return self.recorder.received


@contextmanager
def scripted(executor: Executor, tokenizer: Tokenizer, script: Script, **settings: Any) -> Iterator[ScriptedServer]:
    """A server for the length of a block. A grammar that derives one text makes the model say it."""
    honest_params, honest_app = chat.sampling_params, listener.make_app
    recorders: list[Recorder] = []

    def params(body: ChatRequest, **more: Any) -> SamplingParams:
        free = dataclasses.replace(honest_params(body, **more), grammar=None)
        return SamplingParams.of(free, choice=[script(body)])

    def app(*given: Any) -> Recorder:
        recorders.append(Recorder(honest_app(*given)))
        return recorders[-1]

    shown = dataclasses.replace(tokenizer, chat_template=TEMPLATE)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(chat, "sampling_params", params)
        patches.setattr(listener, "make_app", app)
        with running(executor, shown, **settings) as server:
            yield ScriptedServer(server, recorders[0])
