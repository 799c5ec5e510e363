"""The key of a cluster: messages between its doors and replicas carry an HMAC with it, and others are refused.

It proves who sent a message and that it was not changed. It hides nothing: what travels can be read on the way.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

from ..errors import InputError, ParamError

NONCE, SEAL = "x-kvilt-nonce", "x-kvilt-seal"
_KEY_BYTES = 32


class ClusterKey:
    """A secret that all processes of one cluster have."""

    __slots__ = ("secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _KEY_BYTES:
            raise ParamError("cluster_key", f"must have at least {_KEY_BYTES} bytes")
        self.secret = secret

    @classmethod
    def new(cls) -> ClusterKey:
        """A key that no other cluster has."""
        return cls(secrets.token_bytes(_KEY_BYTES))

    def __repr__(self) -> str:
        return "ClusterKey(...)"

    def request_headers(self, path: str, body: bytes) -> dict[str, str]:
        """The headers of a request to a path; each request has a nonce of its own."""
        nonce = secrets.token_hex(16)
        return {NONCE: nonce, SEAL: self._seal("request", path, nonce, body)}

    def answer_headers(self, path: str, asked: Mapping[str, str], body: bytes) -> dict[str, str]:
        """The headers of the answer to a request: its seal covers the request's nonce, so that it answers no other."""
        return {SEAL: self._seal("answer", path, asked.get(NONCE, ""), body)}

    def check_request(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Raise unless a process of this cluster made this request."""
        self._check(headers, self._seal("request", path, headers.get(NONCE, ""), body))

    def check_answer(self, path: str, asked: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> None:
        """Raise unless this is the answer of a process of this cluster to a request with these headers."""
        self._check(headers, self._seal("answer", path, asked.get(NONCE, ""), body))

    def _check(self, headers: Mapping[str, str], expected: str) -> None:
        if not hmac.compare_digest(headers.get(SEAL, "").encode("utf-8", "replace"), expected.encode()):
            raise InputError("this message is not of this cluster")

    def _seal(self, kind: str, path: str, nonce: str, body: bytes) -> str:
        head = f"{kind}\n{path}\n{nonce}\n".encode("utf-8", "surrogatepass")
        return hmac.digest(self.secret, head + body, "sha256").hex()
