"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ...errors import ContextOverflow, InputError
from ...llm.offload import TOKENIZE
from ..ask import messages_of
from ..counts import token_text
from ..respond import json_response
from ..schema.tokens import Detokenized, DetokenizeRequest, TokenizeRequest, TokenizerInfo, Tokens
from ..service import Service
from .common import BODY, Here, StrictRoute, Who, refusals

router = APIRouter(route_class=StrictRoute, tags=["tokens"])


@router.post("/tokenize", response_model=None, responses={200: {"model": Tokens}, **BODY})
async def tokenize(asked: TokenizeRequest, service: Here, caller: Who) -> Response:
    """The tokens of a prompt, or of messages as a conversation shows them."""
    service.check_model(asked.model)
    return await service.llm.offload.run(TOKENIZE, _tokens, service, asked, owner=caller.tenant)


def _tokens(service: Service, asked: TokenizeRequest) -> Response:
    llm = service.llm
    if (asked.prompt is None) == (asked.messages is None):
        raise InputError("give a prompt or messages to tokenize, one of them")
    if asked.messages is None:
        most = llm.executor.max_context
        ids = llm.tokenizer.encode(asked.prompt or "", add_special=asked.add_special_tokens, limit=most)
    else:
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()] or None
        ids = llm.chat_ids(messages_of(asked.messages), tools, asked.add_generation_prompt)
    made = {"tokens": ids, "count": len(ids), "max_model_len": llm.executor.max_context}
    shown = [token_text(llm.tokenizer, token) for token in ids] if asked.return_token_strs else None
    return json_response({**made, "token_strs": shown})


@router.post("/detokenize", response_model=None, responses={200: {"model": Detokenized}, **BODY})
async def detokenize(asked: DetokenizeRequest, service: Here, caller: Who) -> Response:
    """The text of tokens, as many as a prompt may have."""
    service.check_model(asked.model)
    return await service.llm.offload.run(TOKENIZE, _text, service, asked, owner=caller.tenant)


def _text(service: Service, asked: DetokenizeRequest) -> Response:
    if len(asked.tokens) > (limit := service.llm.executor.max_context):
        raise ContextOverflow(len(asked.tokens), limit)
    size = service.llm.executor.spec.vocab_size
    if (past := next((token for token in asked.tokens if token >= size), None)) is not None:
        raise InputError(f"tokens: {past} is past the vocabulary of {size} tokens")
    return json_response({"prompt": service.llm.tokenizer.decode(asked.tokens, skip_special=False)})


@router.get("/tokenizer_info", response_model=None, responses={200: {"model": TokenizerInfo}, **refusals()})
async def tokenizer_info(service: Here) -> Response:
    """What there is to know of the tokenizer."""
    tokenizer, parser = service.llm.tokenizer, service.parser
    return json_response(
        {
            "vocab_size": tokenizer.vocab_size,
            "max_model_len": service.llm.executor.max_context,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_ids": sorted(service.llm.stop_ids),
            "special_tokens": dict(tokenizer.special),
            "named_tokens": dict(tokenizer.named),
            "chat_template": tokenizer.chat_template,
            "tool_parser": parser.name,
            "reasoning": None if parser.thinking is None else [parser.thinking.open, parser.thinking.close],
        }
    )
