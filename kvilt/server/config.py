"""How a server is reached, whom it lets in and how much it takes from them: frozen, checked by name."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ParamError

_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_HOST = re.compile(r"(?!-)[A-Za-z0-9.-]{1,253}")
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]{1,260}")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything about a server but its model."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    names: tuple[str, ...] = ("kvilt",)  # what the model is called in requests; the first is shown
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: everybody is let in
    admin_key: str | None = field(default=None, repr=False)  # none: admin routes are closed
    allowed_hosts: tuple[str, ...] = ()  # names of this machine besides localhost and addresses; "*": any
    cors_origins: tuple[str, ...] = ()  # pages that may ask besides localhost's; "*": any
    metrics_port: int | None = None  # /metrics without a key; 0: any free one; none: beside all other routes alone
    metrics_host: str = "127.0.0.1"
    kv_dir: Path | None = None  # where KV handles are saved; none: nowhere
    lora_dir: Path | None = None  # where adapters may be loaded from while it runs; none: nowhere
    max_body_bytes: int = 8 << 20
    max_connections: int = 2048
    header_timeout_s: float = 15.0  # from the first byte of a request, or from connecting, to its last header
    body_timeout_s: float = 60.0  # from there to the end of the body
    write_timeout_s: float = 30.0  # for a client to take what it was sent
    idle_timeout_s: float = 30.0  # between requests of one connection
    keep_alive_s: float = 15.0  # silence in a stream before a comment is sent
    grace_s: float = 30.0  # for requests in progress when the server is told to end
    max_prompts: int = 1024  # in one request
    max_messages: int = 2048
    max_tools: int = 128
    max_documents: int = 1024
    max_saved: int = 64  # files of one key
    max_saved_bytes: int = 8 << 30  # once a key's files have so many, no more are saved

    def __post_init__(self) -> None:
        _whole("port", self.port, 0, 65535)
        _whole("metrics_port", 0 if self.metrics_port is None else self.metrics_port, 0, 65535)
        for name in ("body_bytes", "connections", "prompts", "messages", "tools", "documents", "saved", "saved_bytes"):
            _whole(f"max_{name}", getattr(self, f"max_{name}"), 1, None)
        for name in ("header", "body", "write", "idle"):
            _seconds(f"{name}_timeout_s", getattr(self, f"{name}_timeout_s"))
        _seconds("keep_alive_s", self.keep_alive_s)
        _seconds("grace_s", self.grace_s)
        for key in (*self.api_keys, *([self.admin_key] if self.admin_key is not None else [])):
            if not _KEY.fullmatch(key):
                raise ParamError("api_key", "a key is 1 to 512 printable ASCII characters without blanks")
        if self.admin_key in self.api_keys:
            raise ParamError("admin_key", "must differ from every API key")
        for host in self.allowed_hosts:
            if host != "*" and not _HOST.fullmatch(host):
                raise ParamError("allowed_host", f"{host!r} is no host name; write it like llm.example.com, or *")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ParamError("cors_origin", f"{origin!r} is no origin; write it like https://app.example.com, or *")
        if not self.names or not all(self.names):
            raise ParamError("served_model_name", "the model needs a name")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        upto = "" if high is None else f" and at most {high}"
        raise ParamError(name, f"must be a whole number of at least {low}{upto}, not {value!r}")


def _seconds(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ParamError(name, f"must be a finite number of seconds above 0, not {value!r}")
