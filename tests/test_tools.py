"""Tools in Python: schemas from type hints, the loop of calls and results, and templates that know no tools."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import kvilt
from kvilt import LLM
from kvilt.errors import ParamError
from kvilt.llm import AsyncLLM, ParsedToolCall
from kvilt.llm.python_tools import function_schema
from kvilt.llm.tool_calls import run_calls
from kvilt.text.chat import ChatTemplate
from kvilt.text.parse import parser_for

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


class Unit(enum.Enum):
    CELSIUS = "c"
    KELVIN = "k"


def weather(city: str, days: int = 1, unit: Unit = Unit.CELSIUS) -> dict[str, Any]:
    """The weather in a city."""
    if city == "Nowhere":
        raise LookupError("no such city")
    return {"city": city, "days": days, "unit": unit.name}


def odd(
    a: list[float], b: dict[str, bool], c: Literal["x", 1] = "x", d: int | None = None, *, e: Any = None, f: object = 1
) -> None:
    del a, b, c, d, e, f


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with kvilt.load(str(smollm2_path), kv_memory="64M", max_context=512) as model:
        yield model


def test_a_function_is_a_tool_with_a_schema() -> None:
    made = function_schema(weather)["function"]
    assert (made["name"], made["description"]) == ("weather", "The weather in a city.")
    assert made["parameters"] == {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "k"]}},
        "required": ["city"],
        "additionalProperties": False,
    }


def test_types_without_a_schema_are_refused_by_name() -> None:
    with pytest.raises(ParamError, match=r"odd\.f"):
        function_schema(odd)
    with pytest.raises(ParamError, match="type hint"):
        function_schema(lambda_without_hints)
    with pytest.raises(ParamError, match="a tool is a function"):
        function_schema(lambda: None)


def lambda_without_hints(value):  # type: ignore[no-untyped-def]
    return value


def test_calls_are_carried_out_and_errors_are_results() -> None:
    calls = [
        ParsedToolCall("weather", '{"city": "Rome", "unit": "k"}'),
        ParsedToolCall("weather", '{"city": "Nowhere"}'),
    ]
    said, first, second = run_calls("", calls, [weather])
    assert json.loads(first["content"]) == {"city": "Rome", "days": 1, "unit": "KELVIN"}
    assert second["content"] == "LookupError: no such city"
    ids = [call["id"] for call in said["tool_calls"]]
    assert ids == [first["tool_call_id"], second["tool_call_id"]]
    assert all(len(one) == 9 and one.isalnum() for one in ids), "as Mistral's templates demand"
    with pytest.raises(ParamError, match="'other'"):
        run_calls("", [ParsedToolCall("other", "{}")], [weather])


def test_the_loop_with_the_default_model(llm: LLM) -> None:
    done = llm.chat(QUESTION, tools=[weather], tool_choice="required", max_tokens=60)
    (call,) = done.tool_calls
    assert call.name == "weather"
    assert json.loads(call.arguments)["city"]
    assert done.text == ""
    messages = [*QUESTION, *done.run_tools([weather])]
    answer = llm.chat(messages, tools=[weather], tool_choice="none", max_tokens=8)
    assert answer.tool_calls == ()
    assert answer.text
    stream = llm.stream_chat(QUESTION, tools=[weather], tool_choice="weather", max_tokens=60)
    assert list(stream) == []
    assert stream.completion.tool_calls[0].name == "weather"


def test_choices_that_cannot_be_are_refused(llm: LLM) -> None:
    for given in (
        {"tools": [weather], "tool_choice": "other"},
        {"tool_choice": "required"},
        {"tools": [weather], "tool_choice": "required", "regex": "a"},
    ):
        with pytest.raises(ParamError, match="tool_choice"):
            llm.chat(QUESTION, **given)


def test_tools_reach_a_model_whose_template_knows_none(llm: LLM) -> None:
    without = llm.chat(QUESTION, max_tokens=1).usage.prompt_tokens
    with_tools = llm.chat(QUESTION, tools=[weather], max_tokens=1).usage.prompt_tokens
    assert with_tools > without + 50
    assert "The weather in a city." in llm.render_chat(QUESTION, [function_schema(weather)]).text


CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


@pytest.mark.parametrize(
    ("family", "written"),
    [("llama", CALL), ("mistral", f"[{CALL}]"), ("qwen2", f"<tool_call>\n{CALL}\n</tool_call>"), (None, CALL)],
)
def test_the_prompt_of_such_a_template_and_its_parser_agree(family: str | None, written: str) -> None:
    parser = parser_for(PLAIN, family)
    template = ChatTemplate(PLAIN, calls=parser.calls)
    calls = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "name": "other", "content": "sun"},
        {"role": "user", "content": "And?"},
    ]
    text = template.render(messages, tools=[function_schema(weather)])
    assert text.startswith("[system]Be brief.\n\nYou can call these tools:\n{")
    assert f"[assistant]{written}[user]The tool weather returned:\nrain\n\nThe tool other returned:\nsun\n\n" in text
    reader = parser.new([function_schema(weather)])
    pieces = [*reader.feed(written), *reader.finish()]
    assert type(pieces[0]).__name__ == "CallStart"


def test_templates_without_a_system_role_get_the_tools_with_the_first_question() -> None:
    refuses = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
    )
    text = ChatTemplate(refuses).render(QUESTION, tools=[function_schema(weather)])
    assert text.startswith("[user]You can call these tools:")
    assert text.endswith("What is the weather in Paris?")


def test_templates_that_read_tools_stay_as_they_are() -> None:
    reads = "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}" + PLAIN
    assert (
        ChatTemplate(reads).render(QUESTION, tools=[function_schema(weather)])
        == f"weather[user]{QUESTION[0]['content']}"
    )


def test_asynchronously(smollm2_path: Path) -> None:
    async def ask() -> tuple[ParsedToolCall, ...]:
        async with kvilt.load_async(str(smollm2_path), kv_memory="64M", max_context=512) as model:
            assert isinstance(model, AsyncLLM)
            return (await model.chat(QUESTION, tools=[weather], tool_choice="weather", max_tokens=60)).tool_calls

    assert asyncio.run(ask())[0].name == "weather"
