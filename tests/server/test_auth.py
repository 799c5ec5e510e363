"""Who may ask: keys, names of hosts, origins of pages, and what answers tell nobody."""

from __future__ import annotations

import hmac
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import KEY, QUESTION, Running, until

from kvilt.engine.request import Request
from kvilt.errors import ParamError
from kvilt.executor.protocol import Executor
from kvilt.server import auth
from kvilt.server.auth import Caller
from kvilt.server.config import ServeConfig

Start = Callable[..., Any]
CHAT = {"messages": QUESTION, "max_tokens": 1}
ADMIN = "sk-admin-98765"


def routes(http: httpx.Client, key: str) -> list[tuple[str, str]]:
    """Every route of the document, and some more ways to write them."""
    document = http.get("/openapi.json", headers={"authorization": f"Bearer {key}"}).json()
    found = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    more = [("GET", "/openapi.json"), ("GET", "/v1/models/"), ("POST", "/v1/chat/completions/"), ("GET", "/nowhere")]
    return [*found, *more, ("HEAD", "/v1/models"), ("PUT", "/v1/kv"), ("OPTIONS", "/v1/kv"), ("GET", "//v1/models")]


def test_every_route_needs_the_key_but_health_and_the_page(start: Start) -> None:
    with start(api_keys=(KEY,), admin_key=ADMIN) as server, server.http() as http:
        for method, path in routes(http, KEY):
            at = path.replace("{name}", "x").replace("{handle}", "0" * 32)
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"authorization": "Bearer"}):
                answer = http.request(method, at, headers=headers)
                if path in ("/health", "/ready"):
                    assert answer.status_code == 200
                else:
                    assert answer.status_code == 401, (method, path)
                    assert answer.headers["www-authenticate"] == "Bearer"
        assert http.get("/").status_code == 200
        for key in (KEY, ADMIN):
            assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
            assert http.get("/v1/models", headers={"authorization": f"bearer  {key}"}).status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    honest = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return honest(a, b)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    keys = auth.APIKeys(ServeConfig(api_keys=("a", "b" * 100), admin_key="c"))
    one, other = (keys.caller({"authorization": f"Bearer {key}"}) for key in ("a", "b" * 100))
    assert one.tenant != other.tenant
    assert seen == [(32, 32)] * 6, "every key is looked at every time, at equal lengths"
    assert keys.caller({"authorization": "Bearer c"}).is_admin
    assert "aaa" not in repr(ServeConfig(api_keys=("aaa",), admin_key="bbb"))


def test_a_caller_without_keys_is_nobody_special() -> None:
    keys = auth.APIKeys(ServeConfig())
    assert keys.caller({}) == keys.caller({"authorization": "Bearer x"}) == auth.Caller()
    with pytest.raises(auth.HTTPError):
        auth.check_admin(auth.Caller())
    auth.check_admin(auth.Caller("", True))


def test_salts_are_parts_of_a_key() -> None:
    """KV is found by the salt; what is counted is counted for the key."""
    for key in (Caller("a"), Caller()):
        parts = [key.salted(salt) for salt in ("x", "y", "x/y", "")]
        assert len({part.tenant for part in parts} | {key.tenant}) == 5
        for part in parts:
            assert Request([1], tenant=part.tenant).owner == key.tenant
    assert Caller("a").salted("x").tenant != Caller("b").salted("x").tenant


def test_routes_of_the_owner_need_the_admin_key(start: Start, executor: Executor) -> None:
    with start() as server, server.http() as http:
        assert http.post("/reset_prefix_cache").status_code == 403, "nobody is the owner where no admin key is set"
    with start(api_keys=(KEY,), admin_key=ADMIN) as server, server.http() as http:
        http.post("/v1/completions", json={"prompt": "word " * 100}, headers={"authorization": f"Bearer {KEY}"})
        assert len(executor.prefixes) > 0
        refused = http.post("/reset_prefix_cache", headers={"authorization": f"Bearer {KEY}"})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "admin_only"
        assert len(executor.prefixes) > 0
        cleared = http.post("/reset_prefix_cache", headers={"authorization": f"Bearer {ADMIN}"})
        assert cleared.json() == {"cleared": True}
        assert len(executor.prefixes) == 0


