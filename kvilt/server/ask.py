"""From a request's fields to what the model takes: sampling params, terms, messages. Refuses to know HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import ParamError
from ..llm import Reading
from ..sampling.params import SamplingParams
from .documents import blend_terms
from .gate import Caller
from .schema.chat import AssistantMessage, ChatMessage, Content, MadeCall
from .schema.fields import (
    ChoiceFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    RegexFormat,
    Sampling,
)

# Fields that mean the same here and there.
_SAME = (
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words",
    "min_tokens",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "draft_tokens",
)


def sampling_of(asked: Sampling, **more: Any) -> SamplingParams:
    """How tokens are drawn; `more` are fields that the two kinds of request spell differently."""
    fields = {name: value for name in _SAME if (value := getattr(asked, name)) is not None}
    fields["temperature"] = 1.0 if asked.temperature is None else asked.temperature
    if asked.top_k is not None:
        fields["top_k"] = max(0, asked.top_k)
    if asked.logit_bias:
        fields["logit_bias"] = {int(token): bias for token, bias in asked.logit_bias.items()}
    return SamplingParams.of(**fields, **grammar_of(asked), **more)


def grammar_of(asked: Sampling) -> dict[str, Any]:
    """What the text must be, under the name that sampling has for it."""
    found = {**_format(asked), **_structured(asked)}
    if len(found) > 1 or (_format(asked) and _structured(asked)):
        raise ParamError("structured_outputs", "asks for a second grammar; give one")
    return found


def _format(asked: Sampling) -> dict[str, Any]:
    match asked.response_format:
        case JsonObjectFormat():
            return {"json_object": True}
        case JsonSchemaFormat(json_schema=spec):
            return {"json_schema": spec.json_schema}
        case RegexFormat(regex=regex):
            return {"regex": regex}
        case ChoiceFormat(choice=choice):
            return {"choice": choice}
        case LarkFormat(lark=lark):
            return {"lark": lark}
        case _:
            return {}


def _structured(asked: Sampling) -> dict[str, Any]:
    given = asked.structured_outputs
    if given is None:
        return {}
    named = {
        "json_schema": given.json_,
        "regex": given.regex,
        "choice": given.choice,
        "lark": given.grammar,
        "json_object": given.json_object or None,
    }
    return {name: value for name, value in named.items() if value is not None}


def terms_of(asked: Sampling, caller: Caller, name: str, lora: str | None = None) -> dict[str, Any]:
    """How a request is served."""
    if asked.lora_scale is not None and lora is None:
        raise ParamError("lora_scale", "is for adapters; name one as the model")
    return {
        "lora": lora,
        "lora_scale": 1.0 if asked.lora_scale is None else asked.lora_scale,
        "id": name,
        "tenant": caller.salted(asked.cache_salt).tenant,
        "kv": asked.kv,
        "keep_kv": bool(asked.kv_out),
        **blend_terms(asked),
    }


def wants_progress(asked: Sampling) -> bool:
    """Whether a stream must hear how far its prompt is read: to say so, or to count while it runs."""
    options = asked.stream_options
    return bool(asked.stream and (asked.return_progress or (options and options.continuous_usage_stats)))


def progress_of(reading: Reading) -> dict[str, int]:
    """How far a prompt is read, under the names that llama.cpp's clients know."""
    return {"total": reading.prompt_tokens, "cache": reading.cached, "processed": reading.tokens}


def messages_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """A conversation as templates take it: contents as one text, arguments of calls as objects."""
    return [_message(message) for message in messages]


def _message(message: ChatMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name, None)) is not None:
            made[name] = value
    if isinstance(message, AssistantMessage):
        if message.reasoning_content is not None:
            made["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            made["tool_calls"] = [_call(call) for call in message.tool_calls]
    return made


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _call(call: MadeCall) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they want them as an object."""
    arguments: Any = call.function.arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    function = {"name": call.function.name, "arguments": parsed if isinstance(parsed, dict) else arguments}
    return {"id": call.id, "type": "function", "function": function}
