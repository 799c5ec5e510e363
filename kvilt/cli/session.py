"""`kvilt session`: the sessions of a running server, and their files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

from ..errors import InputError, KviltError
from ..kv.file import write_whole


class SessionClient:
    """Asks one server."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float = 600.0) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1/sessions"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s

    def call(self, method: str, path: str = "", data: bytes | None = None, kind: str = "application/json") -> bytes:
        """The body of an answer; raises with the server's own words where it refuses."""
        headers = {**self._headers, **({} if data is None else {"Content-Type": kind})}
        asked = Request(self._base + path, data, headers, method=method)
        try:
            with urlopen(asked, timeout=self._timeout_s) as answer:
                body: bytes = answer.read()
                return body
        except HTTPError as error:
            raise InputError(f"the server refuses: {_message(error.read()) or error.reason}") from None
        except URLError as error:
            raise KviltError(f"the server at {self._base} does not answer: {error.reason}") from None

    def json(self, method: str, path: str = "", fields: dict[str, Any] | None = None) -> Any:
        """The same for JSON."""
        return json.loads(self.call(method, path, None if fields is None else json.dumps(fields).encode()))


def act(client: SessionClient, action: str, name: str, target: str, kv: bool, turn: str | None) -> None:
    """Carry out one action; what it needs and is missing is named."""
    needed = {"list": 0, "show": 1, "delete": 1, "import": 1, "export": 2, "fork": 2}
    if action not in needed:
        raise InputError(f"{action!r} is not one of {', '.join(needed)}")
    if sum(map(bool, (name, target))) < needed[action]:
        raise InputError(f"{action} needs {'a name and a target' if needed[action] > 1 else 'a name'}; see --help")
    match action:
        case "list":
            show_all(client)
        case "show":
            show(client, name)
        case "delete":
            client.json("DELETE", _path(name))
        case "import":
            load(client, Path(name), target or None)
        case "export":
            export(client, name, Path(target), kv)
        case _:
            client.json("POST", f"{_path(name)}/fork", {"name": target, "turn": turn})


def show_all(client: SessionClient) -> None:
    """Print one line for each session."""
    for one in client.json("GET")["data"]:
        left = f"{one['expires_in_s']:.0f} s left"
        print(f"{one['name']}\t{one['turns']} turns\t{one['tokens']:,} tokens\t{left}")


def show(client: SessionClient, name: str) -> None:
    """Print the tree of a session, each turn below the one it continues."""
    found = client.json("GET", _path(name))
    depth: dict[str | None, int] = {None: -1}
    for turn in found["turns"]:
        depth[turn["id"]] = depth[turn["parent"]] + 1
        kept = "" if turn["resident"] else ", not here"
        new = turn["tokens"] - turn["shared_tokens"]
        print(f"{'  ' * depth[turn['id']]}{turn['id']}: {turn['shared_tokens']:,} shared, {new:,} new tokens{kept}")


def export(client: SessionClient, name: str, path: Path, kv: bool) -> None:
    """Write a session to a file that is whole or not there."""
    data = client.call("GET", f"{_path(name)}/export?kv={'true' if kv else 'false'}")
    write_whole(path, data)
    print(f"{path}: {len(data):,} bytes", file=sys.stderr)


def load(client: SessionClient, path: Path, name: str | None) -> None:
    """Send a file to the server, and print what became of its KV."""
    given = f"?{urlencode({'name': name})}" if name is not None else ""
    made = json.loads(client.call("POST", f"/import{given}", path.read_bytes(), "application/octet-stream"))
    words = {
        "used": "its KV is used",
        "recomputed": f"its KV is computed again ({made['why']})",
        "none": "the file has no KV",
    }
    print(f"{made['name']}: {len(made['turns'])} turns, {made['tokens']:,} tokens; {words[made['kv']]}")


def _path(name: str) -> str:
    return "/" + quote(name, safe="")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
