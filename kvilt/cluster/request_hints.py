"""What a router needs of a request: the tokens of its prompt, its tenant, its adapter, and the names it begins with.

All of it is a guess that decides where a request goes and nothing else: the replica reads the request strictly. What
cannot be read here gives no hint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson

from ..errors import KviltError
from ..server.auth import Caller
from ..server.config import ServeConfig
from ..server.request_prompt import request_prompt
from ..text.tokenizer import Tokenizer
from .router import Prompt

_NAMED_PATH = re.compile(r"/v1/(?P<kind>kv|sessions|responses)/(?P<name>[^/]{1,256})(?:/[a-z_]+)?")
_PINNED = ("/v1/files", "/v1/batches")  # one replica keeps those of a key
_NOT_NAMES = frozenset({"restore", "chunks", "saved", "state", "certificates", "import", "input_tokens"})
_NEW_NAME = re.compile(rb'"id": ?"([0-9a-f]{32}|resp_[0-9a-f]{32})"')
_GENERATES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")


def prompt_of(
    path: str,
    body: bytes,
    caller: Caller,
    tokenizer: Tokenizer | None,
    config: ServeConfig,
    adapters: Mapping[str, str],
) -> Prompt:
    """What decides where a request goes. `adapters` has the identity of each by its name in requests."""
    fields = _fields(body)
    salt = fields.get("cache_salt")
    tenant = caller.salted(salt if isinstance(salt, str) else None).tenant
    tokens: tuple[int, ...] = ()
    if tokenizer is not None and path in _GENERATES:
        with suppress(KviltError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            tokens = request_prompt(fields, tokenizer).ids  # else the replica says what is wrong with it
    model = fields.get("model")
    adapter = adapters.get(config.resolve(model)) if isinstance(model, str) else None
    return Prompt(tokens, adapter, tenant, _names(path, fields, tenant), _documents(fields))


def named(tenant: str, name: str) -> str:
    """A name of one tenant."""
    return f"{tenant} {name}"


def handle_of(path: str) -> str | None:
    """The handle, session or response that a path is about."""
    found = _NAMED_PATH.fullmatch(path)
    return None if found is None or found["name"] in _NOT_NAMES else found["name"]


def new_names(data: bytes) -> list[str]:
    """Names of handles and stored responses in a piece of an answer."""
    return [name.decode() for name in _NEW_NAME.findall(data)]


def _fields(body: bytes) -> dict[str, Any]:
    try:
        read = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError:
        return {}
    return read if isinstance(read, dict) else {}


def _names(path: str, fields: dict[str, Any], tenant: str) -> tuple[str, ...]:
    session = fields.get("session")
    if isinstance(session, dict):
        session = session.get("id") or session.get("name")
    given = [handle_of(path), fields.get("kv"), fields.get("previous_response_id"), session]
    if path.startswith(_PINNED):
        given.append("files")
    return tuple(named(tenant, one) for one in given if isinstance(one, str) and one)


def _documents(fields: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Hashes of documents, and their sizes at four characters a token."""
    found = fields.get("documents")
    if not isinstance(found, list):
        return ()
    texts = [one.get("text", "") if isinstance(one, dict) else one for one in found[:1024]]
    return tuple(
        (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest(), len(text) // 4)
        for text in texts
        if isinstance(text, str) and text
    )
