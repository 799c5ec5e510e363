"""The door over two real servers on loopback: the same API, requests where their KV is, and replicas that die."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from clusters import ADMIN, OTHER, Cluster, cluster_of_two
from running import KEY, QUESTION

from kvilt.cluster.replica_set import ReplicaInfo
from kvilt.cluster.request_hints import named
from kvilt.server.auth import tenant_of_key
from kvilt.server.metrics import labelled
from kvilt.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def cluster(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of_two(tokenizer, tmp_path_factory.mktemp("served")) as made:
        yield made


def ask(client: openai.OpenAI, text: str = "What is the capital of Germany?", **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    settings = {"max_tokens": 6, "temperature": 0, **more}
    return client.chat.completions.create(model="tiny", messages=messages, **settings)  # type: ignore[call-overload]


def test_conversations_of_a_key_are_on_one_replica(tokenizer: Tokenizer, tmp_path: Path) -> None:
    body = {"title": "Rivers", "conversation": "{}", "revision": 0}
    with cluster_of_two(tokenizer, tmp_path, chats_dir=tmp_path / "shared") as made, made.http() as http:
        for name in ("elbe", "oder"):
            http.put(f"/v1/chats/{name}", json=body).raise_for_status()
        for _ in range(6):  # wherever other requests go
            ask(made.openai(), f"Question {_}")
            assert {one["id"] for one in http.get("/v1/chats").json()["data"]} == {"elbe", "oder"}
        assert http.put("/v1/chats/elbe", json=body).status_code == 409, "another page has written it"
        chosen = {made.door.router.home(named(tenant_of_key(KEY), "files", "all")) for _ in range(3)}
        assert len(chosen) == 1 and None not in chosen
        with made.http(OTHER) as other:
            assert other.get("/v1/chats").json()["data"] == []


def test_answers_are_those_of_one_server(cluster: Cluster) -> None:
    direct = cluster.replicas["a"].openai()
    for text in ("Hello there", "Name three rivers", "Count to ten"):
        assert ask(cluster.openai(), text).choices[0].message.content == ask(direct, text).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content for chunk in ask(cluster.openai(), "Hello there", stream=True) if chunk.choices
    ]
    assert "".join(filter(None, pieces)) == ask(direct, "Hello there").choices[0].message.content
    with cluster.http() as http, cluster.replicas["a"].http(headers=dict(http.headers)) as own:
        assert http.get("/openapi.json").json() == own.get("/openapi.json").json()
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        for path, body in (
            ("/v1/chat/completions", {"messages": 5}),
            ("/v1/messages", {}),
            ("/api/chat", {"messages": 1}),
        ):
            ours, theirs = http.post(path, json=body), own.post(path, json=body)
            assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())
            drop = {"x-request-id", "request-id", "date"}
            assert {name for name in ours.headers if name not in drop} == {n for n in theirs.headers if n not in drop}
        assert http.get("/nowhere").json() == own.get("/nowhere").json()


def test_keys_and_limits_are_checked_at_the_door(cluster: Cluster) -> None:
    with pytest.raises(openai.AuthenticationError):
        ask(cluster.openai("sk-wrong"))
    with cluster.http() as http:
        assert (
            http.post("/v1/chat/completions", content=b"x", headers={"content-type": "text/plain"}).status_code == 415
        )
        assert http.post("/v1/chat/completions", content=b"x" * (9 << 20)).status_code in (413, 415)
        assert http.get("/health", headers={"host": "evil.example"}).status_code == 403
        assert http.get("/metrics").status_code == 403
        assert http.get("/v1/cluster").status_code == 403
        assert http.get("/ready").json() == {"status": "ok"}
        given = http.get("/v1/models", headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"


def test_the_next_turn_goes_where_the_last_one_was(cluster: Cluster) -> None:
    client = cluster.openai()
    for n in range(4):
        text = f"Conversation {n}: " + " ".join(f"word{n * 100 + k}" for k in range(60))
        first = ask(client, text)
        cluster.settled()
        messages = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "Go on"},
        ]
        again = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, temperature=0)  # type: ignore[arg-type]
        assert again.usage is not None and again.usage.prompt_tokens_details is not None
        assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 96


def test_tenants_get_the_hints_of_their_own_kv(cluster: Cluster) -> None:
    text = "A secret of one key: " + " ".join(f"thing{k}" for k in range(60))
    ask(cluster.openai(), text)
    cluster.settled()
    other = ask(cluster.openai(OTHER), text)
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_a_handle_made_anywhere_is_used_from_the_door(cluster: Cluster) -> None:
    with cluster.http() as http:
        made = [http.post("/v1/kv", json={"messages": QUESTION}).json()["id"] for _ in range(3)]
        direct = cluster.replicas["b"]
        with direct.http(headers=dict(http.headers)) as own:
            made.append(own.post("/v1/kv", json={"messages": QUESTION}).json()["id"])  # the door has not seen it
        for one in made:
            fork = http.post(f"/v1/kv/{one}/fork", json={})
            assert fork.status_code == 200, fork.text
            body = {"model": "tiny", "prompt": " and", "kv": fork.json()["id"], "max_tokens": 2, "temperature": 0}
            done = http.post("/v1/completions", json=body)
            assert done.status_code == 200, done.text
            assert done.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        listed = {one["id"] for one in http.get("/v1/kv").json()["data"]}
        assert set(made) <= listed
        assert http.get("/v1/kv/" + "0" * 32).status_code == 404
        with cluster.http(OTHER) as stranger:
            assert stranger.get(f"/v1/kv/{made[0]}").status_code == 404
        for one in listed:
            assert http.delete(f"/v1/kv/{one}").status_code == 200


def test_sessions_stay_at_home(cluster: Cluster) -> None:
    with cluster.http() as http:
        for n in range(3):
            body = {"messages": [{"role": "user", "content": f"turn {n}"}], "session": "mine", "max_tokens": 2}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        (shown,) = http.get("/v1/sessions").json()["data"]
        assert shown["turns"] == 3
        assert http.delete("/v1/sessions/mine").status_code == 200


def test_a_door_that_forgot_homes_finds_them_again(cluster: Cluster) -> None:
    """As one does that was started again: of a session, and of a handle under a cache salt."""
    with cluster.http() as http:
        body = {"messages": [{"role": "user", "content": "first"}], "session": "kept", "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        made = http.post("/v1/kv?cache_salt=s", json={"messages": QUESTION}).json()["id"]
        homes = cluster.door.router._homes
        for shift in range(4):  # whichever replica the score would choose
            homes.clear()
            text = f"turn {shift} " + "word " * shift
            turn = {"messages": [{"role": "user", "content": text}], "session": "kept", "max_tokens": 2}
            assert http.post("/v1/chat/completions", json=turn).status_code == 200
            homes.clear()
            assert http.get(f"/v1/kv/{made}?cache_salt=s").status_code == 200
            assert http.get(f"/v1/kv/{made}").status_code == 404
        assert http.get("/v1/sessions/kept").json()["turns"][-1]
        assert [one["turns"] for one in http.get("/v1/sessions").json()["data"]] == [5]
        assert http.delete("/v1/sessions/kept").status_code == 200
        assert http.delete(f"/v1/kv/{made}?cache_salt=s").status_code == 200


def test_only_streams_say_how_fast_a_replica_is(cluster: Cluster) -> None:
    def speeds() -> dict[str, float]:
        return {name: speed for name, (_, speed) in cluster.door.router.load().items()}

    before = speeds()
    ask(cluster.openai(), "A question that is answered at once, and " + "long " * 100)
    assert speeds() == before
    assert list(ask(cluster.openai(), "A question that is answered by and by, " + "very long " * 100, stream=True))
    assert speeds() != before


def test_a_client_that_leaves_ends_its_request_on_the_replica(cluster: Cluster) -> None:
    with cluster.http() as http:
        body = {"messages": QUESTION, "max_tokens": 900, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            next(reply.iter_bytes())
        cluster.until(lambda: not any(one.service._in_progress for one in cluster.replicas.values()))
    cluster.until(lambda: all(round(backlog) == 0 for backlog, _ in cluster.door.router.load().values()))


def test_admin_requests_reach_every_replica_and_metrics_come_from_all(cluster: Cluster) -> None:
    ask(cluster.openai())
    with cluster.http(ADMIN) as http:
        assert http.post("/reset_prefix_cache").json() == {"cleared": True}
        assert [len(one.llm.executor.prefixes) for one in cluster.replicas.values()] == [0, 0]
        cluster.settled()
        text = http.get("/metrics").text
        for name in ("a", "b", "door"):
            assert f'replica="{name}"' in text
        shown = http.get("/v1/cluster").json()
        assert [one["name"] for one in shown["replicas"]] == ["a", "b"]


def test_requests_of_a_replica_that_is_gone_go_to_another_one(cluster: Cluster) -> None:
    """It has announced itself, but nothing listens at its address."""
    with cluster.http() as http:
        good = http.get("/v1/models").status_code
        gone = ReplicaInfo("gone", "http://127.0.0.1:9", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", 32, 1)
        cluster.loop.call_soon_threadsafe(cluster.door.replicas.announce, gone)
        cluster.until(lambda: cluster.door.replicas.get("gone") is not None)
        cluster.door.router.settle(named(tenant_of_key(KEY), "sessions", "home"), "gone")
        before = cluster.door.retries
        body = {"messages": QUESTION, "max_tokens": 2, "session": "home"}
        assert http.post("/v1/chat/completions", json=body).status_code == good
        assert cluster.door.retries == before + 1
        assert cluster.door.replicas.get("gone") is None
        assert http.delete("/v1/sessions/home").status_code == 200
        cluster.loop.call_soon_threadsafe(cluster.door.replicas.announce, gone)
        cluster.until(lambda: cluster.door.replicas.get("gone") is not None)
        sick = replace(gone, healthy=False)
        cluster.loop.call_soon_threadsafe(cluster.door.replicas.announce, sick)
        cluster.until(lambda: cluster.door.replicas.get("gone") is None)


def test_metrics_get_the_name_of_their_replica() -> None:
    text = '# HELP a b\na 1\nb_bucket{le="+Inf"} 2\n'
    assert labelled(text, "replica", "r") == 'a{replica="r"} 1\nb_bucket{le="+Inf",replica="r"} 2\n'


@contextmanager
def _dying(pieces: list[bytes]) -> Iterator[str]:
    """A replica that sends so much of an answer and dies."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                for piece in pieces:
                    connection.sendall(piece)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as a kill does

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(60)


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


