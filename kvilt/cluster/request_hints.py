"""What a router needs of a request: the tokens of its prompt, its tenant, its adapter, and the names it begins with.

All of it is a guess that decides where a request goes and nothing else: the replica reads the request strictly. What
cannot be read here gives no hint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import orjson

from ..errors import KviltError
from ..kv.row import BASE
from ..server.auth import Caller
from ..server.config import ServeConfig
from ..server.request_prompt import request_prompt
from ..text.tokenizer import Tokenizer
from .page_transfer import PageSpan
from .router import Prompt


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """What a request asks for, and the key that asks."""

    path: str
    query: bytes
    caller: Caller


_NAMED_PATH = re.compile(r"/v1/(?P<kind>kv|sessions|responses)/(?P<name>[^/]{1,256})(?:/[a-z_]+)?")
_PINNED = ("/v1/files", "/v1/batches", "/v1/chats")  # one replica keeps those of a key
_NOT_NAMES = frozenset({"restore", "chunks", "saved", "state", "certificates", "import", "input_tokens"})
_NEW_NAME = re.compile(rb'"id": ?"([0-9a-f]{32}|resp_[0-9a-f]{32})"')
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What decides where a request goes, and the adapter by its name in requests."""

    prompt: Prompt
    lora: str | None = None


def request_hints(
    target: RequestTarget, body: bytes, tokenizer: Tokenizer | None, config: ServeConfig, adapters: Mapping[str, str]
) -> RequestHints:
    """The hints of a request. `adapters` has the identity of each by its name in requests."""
    fields = _fields(body)
    asked = parse_qs(target.query.decode("latin-1")).get("cache_salt", [None])[0]
    salt = fields.get("cache_salt", asked)
    salt = salt if isinstance(salt, str) else None
    tenant = target.caller.salted(salt).tenant
    tokens: tuple[int, ...] = ()
    if tokenizer is not None and target.path in GENERATING:
        with suppress(KviltError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            tokens = request_prompt(fields, tokenizer).ids  # else the replica says what is wrong with it
    model = fields.get("model")
    lora = config.resolve(model) if isinstance(model, str) else None
    adapter = None if lora is None else adapters.get(lora)
    names = _names(target.path, fields, tenant)
    return RequestHints(
        Prompt(tokens, adapter, tenant, names, _documents(fields)), lora if adapter is not None else None
    )


def named(tenant: str, kind: str, name: str) -> str:
    """A name of one tenant; the kind is that of its path: kv, sessions, responses, or files for all of them."""
    return f"{tenant} {kind} {name}"


def name_parts(full: str) -> tuple[str, str, str]:
    """Tenant, kind and name of what `named` made."""
    tenant, kind, name = full.split(" ", 2)
    return tenant, kind, name


def page_span(prompt: Prompt, tokens: int, page_tokens: int) -> PageSpan:
    """The first tokens of a prompt as pages that one replica asks another for."""
    ids = tuple(map(int, prompt.tokens[:tokens]))
    return PageSpan(ids, prompt.adapter or BASE, prompt.salt, 0, len(ids) // page_tokens)


def new_names(tenant: str, data: bytes) -> list[str]:
    """Names of handles and stored responses in a piece of an answer."""
    found = [name.decode() for name in _NEW_NAME.findall(data)]
    return [named(tenant, "responses" if name.startswith("resp_") else "kv", name) for name in found]


def _fields(body: bytes) -> dict[str, Any]:
    try:
        read = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError:
        return {}
    return read if isinstance(read, dict) else {}


def _names(path: str, fields: dict[str, Any], tenant: str) -> tuple[str, ...]:
    """The names that a request is about, or begins with."""
    session = fields.get("session")
    if isinstance(session, dict):
        session = session.get("id") or session.get("name")
    found = _NAMED_PATH.fullmatch(path)
    given: list[tuple[str, Any]] = [
        ("kv", fields.get("kv")),
        ("responses", fields.get("previous_response_id")),
        ("sessions", session),
    ]
    if found is not None and found["name"] not in _NOT_NAMES:
        given.insert(0, (found["kind"], found["name"]))
    if path.startswith(_PINNED):
        given.append(("files", "all"))
    return tuple(named(tenant, kind, name) for kind, name in given if isinstance(name, str) and name)


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
