"""A model hub on the loopback interface: the few routes that huggingface_hub asks, over real HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """Repositories by name, and everything that was asked."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)  # repository to status and error code
    cut: set[str] = field(default_factory=set)  # files whose next answer breaks off half way
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    tokens: list[str] = field(default_factory=list)
    endpoint: str = ""

    def fetched(self) -> set[str]:
        """Files whose bytes were sent, at least in part."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for method, path, _ in self.asked if method == "FILE"}


def cached_repository(cache: Path, name: str, files: dict[str, bytes]) -> None:
    """Write a repository into a hub's cache, as a download leaves it: links to files that are named by their hash."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = folder / "snapshots" / COMMIT, folder / "blobs"
    for made in (snapshot, blobs, folder / "refs"):
        made.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for file, content in files.items():
        blob = blobs / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file).symlink_to(blob)


@contextmanager
def serving() -> Iterator[FakeHub]:
    """A hub that listens for the length of a block."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _routes(hub))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _routes(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Routes(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._route()

        def do_GET(self) -> None:
            self._route()

        def log_message(self, *_: object) -> None:
            pass

        def _route(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("Range", "")))
            hub.tokens.append(self.headers.get("Authorization", ""))
            api = path.startswith("/api/models/")
            steps = path.removeprefix("/api/models").strip("/").split("/")
            name, rest = "/".join(steps[:2]), steps[2:]
            if name in hub.refused:
                status, code = hub.refused[name]
                self._send(status, b"{}", {"X-Error-Code": code} if code else {})
            elif name not in hub.repositories:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif api:
                self._json(_tree(hub, name) if rest[:1] == ["tree"] else _info(hub, name))
            elif rest[:1] == ["resolve"]:
                self._file(name, "/".join(rest[2:]), path)
            else:
                self._send(404, b"{}", {})

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _file(self, name: str, file: str, path: str) -> None:
            body = hub.repositories[name].get(file)
            if body is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            etag = hashlib.sha1(body).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            asked = self.headers.get("Range", "")
            start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
            if asked:
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            cut = self.command == "GET" and file in hub.cut
            if self.command == "GET":
                hub.asked.append(("FILE", path, asked))
                hub.cut.discard(file)
            self._send(206 if asked else 200, body[start:], headers, cut)

        def _send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if cut else body)
                self.wfile.flush()
                self.close_connection = cut or self.close_connection

    return Routes


def _info(hub: FakeHub, name: str) -> dict[str, object]:
    siblings = [{"rfilename": file} for file in hub.repositories[name]]
    return {"_id": "1", "id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}


def _tree(hub: FakeHub, name: str) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": file, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
        for file, body in hub.repositories[name].items()
    ]
