"""The frozen configuration of a server: addresses, keys, limits. Wrong values are refused by name."""

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
    """The configuration of a server without its model."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    names: tuple[str, ...] = ("kvilt",)  # of the model in requests; answers show the first
    aliases: tuple[tuple[str, str], ...] = ()  # other names, perhaps with * at the end, and what they stand for
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: no key is needed
    admin_key: str | None = field(default=None, repr=False)  # none: admin routes are closed
    allowed_hosts: tuple[str, ...] = ()  # names of this machine besides localhost and addresses; "*": any
    cors_origins: tuple[str, ...] = ()  # allowed besides those of localhost; "*": any
    metrics_port: int | None = None  # a second port for /metrics, without a key; 0: any free one
    metrics_host: str = "127.0.0.1"
    kv_dir: Path | None = None  # where KV handles are saved; none: saving is off
    lora_dir: Path | None = None  # where adapters are loaded from at run time; none: loading is off
    chats_dir: Path | None = None  # where the page keeps conversations; none: browsers keep them
    files_dir: Path | None = None  # where files and batches are; none: a temporary folder that ends with the process
    max_body_bytes: int = 8 << 20
    max_session_bytes: int = 1 << 28  # of the file of a session that is imported
    stable_prompts: bool = False  # move lines of system prompts that change behind those that do not
    max_connections: int = 2048
    header_timeout_s: float = 15.0  # from the connection, or the first byte of a request, to its last header
    body_timeout_s: float = 60.0  # from the last header to the end of the body
    upload_timeout_s: float = 300.0  # the same for a file
    write_timeout_s: float = 30.0  # for a client to read what was sent
    idle_timeout_s: float = 30.0  # between requests of one connection
    keep_alive_s: float = 15.0  # without an event in a stream, until a comment is sent
    grace_s: float = 30.0  # for requests in progress when the server shuts down
    max_prompts: int = 1024  # in one request
    max_messages: int = 2048
    max_tools: int = 128
    max_documents: int = 1024
    max_responses: int = 128  # stored ones of one key
    max_saved: int = 64  # files of one key
    max_saved_bytes: int = 8 << 30  # of all files of one key
    max_file_bytes: int = 128 << 20  # of one upload
    max_files: int = 512  # of one key, uploaded or written by batches
    max_files_bytes: int = 2 << 30  # of all of them
    max_chats: int = 1024  # conversations of one key
    max_chats_bytes: int = 1 << 30  # of all of them
    max_batches: int = 128  # of one key; the oldest that have ended give way
    max_batch_lines: int = 50_000

    def __post_init__(self) -> None:
        _whole("port", self.port, 0, 65535)
        _whole("metrics_port", 0 if self.metrics_port is None else self.metrics_port, 0, 65535)
        for name in (
            "body_bytes",
            "connections",
            "prompts",
            "messages",
            "tools",
            "documents",
            "responses",
            "saved",
            "saved_bytes",
            "file_bytes",
            "files",
            "files_bytes",
            "chats",
            "chats_bytes",
            "batches",
            "batch_lines",
        ):
            _whole(f"max_{name}", getattr(self, f"max_{name}"), 1, None)
        for name in ("header", "body", "upload", "write", "idle"):
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
        for alias, target in self.aliases:
            if not target or not alias or "*" in alias[:-1]:
                raise ParamError("alias", f"{alias!r} is no name; * may stand at its end")

    def resolve(self, name: str) -> str:
        """The name that an alias stands for; a name that is no alias stands for itself."""
        if name in self.names:
            return name
        for alias, target in self.aliases:
            if name == alias or (alias.endswith("*") and name.startswith(alias[:-1])):
                return target
        return name

    @property
    def is_local(self) -> bool:
        """Whether the server listens on a loopback address only."""
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
