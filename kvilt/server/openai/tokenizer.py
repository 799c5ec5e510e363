"""POST /tokenize and /detokenize, GET /tokenizer_info, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from ...errors import ContextOverflow, InputError
from ...llm.offload import TOKENIZE
from ..http.responses import json_response
from ..http.routing import BODY_ERRORS, CallerDep, ServiceDep, StrictRoute, error_responses
from ..http.schema import RequestModel, ResponseModel
from ..service import Service
from .fields import Messages, TemplateKwargs, TokenId, Tool
from .params import template_messages
from .usage import token_text


class TokenizeRequest(RequestModel):
    """A prompt or messages to tokenize."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: str | None = None
    add_special_tokens: bool = Field(True, description="Whether to add the tokens that start a text.")
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    add_generation_prompt: bool = Field(True, description="Whether the template adds the start of an answer.")
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None


class Tokens(ResponseModel):
    """Tokens of a text."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Tokens to detokenize."""

    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Detokenized(ResponseModel):
    """The text of tokens, with special tokens written out."""

    prompt: str


class TokenizerInfo(ResponseModel):
    """The tokenizer: vocabulary, special tokens, chat template, parsers."""

    vocab_size: int
    max_model_len: int
    bos_token_id: int | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    eos_token_ids: list[int]
    special_tokens: dict[str, int]
    named_tokens: dict[str, str]
    chat_template: str | None
    tool_parser: str
    reasoning: list[str] | None


router = APIRouter(route_class=StrictRoute, tags=["tokens"])


@router.post("/tokenize", response_model=None, responses={200: {"model": Tokens}, **BODY_ERRORS})
async def tokenize(body: TokenizeRequest, service: ServiceDep, caller: CallerDep) -> Response:
    """The tokens of a prompt, or of messages in the chat template."""
    service.check_model(body.model)
    return await service.llm.offload.run(TOKENIZE, _tokens, service, body, owner=caller.tenant)


def _tokens(service: Service, body: TokenizeRequest) -> Response:
    llm = service.llm
    if (body.prompt is None) == (body.messages is None):
        raise InputError("give a prompt or messages to tokenize, one of them")
    if body.messages is None:
        most = llm.executor.max_context
        ids = llm.tokenizer.encode(body.prompt or "", add_special=body.add_special_tokens, limit=most)
    else:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None
        variables = body.chat_template_kwargs
        ids = llm.chat_ids(template_messages(body.messages), tools, body.add_generation_prompt, variables)
    made = {"tokens": ids, "count": len(ids), "max_model_len": llm.executor.max_context}
    shown = [token_text(llm.tokenizer, token) for token in ids] if body.return_token_strs else None
    return json_response({**made, "token_strs": shown})


@router.post("/detokenize", response_model=None, responses={200: {"model": Detokenized}, **BODY_ERRORS})
async def detokenize(body: DetokenizeRequest, service: ServiceDep, caller: CallerDep) -> Response:
    """The text of tokens, at most as many as fit the context."""
    service.check_model(body.model)
    return await service.llm.offload.run(TOKENIZE, _text, service, body, owner=caller.tenant)


def _text(service: Service, body: DetokenizeRequest) -> Response:
    if len(body.tokens) > (limit := service.llm.executor.max_context):
        raise ContextOverflow(len(body.tokens), limit)
    size = service.llm.executor.spec.vocab_size
    if (past := next((token for token in body.tokens if token >= size), None)) is not None:
        raise InputError(f"tokens: {past} is past the vocabulary of {size} tokens")
    return json_response({"prompt": service.llm.tokenizer.decode(body.tokens, skip_special=False)})


@router.get("/tokenizer_info", response_model=None, responses={200: {"model": TokenizerInfo}, **error_responses()})
async def tokenizer_info(service: ServiceDep) -> Response:
    """The tokenizer: vocabulary, special tokens, chat template, parsers."""
    tokenizer, parser = service.llm.tokenizer, service.parser
    return json_response(
        {
            "vocab_size": tokenizer.vocab_size,
            "max_model_len": service.llm.executor.max_context,
            "bos_token_id": tokenizer.bos_id,
            "bos_token": tokenizer.named.get("bos_token"),
            "eos_token": tokenizer.named.get("eos_token"),
            "pad_token": tokenizer.named.get("pad_token"),
            "eos_token_ids": sorted(service.llm.stop_ids),
            "special_tokens": dict(tokenizer.special),
            "named_tokens": dict(tokenizer.named),
            "chat_template": tokenizer.chat_template,
            "tool_parser": parser.name,
            "reasoning": None if parser.thinking is None else [parser.thinking.open, parser.thinking.close],
        }
    )
