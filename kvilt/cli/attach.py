"""Answers from a server of this user that has the model loaded already. Imports neither torch nor a model.

Loading torch takes longer than most answers. A server fits if it runs with the same files and the same arithmetic.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .. import __version__
from ..errors import KviltError
from ..server.running import RunningServer, ServedModel, running_servers
from ..weights.file_identity import file_identity
from .keys import client_key
from .option_groups import DRAFTS, RUNTIME

CONNECT_S = 2.0
ANSWER_S = 600.0  # without a byte; a server that is busy sends none while a request waits
_SEED_BITS = 32  # short enough to type
# What decides the tokens of an answer. Other options decide how fast it comes; they count if the user gives them.
_ARITHMETIC = ("device", "backend", "kv_dtype", "deterministic")
_SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "stop", "repetition_detection"),
)


class Unavailable(KviltError):
    """A server that was found cannot answer; the model can still be loaded here."""


@dataclass(frozen=True, slots=True)
class AttachedModel:
    """A model of a running server, as `kvilt run` and `kvilt chat` use it."""

    server: RunningServer
    model: ServedModel
    defaults: Mapping[str, float]  # how it samples where the user says nothing
    max_context: int
    api_key: str | None = field(repr=False)

    @property
    def note(self) -> str:
        return f"answered by kvilt serve at {self.server.url} (process {self.server.pid}); --no-attach loads the model"

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a request: the user's options over the model's defaults, as `kvilt run` has them."""
        fields = {name: given[name] for name in _SAMPLING if given.get(name) not in (None, ())}
        if fields.get("temperature") != 0:
            fields = {"temperature": 1.0, **self.defaults, **fields}
        if fields["temperature"] and "seed" not in fields:
            fields["seed"] = secrets.randbits(_SEED_BITS)
        return fields

    def stream(self, path: str, body: Mapping[str, Any]) -> tuple[HTTPConnection, Iterator[dict[str, Any]]]:
        """The events of a streamed answer, and their connection; closing it ends the request."""
        own = {"model": self.model.names[0], "stream": True, "stream_options": {"include_usage": True}}
        connection = self._connect(ANSWER_S)
        try:
            return connection, _events(self._ask(connection, "POST", path, json.dumps({**own, **body})))
        except BaseException:
            connection.close()
            raise

    def delete(self, path: str) -> None:
        """Give something of the server back; one that has ended keeps nothing."""
        with suppress(Unavailable), closing(self._connect(CONNECT_S)) as connection:
            self._ask(connection, "DELETE", path).read()

    def get(self, path: str) -> Any:
        with closing(self._connect(CONNECT_S)) as connection:
            return json.loads(self._ask(connection, "GET", path).read())

    def _connect(self, timeout_s: float) -> HTTPConnection:
        address = urlsplit(self.server.url)
        kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
        return kind(address.hostname or "", address.port, timeout=timeout_s)

    def _ask(self, connection: HTTPConnection, method: str, path: str, body: str | None = None) -> HTTPResponse:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, path, body=None if body is None else body.encode(), headers=headers)
            response = connection.getresponse()
            if response.status < 300:
                return response
            reason = _message(response.read())
        except (OSError, HTTPException) as error:
            raise Unavailable(f"the server at {self.server.url} does not answer: {error}") from None
        raise Unavailable(f"the server at {self.server.url} refuses ({response.status}): {reason}")


def attached(model: str, config: Mapping[str, Any]) -> AttachedModel | None:
    """The model on a server of this user that runs it as the options of a command ask for; None if none does."""
    for server in running_servers():
        if server.version != __version__ or not _runs_alike(server.options, config):
            continue
        served = next((one for one in server.models if _is_same(one, model)), None)
        key = client_key(None, None) if server.needs_key else None
        if served is None or (server.needs_key and key is None):
            continue
        found = AttachedModel(server, served, {}, 0, key)
        try:
            card = found.get(f"/v1/models/{served.names[0]}")
            return AttachedModel(server, served, card["sampling_defaults"], card["max_model_len"], key)
        except (KviltError, ValueError, KeyError, TypeError):
            continue  # it ends just now, or is another program by now
    return None


def _is_same(served: ServedModel, model: str) -> bool:
    """Whether a server has loaded what this name or path stands for, and the files have not changed since."""
    try:
        if served.source == model and not Path(model).exists():
            return file_identity(served.path) == served.identity
        return file_identity(model) == served.identity
    except OSError:
        return False


def _runs_alike(running: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a server computes with the same arithmetic, and as the user asked for in every other option."""
    usual = {name: option.default for group in (RUNTIME, DRAFTS) for name, option in group.options.items()}
    for name, default in usual.items():
        asked = wanted.get(name, default)
        if (name in _ARITHMETIC or asked != default) and running.get(name, default) != asked:
            return False
    return True


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events, up to [DONE]."""
    try:
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if (data := line[6:].strip()) == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise KviltError(f"the server ended the answer: {event['error'].get('message', 'no reason was given')}")
            yield event
    except (OSError, HTTPException, ValueError) as error:
        raise KviltError(f"the answer broke off: {error}") from None
    raise KviltError("the answer broke off: the server closed the connection")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason was given"


@dataclass(slots=True)
class RemoteAnswer:
    """An answer that a server streams: pieces of text first, then what is known of it."""

    attached: AttachedModel
    path: str
    body: Mapping[str, Any]
    text: str = ""
    finish_reason: str = "cancelled"
    usage: dict[str, Any] = field(default_factory=dict)
    first_token_s: float | None = None
    total_s: float = 0.0
    _socket: socket.socket | None = None
    _stopped: bool = False

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Text as it comes, and whether it is reasoning. An iterator that is closed early ends the request."""
        started_s = time.perf_counter()
        connection, events = self.attached.stream(self.path, self.body)
        self._socket = connection.sock
        with closing(connection):
            try:
                for event in events:
                    self.usage = event.get("usage") or self.usage
                    for choice in event.get("choices", ()):
                        self.finish_reason = choice.get("finish_reason") or self.finish_reason
                        yield from self._read(choice, started_s)
                    self.total_s = time.perf_counter() - started_s
            except KviltError:
                if not self._stopped:
                    raise

    def stop(self) -> None:
        """End the answer and keep its text so far. Signal callbacks may call this twice."""
        self._stopped = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, choice: Mapping[str, Any], started_s: float) -> Iterator[tuple[str, bool]]:
        delta = choice.get("delta") or {"content": choice.get("text")}
        for name in ("reasoning_content", "content"):
            if piece := delta.get(name):
                self.first_token_s = self.first_token_s or time.perf_counter() - started_s
                self.text += piece if name == "content" else ""
                yield piece, name != "content"

    @property
    def numbers(self) -> str:
        """The line of numbers under an answer, as `kvilt run` has it."""
        generated = self.usage.get("completion_tokens", 0)
        first_s = self.first_token_s or self.total_s
        speed = (generated - 1) / (self.total_s - first_s) if generated > 1 and self.total_s > first_s else 0.0
        reused = self.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return (
            f"{self.usage.get('prompt_tokens', 0)} prompt tokens ({reused} reused) · {generated} generated · "
            f"{speed:.1f} tok/s · first token {first_s:.2f} s · {self.finish_reason}"
        )
