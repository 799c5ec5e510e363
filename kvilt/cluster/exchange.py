"""The routes of a replica for its own cluster: pages for other replicas, and what doors ask besides the API.

It listens at a port of its own. Every request and answer has an HMAC with the cluster's key; nothing is pickled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from ..errors import InputError, KviltError
from ..server.service import Service
from .cluster_key import ClusterKey
from .page_transfer import PageReader, PageSpan, PageTransfer

_log = logging.getLogger(__name__)
_MOST_BODY_BYTES = 32 << 20
_AT_ONCE = 4  # transfers out of this replica, and into it
_PAGES = 8  # that are checked and placed at once
_LENGTH_BYTES = 8
PAGES, PULL, PREFILL, HOLDS, ALIVE = "/pages", "/pull", "/prefill", "/holds", "/alive"
_BEAT_S = 0.25
Answer = Callable[[Any], Awaitable[Any]]


class Exchange:
    """The server of these routes. Belongs to the event loop of the replica's HTTP server."""

    def __init__(self, service: Service, key: ClusterKey, host: str = "127.0.0.1") -> None:
        llm = service.llm
        self._service, self._key, self._host = service, key, host
        self._transfer = PageTransfer(llm.executor, key.secret, llm.engine.on_evict)
        self._out, self._in = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_AT_ONCE)
        self._runner: web.AppRunner | None = None
        self._http: aiohttp.ClientSession | None = None
        self._stopping = False
        self.url = ""
        self.sent_bytes = self.taken_bytes = self.taken_tokens = 0

    async def start(self) -> None:
        """Listen at any free port."""
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.router.add_post(PAGES, self._pages)
        app.router.add_get(ALIVE, self._alive)
        for path, answer in ((PULL, self._pull), (PREFILL, self._prefill), (HOLDS, self._holds)):
            app.router.add_post(path, self._sealed(answer))
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_BEAT_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=1.0))

    async def stop(self) -> None:
        """Close all sockets."""
        self._stopping = True
        if self._http is not None:
            await self._http.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _sealed(self, answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        """A route whose requests and answers are JSON with a seal."""

        async def route(request: web.Request) -> web.Response:
            status = 200
            try:
                made = await answer(await self._body(request))
            except KviltError as error:
                status, made = 400, {"error": str(error)}
            body = orjson.dumps(made)
            headers = self._key.answer_headers(request.path, request.headers, body)
            return web.Response(body=body, status=status, headers=headers, content_type="application/json")

        return route

    async def _body(self, request: web.Request) -> Any:
        data = await request.read()
        try:
            self._key.check_request(request.path, request.headers, data)
            return orjson.loads(data)
        except (InputError, orjson.JSONDecodeError):
            raise web.HTTPForbidden(text="this message is not of this cluster") from None

    async def _alive(self, request: web.Request) -> web.StreamResponse:
        """A byte four times a second for as long as the process lives and its event loop turns."""
        try:
            self._key.check_request(request.path, request.headers, b"")
        except InputError:
            raise web.HTTPForbidden(text="this message is not of this cluster") from None
        reply = web.StreamResponse()
        await reply.prepare(request)
        while not self._stopping:
            await reply.write(b".")
            await asyncio.sleep(_BEAT_S)
        return reply

    # Pages.

    async def _pages(self, request: web.Request) -> web.StreamResponse:
        """The records of a span, each after its length; they have seals of their own."""
        try:
            span = PageSpan.of_fields(await self._body(request))
            records = self._transfer.records(span)
        except InputError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        reply = web.StreamResponse()
        await reply.prepare(request)
        async with self._out:
            while (record := await asyncio.to_thread(next, records, None)) is not None:
                await reply.write(len(record).to_bytes(_LENGTH_BYTES, "little") + record)
                self.sent_bytes += len(record)
        await reply.write_eof()
        return reply

    async def _pull(self, fields: Any) -> dict[str, Any]:
        """Take what is missing of a prompt from another replica; what came in time stays."""
        match fields:
            case {"source": str(source), "limit_s": int() | float() as limit_s, "span": asked}:
                span = await asyncio.to_thread(self._transfer.missing, PageSpan.of_fields(asked))
            case _:
                raise InputError("a pull names a source, a limit in seconds and a span")
        began_s, before = time.monotonic(), self.taken_bytes
        reader = self._transfer.reader(span)
        if span.first < span.stop:
            try:
                async with self._in, asyncio.timeout(limit_s):
                    await self._read(source, span, reader)
            except (aiohttp.ClientError, OSError, TimeoutError, KviltError) as error:
                _log.warning("pages from %s did not all come: %s", source, error or type(error).__name__)
        tokens = reader.pages * self._transfer.page_tokens
        self.taken_tokens += tokens
        return {"tokens": tokens, "bytes": self.taken_bytes - before, "seconds": time.monotonic() - began_s}

    async def _read(self, source: str, span: PageSpan, reader: PageReader) -> None:
        assert self._http is not None
        body = orjson.dumps(span.fields())
        headers = self._key.request_headers(PAGES, body)
        async with self._http.post(source + PAGES, data=body, headers=headers) as reply:
            if reply.status != 200:
                raise InputError(f"it answers with status {reply.status}")
            records: list[bytes] = []
            while (record := await self._record(reply)) is not None:
                records.append(record)
                if len(records) >= _PAGES:
                    if not await asyncio.to_thread(reader.take, records):
                        raise InputError("a page does not fit, or finds no room")
                    records = []
            if records and not await asyncio.to_thread(reader.take, records):
                raise InputError("a page does not fit, or finds no room")

    async def _record(self, reply: aiohttp.ClientResponse) -> bytes | None:
        try:
            length = int.from_bytes(await reply.content.readexactly(_LENGTH_BYTES), "little")
        except asyncio.IncompleteReadError as end:
            if not end.partial:
                return None
            raise InputError("the pages are cut short") from None
        if length > self._transfer.most_record_bytes:
            raise InputError("a page is larger than any of this model")
        try:
            record = await reply.content.readexactly(length)
        except asyncio.IncompleteReadError:
            raise InputError("the pages are cut short") from None
        self.taken_bytes += length
        return record

    # For doors.

    async def _prefill(self, fields: Any) -> dict[str, Any]:
        """Compute the KV of a prompt, for another replica to take."""
        match fields:
            case {"lora": str() | None as lora, "span": asked}:
                span = PageSpan.of_fields(asked)
            case _:
                raise InputError("a prefill names an adapter and a span")
        llm = self._service.llm
        done = await llm.generate(
            list(span.tokens), max_tokens=1, temperature=0.0, ignore_eos=True, tenant=span.salt, lora=lora
        )
        return {"tokens": done.usage.prompt_tokens}

    async def _holds(self, fields: Any) -> list[float | None]:
        """When these names, if they are here, were last used: handles, sessions and stored responses."""
        match fields:
            case {"names": list(names)}:
                return [self._held_since(*name) for name in names if _is_name(name)]
        raise InputError("names are a list")

    def _held_since(self, tenant: str, kind: str, name: str) -> float | None:
        match kind:
            case "kv":
                return self._service.llm.kv.held_since(name, tenant=tenant)
            case "sessions":
                return self._service.llm.sessions.held_since(tenant, name)
            case "responses":
                return self._service.responses.held_since(name, tenant)
        return None


def _is_name(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(one, str) for one in value)
