"""Who may ask: the names this server answers to, the pages that may call it, and keys compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from ..kv.owner import part_of
from .config import ServeConfig
from .http.errors import HTTPError

_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever a key belongs to. KV is shared, and handles are seen, only by the same tenant; quotas are the key's."""

    tenant: str = ""
    is_admin: bool = False

    def salted(self, salt: str | None) -> Caller:
        """The part of a key that only requests with this salt are: KV and handles of its own, quotas of the key."""
        if salt is None:
            return self
        return replace(self, tenant=part_of(self.tenant, _tenant_hash(f"salt {self.tenant} {salt}".encode())))


def check_host(headers: Mapping[str, str], config: ServeConfig) -> None:
    """Refuse names that are not this server's: a page that rebinds its own name to our address is found out here.

    An address cannot be rebound, so addresses are fine.
    """
    given = headers.get("host", "")
    name = _host_name(given)
    if "*" in config.allowed_hosts or name in _HERE or name == config.host.lower() or _is_address(name):
        return
    if name in {allowed.lower() for allowed in config.allowed_hosts}:
        return
    raise HTTPError(
        403, "this server does not answer to that Host; its owner can add it with --allowed-host", code="unknown_host"
    )


def check_origin(headers: Mapping[str, str], config: ServeConfig) -> str | None:
    """The origin of the page that asks, if it may; None where no page asks."""
    origin = headers.get("origin")
    if origin is None:
        return None
    if "*" in config.cors_origins or origin in config.cors_origins:
        return origin
    try:
        parts = urlsplit(origin)
        known = parts.scheme in ("http", "https") and (
            parts.hostname in _HERE or parts.netloc.lower() == headers.get("host", "").lower()
        )
    except ValueError:
        known = False
    if not known:
        raise HTTPError(
            403, "pages of this origin may not ask; the owner can allow it with --cors-origin", code="unknown_origin"
        )
    return origin


class APIKeys:
    """The keys of a server; none are kept as they were written."""

    def __init__(self, config: ServeConfig) -> None:
        self._keys = [_digest(key) for key in config.api_keys]
        self._admin = None if config.admin_key is None else _digest(config.admin_key)

    @property
    def needed(self) -> bool:
        """Whether a caller must show one."""
        return bool(self._keys)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Whoever asks, or a refusal. Every key is looked at, whichever fits."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        shown = _digest(given.strip() if scheme.lower() == "bearer" else "")
        fits = [hmac.compare_digest(shown, key) for key in self._keys]
        is_admin = self._admin is not None and hmac.compare_digest(shown, self._admin)
        if is_admin or any(fits):
            return Caller(_tenant_hash(shown), is_admin)
        if not self.needed:
            return Caller()
        wanted = "this key is not known" if given else "a key is needed: send Authorization: Bearer KEY"
        raise HTTPError(401, wanted, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def tenant_of_key(key: str) -> str:
    """Whose KV requests with this key find."""
    return _tenant_hash(_digest(key))


def check_admin(caller: Caller) -> None:
    """Refuse everybody but the owner."""
    if not caller.is_admin:
        raise HTTPError(403, "this route needs the admin key, which is set with --admin-key", code="admin_only")


def check_metrics(caller: Caller, config: ServeConfig) -> None:
    """Refuse what all keys do to everybody but the owner; without keys there is one tenant, which sees itself."""
    if config.api_keys and not caller.is_admin:
        raise HTTPError(
            403,
            "/metrics tells what every key does: it needs the admin key, or a port of its own (--metrics-port)",
            code="admin_only",
        )


def _digest(key: str) -> bytes:
    """Equal lengths, so that comparing takes the same time for all keys."""
    return hashlib.sha256(b"kvilt key " + key.encode("utf-8", "surrogatepass")).digest()


def _tenant_hash(secret: bytes) -> str:
    return hashlib.sha256(b"kvilt tenant " + secret).hexdigest()[:32]


def _host_name(host: str) -> str:
    """A Host header without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
