"""The door of a cluster: an ASGI application with the API of one server, whose requests replicas answer.

The door checks keys, hosts and limits with the server's own middleware, chooses a replica, and passes bytes on. It
computes nothing and keeps nothing that could not be asked for again.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import aiohttp
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import InputError, QueueFull
from ..kv.owner import owner_of
from ..server.app import StaticFiles, error_shape
from ..server.auth import Caller, check_metrics
from ..server.config import ServeConfig
from ..server.files.routes import UPLOAD_PATH
from ..server.http.errors import HTTPError, http_error_of
from ..server.http.forward import (
    Body,
    ForwardingService,
    ServerGone,
    WatchedClient,
    WholeAnswer,
    add_request_id,
    body_pieces,
    break_off,
    fetch,
    forward,
    plain_session,
    read_body,
    request_headers,
    target_url,
    until_disconnect,
    until_gone,
)
from ..server.http.middleware import RequestMiddleware
from ..server.http.responses import json_response
from ..server.metrics import CONTENT_TYPE, labelled, prometheus_text
from ..server.sessions.fields import IMPORT_PATH
from ..text.tokenizer import Tokenizer
from .cluster_key import ClusterKey
from .exchange_client import ExchangeClient
from .fair_queue import FairQueue
from .replica_set import ReplicaInfo, ReplicaSet
from .request_hints import GENERATING, RequestHints, RequestTarget, name_parts, new_names, page_span, request_hints
from .router import Router, Ticket
from .status import cluster_status

_ATTEMPTS = 3
_PREFILL_S = 60.0  # that a prefill elsewhere may take at least
_STREAMED = frozenset({UPLOAD_PATH, IMPORT_PATH})  # bodies that pass through without being held, and are sent once
_EVERYWHERE = frozenset({"/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_MERGED = frozenset({"/v1/kv", "/v1/sessions"})
_HANDLE_PATH = re.compile(r"/v1/kv/[0-9a-f]{32}")
STATUS_PATH = "/v1/cluster"


class Door:
    """Requests in, replicas behind. Belongs to the event loop that opens it."""

    def __init__(
        self,
        config: ServeConfig,
        router: Router,
        tokenizer: Tokenizer | None,
        key: ClusterKey,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`weights` of API keys by tenant; one that is not named weighs 1."""
        self.service = ForwardingService(config)
        self.router, self.replicas = router, ReplicaSet(router, lambda url: self._exchange.beats(url))
        self.queue = FairQueue(weights)
        self.retries = 0
        self._moving = 0  # requests whose KV is on its way, or computed elsewhere
        self._tokenizer, self._key = tokenizer, key
        self._threads = ThreadPoolExecutor(2, "kvilt-door")
        self._http: aiohttp.ClientSession | None = None
        page = StaticFiles()
        self._app = RequestMiddleware(self._route, self.service, page.__contains__, error_shape, {UPLOAD_PATH})

    async def __aenter__(self) -> Door:
        self._http = plain_session()
        self._exchange = ExchangeClient(self._http, self._key)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.replicas.close()
        if self._http is not None:
            await self._http.close()
        self._threads.shutdown(wait=False)

    def unsent(self) -> float:
        """Requests that wait here or for their KV: the part of each replica that answers requests."""
        answering = sum(not one.prefill_only for one in self.replicas.all())
        return (self.queue.waiting + self._moving) / max(1, answering)

    def change_model(self, tokenizer: Tokenizer | None) -> None:
        """Replicas of another model take the place of those that are there."""
        self._tokenizer = tokenizer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        add_request_id(scope)
        await self._app(scope, receive, send)

    # Paths.

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._answered_here(scope, receive)
            if response is None:
                await self._forward(scope, receive, send)
                return
        except HTTPError as error:
            response = error.response(scope)
        await response(scope, receive, send)

    async def _answered_here(self, scope: Scope, receive: Receive) -> Response | None:
        """The answer of a path that is about all replicas; None where one of them answers."""
        path, method = scope["path"], scope["method"]
        match path:
            case "/health":
                return json_response({"status": "ok"})
            case "/ready":
                there = bool(len(self.replicas))
                return json_response({"status": "ok" if there else "no replica"}, 200 if there else 503)
            case "/metrics":
                check_metrics(scope["kvilt.caller"], self.service.config)
                return Response(await self._metrics(scope), 200, media_type=CONTENT_TYPE)
            case _ if path == STATUS_PATH and method == "GET":
                check_metrics(scope["kvilt.caller"], self.service.config)
                return json_response(cluster_status(self.router, self.replicas, self.retries))
            case _ if path in _EVERYWHERE and method == "POST":
                return await self._everywhere(scope, await read_body(receive))
            case _ if method == "DELETE" and _HANDLE_PATH.fullmatch(path):
                return await self._deleted(scope)
            case _ if path in _MERGED and method == "GET":
                return await self._merged(scope)
        return None

    async def _all(self, scope: Scope, body: bytes | None = None) -> dict[str, WholeAnswer]:
        """The answers of all replicas; those that are gone have none."""
        replicas = self.replicas.all()
        sent = [
            fetch(self._session, target_url(one.url, scope), scope["method"], request_headers(scope), body)
            for one in replicas
        ]
        answers: dict[str, WholeAnswer] = {}
        for one, answer in zip(replicas, await asyncio.gather(*sent, return_exceptions=True), strict=True):
            if isinstance(answer, WholeAnswer):
                answers[one.name] = answer
            else:
                self.replicas.lost(one.name, "it does not answer")
        if not answers:
            raise _nowhere()
        return answers

    async def _everywhere(self, scope: Scope, body: bytes) -> Response:
        """Every replica does it; the first refusal is the answer."""
        answers = list((await self._all(scope, body)).values())
        return next((one for one in answers if one.status >= 400), answers[0]).response()

    async def _deleted(self, scope: Scope) -> Response:
        """A handle goes from every replica that has it: one may have taken it over from another."""
        return min((await self._all(scope)).values(), key=lambda one: one.status).response()

    async def _merged(self, scope: Scope) -> Response:
        """One list of the lists of all replicas."""
        answers = list((await self._all(scope)).values())
        if refused := [one for one in answers if one.status >= 400]:
            return refused[0].response()
        lists = [orjson.loads(one.body) for one in answers]
        items = {item["id"]: item for one in reversed(lists) for item in one["data"]}
        return json_response({**lists[0], "data": list(items.values())})

    async def _metrics(self, scope: Scope) -> str:
        own = labelled(prometheus_text(self.service.metrics, self.service.config.names[0]), "replica", "door")
        answers = (await self._all(scope)).items() if len(self.replicas) else ()
        return "".join(
            [own, *(labelled(one.body.decode(), "replica", name) for name, one in answers if one.status == 200)]
        )

    # One replica.

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        streamed = scope["path"] in _STREAMED and scope["method"] == "POST"
        body: Body = body_pieces(receive) if streamed else await read_body(receive)
        if not isinstance(body, bytes) or scope["path"] not in GENERATING:
            await self._answer(scope, receive, send, body)
            return
        async with self._turn(scope.get("kvilt.caller", Caller()), len(body), receive) as receive:
            await self._answer(scope, receive, send, body)

    @asynccontextmanager
    async def _turn(self, caller: Caller, nbytes: int, receive: Receive) -> AsyncIterator[Receive]:
        """Wait until a key may send one more request; a client that leaves meanwhile ends its own."""
        started = asyncio.Event()
        self.queue.room = max(1, sum(one.rows for one in self.replicas.all()))
        try:
            queued = self.queue.enter(owner_of(caller.tenant), nbytes, started.set)
        except QueueFull as full:
            raise http_error_of(full) from None
        try:
            watched = WatchedClient(receive)
            if not await watched.or_gone(started):
                raise HTTPError(400, "the client left before its request began", code="disconnected")
            yield watched.receive
        finally:
            self.queue.leave(queued)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, body: Body) -> None:
        caller: Caller = scope.get("kvilt.caller", Caller())
        streamed = not isinstance(body, bytes)
        target = RequestTarget(scope["path"], scope.get("query_string", b""), caller)
        hints = await self._hints(target, body if isinstance(body, bytes) else b"")
        await self._find_home(hints.prompt.names)
        prompt = hints.prompt
        failed: list[str] = []
        for left in reversed(range(1 if streamed else _ATTEMPTS)):
            try:
                ticket = self.router.route(prompt, time.monotonic(), failed)
            except InputError:
                raise _nowhere() from None
            try:
                await self._send_to(ticket, scope, body, hints, receive, send)
                return
            except ServerGone as gone:
                failed.append(ticket.replica)
                self.replicas.lost(ticket.replica, "a request found it gone")
                if gone.began:
                    await break_off(scope, gone, _gone(), send)
                    return
                if not left:
                    raise _nowhere() from None
                self.retries += 1

    async def _send_to(
        self, ticket: Ticket, scope: Scope, body: Body, hints: RequestHints, receive: Receive, send: Send
    ) -> None:
        replica = self.replicas.get(ticket.replica)
        if replica is None:
            raise ServerGone(began=False)

        def seen(piece: bytes, has_tokens: bool) -> None:
            if has_tokens:  # an answer in one piece says nothing of its first token
                self.router.first_token(ticket, time.monotonic())
            for name in new_names(hints.prompt.salt, piece):
                self.router.settle(name, ticket.replica)

        async def sent() -> None:
            await self._move_kv(ticket, replica, hints)
            to = (target_url(replica.url, scope), scope["method"], request_headers(scope))
            await forward(self._session, *to, body, send, seen, gone)

        gone = self.replicas.gone(ticket.replica)
        work = asyncio.ensure_future(sent())
        watching = asyncio.ensure_future(until_gone(work, gone))
        try:
            if isinstance(body, bytes):
                await until_disconnect(work, receive)
            else:
                await work
        finally:
            watching.cancel()
            self.router.end(ticket)

    async def _move_kv(self, ticket: Ticket, replica: ReplicaInfo, hints: RequestHints) -> None:
        """Bring KV to the replica of a request first, where the router expects that to be faster than computing it."""
        source = None if ticket.source is None else self.replicas.get(ticket.source)
        if source is None:
            return
        self._moving += 1
        try:
            await self._take(ticket, replica, source, hints)
        finally:
            self._moving -= 1

    async def _take(self, ticket: Ticket, replica: ReplicaInfo, source: ReplicaInfo, hints: RequestHints) -> None:
        """Let a replica take KV from another one, which may have to compute it."""
        if ticket.prefill is not None and not await self._prefilled(ticket.prefill, source, hints):
            return
        span = page_span(hints.prompt, ticket.reach, replica.page_tokens)
        expected_s = ticket.moved * replica.token_bytes / self.router.transfers.speed(time.monotonic())
        moved = await self._exchange.pull(replica.exchange, source.exchange, span, max(1.0, 3 * expected_s))
        self.router.moved(ticket, moved.nbytes if moved.tokens else 0, moved.seconds, time.monotonic())

    async def _prefilled(self, ticket: Ticket, replica: ReplicaInfo, hints: RequestHints) -> bool:
        """Let a replica compute a prompt for another one; whether it did."""
        span = page_span(hints.prompt, len(hints.prompt.tokens), replica.page_tokens)
        try:
            limit_s = max(_PREFILL_S, 10 * ticket.expected_s)
            done = await self._exchange.prefill(replica.exchange, span, hints.lora, limit_s)
            if done:
                self.router.first_token(ticket, time.monotonic())
            return done
        finally:
            self.router.end(ticket)

    async def _hints(self, target: RequestTarget, body: bytes) -> RequestHints:
        read = (target, body, self._tokenizer, self.service.config, self.replicas.adapters())
        return await asyncio.get_running_loop().run_in_executor(self._threads, request_hints, *read)

    async def _find_home(self, names: Sequence[str]) -> None:
        """Ask all replicas for names that no answer gave: this door may have begun after they were made."""
        unknown = [name for name in names if self.router.home(name) is None]
        asked = [one for one in self.replicas.all() if one.exchange]
        if not unknown or len(asked) < 2:
            return
        parts = [name_parts(name) for name in unknown]
        answers = await asyncio.gather(*(self._exchange.held_since(one.exchange, parts) for one in asked))
        for at, name in enumerate(unknown):
            held = [(used_s, one.name) for one, found in zip(asked, answers, strict=True) if (used_s := found[at])]
            if held:  # two may have it where one was thought to be gone and came back: the last used one counts
                self.router.settle(name, max(held)[1])

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None
        return self._http


def _nowhere() -> HTTPError:
    return HTTPError(503, "no replica is there; try again", code="no_replica", headers={"retry-after": "1"})


def _gone() -> HTTPError:
    return HTTPError(502, "the replica that computed this answer is gone; send the request again", code="replica_gone")
