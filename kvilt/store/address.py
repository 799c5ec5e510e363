"""Addresses of records: a hash key over everything that decides a record's content, and that content for comparison.

A record matches an `Address` only if all of its fields agree, token by token. Refuses to know tiers and bytes of KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from ..errors import InputError
from ..kv.identity import Identity
from ..kv.layout import KVLayout
from ..kv.owner import owner_of, part_of
from ..kv.row import EMBEDDED, HASH_BYTES, Token
from ..ops.kv_dtypes import KV_DTYPES, KVDtype, kv_dtype_of

FORMAT = 1  # of records; part of every key, so that a reader never finds records of another format
KEY_BYTES = 32


class Kind(StrEnum):
    """What a record is for; one kind is never served as another."""

    CHUNK = "chunk"  # a document computed on its own, keys before rotation
    HANDLE = "handle"  # a whole row of a cache, keys as they are in pages
    PREFIX = "prefix"  # one page of a prompt, valid after all tokens before it


@dataclass(frozen=True, slots=True)
class LayerForm:
    """The shape of one layer's KV, but for the number of tokens."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: str  # the name of a KV dtype

    @property
    def scaled(self) -> bool:
        """Whether keys and values come with a float32 scale for each token and head."""
        known = KV_DTYPES.get(self.dtype)
        return known is not None and known.scales > 0


