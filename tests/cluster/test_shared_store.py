"""Handles, sessions and stored responses whose home is gone: any replica goes on with them from a shared store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from clusters import OTHER, Cluster, cluster_of_two
from running import KEY, QUESTION

from kvilt.cluster.request_hints import named
from kvilt.server.auth import tenant_of_key
from kvilt.store.disk import Disk
from kvilt.store.store import Store
from kvilt.store.tier import Budget
from kvilt.text.tokenizer import Tokenizer

TENANT = tenant_of_key(KEY)
BUDGET = Budget(1 << 24)


@pytest.fixture(scope="module", params=["folder", pytest.param("redis", marks=pytest.mark.needs("redis"))])
def cluster(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("served")
    with cluster_of_two(tokenizer, folder, _opener(request, folder)) as made:
        yield made


def _opener(request: pytest.FixtureRequest, folder: Path) -> Callable[[], Store]:
    if request.param == "folder":
        return lambda: Store(tiers=[Disk(folder / "store", BUDGET)])
    from kvilt.store.redis import Redis

    server = request.getfixturevalue("_redis")
    return lambda: Store(tiers=[Redis(server.url, BUDGET, read_timeout_s=60.0)])


def _complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = http.post("/v1/completions", json={"max_tokens": 6, "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    done: dict[str, Any] = reply.json()
    return done


def _home(cluster: Cluster, kind: str, name: str) -> str:
    home = cluster.door.router.home(named(TENANT, kind, name))
    assert home is not None
    return home


def test_a_handle_outlives_its_home(cluster: Cluster) -> None:
    with cluster.http() as http, ExitStack() as after:
        made = http.post("/v1/kv", json={"messages": QUESTION}).json()
        expected = _complete(http, prompt=" and", kv=made["id"])["choices"][0]["text"]
        home = _home(cluster, "kv", made["id"])
        cluster.lose(home)
        after.callback(cluster.find_again, home)
        assert made["id"] in {one["id"] for one in http.get("/v1/kv").json()["data"]}  # from its note
        fork = http.post(f"/v1/kv/{made['id']}/fork", json={})
        assert fork.status_code == 200, fork.text
        assert _complete(http, prompt=" and", kv=fork.json()["id"])["choices"][0]["text"] == expected
        assert http.post(f"/v1/kv/{made['id']}/truncate", json={"length": 3}).json()["tokens"] == 3
        with cluster.http(OTHER) as stranger:
            assert stranger.get(f"/v1/kv/{made['id']}").status_code == 404
        # The old home is back, and a new door knows nothing: the replica that used it last counts.
        cluster.find_again(home)
        cluster.door.router._homes.clear()
        assert http.get(f"/v1/kv/{made['id']}").json()["tokens"] == 3
        for one in (made["id"], fork.json()["id"]):
            assert http.delete(f"/v1/kv/{one}").status_code == 200
            assert http.get(f"/v1/kv/{one}").status_code == 404


def test_a_session_goes_on_elsewhere(cluster: Cluster) -> None:
    with cluster.http() as http, ExitStack() as after:
        body = {"messages": QUESTION, "session": "travels", "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        home = _home(cluster, "sessions", "travels")
        assert cluster.replicas[home].llm.sessions.flush(60)
        cluster.lose(home)
        after.callback(cluster.find_again, home)
        assert [one["turns"] for one in http.get("/v1/sessions").json()["data"]] == [1]
        body = {"messages": [{"role": "user", "content": "second"}], "session": "travels", "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert [one["turns"] for one in http.get("/v1/sessions").json()["data"]] == [2]
        cluster.find_again(home)
        cluster.door.router._homes.clear()
        assert len(http.get("/v1/sessions/travels").json()["turns"]) == 2
        assert http.delete("/v1/sessions/travels").status_code == 200


def test_a_stored_response_goes_on_elsewhere(cluster: Cluster) -> None:
    with cluster.http() as http, ExitStack() as after:

        def respond(previous: str | None, stream: bool = False) -> httpx.Response:
            body = {"input": "Name a river", "max_output_tokens": 5, "temperature": 0, "stream": stream}
            return http.post("/v1/responses", json={**body, "previous_response_id": previous})

        first = respond(None).json()
        expected = respond(first["id"]).json()["output"]
        home = _home(cluster, "responses", first["id"])
        cluster.lose(home)
        after.callback(cluster.find_again, home)
        shown = http.get(f"/v1/responses/{first['id']}")
        assert shown.json() == first
        again = respond(first["id"])
        assert again.status_code == 200, again.text
        assert [one["content"] for one in again.json()["output"]] == [one["content"] for one in expected]
        with cluster.http(OTHER) as stranger:
            assert stranger.get(f"/v1/responses/{first['id']}").status_code == 404
        assert http.delete(f"/v1/responses/{first['id']}").status_code == 200
        assert http.get(f"/v1/responses/{first['id']}").status_code == 404


@pytest.mark.needs("redis")
def test_a_dead_redis_costs_hits_and_nothing_else(
    tokenizer: Tokenizer, tmp_path: Path, proxy: Any, redis_server: Any
) -> None:
    from kvilt.store.redis import Redis

    url = f"redis://127.0.0.1:{proxy.port}"
    with (
        cluster_of_two(tokenizer, tmp_path, lambda: Store(tiers=[Redis(url, BUDGET)])) as cluster,
        cluster.http() as http,
    ):
        before = _complete(http, prompt="Once upon a time")["choices"][0]["text"]
        made = http.post("/v1/kv", json={"messages": QUESTION}).json()["id"]
        redis_server.kill()
        assert _complete(http, prompt="Once upon a time")["choices"][0]["text"] == before
        other = http.post("/v1/kv", json={"messages": QUESTION}).json()["id"]
        for one in (made, other):  # their homes have them in memory
            assert http.get(f"/v1/kv/{one}").status_code == 200
        assert http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2}).status_code == 200
        assert http.get("/v1/kv").status_code == 200
