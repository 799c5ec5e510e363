"""The tools of `kvilt mcp` through the official SDK's client; the library's own calls are the oracle."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import Client, StdioServerParameters
from tiny import write_tiny, write_tiny_of_bytes

from kvilt import LLM, AsyncLLM
from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.mcp.server import LocalHTTPServer, make_server
from kvilt.text.tokenizer import Tokenizer, from_gguf

TEXT = "The tower is three hundred metres tall, and it stands in Paris beside the river. "
DOCUMENTS = [TEXT * 3, "Berlin has four million inhabitants and many lakes around it. " * 4]
TOOLS = {
    *("generate", "chat", "blend", "warm"),
    *("kv_create", "kv_list", "kv_info", "kv_fork", "kv_truncate", "kv_pin", "kv_delete", "kv_save", "kv_restore"),
}
Call = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(smollm2_path)


@pytest.fixture(scope="session")
def executor(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = tmp_path_factory.mktemp("tools")
    write_tiny(folder, vocab_size=tokenizer.vocab_size, max_position_embeddings=1024)
    made = load_executor(folder, RunConfig(kv_memory=1 << 22, backend="native", threads=1))
    made.close = lambda: None  # type: ignore[method-assign]  # it outlives each server
    return made


@pytest.fixture(scope="session")
def llm(executor: Executor, tokenizer: Tokenizer) -> LLM:
    return LLM(executor, tokenizer)


Connect = Callable[..., Any]


@pytest.fixture
def connect(executor: Executor, tokenizer: Tokenizer) -> Connect:
    """A client in this process, for the length of a block."""

    @asynccontextmanager
    async def connected(kv_dir: Path | None = None) -> AsyncIterator[Client]:
        async with AsyncLLM(executor, tokenizer) as served, Client(make_server(served, "1", kv_dir)) as client:
            yield client

    return connected


async def call(client: Client, name: str, /, **given: Any) -> dict[str, Any]:
    """The result of a tool that must not fail."""
    done = await client.call_tool(name, given)
    assert not done.is_error, done.content[0].text
    assert json.loads(done.content[0].text) == done.structured_content
    return done.structured_content


async def refused(client: Client, name: str, /, **given: Any) -> str:
    """What the error of a tool says."""
    done = await client.call_tool(name, given)
    assert done.is_error
    return done.content[0].text


def test_every_tool_is_listed_with_its_arguments(connect: Connect) -> None:
    async def work() -> None:
        async with connect() as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == TOOLS
        for tool in tools.values():
            assert tool.description
            assert tool.input_schema["additionalProperties"] is False
        assert tools["generate"].input_schema["required"] == ["prompt"]
        assert tools["kv_list"].annotations.read_only_hint
        assert tools["kv_delete"].annotations.destructive_hint

    asyncio.run(work())


def test_generate_and_chat_are_those_of_the_library(connect: Connect, llm: LLM) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]

    async def work() -> None:
        async with connect() as client:
            done = await call(client, "generate", prompt=TEXT, max_tokens=8)
            expected = llm.generate(TEXT, max_tokens=8)
            assert (done["text"], done["completion_tokens"]) == (expected.text, 8)
            assert (done["prompt_tokens"], done["finish_reason"]) == (expected.usage.prompt_tokens, "length")
            drawn = await call(client, "generate", prompt=TEXT, max_tokens=8, temperature=1.0, seed=7, top_p=0.9)
            assert drawn["text"] == llm.generate(TEXT, max_tokens=8, temperature=1.0, seed=7, top_p=0.9).text
            answer = await call(client, "chat", messages=turns, max_tokens=8)
            assert answer["text"] == llm.chat(turns, max_tokens=8).text
            again = await call(client, "chat", messages=turns, max_tokens=8)
            assert again["cached_tokens"] >= answer["cached_tokens"]
            schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
            schema["additionalProperties"] = False
            made = await call(client, "chat", messages=turns, max_tokens=60, json_schema=schema)
            assert json.loads(made["text"])["a"] in (1, 2)

    asyncio.run(work())


def test_documents_are_computed_once_and_blended_in_any_order(connect: Connect, llm: LLM) -> None:
    async def work() -> None:
        async with connect() as client:
            stored = (await call(client, "warm", documents=DOCUMENTS))["documents"]
            assert [one["found"] for one in stored] == [False, False]
            assert all(one["tokens"] > 20 for one in stored)
            for documents in (DOCUMENTS, DOCUMENTS[::-1]):
                fields = {"question": "How tall?", "max_tokens": 6, "ratio": 0.2}
                done = await call(client, "blend", documents=documents, **fields)
                assert done["blended_tokens"] > 40
                question = [{"role": "user", "content": "How tall?"}]
                expected = llm.chat(question, documents=documents, max_tokens=6)
                assert done["prompt_tokens"] == expected.usage.prompt_tokens
            assert all(one["found"] for one in (await call(client, "warm", documents=DOCUMENTS))["documents"])

    asyncio.run(work())


def test_kv_is_forked_cut_continued_and_deleted(connect: Connect, llm: LLM) -> None:
    async def work() -> None:
        async with connect() as client:
            made = await call(client, "kv_create", prompt=TEXT, ttl_s=600.0)
            assert made["tokens"] == len(llm.prompt_ids(TEXT))
            fork = await call(client, "kv_fork", kv=made["id"])
            cut = await call(client, "kv_truncate", kv=fork["id"], length=5)
            assert (cut["id"], cut["tokens"]) == (fork["id"], 5)
            done = await call(client, "generate", prompt=" So", kv=made["id"], max_tokens=6, keep_kv=True)
            assert done["cached_tokens"] == made["tokens"]
            with llm.prefill(TEXT) as cache:
                expected = llm.generate(" So", kv=cache, max_tokens=6)
            assert done["text"] == expected.text
            assert done["kv"]["tokens"] == expected.usage.prompt_tokens + 5, "the last token was never computed"
            pinned = await call(client, "kv_pin", kv=made["id"], ttl_s=900)
            assert pinned["pinned"]
            ids = {made["id"], fork["id"], done["kv"]["id"]}
            assert {one["id"] for one in (await call(client, "kv_list"))["handles"]} == ids
            for one in ids:
                await call(client, "kv_delete", kv=one)
            assert (await call(client, "kv_list"))["handles"] == []
            assert made["id"] in await refused(client, "kv_info", kv=made["id"])

    asyncio.run(work())


def test_saved_kv_outlives_the_server(connect: Connect, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": TEXT}]

    async def work() -> None:
        async with connect(tmp_path / "kv") as client:
            made = await call(client, "kv_create", messages=turns)
            saved = await call(client, "kv_save", kv=made["id"], name="tower")
            assert saved["bytes"] == (tmp_path / "kv" / "tower.kvilt").stat().st_size
        async with connect(tmp_path / "kv") as client:
            assert await call(client, "kv_list") == {"handles": [], "saved": ["tower"]}
            restored = await call(client, "kv_restore", name="tower")
            assert restored["tokens"] == made["tokens"]
            answer = await call(client, "chat", messages=turns, kv=restored["id"], max_tokens=2)
            assert answer["cached_tokens"] == made["tokens"]
            assert "'other'; saved are: tower" in await refused(client, "kv_restore", name="other")

    asyncio.run(work())


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("nothing", {}, "there is no tool 'nothing'"),
        ("generate", {}, "prompt: Field required"),
        ("generate", {"prompt": 5}, "prompt: "),
        ("generate", {"prompt": "x", "max_token": 5}, "max_token: "),
        ("generate", {"prompt": "x", "max_tokens": 0}, "max_tokens: "),
        ("generate", {"prompt": "x", "max_tokens": "5"}, "max_tokens: "),
        ("generate", {"prompt": "x", "kv": "kv-none"}, "kv-none"),
        ("generate", {"prompt": "x", "json_schema": {"type": 5}}, "json_schema"),
        ("generate", {"prompt": "long " * 2000}, "tokens"),
        ("chat", {"messages": []}, "messages: "),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: "),
        ("blend", {"documents": [], "question": "x"}, "documents: "),
        ("blend", {"documents": ["x"], "question": "x", "strategy": "magic"}, "strategy"),
        ("kv_create", {}, "prompt or from messages"),
        ("kv_truncate", {"kv": "kv-none", "length": -1}, "length: "),
        ("kv_pin", {"kv": "kv-none", "ttl_s": 0}, "ttl_s: "),
        ("kv_save", {"kv": "kv-none", "name": "../x"}, "name: "),
        ("kv_save", {"kv": "kv-none", "name": "x"}, "kv-none"),
        ("kv_restore", {"name": "x"}, "--kv-dir"),
    ],
)
def test_bad_input_gets_a_clear_error(connect: Connect, name: str, given: dict[str, Any], told: str) -> None:
    async def work() -> None:
        async with connect() as client:
            assert told in await refused(client, name, **given)
            assert (await call(client, "generate", prompt="x", max_tokens=1))["text"] is not None

    asyncio.run(work())


def test_a_bug_is_logged_and_not_shown(connect: Connect, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(AsyncLLM, "warm", lambda *given, **more: 1 / 0)

    async def work() -> None:
        async with connect() as client:
            said = await refused(client, "warm", documents=["x"])
        assert said == "kvilt failed in warm; its log says where"

    asyncio.run(work())
    assert "ZeroDivisionError" in caplog.text


def test_a_call_that_is_given_up_ends_its_request(connect: Connect) -> None:
    async def work() -> None:
        async with connect() as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.call_tool("generate", {"prompt": "x", "max_tokens": 900, "stop": None})
            assert (await call(client, "generate", prompt="x", max_tokens=1))["completion_tokens"] == 1

    asyncio.run(work())


# Transports.


def test_over_http_only_this_machine_may_ask(executor: Executor, tokenizer: Tokenizer) -> None:
    async def work() -> None:
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        async with AsyncLLM(executor, tokenizer) as served:
            server = LocalHTTPServer(make_server(served, "1"), 0, listening.set_result)
            running = asyncio.ensure_future(server.serve())
            url = f"http://127.0.0.1:{await listening}/mcp"
            async with Client(url) as client:
                assert (await call(client, "generate", prompt="x", max_tokens=2))["completion_tokens"] == 2
                made = await call(client, "kv_create", prompt=TEXT)
            async with Client(url) as client:
                assert (await call(client, "kv_info", kv=made["id"]))["tokens"] == made["tokens"]
            async with httpx.AsyncClient() as http:
                for header in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
                    answer = await http.post(url, json={}, headers={"accept": "application/json", **header})
                    assert answer.status_code in (403, 421)
            server.should_exit = True
            await running

    asyncio.run(work())


def test_the_command_serves_on_stdin_and_stdout(tmp_path: Path) -> None:
    folder = write_tiny_of_bytes(tmp_path / "model")
    command = ["-m", "kvilt", "mcp", "--model", str(folder), "--threads", "1", "--kv-memory", "4M"]
    started = StdioServerParameters(command=sys.executable, args=[*command, "--kv-dir", str(tmp_path / "kv")])

    async def work() -> None:
        async with Client(started) as client:
            made = await call(client, "kv_create", prompt="abc")
            assert made["tokens"] == 3
            done = await call(client, "generate", prompt="d", kv=made["id"], max_tokens=4)
            assert (done["cached_tokens"], done["completion_tokens"]) == (3, 4)
            await call(client, "kv_save", kv=made["id"], name="abc")

    asyncio.run(work())
    assert (tmp_path / "kv" / "abc.kvilt").exists()