Form = tuple[LayerForm, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """What a lookup asks for. Only the factories below make one, because they compute the key."""

    kind: Kind
    identity: Identity
    content: bytes  # the exact tokens, see `token_bytes`
    tokens: int
    form: Form
    firsts: tuple[int, ...]  # per layer, the oldest position that must be there; of a record, that is there
    key: bytes

    @property
    def tenant(self) -> str:
        return tenant_of(self.identity.salt)

    @property
    def owner(self) -> str:
        """The owner whose quota the record counts against: an API key, whatever its salts."""
        return owner_of(self.tenant)

    def key_under(self, codec: bytes, secret: bytes) -> bytes:
        """The key with a codec and a secret mixed in, where there are any; without them, the key."""
        if not codec and not secret:
            return self.key
        parts = (self.key, len(codec).to_bytes(8, "little"), codec, _digest(b"salt", secret))
        return _digest(b"more", b"".join(parts))

    def with_firsts(self, firsts: tuple[int, ...]) -> Address:
        """The same address with other first positions per layer."""
        return replace(self, firsts=firsts)


def tenant_of(salt: str) -> str:
    """The hashed name of a tenant: it hides the salt, and tenants of one owner still share their first part."""
    owner = owner_of(salt)
    hidden = _digest(b"tenant", owner.encode("utf-8", "surrogatepass")).hex()[:32]
    if owner == salt:
        return hidden
    return part_of(hidden, _digest(b"tenant", salt.encode("utf-8", "surrogatepass")).hex()[:32])


def form_of(layout: KVLayout, dtype: torch.dtype | None = None) -> Form:
    """The form of a model's KV layer by layer, in the layout's own dtype or another."""
    shapes = [layout.shape_of(place.group) for place in layout.places()]
    name = None if dtype is None else stored_dtype(dtype, dtype, scaled=False).name
    return tuple(LayerForm(s.kv_heads, s.key_dim, s.value_dim, name or s.dtype.name) for s in shapes)


def stored_dtype(keys: torch.dtype, values: torch.dtype, scaled: bool) -> KVDtype:
    """The KV dtype of tensors with or without scales; where there is none, the one that needs what they lack."""
    found = kv_dtype_of(keys, values, scaled) or kv_dtype_of(keys, values, not scaled)
    if found is None:
        name = " and ".join(sorted({str(one).removeprefix("torch.") for one in (keys, values)}))
        raise InputError(f"KV of dtype {name} cannot be stored; use one of {', '.join(KV_DTYPES)}")
    return found


def chunk_address(identity: Identity, tokens: Sequence[Token], form: Form) -> Address:
    """The address of the chunk of exactly these tokens; a match holds all of them."""
    return _address(Kind.CHUNK, identity, tokens, form, (0,) * len(form))


def row_address(identity: Identity, tokens: Sequence[Token], layout: KVLayout) -> Address:
    """The address of a whole cache row; a match holds every position that the next query attends to."""
    needed = [*(group.first_needed(len(tokens)) for group in layout.groups), len(tokens)]  # a state may be missing
    firsts = tuple(needed[place.group] for place in layout.places())
    return _address(Kind.HANDLE, identity, tokens, form_of(layout), firsts)


def page_addresses(
    identity: Identity, tokens: Sequence[Token], layout: KVLayout, page_tokens: int, start: int = 0
) -> Iterator[Address]:
    """The address of each full page of a prompt from position `start` on, which must begin a page.

    A page that a sliding window no longer reaches need not hold that window's KV. Each key costs one page
    of hashing, however long the prompt is.
    """
    if page_tokens < 1 or start < 0 or start % page_tokens:
        raise InputError(f"position {start} does not begin a page of {page_tokens} tokens")
    form, stop = form_of(layout), len(tokens) // page_tokens * page_tokens
    state = _beginning(Kind.PREFIX, identity, form)
    content = b""
    for end in range(page_tokens, stop + 1, page_tokens):
        page = token_bytes(tokens[end - page_tokens : end])
        state.update(page)
        content += page
        if end <= start:
            continue
        needed = [end if group.first_needed(stop) >= end else end - page_tokens for group in layout.groups]
        needed.append(end)  # few pages have a recurrent state at their end
        firsts = tuple(needed[place.group] for place in layout.places())
        yield Address(Kind.PREFIX, identity, content, end, form, firsts, state.copy().digest())


def page_address(identity: Identity, tokens: Sequence[Token], layout: KVLayout, start: int) -> Address:
    """The address of the page that begins at `start` and ends with the last of these tokens."""
    form = form_of(layout)
    return _address(Kind.PREFIX, identity, tokens, form, (start,) * len(form))


def token_bytes(tokens: Sequence[Token]) -> bytes:
    """Tokens as bytes: 8 for an id, little endian; for an embedding row -1 and its hash. Equal bytes, equal tokens."""
    try:
        ids = _ids(tokens)
    except (OverflowError, TypeError):
        raise InputError("a token is an id below 2^63 or the hash of an embedding row") from None
    if EMBEDDED not in ids:
        if ids and min(ids) < 0:
            raise InputError(f"{min(ids)} is no token id")
        return ids.tobytes()
    return b"".join(_one_token(token) for token in tokens)


def _ids(tokens: Sequence[Token]) -> array[int]:
    try:
        return array("q", tokens)  # type: ignore[arg-type]  # most have ids alone, and are read at once
    except TypeError:
        return array("q", [EMBEDDED if isinstance(token, bytes) else token for token in tokens])


def _one_token(token: Token) -> bytes:
    if isinstance(token, bytes):
        if len(token) != HASH_BYTES:
            raise InputError(f"the hash of an embedding row has {HASH_BYTES} bytes, not {len(token)}")
        return EMBEDDED.to_bytes(8, "little", signed=True) + token
    if token < 0:
        raise InputError(f"{token} is no token id")
    return int(token).to_bytes(8, "little")


def tokens_of(content: bytes) -> list[Token]:
    """The inverse of `token_bytes`."""
    if len(content) % 8:
        raise InputError("these bytes are not tokens")
    tokens: list[Token] = []
    at = 0
    while at < len(content):
        token = int.from_bytes(content[at : at + 8], "little", signed=True)
        at += 8
        if token == EMBEDDED:
            tokens.append(content[at : at + HASH_BYTES])
            at += HASH_BYTES
        else:
            tokens.append(token)
    return tokens


def _address(kind: Kind, identity: Identity, tokens: Sequence[Token], form: Form, firsts: tuple[int, ...]) -> Address:
    if not form:
        raise InputError("KV without layers has no address")
    content, state = token_bytes(tokens), _beginning(kind, identity, form)
    state.update(content)
    return Address(kind, identity, content, len(tokens), form, firsts, state.digest())


def _beginning(kind: Kind, identity: Identity, form: Form) -> hashlib.blake2b:
    """The hash state of a key before its tokens; each field is preceded by its length."""
    shapes = ";".join(f"{one.heads},{one.key_dim},{one.value_dim},{one.dtype}" for one in form)
    own = (identity.model, identity.numerics, identity.adapter, identity.origin, tenant_of(identity.salt))
    fields = [text.encode("utf-8", "surrogatepass") for text in (str(FORMAT), kind.value, *own, shapes)]
    state = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kvilt store key")
    state.update(b"".join(len(one).to_bytes(8, "little") + one for one in fields))
    return state


def _digest(purpose: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=b"kvilt store " + purpose[:4]).digest()
