"""Authentication: allowed Host names, allowed origins, and API keys compared in constant time."""

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
    """The owner of an API key. KV and handles belong to a tenant; quotas belong to the key."""

    tenant: str = ""
    is_admin: bool = False

    def salted(self, salt: str | None) -> Caller:
        """The same key with a cache salt: a tenant with its own KV and handles, under the quotas of the key."""
        if salt is None:
            return self
        return replace(self, tenant=part_of(self.tenant, _tenant_hash(f"salt {self.tenant} {salt}".encode())))


def check_host(headers: Mapping[str, str], config: ServeConfig) -> None:
    """Refuse Host names that are not this server's. This stops DNS rebinding by web pages.

    An IP address cannot be rebound, so every address is accepted.
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
    """The Origin header of a web page, refused unless it is allowed; None for other clients."""
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
            403, "this origin is not allowed; the server's owner can add it with --cors-origin", code="unknown_origin"
        )
    return origin


class APIKeys:
    """The API keys and the admin key of a server, kept as digests only."""

    def __init__(self, config: ServeConfig) -> None:
        self._keys = [_digest(key) for key in config.api_keys]
        self._admin = None if config.admin_key is None else _digest(config.admin_key)

    @property
    def needed(self) -> bool:
        """Whether requests must carry a key."""
        return bool(self._keys)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """The owner of the key in these headers. Every key is compared, so that the time does not tell which fits.

        Anthropic's clients send the key as X-Api-Key; where both headers are there, the bearer token counts.
        """
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given if "authorization" in headers else headers.get("x-api-key", "")
        is_key = scheme.lower() == "bearer" or "authorization" not in headers
        shown = _digest(given.strip() if is_key else "")
        fits = [hmac.compare_digest(shown, key) for key in self._keys]
        is_admin = self._admin is not None and hmac.compare_digest(shown, self._admin)
        if is_admin or any(fits):
            return Caller(_tenant_hash(shown), is_admin)
        if not self.needed:
            return Caller()
        wanted = (
            "this key is not known" if given else "a key is needed: send Authorization: Bearer KEY, or X-Api-Key: KEY"
        )
        raise HTTPError(401, wanted, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def tenant_of_key(key: str) -> str:
    """The tenant of a key, under which its KV is stored."""
    return _tenant_hash(_digest(key))


def check_admin(caller: Caller) -> None:
    """Refuse every caller without the admin key."""
    if not caller.is_admin:
        raise HTTPError(403, "this route needs the admin key, which is set with --admin-key", code="admin_only")


def check_metrics(caller: Caller, config: ServeConfig) -> None:
    """Require the admin key for metrics where API keys are set: metrics count the requests of all keys."""
    if config.api_keys and not caller.is_admin:
        raise HTTPError(
            403,
            "/metrics covers all keys: it needs the admin key, or a port of its own (--metrics-port)",
            code="admin_only",
        )


def _digest(key: str) -> bytes:
    """A digest of fixed length, so that comparing takes the same time for all keys."""
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