def test_metrics_of_all_keys_are_the_owners(start: Start) -> None:
    with start(api_keys=(KEY,), admin_key=ADMIN) as server, server.http() as http:
        refused = http.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
        assert "kvilt_" not in refused.text
        assert "kvilt_" in http.get("/metrics", headers={"authorization": f"Bearer {ADMIN}"}).text
    with start(admin_key=ADMIN) as server, server.http() as http:
        assert http.get("/metrics").status_code == 200, "without keys there is one tenant"


def test_metrics_have_a_port_of_their_own(start: Start) -> None:
    """It serves them without a key, answers to this machine's names alone, and ends with the server."""
    with start(api_keys=(KEY,), metrics_port=0) as server:
        assert server.listener.metrics is not None
        until(lambda: server.listener.metrics.started)
        at = f"http://127.0.0.1:{server.listener.metrics.port}"
        with httpx.Client(base_url=at, timeout=60) as http:
            assert "kvilt_num_requests_running" in http.get("/metrics").text
            assert http.head("/metrics").status_code == 200
            assert http.post("/metrics", content=b"x" * 100_000).status_code == 405
            assert http.get("/metrics", headers={"host": "evil.com"}).status_code == 403
            for path in ("/", "/health", "/v1/models", "/metrics/"):
                assert http.get(path, headers={"authorization": f"Bearer {KEY}"}).status_code == 404
        (bound,) = server.listener.metrics.servers[0].sockets
        assert bound.getsockname()[0] == "127.0.0.1"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{at}/metrics")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST:8000", "[::1]:8000", "192.168.0.7:8000", "[fe80::1]"]
)
def test_names_of_this_machine_are_answered_to(server: Running, host: str) -> None:
    with server.http() as http:
        assert http.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.com", "evil.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "", "a b", "[", "evil.com#localhost"],
)
def test_other_names_are_not(server: Running, host: str) -> None:
    with server.http() as http:
        for route in ("/health", "/v1/models", "/"):
            refused = http.get(route, headers={"host": host})
            assert refused.status_code in (400, 403), "a rebound name ends here"


def test_names_can_be_added(start: Start) -> None:
    with start(allowed_hosts=("llm.example.com",)) as server, server.http() as http:
        assert http.get("/health", headers={"host": "LLM.example.com:443"}).status_code == 200
        assert http.get("/health", headers={"host": "x.llm.example.com"}).status_code == 403
    with start(allowed_hosts=("*",)) as server, server.http() as http:
        assert http.get("/health", headers={"host": "anything"}).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.com",
        "http://localhost.evil.com",
        "http://evil.com/localhost",
        "null",
        "file://",
        "",
        "http://[",
        "x",
    ],
)
def test_pages_of_elsewhere_may_not_ask(server: Running, origin: str) -> None:
    with server.http() as http:
        refused = http.post("/v1/chat/completions", json=CHAT, headers={"origin": origin})
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers
        asked = {"origin": origin, "access-control-request-method": "POST"}
        assert http.options("/v1/chat/completions", headers=asked).status_code == 403


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173"])
def test_pages_of_this_machine_may(server: Running, origin: str) -> None:
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT, headers={"origin": origin})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        assert answer.headers["vary"] == "Origin"
        asked = {"origin": origin, "access-control-request-method": "POST"}
        preflight = http.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code == 204
        assert "authorization" in preflight.headers["access-control-allow-headers"]


def test_origins_can_be_added_and_a_preflight_needs_no_key(start: Start) -> None:
    with start(cors_origins=("https://app.example.com",), api_keys=(KEY,)) as server, server.http() as http:
        asked = {"origin": "https://app.example.com", "access-control-request-method": "POST"}
        assert http.options("/v1/kv", headers=asked).status_code == 204
        assert http.post("/v1/kv", json={}, headers={"origin": "https://app.example.com"}).status_code == 401
        assert http.get("/health", headers={"origin": "https://app.example.com.evil.com"}).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_form_can_send_is_not_read(server: Running, kind: str) -> None:
    with server.http() as http:
        answer = http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"content-type": kind})
        assert answer.status_code == 415


