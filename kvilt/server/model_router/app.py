"""The router of several models: an ASGI application with the API of one server, whose requests go to the process of
the model that they name.

It checks keys, hosts and limits with the server's own middleware, and passes bytes on. What is about all models, such
as the list of them, it answers itself.
"""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlencode

import aiohttp
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ... import __version__
from ...errors import QueueFull, WorkTimeout
from ...llm.offload import PARSE, Offload
from ..app import StaticFiles, error_shape
from ..auth import Caller, check_metrics
from ..config import ServeConfig
from ..files.routes import UPLOAD_PATH
from ..http.access_log import LOGGED_ELSEWHERE
from ..http.errors import HTTPError, draining_error, http_error_of
from ..http.forward import (
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
from ..http.middleware import RequestMiddleware
from ..http.responses import json_response
from ..metrics import CONTENT_TYPE, labelled, prometheus_text
from ..sessions.fields import IMPORT_PATH
from .loaded_models import LoadedModels, ModelBusy
from .model_lists import list_entry, merged_list
from .model_process import ModelFailed, ModelProcess, RoutedModel

_STREAMED = frozenset({UPLOAD_PATH, IMPORT_PATH})  # bodies that pass through without being held, and are sent once
_FIRST_MODEL = ("/v1/files", "/v1/batches")  # files and batches of a key are with one model unless ?model= says another
_NAMED_PATH = re.compile(
    r"(/v1/(?:kv/[0-9a-f]{32}|responses/resp_[0-9a-f]+|sessions/(?!import$)[^/]{1,256}))(?:/[a-z_]+)?"
)
_SMALL = 1 << 16  # bytes of a body that is read on the event loop: a thread would cost more
_LISTS = frozenset({"/v1/models", "/api/tags", "/api/ps"})
_RETRY = {"retry-after": "5"}


class ModelRouter:
    """Requests in, the processes of models behind. Belongs to the event loop that opens it."""

    def __init__(self, config: ServeConfig, models: LoadedModels, admin_key: str) -> None:
        """`admin_key` opens the processes' metrics."""
        self._admin_key = admin_key
        self.service = ForwardingService(config)
        self.models = models
        self._by_name = {name: model for model in models.models for name in model.names}
        self._created_s = int(time.time())
        self._page = StaticFiles()
        self._offload = Offload()
        self._http: aiohttp.ClientSession | None = None
        self._app = RequestMiddleware(self._route, self.service, self._page.__contains__, error_shape, {UPLOAD_PATH})

    async def __aenter__(self) -> ModelRouter:
        self._http = plain_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.models.close()
        if self._http is not None:
            await self._http.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        add_request_id(scope)
        await self._app(scope, receive, send)

    async def exposition(self) -> str:
        """The metrics of the router and of all loaded models, each with the label `model`."""
        own = labelled(prometheus_text(self.service.metrics, "router"), "model", "router")
        found = await self._all("/metrics", [("host", "localhost"), ("authorization", f"Bearer {self._admin_key}")])
        texts = {name: one.body.decode() for name, one in found.items() if one.status == 200}
        return "".join([own, *(labelled(text, "model", name) for name, text in texts.items())])

    # Paths that are about all models.

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._answered_here(scope)
            if response is None:
                scope[LOGGED_ELSEWHERE] = True
                await self._forward(scope, receive, send)
                return
        except (ModelFailed, ModelBusy) as error:
            code = "model_busy" if isinstance(error, ModelBusy) else "model_failed"
            response = HTTPError(503, str(error), code=code, headers=_RETRY).response(scope)
        except (QueueFull, WorkTimeout) as error:
            response = http_error_of(error).response(scope)
        except HTTPError as error:
            response = error.response(scope)
        scope[LOGGED_ELSEWHERE] = False
        await response(scope, receive, send)

    async def _answered_here(self, scope: Scope) -> Response | None:
        path, method = scope["path"], scope["method"]
        if method not in ("GET", "HEAD"):
            return None
        if path in self._page:
            return self._page.response(path)
        match path:
            case "/health":
                return json_response({"status": "ok"})
            case "/ready":
                ready = not self.service.draining
                return json_response({"status": "ok" if ready else "draining"}, 200 if ready else 503)
            case "/version":
                return json_response({"version": __version__})
            case "/metrics":
                check_metrics(scope["kvilt.caller"], self.service.config)
                return Response(await self.exposition(), 200, media_type=CONTENT_TYPE)
            case _ if path in _LISTS:
                return json_response(await self._list(scope, path))
            case _ if path.startswith("/v1/models/"):
                return json_response(await self._card(scope, path.removeprefix("/v1/models/")))
        return None

    async def _list(self, scope: Scope, path: str) -> dict[str, Any]:
        """All models: those that are loaded as their processes list them, the others by name."""
        answers = await self._all(path, request_headers(scope))
        lists = {name: orjson.loads(one.body) for name, one in answers.items() if one.status == 200}
        return merged_list(path, self.models.models, lists, self._created_s, "anthropic-version" in _names(scope))

    async def _card(self, scope: Scope, name: str) -> dict[str, Any]:
        listed = await self._list(scope, "/v1/models")
        for card in listed["data"]:
            if card["id"] == name:
                return dict(card)
        model = self._by_name.get(self.service.config.resolve(name))
        if model is None:
            raise self._unknown(name)
        return {**list_entry("/v1/models", model, self._created_s, False), "id": name}

    async def _all(self, path: str, headers: list[tuple[str, str]]) -> dict[str, WholeAnswer]:
        """The answers of all loaded models by name; one that has just ended has none."""
        processes = self.models.loaded()
        sent = [fetch(self._session, one.ready.url + path, "GET", headers, None) for one in processes]
        answers = await asyncio.gather(*sent, return_exceptions=True)
        pairs = zip(processes, answers, strict=True)
        return {process.model.name: one for process, one in pairs if isinstance(one, WholeAnswer)}

    # Paths that are about one.

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        streamed = scope["path"] in _STREAMED and scope["method"] == "POST"
        body: Body = body_pieces(receive) if streamed else await read_body(receive)
        asked = _take_model(scope)
        if asked is None and isinstance(body, bytes):
            read = partial(model_in, body, scope["path"].startswith("/api/"))
            caller: Caller = scope.get("kvilt.caller", Caller())
            asked = read() if len(body) < _SMALL else await self._offload.run(PARSE, read, owner=caller.tenant)
        model = self._default(scope["path"]) if asked is None else await self._find(scope, asked)
        if named := _NAMED_PATH.fullmatch(scope["path"]):
            model = await self._home(scope, named[1], model)
        attempts = 2 if isinstance(body, bytes) else 1
        for left in reversed(range(attempts)):
            try:
                await self._send_to(model, scope, body, receive, send)
                return
            except ServerGone as gone:
                if gone.began:
                    await break_off(scope, gone, _gone(model), send)
                    return
                if not left:
                    raise _gone(model) from None

    async def _send_to(self, model: RoutedModel, scope: Scope, body: Body, receive: Receive, send: Send) -> None:
        """What only looks, such as the page's stream of the state of KV, does not keep a model from making room."""
        client = WatchedClient(receive) if isinstance(body, bytes) else None
        process = self.models.process_of(model.name)
        looks = scope["method"] in ("GET", "HEAD") and process is not None
        if not looks and (process := await self._acquire(model, client)) is None:
            return  # the client has left
        assert process is not None
        try:
            if self.service.draining and not looks:
                raise draining_error()
            to = (target_url(process.ready.url, scope), scope["method"], request_headers(scope))
            work = asyncio.ensure_future(forward(self._session, *to, body, send, _nothing, process.gone))
            watching = asyncio.ensure_future(until_gone(work, process.gone))
            try:
                await (work if client is None else until_disconnect(work, client.receive))
            finally:
                watching.cancel()
        finally:
            if not looks:
                self.models.release(model.name)

    async def _acquire(self, model: RoutedModel, client: WatchedClient | None) -> ModelProcess | None:
        """The process of a model; None if the client leaves while the model is loaded."""
        acquiring, there = asyncio.ensure_future(self.models.acquire(model.name)), asyncio.Event()
        acquiring.add_done_callback(lambda _: there.set())
        kept = False
        try:
            if client is None or await client.or_gone(there):
                process = await acquiring
                kept = True
                return process
            return None
        finally:
            if not kept and acquiring.done() and not acquiring.cancelled() and acquiring.exception() is None:
                self.models.release(model.name)
            acquiring.cancel()

    async def _find(self, scope: Scope, name: str) -> RoutedModel:
        """The model that a name stands for: its own name, an alias, or an adapter that its process has."""
        config = self.service.config
        for each in (name, name.removesuffix(":latest")):
            if (found := self._by_name.get(config.resolve(each))) is not None:
                return found
        answers = await self._all("/v1/models", _headers(scope, but="anthropic-version"))
        for owner, answer in answers.items():
            if answer.status == 200 and any(card["id"] == name for card in orjson.loads(answer.body)["data"]):
                return self._by_name[owner]
        raise self._unknown(name)

    def _default(self, path: str) -> RoutedModel:
        """The model of requests that name none: the one that was used last; for files and batches the first."""
        processes = self.models.loaded()
        if not processes or path.startswith(_FIRST_MODEL):
            return self.models.models[0]
        return processes[0].model

    async def _home(self, scope: Scope, path: str, model: RoutedModel) -> RoutedModel:
        """The model whose process has the handle, session or response of this path: this one if it has it."""
        if len(self.models.loaded()) < 2:
            return model
        salts = [pair for pair in _query(scope) if pair[0] == "cache_salt"]
        answers = await self._all(f"{path}?{urlencode(salts)}" if salts else path, _headers(scope, but="accept"))
        there = [name for name, answer in answers.items() if answer.status not in (404, 410)]
        return model if model.name in there or not there else self._by_name[there[0]]

    def _unknown(self, name: str) -> HTTPError:
        known = ", ".join(repr(model.name) for model in self.models.models)
        message = f"this server has no model {name[:64]!r}; it has {known}"
        return HTTPError(404, message, param="model", code="model_not_found")

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None
        return self._http


def model_in(body: bytes, for_ollama: bool = False) -> str | None:
    """The model that a JSON body names. What cannot be read names none: the process says what is wrong with it."""
    try:
        fields = orjson.loads(body) if body else None
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    found = fields.get("model", fields.get("name") if for_ollama else None)  # `name` is Ollama's older word
    return found if isinstance(found, str) and found else None


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)


def _take_model(scope: Scope) -> str | None:
    """The model of `?model=`, which the process does not get to see."""
    given = _query(scope)
    names = [value for name, value in given if name == "model"]
    if not names:
        return None
    scope["query_string"] = urlencode([pair for pair in given if pair[0] != "model"]).encode("latin-1")
    return names[-1]


def _headers(scope: Scope, but: str) -> list[tuple[str, str]]:
    return [pair for pair in request_headers(scope) if pair[0] != but]


def _names(scope: Scope) -> set[str]:
    return {name.decode("latin-1") for name, _ in scope["headers"]}


def _nothing(_piece: bytes, _has_tokens: bool) -> None:
    """Pieces of answers are not looked at."""


def _gone(model: RoutedModel) -> HTTPError:
    message = f"the process of {model.name} is gone; send the request again"
    return HTTPError(502, message, code="model_gone")
