"""From Ollama's requests to the internal chat request."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from ...sampling.params import SamplingParams
from ..openai.schema import ChatRequest, chat_request
from ..sessions.fields import session_json
from .schema import OllamaChatRequest, OllamaGenerateRequest, OllamaGeneration, OllamaMessage, OllamaOptions

# Options, and their names in the internal request.
_SAMPLED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
}
_OTHERS = ("presence_penalty", "frequency_penalty", "seed", "stop")


def translate_chat(body: OllamaChatRequest, defaults: SamplingParams) -> ChatRequest:
    """A conversation; `defaults` hold for the options that are left out."""
    tools = [{"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in body.tools or ()]
    messages = _messages(body.messages or ())
    last = messages[-1] if messages else {}
    continues = last.get("role") == "assistant" and not last.get("tool_calls")
    fields = {"continue_final_message": continues or None, "tools": tools or None, **_fields(body, defaults)}
    return chat_request({"messages": messages, **fields})


def translate_prompt(body: OllamaGenerateRequest, defaults: SamplingParams) -> ChatRequest:
    """A prompt as a conversation of one message."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt or ""}]
    return chat_request({"messages": messages, **_fields(body, defaults)})


def _fields(body: OllamaGeneration, defaults: SamplingParams) -> dict[str, Any]:
    """What chat and generate share."""
    options = body.options or OllamaOptions.model_validate({})
    made: dict[str, Any] = {name: getattr(options, name) for name in _OTHERS}
    for name, internal in _SAMPLED.items():
        given = getattr(options, name)
        made[internal] = getattr(defaults, internal) if given is None else given
    if options.num_predict is not None and options.num_predict > 0:
        made["max_tokens"] = options.num_predict
    made |= {"model": body.model, "stream": body.stream is not False, **_format(body.format), **_think(body.think)}
    return made | {
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        "session": session_json(body.session),
    }


def _format(wanted: str | dict[str, Any] | None) -> dict[str, Any]:
    if not wanted:
        return {}
    if isinstance(wanted, str):
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": wanted}}}


def _think(think: bool | str | None) -> dict[str, Any]:
    if think is None:
        return {}
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {"chat_template_kwargs": {"enable_thinking": think}}


def _messages(given: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages. Ollama's calls need no ids, so those without get some, and results answer calls in their order."""
    made, asked, count = [], deque[str](), 0
    for message in given:
        own: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "assistant" and message.thinking:
            own["reasoning_content"] = message.thinking
        if message.role == "assistant" and message.tool_calls:
            own["tool_calls"] = []
            for call in message.tool_calls:
                name = call.id or f"call{count:05d}"  # the length that Mistral's templates ask for
                count += 1
                asked.append(name)
                function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
                own["tool_calls"].append({"id": name, "function": function})
        if message.role == "tool":
            first = asked.popleft() if asked else None
            own |= {"name": message.tool_name, "tool_call_id": message.tool_call_id or first}
        made.append(own)
    return made
