"""What commands ask of a running server over HTTP."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ..errors import InputError, KviltError


class ServerClient:
    """Asks one server; raises with the server's own words where it refuses."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 10.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s

    def text(self, path: str) -> str:
        """The body of an answer to GET."""
        try:
            with urlopen(Request(self.url + path, headers=self._headers), timeout=self._timeout_s) as answer:
                body: bytes = answer.read()
                return body.decode("utf-8", "replace")
        except HTTPError as error:
            raise InputError(f"the server at {self.url} refuses: {_message(error.read()) or error.reason}") from None
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise KviltError(f"the server at {self.url} does not answer: {reason}") from None

    def json(self, path: str) -> Any:
        """The same for JSON."""
        return json.loads(self.text(path))


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
