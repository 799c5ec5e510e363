"""From the fields of a request to what the model takes: sampling params, request options, messages, documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...blend.recipe import Recipe
from ...errors import ParamError
from ...llm import ReadingProgress
from ...llm.documents import titled
from ...sampling.constraint import JsonSchema
from ...sampling.params import SamplingParams
from ..auth import Caller
from ..config import ServeConfig
from ..http.errors import HTTPError
from ..service import Service
from ..sessions.fields import session_options
from .fields import (
    AssistantMessage,
    BlendOptions,
    ChatMessage,
    ChoiceFormat,
    Content,
    Document,
    GbnfFormat,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    RegexFormat,
    ToolCallParam,
)
from .schema import ChatRequest

# Fields with the same name and meaning in SamplingParams.
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
    "repetition_detection",
)


def sampling_params(body: GenerationRequest, **more: Any) -> SamplingParams:
    """The sampling params of a request; `more` are the fields that chat and completions spell differently."""
    fields = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    fields["temperature"] = 1.0 if body.temperature is None else body.temperature
    if body.top_k is not None:
        fields["top_k"] = max(0, body.top_k)
    if body.logit_bias:
        fields["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    return SamplingParams.of(**fields, **grammar_params(body), **more)


def grammar_params(body: GenerationRequest) -> dict[str, Any]:
    """The grammar of a request, as a keyword of SamplingParams."""
    found = {**_format(body), **_structured(body)}
    if len(found) > 1 or (_format(body) and _structured(body)):
        raise ParamError("structured_outputs", "asks for a second grammar; give one")
    return found


def _format(body: GenerationRequest) -> dict[str, Any]:
    match body.response_format:
        case JsonObjectFormat(json_schema=schema):
            return {"json_object": True} if schema is None else {"json_schema": {"type": "object", **schema}}
        case JsonSchemaFormat(json_schema=spec):
            return {"json_schema": JsonSchema(spec.json_schema, bool(spec.close_objects))}
        case RegexFormat(regex=regex):
            return {"regex": regex}
        case ChoiceFormat(choice=choice):
            return {"choice": choice}
        case LarkFormat(lark=lark):
            return {"lark": lark}
        case GbnfFormat(gbnf=gbnf):
            return {"gbnf": gbnf}
        case _:
            return {}


def _structured(body: GenerationRequest) -> dict[str, Any]:
    given = body.structured_outputs
    if given is None:
        return {} if body.grammar is None else {"gbnf": body.grammar}
    if body.grammar is not None:
        raise ParamError("grammar", "stands beside structured_outputs; give one of them")
    in_gbnf = given.grammar is not None and "::=" in given.grammar
    named = {
        "json_schema": given.json_,
        "regex": given.regex,
        "choice": given.choice,
        "gbnf" if in_gbnf else "lark": given.grammar,
        "json_object": given.json_object or None,
    }
    return {name: value for name, value in named.items() if value is not None}


def request_options(body: GenerationRequest, caller: Caller, name: str, lora: str | None = None) -> dict[str, Any]:
    """The keywords of a request besides prompt and sampling: adapter, id, tenant, KV handle, documents."""
    if body.lora_scale is not None and lora is None:
        raise ParamError("lora_scale", "is for adapters; name one as the model")
    return {
        "lora": lora,
        "lora_scale": 1.0 if body.lora_scale is None else body.lora_scale,
        "id": name,
        "tenant": caller.salted(body.cache_salt).tenant,
        "kv": body.kv,
        "keep_kv": bool(body.kv_out),
        "session": session_options(body.session),
        "prediction": _text(body.prediction.content) if isinstance(body, ChatRequest) and body.prediction else "",
        **document_options(body),
    }


def wants_progress(body: GenerationRequest) -> bool:
    """Whether a stream needs the progress of its prompt, to show it or to count tokens while it runs."""
    options = body.stream_options
    return bool(body.stream and (body.return_progress or (options and options.continuous_usage_stats)))


def prompt_progress(reading: ReadingProgress) -> dict[str, int]:
    """The progress of a prompt, under llama.cpp's names."""
    return {"total": reading.prompt_tokens, "cache": reading.cached, "processed": reading.tokens}


