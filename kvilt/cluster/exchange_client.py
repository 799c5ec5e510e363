"""What a door asks of the exchange of a replica: to take KV from another one, to compute some, and what is held there.

A replica that fails, or whose answer has no valid seal, gives no answer; a request then goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import aiohttp
import orjson

from ..errors import InputError
from .cluster_key import ClusterKey
from .exchange import ALIVE, HOLDS, PREFILL, PULL
from .page_transfer import PageSpan

_log = logging.getLogger(__name__)
_ASK_S = 2.0
_MORE_S = 5.0  # than the limit of a pull, for its answer
_FAILURES = (aiohttp.ClientError, OSError, TimeoutError, InputError, orjson.JSONDecodeError)


class MovedKV(NamedTuple):
    """What a pull brought."""

    tokens: int
    nbytes: int
    seconds: float


class ExchangeClient:
    """Asks replicas over one HTTP session."""

    def __init__(self, http: aiohttp.ClientSession, key: ClusterKey) -> None:
        self._http, self._key = http, key

    async def pull(self, target: str, source: str, span: PageSpan, limit_s: float) -> MovedKV:
        """Let the replica at `target` take the pages of a span from the one at `source`."""
        asked = {"source": source, "limit_s": limit_s, "span": span.fields()}
        match await self._ask(target, PULL, asked, limit_s + _MORE_S):
            case {"tokens": int(tokens), "bytes": int(nbytes), "seconds": int() | float() as seconds}:
                return MovedKV(tokens, nbytes, seconds)
        return MovedKV(0, 0, 0.0)

    async def prefill(self, replica: str, span: PageSpan, lora: str | None, limit_s: float) -> bool:
        """Let a replica compute the KV of a prompt; whether it did."""
        return isinstance(await self._ask(replica, PREFILL, {"lora": lora, "span": span.fields()}, limit_s), dict)

    async def held_since(self, replica: str, names: Sequence[Sequence[str]]) -> list[float | None]:
        """When each of these names (tenant, kind, name) was last used at a replica; None where it is not there."""
        found = await self._ask(replica, HOLDS, {"names": [list(name) for name in names]}, _ASK_S)
        if isinstance(found, list) and len(found) == len(names):
            return [one if isinstance(one, float) else None for one in found]
        return [None] * len(names)

    async def beats(self, replica: str) -> AsyncIterator[None]:
        """One item for each sign of life of a replica; ends when the connection breaks."""
        headers = self._key.request_headers(ALIVE, b"")
        try:
            async with self._http.get(replica + ALIVE, headers=headers) as reply:
                if reply.status != 200:
                    return
                async for _ in reply.content.iter_any():
                    yield
        except (aiohttp.ClientError, OSError):
            return

    async def _ask(self, replica: str, path: str, asked: Any, limit_s: float) -> Any:
        """The answer, or None."""
        body = orjson.dumps(asked)
        headers = self._key.request_headers(path, body)
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=1.0)
        try:
            async with self._http.post(replica + path, data=body, headers=headers, timeout=timeout) as reply:
                data = await reply.read()
                if reply.status != 200:
                    raise InputError(f"status {reply.status}")
                self._key.check_answer(path, headers, reply.headers, data)
                return orjson.loads(data)
        except _FAILURES as error:
            _log.warning("%s at %s failed: %s", path, replica, error or type(error).__name__)
            return None
