"""Requests of real clients, kept in `tests/fixtures/agents` without texts, paths and ids of the machine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_clients import Workspace
from scripted_server import ReceivedRequest

FOLDER = Path(__file__).parents[2] / "fixtures" / "agents"
WORK, HOME = "/work", "/home/user"
_KEPT_HEADERS = ("accept", "content-type", "user-agent", "anthropic-version", "anthropic-beta", "x-codex-beta-features")
_LONGEST = 120  # characters of a text; of longer ones the beginning is kept
_WHOLE = ("definition", "arguments", "input")  # grammars and calls are kept as they are
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_DEVICE = re.compile(r"\b[0-9a-f]{64}\b")
_SYSTEM = re.compile(r" \([^)]*\)")  # of a client's name and version


def write(name: str, requests: Sequence[ReceivedRequest], place: Workspace) -> None:
    """Keep requests. A field that is as in the request before is left out."""
    kept: list[dict[str, Any]] = []
    before: dict[str, Any] = {}
    for one in requests:
        body = scrubbed(one.body, place)
        headers = {name: value for name, value in one.headers.items() if name in _KEPT_HEADERS}
        headers["user-agent"] = _SYSTEM.sub("", headers["user-agent"])
        same = [name for name, value in body.items() if before.get(name) == value]
        new = {name: value for name, value in body.items() if name not in same}
        query = f"?{one.query}" if one.query else ""
        kept.append({"path": one.path + query, "headers": headers, "same": same, "body": new})
        before = body
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(name: str) -> list[dict[str, Any]]:
    """Kept requests, each with its path, its headers and its whole body."""
    requests = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    before: dict[str, Any] = {}
    for one in requests:
        one["body"] = {**{name: before[name] for name in one.pop("same")}, **one["body"]}
        before = one["body"]
    return list(requests)


def scrubbed(value: Any, place: Workspace, name: str = "") -> Any:
    """A part of a body without what belongs to this machine, and without long texts."""
    match value:
        case dict():
            return {key: scrubbed(one, place, key) for key, one in value.items()}
        case list():
            return [scrubbed(one, place, name) for one in value]
        case str():
            text = value.replace(str(place.work), WORK).replace(str(place.home), HOME)
            text = _DEVICE.sub("0" * 64, _UUID.sub("00000000-0000-0000-0000-000000000000", text))
            return text if name in _WHOLE or len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        case _:
            return value