def template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """The variables that a chat template is given: those of the request, and its reasoning effort."""
    given, effort = dict(body.chat_template_kwargs or {}), body.reasoning_effort
    if effort is None:
        return given
    if given.setdefault("reasoning_effort", effort) != effort:
        raise ParamError("reasoning_effort", "stands in chat_template_kwargs with another value; give one of them")
    if effort == "none":  # families that can only switch reasoning off read this variable
        given.setdefault("enable_thinking", False)
    return given


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: content as one text, arguments of tool calls as objects."""
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


def _call(call: ToolCallParam) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates write the JSON themselves."""
    arguments: Any = call.function.arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    function = {"name": call.function.name, "arguments": parsed if isinstance(parsed, dict) else arguments}
    return {"id": call.id, "type": "function", "function": function}


def document_texts(documents: Sequence[str | Document] | None) -> list[str]:
    """The texts of documents. A title becomes the first line, so it is part of the document's identity."""
    return [one if isinstance(one, str) else _document_text(one) for one in documents or ()]


def _document_text(document: Document) -> str:
    text = document.text if document.content is None else document.content
    assert text is not None
    return titled(document.title, text)


def blend_recipe(body: GenerationRequest) -> Recipe | None:
    """How the documents are blended; None: the model's default."""
    if body.blend is None:
        return None
    try:
        return Recipe.of(None, **_recipe_fields(body.blend))
    except ParamError as error:
        raise HTTPError(400, f"blend.{error}", param=f"blend.{error.field}", code="invalid_value") from None


def _recipe_fields(blend: BlendOptions) -> dict[str, Any]:
    """The fields of the recipe that the request sets."""
    fields = blend.model_dump(exclude_none=True, exclude={"discover"})
    former = fields.pop("mend", None)
    return fields if former is None else {"repair": former, **fields}


def document_options(body: GenerationRequest) -> dict[str, Any]:
    """The keywords for documents that are given or discovered, if there are any."""
    if body.documents:
        return {"documents": document_texts(body.documents), "recipe": blend_recipe(body)}
    return {} if body.blend is None else {"discover": body.blend.discover, "recipe": blend_recipe(body)}


def check_documents(service: Service, body: GenerationRequest) -> None:
    """Refuse impossible combinations before any document is tokenized."""
    check_document_count(service.config, len(body.documents or ()))
    if body.documents and body.kv is not None:
        raise ParamError("kv", "cannot be combined with documents; leave out one of them")
    if wants_discovery(body) and (body.documents or body.kv is not None):
        beside = "documents" if body.documents else "kv"
        said = f"blend.discover: cannot be combined with {beside}; leave out one of them"
        raise HTTPError(400, said, param="blend.discover", code="invalid_value")
    if body.blend is not None and not body.documents and not _has_effect(body, body.blend, service):
        raise ParamError("blend", "has no effect without documents; give documents, or set blend.discover")
    blend_recipe(body)


def wants_discovery(body: GenerationRequest) -> bool:
    """Whether the request asks to discover known documents in its prompt."""
    return body.blend is not None and body.blend.discover is True


def _has_effect(body: GenerationRequest, blend: BlendOptions, service: Service) -> bool:
    """Whether the blend options of a request without documents have an effect."""
    if blend.discover is False:
        return not _recipe_fields(blend)
    return body.kv is None and (blend.discover or service.llm.config.discover)


def check_document_count(config: ServeConfig, documents: int) -> None:
    """Refuse too many documents."""
    most = config.max_documents
    if documents > most:
        said = f"documents: {documents} were sent and {most} are allowed"
        raise HTTPError(400, said, param="documents", code="too_many")
