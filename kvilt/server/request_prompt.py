"""The prompt of a request of any API, from its JSON and without a model: for explanations offline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter

from ..errors import InputError
from ..sampling.params import SamplingParams
from ..text.chat import ChatTemplate
from ..text.tokenizer import Tokenizer
from .anthropic.schema import CountTokensRequest, MessagesRequest
from .anthropic.translate import translate as translate_messages
from .http.body import validate
from .http.errors import HTTPError
from .ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from .ollama.translate import translate_chat, translate_prompt
from .openai.chat import chat_tools
from .openai.params import template_kwargs, template_messages
from .openai.schema import ChatRequest
from .responses.items import messages_of
from .responses.schema import ResponseRequest
from .responses.translate import translate as translate_response

Api = Literal["chat", "completions", "messages", "responses", "ollama"]


@dataclass(frozen=True, slots=True)
class RequestPrompt:
    """The tokens of a request's prompt, and what besides them decides whether KV is shared."""

    api: Api
    ids: tuple[int, ...]
    model: str
    salt: str


def request_prompt(fields: Any, tokenizer: Tokenizer) -> RequestPrompt:
    """The prompt of a request; raises InputError for what no API takes."""
    if not isinstance(fields, dict):
        raise InputError("a request is a JSON object")
    api = api_of(fields)
    try:
        ids = _ids(fields, api, tokenizer)
    except RequestValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:]))
        raise InputError(f"this is no request of the {api} API: {where}: {first['msg']}") from None
    except HTTPError as error:
        raise InputError(f"this is no request of the {api} API: {error.message}") from None
    return RequestPrompt(api, tuple(ids), str(fields.get("model") or ""), str(fields.get("cache_salt") or ""))


def api_of(fields: dict[str, Any]) -> Api:
    """The API that a request is written for, by the fields that only one of them has."""
    if "messages" not in fields:
        if "input" in fields:
            return "responses"
        return "ollama" if isinstance(fields.get("options"), dict) or "raw" in fields else "completions"
    if isinstance(fields.get("options"), dict) or "keep_alive" in fields:
        return "ollama"
    tools = [tool for tool in fields.get("tools") or () if isinstance(tool, dict)]
    anthropic = {"system", "stop_sequences", "thinking", "anthropic_version", "diagnostics"}
    if anthropic & fields.keys() or any("input_schema" in tool for tool in tools):
        return "messages"
    return "messages" if any(_has_blocks(message) for message in fields.get("messages") or ()) else "chat"


def _has_blocks(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    blocks = content if isinstance(content, list) else []
    return any(isinstance(block, dict) and block.get("type") in ("tool_use", "tool_result") for block in blocks)


def _ids(fields: dict[str, Any], api: Api, tokenizer: Tokenizer) -> list[int]:
    if api == "completions" or (api == "ollama" and fields.get("raw")):
        return _text_ids(fields.get("prompt"), tokenizer)
    body = _chat_body(fields, api)
    template = ChatTemplate.of(tokenizer)
    variables = template.options_read(template_kwargs(body))
    return template.encode(
        tokenizer,
        template_messages(body.messages),
        tools=chat_tools(body),
        continue_final_message=bool(body.continue_final_message),
        **variables,
    )


def _text_ids(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special=True)
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    raise InputError("explain takes one prompt, as a text or as token ids")


def _chat_body(fields: dict[str, Any], api: Api) -> ChatRequest:
    fields = {name: value for name, value in fields.items() if name != "anthropic_version"}
    match api:
        case "messages":
            kind = MessagesRequest if "max_tokens" in fields else CountTokensRequest
            body: CountTokensRequest = validate(fields, TypeAdapter(kind))
            return translate_messages(body).body
        case "responses":
            asked: ResponseRequest = validate(fields, TypeAdapter(ResponseRequest))
            return translate_response(asked, messages_of(asked.input)).body
        case "ollama" if "messages" in fields:
            return translate_chat(validate(fields, TypeAdapter(OllamaChatRequest)), SamplingParams())
        case "ollama":
            return translate_prompt(validate(fields, TypeAdapter(OllamaGenerateRequest)), SamplingParams())
        case _:
            made: ChatRequest = validate(fields, TypeAdapter(ChatRequest))
            return made
