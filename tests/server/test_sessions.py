"""Sessions over HTTP: the field in every API, the tree, forks, files, and whose they are."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Running
from typer.testing import CliRunner

from kvilt.cli.app import app
from kvilt.server.sessions.stable_prompts import LineShape, StablePrompts, changed_lines

Start = Callable[..., Any]
RULES = "You answer with care, you use tools where they help, and you never forget what was said before. " * 3


@pytest.fixture
def server(start: Start) -> Iterator[Running]:
    with start() as one:
        one.llm.executor.prefixes.clear()
        yield one


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


APIS: dict[str, tuple[str, Callable[[list[dict[str, str]]], dict[str, Any]], Callable[[Any], Any]]] = {
    "chat": (
        "/v1/chat/completions",
        lambda said: {"messages": [{"role": "system", "content": RULES}, *said], "max_tokens": 4, "temperature": 0},
        lambda answer: (answer["choices"][0]["message"]["content"], answer["usage"]["kvilt"]),
    ),
    "responses": (
        "/v1/responses",
        lambda said: {"instructions": RULES, "input": said, "max_output_tokens": 4, "temperature": 0, "store": False},
        lambda answer: (answer["output"][0]["content"][0]["text"], answer["usage"]["kvilt"]),
    ),
    "messages": (
        "/v1/messages",
        lambda said: {"model": "tiny", "system": RULES, "messages": said, "max_tokens": 4, "temperature": 0},
        lambda answer: (answer["content"][0]["text"], answer["usage"]["kvilt"]),
    ),
    "ollama": (
        "/api/chat",
        lambda said: {
            "model": "tiny",
            "messages": [{"role": "system", "content": RULES}, *said],
            "stream": False,
            "options": {"num_predict": 4, "temperature": 0},
        },
        lambda answer: (answer["message"]["content"], answer["kvilt"]),
    ),
}


def ask(server: Running, api: str, said: list[dict[str, str]], session: Any) -> tuple[str, dict[str, Any]]:
    path, body, read = APIS[api]
    fields = body(said) | ({} if session is None else {"session": session})
    answer = httpx.post(server.url + path, json=fields, timeout=60)
    assert answer.status_code == 200, answer.text
    found: tuple[str, dict[str, Any]] = read(answer.json())
    return found


def look(server: Running, path: str = "") -> Any:
    answer = httpx.get(f"{server.url}/v1/sessions{path}", timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("api", APIS)
def test_every_api_has_sessions(server: Running, api: str) -> None:
    first, counts = ask(server, api, messages("hi"), "agent")
    assert counts["prefix_hit"] == 0
    prompt = counts["computed"]
    second, counts = ask(server, api, messages("hi", "so", "again"), "agent")
    assert prompt - 10 < counts["prefix_hit"] <= prompt + 4  # not only whole pages
    assert counts["prefix_hit"] % 32 or counts["computed"] < 32
    server.llm.executor.prefixes.clear()
    assert ask(server, api, messages("hi", "so", "again"), None)[0] == second
    (shown,) = look(server)["data"]
    assert (shown["name"], shown["turns"]) == ("agent", 2)
    assert first is not None


def test_completions_have_sessions(server: Running) -> None:
    body = {"prompt": RULES, "max_tokens": 4, "temperature": 0, "session": {"name": "x", "ttl_s": 60}}
    done = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    body["prompt"] = RULES + done["choices"][0]["text"] + " and"
    again = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    assert again["usage"]["kvilt"]["computed"] < 8
    (shown,) = look(server)["data"]
    assert 50 < shown["expires_in_s"] <= 60


def test_the_tree_fork_and_delete(server: Running) -> None:
    ask(server, "chat", messages("hi"), "a/b c")
    ask(server, "chat", messages("ho"), "a/b c")
    (summary,) = look(server)["data"]
    one = look(server, "/" + summary["id"])
    assert [(turn["id"], turn["parent"]) for turn in one["turns"]] == [("t1", None), ("t2", "t1")]
    made = httpx.post(f"{server.url}/v1/sessions/{summary['id']}/fork", json={"name": "copy", "turn": "t1"}, timeout=60)
    assert made.status_code == 200 and [turn["id"] for turn in made.json()["turns"]] == ["t1"]
    gone = httpx.delete(f"{server.url}/v1/sessions/{summary['id']}", timeout=60)
    assert gone.json() == {"id": summary["id"], "deleted": True}
    assert [shown["name"] for shown in look(server)["data"]] == ["copy"]
    assert httpx.get(f"{server.url}/v1/sessions/nope", timeout=60).json()["error"]["code"] == "session_not_found"


def test_a_session_is_a_file(server: Running) -> None:
    ask(server, "chat", messages("hi"), "a")
    data = httpx.get(f"{server.url}/v1/sessions/a/export", timeout=60).content
    small = httpx.get(f"{server.url}/v1/sessions/a/export", params={"kv": False}, timeout=60).content
    assert len(small) < len(data)
    headers = {"content-type": "application/octet-stream"}
    into = f"{server.url}/v1/sessions/import"
    made = httpx.post(into, content=data, params={"name": "b"}, headers=headers, timeout=60).json()
    assert (made["name"], made["kv"], made["why"]) == ("b", "used", None)
    server.llm.executor.prefixes.clear()
    _, counts = ask(server, "chat", messages("hi"), "b")
    assert counts["computed"] == 1
    bad = httpx.post(into, content=data[:-1], headers=headers, timeout=60)
    assert bad.status_code == 400 and "checksum" in bad.json()["error"]["message"]
    assert (
        httpx.post(f"{server.url}/v1/chat/completions", content=b"{}", headers=headers, timeout=60).status_code == 415
    )


def test_a_file_that_is_too_large_is_refused(start: Start) -> None:
    with start(max_session_bytes=1000) as server:
        headers = {"content-type": "application/octet-stream"}
        refused = httpx.post(f"{server.url}/v1/sessions/import", content=b"x" * 2000, headers=headers, timeout=60)
        assert refused.status_code == 413


@pytest.mark.parametrize(
    "session",
    ["", "x" * 257, 5, {"name": "a", "hint": "maybe"}, {"name": "a", "ttl_s": 0}, {"ttl_s": 5}, {"name": "a", "x": 1}],
)
def test_what_is_no_session_is_refused_by_name(server: Running, session: Any) -> None:
    body = {"messages": messages("hi"), "max_tokens": 2, "session": session}
    refused = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("session")


def test_keys_and_salts_have_their_own_sessions(start: Start) -> None:
    with start(api_keys=("one", "two")) as server:

        def call(key: str, method: str, path: str, **more: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.request(method, server.url + path, headers=headers, timeout=60, **more)

        body = {"messages": messages("hi"), "max_tokens": 2, "session": "a"}
        assert call("one", "POST", "/v1/chat/completions", json=body).status_code == 200
        assert call("two", "GET", "/v1/sessions").json()["data"] == []
        assert call("one", "GET", "/v1/sessions?cache_salt=x").json()["data"] == []
        assert call("two", "GET", "/v1/sessions/a").status_code == 404
        assert call("two", "GET", "/v1/sessions/a/export").status_code == 404
        assert len(call("one", "GET", "/v1/sessions").json()["data"]) == 1


def test_the_command_line(server: Running, tmp_path: Path) -> None:
    ask(server, "chat", messages("hi"), "a")
    run, path = CliRunner(), tmp_path / "out.kvs"

    def kvilt(*given: str) -> str:
        done = run.invoke(app, ["session", *given, "--url", server.url])
        assert done.exit_code == 0, done.output
        return done.output

    assert kvilt("list").startswith("a\t1 turns")
    assert kvilt("show", "a").startswith("t1: 0 shared")
    kvilt("export", "a", str(path))
    assert "its KV is used" in kvilt("import", str(path), "b")
    kvilt("fork", "b", "c")
    kvilt("delete", "b")
    assert kvilt("list").count("turns") == 2
    missing = run.invoke(app, ["session", "show", "nope", "--url", server.url])
    assert missing.exit_code == 2 and "does not exist" in missing.output
    for wrong in (["maybe"], ["show"], ["export", "a"]):
        assert run.invoke(app, ["session", *wrong, "--url", server.url]).exit_code == 2
    gone = run.invoke(app, ["session", "list", "--url", "http://127.0.0.1:9"])
    assert gone.exit_code == 1 and "does not answer" in gone.output


def test_an_export_to_a_full_disk_is_refused_in_a_sentence(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    ask(server, "chat", messages("hi"), "a")
    monkeypatch.setattr("kvilt.cli.session.write_whole", full)
    path = tmp_path / "out.kvs"
    done = CliRunner().invoke(app, ["session", "export", "a", str(path), "--url", server.url])
    assert done.exit_code == 1 and done.output == f"kvilt: No space left on device ({path})\n"


def test_a_file_of_a_newer_version_is_refused_by_name(server: Running) -> None:
    ask(server, "chat", messages("hi"), "a")
    data = httpx.get(f"{server.url}/v1/sessions/a/export", timeout=60).content
    newer = data[:8] + (2).to_bytes(4, "little") + data[12:]
    kind = {"Content-Type": "application/octet-stream"}
    refused = httpx.post(f"{server.url}/v1/sessions/import", content=newer, headers=kind, timeout=60)
    assert refused.status_code == 400 and "newer kvilt" in refused.json()["error"]["message"]


def test_a_span_of_a_handle_is_replaced(server: Running) -> None:
    ids = list(range(100, 260))
    old = httpx.post(f"{server.url}/v1/kv", json={"prompt": ids}, timeout=60).json()
    path = f"{server.url}/v1/kv/{old['id']}/replace"
    exact = httpx.post(path, json={"start": 10, "stop": 40, "tokens": [5, 6], "repair": 1.0}, timeout=60).json()
    assert (exact["tokens"], exact["origin"]) == (132, "exact")
    moved = httpx.post(path, json={"start": 10, "stop": 40, "text": "Hi"}, timeout=60).json()
    assert moved["tokens"] == 131 and moved["origin"].startswith("blend/1 head:1 ratio=0.15")
    body = {"prompt": [7], "kv": exact["id"], "max_tokens": 4, "temperature": 0}
    whole = {"prompt": [*ids[:10], 5, 6, *ids[40:], 7], "max_tokens": 4, "temperature": 0}
    said = [httpx.post(f"{server.url}/v1/completions", json=one, timeout=60).json() for one in (body, whole)]
    assert said[0]["choices"][0]["text"] == said[1]["choices"][0]["text"]
    for bad in (
        {"start": 5, "stop": 4},
        {"start": 0, "stop": 1, "text": "a", "tokens": [1]},
        {"start": 0, "stop": 999},
    ):
        assert httpx.post(path, json=bad, timeout=60).status_code == 400
    assert httpx.post(f"{server.url}/v1/kv/nope/replace", json={"start": 0, "stop": 1}, timeout=60).status_code == 404


def test_lines_that_change_are_named_and_moved(start: Start) -> None:
    def body(day: str) -> dict[str, Any]:
        system = f"You are an agent.\nToday is {day}.\n{RULES}"
        said = [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]
        return {"messages": said, "max_tokens": 2, "temperature": 0, "session": "a"}

    hits: dict[bool, list[int]] = {}
    for moves in (False, True):
        with start(stable_prompts=moves) as server:
            server.llm.executor.prefixes.clear()
            url, counts = f"{server.url}/v1/chat/completions", []
            for day in ("Monday", "Tuesday", "Friday"):
                answer = httpx.post(url, json=body(day), timeout=60).json()
                counts.append(answer["usage"]["kvilt"]["prefix_hit"])
            hits[moves] = counts
            assert look(server, "/a")["volatile_lines"] == ["Today is Friday."]
    assert max(hits[False]) < 20
    assert hits[True][1] < 20 < hits[True][2]  # known from the second request on, and stable from the third


def test_what_a_line_keeps_tells_it_again() -> None:
    old, new = "a\nToday is Monday.\nb\nc", "a\nToday is Friday.\nb\nc"
    ((shape, line),) = changed_lines(old.split("\n"), new.split("\n"))
    assert (shape, line) == (LineShape("Today is ", "day."), "Today is Friday.")
    assert shape.fits("Today is Sunday.") and not shape.fits("Today is a day") and not shape.fits("b")
    assert changed_lines(["a", "b"], ["a", "x"]) == []  # nothing is kept
    assert changed_lines([], ["a"]) == [] and changed_lines(["a", "bcdef"], ["a"]) == []
    prompts = StablePrompts(moves=True)
    for day in ("Monday", "Friday"):
        said = [{"role": "system", "content": f"Rules.\nToday is {day}."}, {"role": "user", "content": "hi"}]
        made = prompts.arranged("", "s", said, lambda _messages: False)  # a template with one system message
    assert made[0]["content"] == "Rules.\nToday is Friday." and len(made) == 2
    made = prompts.arranged("", "s", said, lambda _messages: True)
    assert [one["role"] for one in made] == ["system", "system", "user"]
    assert made[0]["content"] == "Rules." and made[1]["content"] == "Today is Friday."
    assert prompts.arranged("other", "s", said, lambda _messages: True) is said


def test_handles_become_a_file(server: Running) -> None:
    asked = {"messages": messages("hi"), "max_tokens": 4, "temperature": 0, "kv_out": True}
    with server.http() as http:
        first = http.post("/v1/chat/completions", json=asked).json()["choices"][0]
        said = [*asked["messages"], {"role": "assistant", "content": first["message"]["content"]}]
        more = {**asked, "messages": [*said, {"role": "user", "content": "go on"}]}
        second = http.post("/v1/chat/completions", json=more).json()["choices"][0]
        handles = [second["kv"]["id"], first["kv"]["id"]]
        body = {"name": "page", "kv": handles, "conversation": '{"nodes": []}'}
        data = http.post("/v1/sessions/export", json=body).content
        for handle in handles:
            http.delete(f"/v1/kv/{handle}")
        gone = http.post("/v1/sessions/export", json=body)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "kv_not_found")
        server.llm.executor.prefixes.clear()
        headers = {"content-type": "application/octet-stream"}
        made = http.post("/v1/sessions/import", content=data, params={"name": "again"}, headers=headers).json()
        assert (made["kv"], made["conversation"], made["why"]) == ("used", '{"nodes": []}', None)
        tokens = sorted(one["kv"]["tokens"] for one in (first, second))
        assert [turn["tokens"] for turn in made["turns"]] == tokens
        again = http.post("/v1/chat/completions", json={**more, "session": "again"}).json()
        assert again["choices"][0]["message"] == second["message"]
        usage = again["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
        http.delete("/v1/sessions/again")
