"""Several models behind one address: requests reach the model that they name, and nothing else changes for clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import ollama
import pytest
from routers import ADMIN, Routed, router_of
from running import KEY, QUESTION, running, until

from kvilt.executor.protocol import Executor
from kvilt.server.model_router.app import model_in
from kvilt.text.tokenizer import Tokenizer

OTHER = "sk-other-0123456789"
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}


ALIASES = (("claude-*", "alpha"),)
KEYS: dict[str, Any] = {"api_keys": (KEY, OTHER), "admin_key": ADMIN}


@pytest.fixture
def routed(executor: Executor, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Routed]:
    with ExitStack() as stack:
        models = {
            "alpha": stack.enter_context(running(executor, tokenizer, names=("alpha",), aliases=ALIASES, **KEYS)),
            "org/beta": stack.enter_context(running(executor, tokenizer, names=("org/beta", "beta-tuned"), **KEYS)),
        }
        yield stack.enter_context(router_of(models, _made(tmp_path), aliases=ALIASES, **KEYS))


def _made(folder: Path) -> Path:
    (folder / "org").mkdir()
    return folder


def test_requests_reach_the_model_that_they_name_and_load_no_other(routed: Routed) -> None:
    with routed.openai() as client:
        assert [one.id for one in client.models.list()] == ["alpha", "org/beta"]
        assert routed.started == []
        answer = client.chat.completions.create(model="org/beta", messages=QUESTION, max_tokens=4)  # type: ignore[arg-type]
        assert answer.model == "org/beta" and routed.started == ["org/beta"]
        stream = client.completions.create(model="alpha", prompt="Hi", max_tokens=4, stream=True)
        assert {chunk.model for chunk in stream} == {"alpha"}
        assert routed.started == ["org/beta", "alpha"]
        listed = {one.id: one.model_extra["loaded"] for one in client.models.list() if one.model_extra}
        assert listed == {"alpha": True, "org/beta": True, "beta-tuned": True}
        assert client.models.retrieve("org/beta").id == "org/beta"


def test_the_model_of_a_large_body_is_read_too(routed: Routed) -> None:
    body = json.dumps({"model": "org/beta", "prompt": "Hi", "max_tokens": 1}) + " " * (1 << 17)
    with routed.http() as http:
        answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.raise_for_status().json()["model"] == "org/beta" and routed.started == ["org/beta"]


def test_unknown_names_are_refused_and_aliases_and_adapters_are_found(routed: Routed) -> None:
    with routed.http() as http:
        refused = http.post("/v1/completions", json={"model": "gamma", "prompt": "Hi"})
        assert refused.status_code == 404 and "'alpha', 'org/beta'" in refused.json()["error"]["message"]
        assert http.get("/v1/models/gamma").status_code == 404
        assert http.post("/v1/completions", json={"model": "claude-x", "prompt": "Hi", "max_tokens": 1}).is_success
        assert routed.started == ["alpha"]
        http.post("/tokenize?model=org/beta", json={"prompt": "Hi"}).raise_for_status()
        tuned = http.post("/v1/completions", json={"model": "beta-tuned", "prompt": "Hi", "max_tokens": 1})
        assert tuned.is_success, "a name that only the process knows, as of an adapter"


def test_ollamas_and_anthropics_clients_see_all_models(routed: Routed) -> None:
    made = ollama.Client(host=routed.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120)
    with closing(made) as client:
        assert [one.model for one in client.list().models] == ["alpha", "org/beta"]
        assert client.ps().models == []
        client.chat("alpha:latest", messages=[{"role": "user", "content": "Hi"}], options={"num_predict": 2})
        assert [one.model for one in client.ps().models] == ["alpha"]
        assert client.show("alpha").capabilities
    with routed.http() as http:
        listed = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        assert [one["id"] for one in listed["data"]] == ["alpha", "org/beta"] and listed["has_more"] is False
        assert {"max_input_tokens", "display_name"} <= set(listed["data"][1])


def test_without_a_key_nothing_is_loaded(routed: Routed) -> None:
    with routed.http(None) as http:
        assert http.post("/v1/completions", json={"model": "alpha", "prompt": "Hi"}).status_code == 401
        assert http.get("/v1/models").status_code == 401
        assert http.get("/health").is_success and http.get("/").is_success
    assert routed.started == []


def test_handles_are_found_where_they_are_and_belong_to_their_key(routed: Routed) -> None:
    with routed.http() as http, routed.http(OTHER) as other:
        http.post("/v1/completions", json={"model": "alpha", "prompt": "Hi", "max_tokens": 1}).raise_for_status()
        made = http.post("/v1/kv?model=org/beta", json={"prompt": "Once upon a time"})
        handle = made.raise_for_status().json()["id"]
        http.post("/v1/completions", json={"model": "alpha", "prompt": "Hi", "max_tokens": 1}).raise_for_status()
        assert http.get(f"/v1/kv/{handle}").raise_for_status().json()["id"] == handle
        forked = http.post(f"/v1/kv/{handle}/fork", json={}).raise_for_status().json()["id"]
        assert other.get(f"/v1/kv/{handle}").status_code == 404
        ids = {one["id"] for one in http.get("/v1/kv?model=org/beta").json()["data"]}
        assert ids == {handle, forked} and http.get("/v1/kv?model=alpha").json()["data"] == []
        assert http.delete(f"/v1/kv/{handle}").is_success
        assert http.get(f"/v1/kv/{handle}").status_code == 404


def test_a_client_that_leaves_ends_its_request(routed: Routed) -> None:
    engine = routed.models["alpha"].llm.engine
    with routed.http() as http:
        with http.stream("POST", "/v1/completions", json={"model": "alpha", **LONG}) as answer:
            next(answer.iter_lines())
        until(lambda: engine.requests == 0)
    until(lambda: routed.server.router.models.requests == 0)


def test_a_process_that_dies_in_an_answer_ends_it_with_an_error_and_is_started_again(routed: Routed) -> None:
    with routed.http() as http:
        with http.stream("POST", "/v1/completions", json={"model": "alpha", **LONG}) as answer:
            lines = answer.iter_lines()
            next(lines)
            routed.loop.call_soon_threadsafe(routed.processes["alpha"].gone.set)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "model_gone"
        http.post("/v1/completions", json={"model": "alpha", "prompt": "Hi", "max_tokens": 1}).raise_for_status()
    assert routed.started == ["alpha", "alpha"]


def test_a_model_that_cannot_be_loaded_is_named_and_the_others_answer(routed: Routed) -> None:
    routed.failing.add("org/beta")
    with routed.http() as http:
        refused = http.post("/v1/completions", json={"model": "org/beta", "prompt": "Hi"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_failed"
        assert "org/beta cannot be loaded" in refused.json()["error"]["message"] and "retry-after" in refused.headers
        http.post("/v1/completions", json={"model": "alpha", "prompt": "Hi", "max_tokens": 1}).raise_for_status()


def test_metrics_have_the_model_and_need_the_admin_key(routed: Routed) -> None:
    with routed.http() as http, routed.http(ADMIN) as admin:
        http.post("/v1/completions", json={"model": "org/beta", "prompt": "Hi", "max_tokens": 1}).raise_for_status()
        assert http.get("/metrics").status_code == 403
        text = admin.get("/metrics").raise_for_status().text
    assert 'kvilt_generation_tokens_total{model="org/beta"} 1' in text
    assert 'model="router"' in text and 'model="alpha"' not in text


def test_a_server_that_drains_refuses_new_requests(routed: Routed) -> None:
    with routed.http() as http:
        routed.server.service.draining = True
        assert http.post("/v1/completions", json={"model": "alpha", "prompt": "Hi"}).status_code == 503
        assert http.get("/ready").status_code == 503


def test_the_model_of_a_body() -> None:
    assert model_in(b'{"model": "a", "name": "b"}') == "a"
    assert model_in(b'{"name": "b"}') is None and model_in(b'{"name": "b"}', for_ollama=True) == "b"
    for body in (b"", b"[]", b'{"model": 3}', b'{"model": ""}', b'{"model": "a"', b"\xff", b"[" * 100_000):
        assert model_in(body) is None
