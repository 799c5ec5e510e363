"""Tools as agents send them: left out of the prompt until they are asked for, in namespaces, found by a search."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_server import Script, ScriptedServer, scripted, steps, tool_call

from kvilt.executor.protocol import Executor
from kvilt.server.openai.schema import ChatRequest
from kvilt.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = tool_call("weather", city="Paris")
ASK = [{"role": "user", "content": "x"}]
SEARCHED = {"type": "tool_use", "id": "t1", "name": "find", "input": {}}


class Prompts:
    """A script that keeps the internal requests."""

    def __init__(self) -> None:
        self.script: Script = steps("")
        self.seen: list[ChatRequest] = []

    def __call__(self, body: ChatRequest) -> str:
        self.seen.append(body)
        return self.script(body)

    @property
    def tools(self) -> list[str]:
        """What the latest prompt lists."""
        return [tool.function.name for tool in self.seen[-1].tools or ()]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts()


@pytest.fixture(scope="module")
def started(roomy: Executor, tokenizer: Tokenizer, prompts: Prompts) -> Iterator[ScriptedServer]:
    with scripted(roomy, tokenizer, prompts) as one:
        yield one


@pytest.fixture
def http(started: ScriptedServer) -> httpx.Client:
    return started.server.http()


# Messages.


def messages(http: httpx.Client, **fields: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 100, "messages": ASK, **fields}
    return http.post("/v1/messages", json=body)


FIND = {"name": "find", "input_schema": {"type": "object"}}
LATER = {"name": "weather", "description": "Tells.", "input_schema": SCHEMA, "defer_loading": True}


def referring(name: str) -> list[dict[str, Any]]:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference", "tool_name": name}]}
    return [*ASK, {"role": "assistant", "content": [SEARCHED]}, {"role": "user", "content": [result]}]


def test_a_deferred_tool_is_in_the_prompt_where_it_is_referred_to(http: httpx.Client, prompts: Prompts) -> None:
    prompts.script = steps(CALL, CALL)
    early = messages(http, tools=[FIND, LATER]).json()
    assert prompts.tools == ["find"]
    assert early["content"][0]["type"] == "tool_use", "the model may call it all the same"
    done = messages(http, tools=[FIND, LATER], messages=referring("weather")).json()
    assert prompts.tools == ["find"], "the beginning of the prompt stays as it was"
    shown = json.loads(prompts.seen[-1].messages[-1].content)
    assert shown["function"] == {"name": "weather", "description": "Tells.", "parameters": SCHEMA}
    (call,) = done["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Paris"})


def test_a_deferred_tool_that_is_chosen_is_listed(http: httpx.Client, prompts: Prompts) -> None:
    prompts.script = steps(CALL)
    done = messages(http, tools=[FIND, LATER], tool_choice={"type": "tool", "name": "weather"})
    assert done.status_code == 200
    assert prompts.tools == ["find", "weather"]


def test_no_deferred_tool_is_called_where_none_may_be(http: httpx.Client, prompts: Prompts) -> None:
    prompts.script = lambda body: CALL
    done = messages(http, tools=[FIND, LATER], tool_choice={"type": "none"}).json()
    assert [block["type"] for block in done["content"]] == ["text"]


def test_a_reference_to_an_unknown_tool_is_refused(http: httpx.Client) -> None:
    refused = messages(http, tools=[FIND, LATER], messages=referring("nothing"))
    assert refused.status_code == 400
    assert "'nothing'" in refused.json()["error"]["message"]


def test_deferred_tools_count_as_tools(http: httpx.Client) -> None:
    many = [{**LATER, "name": f"t{index}"} for index in range(129)]
    refused = messages(http, tools=many)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


# Responses.


WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
PATCH = {"type": "custom", "name": "patch"}
SPACE = {"type": "namespace", "name": "sky", "description": "All about it.", "tools": [WEATHER, PATCH]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {"type": "object"}}


def responses(http: httpx.Client, **fields: Any) -> Any:
    body = {"model": "tiny", "input": "x", "store": False, **fields}
    done = http.post("/v1/responses", json=body)
    assert done.status_code == 200, done.text
    return done.json()


def test_tools_of_a_namespace_are_called_by_their_whole_name(http: httpx.Client, prompts: Prompts) -> None:
    prompts.script = steps(tool_call("sky.weather", city="Paris") + tool_call("sky.patch", input="+a"))
    function, custom = responses(http, tools=[SPACE])["output"]
    assert prompts.tools == ["sky.weather", "sky.patch"]
    assert (function["type"], function["name"], function["namespace"]) == ("function_call", "weather", "sky")
    assert (custom["type"], custom["name"], custom["namespace"]) == ("custom_tool_call", "patch", "sky")
    assert custom["input"] == "+a"
    prompts.script = steps("", "", "Done.")
    results = [
        {"type": "function_call_output", "call_id": function["call_id"], "output": "Sunny."},
        {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "Done."},
    ]
    replayed = [{"role": "user", "content": "x"}, function, custom, *results]
    responses(http, tools=[SPACE], input=replayed)
    calls = prompts.seen[-1].messages[1].tool_calls
    assert [call.function.name for call in calls] == ["sky.weather", "sky.patch"]


def test_a_search_of_the_client_finds_tools_that_can_be_called(http: httpx.Client, prompts: Prompts) -> None:
    prompts.script = steps(tool_call("tool_search", query="rain"), tool_call("sky.weather", city="Paris"))
    (search,) = responses(http, tools=[SEARCH])["output"]
    assert search.pop("id").startswith("tsc_")
    call_id = search.pop("call_id")
    expected = {"type": "tool_search_call", "status": "completed", "execution": "client"}
    assert search == {**expected, "arguments": {"query": "rain"}}
    found = {"type": "tool_search_output", "call_id": call_id, "execution": "client", "tools": [SPACE]}
    items = [{"role": "user", "content": "x"}, {**search, "call_id": call_id}, found]
    (call,) = responses(http, tools=[SEARCH], input=items)["output"]
    assert prompts.tools == ["tool_search"], "the beginning of the prompt stays as it was"
    assert "sky.patch" in prompts.seen[-1].messages[-1].content
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "weather", "sky")


def test_a_search_streams_as_an_item(http: httpx.Client, prompts: Prompts) -> None:
    prompts.script = steps(tool_call("tool_search", query="rain"))
    body = {"model": "tiny", "input": "x", "tools": [SEARCH], "stream": True}
    lines = http.post("/v1/responses", json=body).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    assert events[3]["item"] == events[4]["response"]["output"][0]
    more = {"model": "tiny", "previous_response_id": events[4]["response"]["id"], "tools": [SEARCH]}
    found = {"type": "tool_search_output", "call_id": events[3]["item"]["call_id"], "tools": [WEATHER]}
    prompts.script = steps("", "Done.")
    assert responses(http, **more, input=[found])["output"][0]["type"] == "message"
    assert prompts.seen[-1].messages[1].tool_calls[0].function.name == "tool_search"


def test_additional_tools_are_listed(http: httpx.Client, prompts: Prompts) -> None:
    prompts.script = steps(tool_call("sky.weather", city="Paris"))
    more = {"type": "additional_tools", "role": "developer", "tools": [SPACE, {"type": "web_search"}]}
    done = responses(http, input=[more, {"role": "user", "content": "x"}], tools=[SEARCH])
    assert prompts.tools == ["tool_search", "sky.weather", "sky.patch"]
    assert done["output"][0]["namespace"] == "sky"
    assert done["warnings"] == ["input.0.tools.1: web_search is not run by this server and was left out"]


def test_a_search_that_the_server_would_run_is_left_out(http: httpx.Client, prompts: Prompts) -> None:
    prompts.script = steps("Done.")
    done = responses(http, tools=[{"type": "tool_search"}, WEATHER])
    assert done["warnings"] == ["tools.0: tool_search is not run by this server and was left out"]
    assert prompts.tools == ["weather"]