_OPENING = b'33\r\ndata: {"delta":{"role":"assistant","content":""}}\n\n\r\n'


@pytest.mark.parametrize(
    ("pieces", "began"),
    [([], False), ([_HEAD], False), ([_HEAD, _OPENING], False), ([_HEAD, b"9\r\ndata: 1\n\n\r\n"], True)],
)
def test_a_stream_is_retried_until_its_first_token_and_then_ends_with_an_error(
    cluster: Cluster, pieces: list[bytes], began: bool
) -> None:
    body = {"messages": QUESTION, "max_tokens": 2, "session": "dies", "stream": True}
    with _dying(pieces) as url, cluster.http() as http:
        info = ReplicaInfo("dying", url, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", 32, 1)
        cluster.loop.call_soon_threadsafe(cluster.door.replicas.announce, info)
        cluster.until(lambda: cluster.door.replicas.get("dying") is not None)
        cluster.door.router.settle(named(tenant_of_key(KEY), "sessions", "dies"), "dying")
        text = http.post("/v1/chat/completions", json=body).text
        if began:
            assert text.startswith("data: 1\n\n")
            assert json.loads(text.removeprefix("data: 1\n\ndata: "))["error"]["code"] == "replica_gone"
        else:
            assert text.endswith("data: [DONE]\n\n")
            assert http.delete("/v1/sessions/dies").status_code == 200
