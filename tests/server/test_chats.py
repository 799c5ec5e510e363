"""Conversations of the page on the server: kept by key, across restarts, never overwritten unseen, within limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import KEY, Running

from kvilt.cli.options import SERVER
from kvilt.cli.serve import serve_config

Start = Callable[..., Any]
OTHER = "sk-other-0123456789"


def put(http: httpx.Client, name: str, *texts: str, revision: int = 0, title: str = "Rivers") -> httpx.Response:
    nodes = [{"id": str(at), "role": "user", "text": text} for at, text in enumerate(texts)]
    body = {"title": title, "conversation": json.dumps({"nodes": nodes}), "revision": revision}
    return http.put(f"/v1/chats/{name}", json=body)


def test_a_conversation_outlives_the_server(start: Start, tmp_path: Path) -> None:
    with start(chats_dir=tmp_path / "chats") as server, server.http() as http:
        assert http.get("/v1/chats").json() == {"object": "list", "kept": True, "data": []}
        made = put(http, "m1", "The Elbe", "Ä\ud83d\ude00").json()
        assert (made["title"], made["revision"], made["named"]) == ("Rivers", 1, False)
        assert http.post("/v1/chats/m1", json={"title": "Elbe"}).json()["title"] == "Elbe"
        assert put(http, "m1", "The Elbe", "Ä", revision=1).json()["title"] == "Elbe", "a title that was given stays"
    with start(chats_dir=tmp_path / "chats") as server, server.http() as http:
        (listed,) = http.get("/v1/chats").json()["data"]
        assert (listed["id"], listed["title"], listed["revision"]) == ("m1", "Elbe", 2)
        found = http.get("/v1/chats/m1").json()
        assert [node["text"] for node in json.loads(found["conversation"])["nodes"]] == ["The Elbe", "Ä"]
        assert http.delete("/v1/chats/m1").json() == {"id": "m1", "deleted": True}
        assert http.get("/v1/chats/m1").json()["error"]["code"] == "chat_not_found"
        assert http.delete("/v1/chats/m1").status_code == 404
    assert [path.name for path in (tmp_path / "chats").iterdir()] == []


def test_words_of_title_and_messages_are_found(start: Start, tmp_path: Path) -> None:
    with start(chats_dir=tmp_path) as server, server.http() as http:
        put(http, "a", "The ELBE ends in the sea", title="First")
        put(http, "b", "The Danube", title="Second elbe")
        found = {
            words: [one["id"] for one in http.get("/v1/chats", params={"q": words}).json()["data"]]
            for words in ("elbe", "elbe SEA", "second", "nodes", "")
        }
    assert found == {"elbe": ["b", "a"], "elbe SEA": ["a"], "second": ["b"], "nodes": [], "": ["b", "a"]}


def test_what_another_page_wrote_is_not_overwritten(start: Start, tmp_path: Path) -> None:
    with start(chats_dir=tmp_path) as server, server.http() as http:
        put(http, "m1", "one")
        for revision in (0, 2):
            refused = put(http, "m1", "two", revision=revision)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "chat_changed")
        assert put(http, "m1", "two", revision=1).json()["revision"] == 2


def test_a_key_sees_its_own_alone(start: Start, tmp_path: Path) -> None:
    def client(server: Running, key: str) -> httpx.Client:
        made: httpx.Client = server.http(headers={"authorization": f"Bearer {key}"})
        return made

    with start(chats_dir=tmp_path, api_keys=(KEY, OTHER)) as server:
        mine, others = client(server, KEY), client(server, OTHER)
        put(mine, "m1", "mine")
        assert others.get("/v1/chats").json()["data"] == []
        assert others.get("/v1/chats/m1").status_code == 404
        assert put(others, "m1", "theirs").json()["revision"] == 1, "the same id is another conversation"
        assert "mine" in mine.get("/v1/chats/m1").json()["conversation"]
        salted = {"cache_salt": "x"}
        assert mine.get("/v1/chats", params=salted).json()["data"] == []
        assert mine.get("/v1/chats/m1", params=salted).status_code == 404


def test_limits_and_names(start: Start, tmp_path: Path) -> None:
    with start(chats_dir=tmp_path, max_chats=1, max_chats_bytes=2000) as server, server.http() as http:
        for name in ("a.b", "x" * 65, "..%2F..%2Fpasswd"):
            assert put(http, name, "x").status_code in (400, 404)
        put(http, "a", "x")
        assert put(http, "b", "x").json()["error"]["code"] == "chat_limit"
        assert put(http, "a", "x" * 3000, revision=1).json()["error"]["code"] == "chat_limit"
        assert put(http, "a", "y", revision=1).status_code == 200


def test_a_damaged_file_is_no_conversation(start: Start, tmp_path: Path) -> None:
    with start(chats_dir=tmp_path) as server, server.http() as http:
        put(http, "a", "x")
        (path,) = tmp_path.iterdir()
        assert path.stat().st_mode & 0o077 == 0, "others on the machine cannot read it"
        path.write_bytes(b"{broken")
        assert http.get("/v1/chats").json()["data"] == []
        assert http.get("/v1/chats/a").status_code == 404
        path.unlink()
        path.symlink_to(__file__)
        assert http.get("/v1/chats/a").status_code == 404


def test_without_a_store_browsers_keep_them(server: Running) -> None:
    with server.http() as http:
        assert http.get("/v1/chats").json() == {"object": "list", "kept": False, "data": []}
        refused = put(http, "a", "x")
        assert refused.status_code == 400
        assert "--store" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("store", "folder"), [(None, None), ("~/kv", Path("~/kv/chats").expanduser())])
def test_the_store_names_the_folder(store: str | None, folder: Path | None) -> None:
    options = {name: option.default for name, option in SERVER.options.items()}
    assert serve_config("m", options, store).chats_dir == folder