# What answers tell.


def test_every_answer_has_strict_headers_and_an_id(server: Running) -> None:
    with server.http() as http:
        for answer in (http.get("/"), http.get("/health"), http.get("/nowhere"), http.post("/v1/kv", content=b"{")):
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
            assert "server" not in answer.headers


def test_a_harmless_request_id_is_kept(server: Running) -> None:
    with server.http() as http:
        assert http.get("/health", headers={"x-request-id": "trace-1:2.3_x"}).headers["x-request-id"] == "trace-1:2.3_x"
        for bad in ("a b", "x" * 129, 'a"b', "<script>"):
            assert http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"] != bad


def test_unknown_routes_and_methods_in_our_shape(server: Running) -> None:
    with server.http() as http:
        assert http.get("/nowhere").json()["error"]["message"] == "there is no such route"
        refused = http.put("/v1/models")
        assert refused.status_code == 405
        assert refused.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2fapp.py", "/web/../app.py", "/app.py"]
)
def test_only_files_of_the_page_are_served(server: Running, path: str) -> None:
    with server.http() as http:
        answer = http.get(httpx.URL(server.url + "/x").copy_with(raw_path=path.encode()))
        assert answer.status_code == 404
        assert b"root:" not in answer.content


def test_a_mistake_of_ours_tells_nothing(start: Start, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def broken(*_given: object, **_more: object) -> None:
        raise RuntimeError(f"secret at {Path(__file__)} 0xdeadbeef")

    with start() as server, server.http() as http, caplog.at_level(logging.ERROR):
        monkeypatch.setattr(server.llm, "stream_chat", broken)
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "secret" not in answer.text
        assert "/" not in answer.json()["error"]["message"]
        assert "secret" in caplog.text


def test_a_log_line_is_one_line(server: Running, caplog: Any) -> None:
    with server.http() as http, caplog.at_level(logging.INFO, "kvilt.access"):
        http.get("/a%0d%0aINFO%20fake", headers={"x-request-id": "ok"})
        until(lambda: any(record.name == "kvilt.access" for record in caplog.records))
    lines = [record.getMessage() for record in caplog.records if record.name == "kvilt.access"]
    assert all("\n" not in line and "\r" not in line for line in lines)


def test_a_log_that_cannot_be_written_harms_nobody(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, _text: str) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    log, handler = logging.getLogger("kvilt.access"), logging.StreamHandler(Full())  # type: ignore[type-var]
    monkeypatch.setattr(logging, "raiseExceptions", False)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with server.http() as http:
            for _ in range(3):
                assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def test_metric_labels_are_bounded(server: Running) -> None:
    with server.http() as http:
        for i in range(30):
            http.get(f"/random/{i}")
            http.get(f"/v1/kv/{i:032x}")
            http.request(f"M{i}", "/health")
        text = http.get("/metrics").text
    routes_seen = set(re.findall(r'route="([^"]*)"', text))
    assert "other" in routes_seen
    assert not any("random" in route for route in routes_seen)
    assert "/v1/kv/{handle}" in routes_seen
    assert set(re.findall(r'method="([^"]*)"', text)) <= {"GET", "POST", "PUT", "OPTIONS", "other"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 70000),
        ("metrics_port", 70000),
        ("api_keys", ("",)),
        ("api_keys", ("a b",)),
        ("api_keys", ("ä",)),
        ("allowed_hosts", ("http://x",)),
        ("cors_origins", ("example.com",)),
        ("grace_s", 0),
        ("max_body_bytes", 0),
        ("body_timeout_s", float("inf")),
        ("names", ()),
    ],
)
def test_settings_are_checked_by_name(field: str, value: object) -> None:
    with pytest.raises(ParamError):
        ServeConfig(**{field: value})


def test_an_admin_key_is_no_api_key() -> None:
    with pytest.raises(ParamError, match="differ"):
        ServeConfig(api_keys=("a",), admin_key="a")
    assert ServeConfig(host="::1").is_local
    assert not ServeConfig(host="0.0.0.0").is_local
    assert not ServeConfig(host="example.com").is_local
