"""KV handles over HTTP: their verbs, their owners, and answers that stand behind them."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import QUESTION, Running, until

from kvilt import LLM
from kvilt.config import EngineConfig
from kvilt.executor.protocol import Executor
from kvilt.kv.file import create_temporary
from kvilt.server.auth import tenant_of_key
from kvilt.text.tokenizer import Tokenizer

Start = Callable[..., Any]
LONG = "Once upon a time there was a king who had three daughters. " * 8
SHORT = {"model": "tiny", "max_tokens": 6, "temperature": 0}
KEYS = ("sk-alice-0123", "sk-bob-45678")


@pytest.fixture(scope="module")
def llm(executor: Executor, tokenizer: Tokenizer) -> LLM:
    return LLM(executor, tokenizer)


@pytest.fixture
def http(server: Running) -> Any:
    with server.http() as client:
        yield client
        for handle in client.get("/v1/kv").json()["data"]:
            client.delete(f"/v1/kv/{handle['id']}")


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_prompt_behind_a_handle(server: Running, http: httpx.Client, llm: LLM, executor: Executor) -> None:
    executor.prefixes.clear()
    kv = http.post("/v1/kv", json={"prompt": LONG}).json()
    assert kv["resident"]
    assert kv["tokens"] == len(llm.prompt_ids(LONG))
    for rest in (" The first", " The second"):
        done = server.openai().completions.create(**SHORT, prompt=rest, extra_body={"kv": kv["id"]})
        assert done.choices[0].text == llm.generate(LONG + rest, max_tokens=6).text
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        assert done.usage.prompt_tokens_details.cached_tokens == kv["tokens"]
    assert http.get(f"/v1/kv/{kv['id']}").json()["tokens"] == kv["tokens"]


def test_a_conversation_that_begins_with_a_handle(server: Running, http: httpx.Client, llm: LLM) -> None:
    system = [{"role": "system", "content": "You answer briefly and never lie, whatever you are asked."}]
    kv = http.post("/v1/kv", json={"messages": system}).json()
    fields = {**SHORT, "extra_body": {"kv": kv["id"]}}
    done = server.openai().chat.completions.create(**fields, messages=[*system, *QUESTION])
    assert done.choices[0].message.content == llm.chat([*system, *QUESTION], max_tokens=6).text
    refused = http.post("/v1/chat/completions", json={**SHORT, "messages": QUESTION, "kv": kv["id"]})
    assert code(refused) == (409, "kv_mismatch")
    assert 0 < refused.json()["error"]["index"] < kv["tokens"]
    assert refused.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_answer_become_handles(server: Running, http: httpx.Client, llm: LLM, stream: bool) -> None:
    fields = {**SHORT, "prompt": "Once upon a time", "n": 2, "seed": 1, "temperature": 1.0, "stream": stream}
    answer = server.openai().completions.create(**fields, extra_body={"kv_out": True})
    chunks = list(answer) if stream else [answer]
    kept = {}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.model_extra and choice.model_extra.get("kv"):
                assert choice.finish_reason == "length"
                kept[choice.index] = choice.model_extra["kv"]
    done = llm.generate("Once upon a time", max_tokens=6, n=2, seed=1, temperature=1.0)
    for index, sample in enumerate((done, *done.alternatives)):
        whole = [*llm.prompt_ids("Once upon a time"), *sample.token_ids]
        assert kept[index]["tokens"] == len(whole) - 1
        more = server.openai().completions.create(
            **SHORT, prompt=sample.token_ids[-1:], extra_body={"kv": kept[index]["id"]}
        )
        assert more.choices[0].text == llm.generate(whole, max_tokens=6).text


def test_a_chat_keeps_its_kv_too(server: Running, http: httpx.Client) -> None:
    done = server.openai().chat.completions.create(**SHORT, messages=QUESTION, extra_body={"kv_out": True})
    kept = (done.choices[0].model_extra or {})["kv"]
    assert http.get(f"/v1/kv/{kept['id']}").status_code == 200
    *_, last = server.openai().chat.completions.create(
        **SHORT, messages=QUESTION, stream=True, extra_body={"kv_out": True}
    )
    assert last.choices[0].finish_reason == "length"
    assert (last.choices[0].model_extra or {})["kv"]["tokens"] == kept["tokens"]


def test_the_verbs(server: Running, http: httpx.Client) -> None:
    made = http.post("/v1/kv", json={"prompt": [5] * 50, "ttl_s": 100}).json()
    assert made["expires_in_s"] <= 100
    at = f"/v1/kv/{made['id']}"
    twin = http.post(f"{at}/fork", json={}).json()
    assert twin["tokens"] == 50
    assert twin["id"] != made["id"]
    assert http.post(f"/v1/kv/{twin['id']}/truncate", json={"length": 40}).json()["tokens"] == 40
    assert http.get(at).json()["tokens"] == 50
    pinned = http.post(f"{at}/pin", json={"ttl_s": 1000}).json()
    assert pinned["pinned"]
    assert pinned["expires_in_s"] > 900
    assert {one["id"] for one in http.get("/v1/kv").json()["data"]} == {made["id"], twin["id"]}
    assert http.delete(at).json() == {"id": made["id"], "deleted": True}
    assert code(http.get(at)) == (404, "kv_not_found")
    assert code(http.delete(at)) == (404, "kv_not_found")
    for verb, body in (("fork", {}), ("truncate", {"length": 1}), ("pin", {"ttl_s": 5}), ("save", {"name": "x"})):
        assert code(http.post(f"{at}/{verb}", json=body)) == (404, "kv_not_found")
    for length in (0, -1, 41, 2**31, "3", None):
        assert http.post(f"/v1/kv/{twin['id']}/truncate", json={"length": length}).status_code == 400
    for ttl_s in (0, -1, 1e12, "5"):
        assert http.post(f"/v1/kv/{twin['id']}/pin", json={"ttl_s": ttl_s}).status_code == 400
    for body in ({}, {"prompt": "a", "messages": QUESTION}, {"prompt": ""}, {"prompt": [10**9]}, {"x": 1}):
        assert http.post("/v1/kv", json=body).status_code == 400


def test_saved_kv_outlives_its_handle(server: Running, http: httpx.Client, executor: Executor) -> None:
    made = http.post("/v1/kv", json={"prompt": LONG}).json()
    written = http.post(f"/v1/kv/{made['id']}/save", json={"name": "story-1"}).json()
    assert written["name"] == "story-1"
    assert written["bytes"] > 1000
    assert http.get("/v1/kv/saved").json()["data"] == [written]
    http.delete(f"/v1/kv/{made['id']}")
    back = http.post("/v1/kv/restore", json={"name": "story-1", "ttl_s": 60}).json()
    assert back["tokens"] == made["tokens"]
    assert back["resident"]
    done = server.openai().completions.create(**SHORT, prompt=" And", extra_body={"kv": back["id"]})
    assert done.choices[0].text
    assert http.delete("/v1/kv/saved/story-1").status_code == 200
    assert code(http.post("/v1/kv/restore", json={"name": "story-1"})) == (404, "kv_file_not_found")
    assert code(http.delete("/v1/kv/saved/story-1")) == (404, "kv_file_not_found")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", ".hid", "a\x00b", "", "x" * 101, "ä", "a.b", "%2e"])
def test_a_name_is_never_a_path(server: Running, http: httpx.Client, name: str) -> None:
    made = http.post("/v1/kv", json={"prompt": [5, 6]}).json()
    for answer in (
        http.post(f"/v1/kv/{made['id']}/save", json={"name": name}),
        http.post("/v1/kv/restore", json={"name": name}),
    ):
        assert answer.status_code == 400
    folder = server.service.config.kv_dir
    assert folder is not None
    assert [path.name for path in folder.iterdir() if path.name.endswith("x")] == []


def test_a_link_in_the_folder_is_not_followed(server: Running, http: httpx.Client, tmp_path: Path) -> None:
    made = http.post("/v1/kv", json={"prompt": [5, 6, 7]}).json()
    http.post(f"/v1/kv/{made['id']}/save", json={"name": "real"})
    folder = server.service.config.kv_dir
    assert folder is not None
    (real,) = folder.glob("*.real.kvilt")
    link, outside = folder / "open.link.kvilt", tmp_path / "outside"
    outside.write_bytes(real.read_bytes())
    link.symlink_to(outside)
    assert code(http.post("/v1/kv/restore", json={"name": "link"})) == (404, "kv_file_not_found")
    before = outside.read_bytes()
    assert http.post(f"/v1/kv/{made['id']}/save", json={"name": "link"}).status_code == 200
    assert outside.read_bytes() == before, "the link was replaced, not written through"
    for name in ("real", "link"):
        http.delete(f"/v1/kv/saved/{name}")


def test_damaged_files_are_refused(server: Running, http: httpx.Client) -> None:
    made = http.post("/v1/kv", json={"prompt": [5] * 40}).json()
    http.post(f"/v1/kv/{made['id']}/save", json={"name": "hurt"})
    folder = server.service.config.kv_dir
    assert folder is not None
    (path,) = folder.glob("*.hurt.kvilt")
    whole = path.read_bytes()
    for hurt in (whole[:-5], b"", whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], b"x" * 5000):
        path.write_bytes(hurt)
        refused = http.post("/v1/kv/restore", json={"name": "hurt"})
        assert code(refused) == (400, "kv_file")
        assert str(folder) not in refused.text
    http.delete("/v1/kv/saved/hurt")


def test_a_server_without_a_folder_saves_nothing(start: Start) -> None:
    with start() as server, server.http() as http:
        made = http.post("/v1/kv", json={"prompt": [5, 6]}).json()
        assert code(http.post(f"/v1/kv/{made['id']}/save", json={"name": "x"})) == (400, "kv_dir_off")
        assert code(http.get("/v1/kv/saved")) == (400, "kv_dir_off")


def test_a_folder_that_cannot_be_written(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from kvilt.engine.handles import handles

    def full(_path: Path, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(handles, "write_whole", full)
    with start(kv_dir=tmp_path) as server, server.http() as http:
        made = http.post("/v1/kv", json={"prompt": [5, 6]}).json()
        refused = http.post(f"/v1/kv/{made['id']}/save", json={"name": "x"})
        assert code(refused) == (503, "kv_dir_full")
        assert str(tmp_path) not in refused.text


def test_a_key_has_so_many_files_and_handles(start: Start, tmp_path: Path) -> None:
    with start(EngineConfig(max_handles=2), kv_dir=tmp_path, max_saved=1) as server, server.http() as http:
        made = http.post("/v1/kv", json={"prompt": [5, 6]}).json()
        at = f"/v1/kv/{made['id']}"
        assert http.post(f"{at}/save", json={"name": "a"}).status_code == 200
        assert http.post(f"{at}/save", json={"name": "a"}).status_code == 200
        assert code(http.post(f"{at}/save", json={"name": "b"})) == (409, "kv_limit")
        assert http.post(f"{at}/fork", json={}).status_code == 200
        assert code(http.post(f"{at}/fork", json={})) == (409, "kv_limit")
        kept = {**SHORT, "prompt": "Hello", "kv_out": True}
        assert code(http.post("/v1/completions", json=kept)) == (409, "kv_limit")
        assert http.post("/v1/completions", json={**SHORT, "prompt": "Hello", "n": 3}).status_code == 200
        assert len(http.get("/v1/kv").json()["data"]) == 2


def test_salts_do_not_multiply_what_a_key_may_have(start: Start, tmp_path: Path) -> None:
    with start(EngineConfig(max_handles=2), api_keys=KEYS, kv_dir=tmp_path, max_saved=2) as server:
        alice, bob = (server.http(headers={"authorization": f"Bearer {key}"}) for key in KEYS)
        made = [alice.post(f"/v1/kv?cache_salt={salt}", json={"prompt": [5, 6]}).json() for salt in "xy"]
        assert code(alice.post("/v1/kv?cache_salt=z", json={"prompt": [5, 6]})) == (409, "kv_limit")
        assert code(alice.post("/v1/kv", json={"prompt": [5, 6]})) == (409, "kv_limit")
        for salt, one in zip("xy", made, strict=True):
            saved = alice.post(f"/v1/kv/{one['id']}/save?cache_salt={salt}", json={"name": "same"})
            assert saved.status_code == 200
        more = alice.post(f"/v1/kv/{made[0]['id']}/save?cache_salt=x", json={"name": "more"})
        assert code(more) == (409, "kv_limit")
        for salt, there in (("?cache_salt=x", ["same"]), ("?cache_salt=y", ["same"]), ("", [])):
            assert [one["name"] for one in alice.get(f"/v1/kv/saved{salt}").json()["data"]] == there
        assert len(list(tmp_path.iterdir())) == 2
        foreign = alice.post("/v1/kv/restore", json={"name": "same"})
        assert code(foreign) == (404, "kv_file_not_found"), "a key without a salt is not its salts"
        assert alice.delete("/v1/kv/saved/same?cache_salt=y").status_code == 200
        assert bob.post("/v1/kv", json={"prompt": [5, 6]}).status_code == 200


def test_salted_requests_do_not_flush_another_keys_prefixes(start: Start, executor: Executor) -> None:
    executor.prefixes.clear()
    text = "Keys have a fair share of the pages, whatever they do. " * 30
    asked = {**SHORT, "max_tokens": 1, "prompt": text}
    with start(api_keys=KEYS) as server:
        alice, bob = (server.http(headers={"authorization": f"Bearer {key}"}) for key in KEYS)

        def cached() -> int:
            usage = alice.post("/v1/completions", json=asked).json()["usage"]
            found: int = usage["prompt_tokens_details"]["cached_tokens"]
            return found

        cached()
        before, pages = cached(), executor.pool.pages
        rounds = 3 * pages * executor.layout.page_tokens // before
        for n in range(rounds):
            assert bob.post("/v1/completions", json={**asked, "cache_salt": str(n)}).status_code == 200
        assert executor.prefixes.evictions > pages, "the pool was full several times over"
        assert cached() == before > 0


def test_saved_bytes_of_a_key_are_bounded_also_while_it_saves_many_at_once(start: Start, tmp_path: Path) -> None:
    with start(kv_dir=tmp_path, max_saved=2) as server, server.http() as http:
        at = f"/v1/kv/{http.post('/v1/kv', json={'prompt': [5, 6]}).json()['id']}/save"
        with ThreadPoolExecutor(6) as threads:
            saved = list(threads.map(lambda n: http.post(at, json={"name": f"n{n}"}).status_code, range(6)))
        assert sorted(saved) == [200, 200, 409, 409, 409, 409]
        assert len(list(tmp_path.iterdir())) == 2
    with start(kv_dir=tmp_path, max_saved_bytes=1) as server, server.http() as http:
        at = f"/v1/kv/{http.post('/v1/kv', json={'prompt': [5, 6]}).json()['id']}/save"
        assert code(http.post(at, json={"name": "more"})) == (409, "kv_limit")


def test_a_server_that_starts_sweeps_what_a_killed_one_left(start: Start, tmp_path: Path) -> None:
    key = tenant_of_key(KEYS[0])
    left = [f".{key}.mine.kvilt.{'0' * 32}.tmp", f".{key}.{key}.salted.kvilt.{'1' * 32}.tmp"]
    left.append(f".open.x.kvilt.{'2' * 32}.tmp")
    others = [f"{key}.mine.kvilt", f".{'0' * 32}.tmp", f".foreign.mine.kvilt.{'0' * 32}.tmp", f".{key}.mine.kvilt.tmp"]
    for name in (*left, *others):
        (tmp_path / name).write_bytes(b"private")
    fd, living = create_temporary(tmp_path, ".open.y.kvilt.")  # of another server that saves to the same folder
    with start(api_keys=KEYS, kv_dir=tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {*others, living.name}
    os.close(fd)


def test_expired_handles_say_so(server: Running, http: httpx.Client) -> None:
    made = http.post("/v1/kv", json={"prompt": [5, 6], "ttl_s": 0.05}).json()
    until(lambda: http.get(f"/v1/kv/{made['id']}").status_code == 410)
    used = http.post("/v1/completions", json={**SHORT, "prompt": "x", "kv": made["id"]})
    assert code(used) == (410, "kv_expired")


# Owners.


def test_handles_and_files_of_another_key_do_not_exist(start: Start, tmp_path: Path, executor: Executor) -> None:
    with start(api_keys=KEYS, kv_dir=tmp_path) as server:
        alice, bob = (server.http(headers={"authorization": f"Bearer {key}"}) for key in KEYS)
        made = alice.post("/v1/kv", json={"prompt": LONG}).json()
        at = f"/v1/kv/{made['id']}"
        assert alice.post(f"{at}/save", json={"name": "mine"}).status_code == 200
        assert bob.get("/v1/kv").json()["data"] == []
        assert bob.get("/v1/kv/saved").json()["data"] == []
        assert code(bob.get(at)) == (404, "kv_not_found")
        assert code(bob.post(f"{at}/fork", json={})) == (404, "kv_not_found")
        assert code(bob.delete(at)) == (404, "kv_not_found")
        assert code(bob.post("/v1/kv/restore", json={"name": "mine"})) == (404, "kv_file_not_found")
        used = {**SHORT, "prompt": "x", "kv": made["id"]}
        assert code(bob.post("/v1/completions", json=used)) == (404, "kv_not_found")
        assert alice.post("/v1/completions", json=used).status_code == 200
        (file,) = tmp_path.iterdir()
        file.rename(tmp_path / file.name.replace(file.name.split(".")[0], tenant(server, KEYS[1])))
        assert code(bob.post("/v1/kv/restore", json={"name": "mine"})) == (400, "kv_file"), (
            "and its KV says whose it is"
        )


def tenant(server: Running, key: str) -> str:
    from kvilt.server.auth import APIKeys

    return APIKeys(server.service.config).caller({"authorization": f"Bearer {key}"}).tenant


def test_keys_do_not_share_what_they_computed(start: Start) -> None:
    with start(api_keys=KEYS) as server:
        counts = []
        for key in (KEYS[0], KEYS[1], KEYS[0]):
            usage = server.openai(api_key=key).completions.create(**SHORT, prompt="Keys do not share. " * 20).usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            counts.append(usage.prompt_tokens_details.cached_tokens)
        assert counts[:2] == [0, 0]
        assert (counts[2] or 0) > 64


def test_a_salt_has_handles_of_its_own(server: Running, http: httpx.Client) -> None:
    made = http.post("/v1/kv?cache_salt=a", json={"prompt": LONG}).json()
    assert http.get("/v1/kv").json()["data"] == []
    assert [one["id"] for one in http.get("/v1/kv?cache_salt=a").json()["data"]] == [made["id"]]
    asked = {**SHORT, "prompt": "x", "kv": made["id"]}
    assert code(http.post("/v1/completions", json=asked)) == (404, "kv_not_found")
    assert http.post("/v1/completions", json={**asked, "cache_salt": "a"}).status_code == 200
    kept = http.post("/v1/completions", json={**SHORT, "prompt": "x", "kv_out": True, "cache_salt": "a"}).json()
    assert len(http.get("/v1/kv?cache_salt=a").json()["data"]) == 2
    http.delete(f"/v1/kv/{made['id']}?cache_salt=a")
    http.delete(f"/v1/kv/{kept['choices'][0]['kv']['id']}?cache_salt=a")


# The inspector.


def test_the_state_shows_what_a_key_has(start: Start, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    executor.prefixes.clear()
    gc.collect()
    with start(api_keys=KEYS) as server:
        alice, bob = (server.http(headers={"authorization": f"Bearer {key}"}) for key in KEYS)
        made = alice.post("/v1/kv", json={"prompt": LONG}).json()
        alice.post("/v1/completions", json={**SHORT, "prompt": " The end", "kv": made["id"]})
        state = alice.get("/v1/kv/state").json()
        assert state["pages"]["total"] == executor.pool.pages
        assert state["pages"]["used"] > 0
        assert [one["id"] for one in state["handles"]] == [made["id"]]
        assert state["prefixes"][0]["text"].startswith("Once upon a time")
        assert state["prefixes"][0]["caches"] >= 1
        assert state["samples"] == []
        theirs = bob.get("/v1/kv/state").json()
        assert theirs["handles"] == theirs["prefixes"] == theirs["samples"] == []
        go, honest = threading.Event(), executor.run
        monkeypatch.setattr(executor, "run", lambda batch: (go.wait(300), honest(batch))[1])
        with alice.stream("POST", "/v1/completions", json={**SHORT, "prompt": "Go", "stream": True}):
            (running,) = alice.get("/v1/kv/state").json()["samples"]
            assert running["prompt_tokens"] == 1
            assert bob.get("/v1/kv/state").json()["samples"] == []
            go.set()
        assert state["omitted"] == 0


def test_many_pollers_share_few_snapshots(start: Start, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is built, forty more ask: they get the next one, and it is one."""
    built, begun, go, look = [], threading.Event(), threading.Event(), executor.prefixes.runs

    def slow(*args: Any) -> Any:
        built.append(threading.current_thread())
        begun.set()
        assert go.wait(300)
        return look(*args)

    monkeypatch.setattr(executor.prefixes, "runs", slow)
    with start(api_keys=KEYS) as server, server.http(headers={"authorization": f"Bearer {KEYS[0]}"}) as alice:
        snapshots, asked = server.service.snapshots, server.service.snapshots.get
        count = 0

        async def counted(tenant: str) -> bytes:
            nonlocal count
            count += 1
            return await asked(tenant)

        monkeypatch.setattr(snapshots, "get", counted)
        with ThreadPoolExecutor(41) as threads:
            first = threads.submit(alice.get, "/v1/kv/state")
            assert begun.wait(300)
            others = [threads.submit(alice.get, "/v1/kv/state") for _ in range(40)]
            until(lambda: count == 41)
            assert alice.get("/health").status_code == 200, "nobody else waits for it"
            go.set()
            assert all(one.result().status_code == 200 for one in (first, *others))
        assert len(built) == 2
        assert all(thread is not server.loop for thread in built)


def test_the_state_is_a_stream_for_those_who_accept_events(start: Start) -> None:
    with start(api_keys=KEYS, admin_key="sk-admin-0123") as server:
        for key, sees in ((KEYS[0], False), ("sk-admin-0123", True)):
            headers = {"Authorization": f"Bearer {key}", "Accept": "text/event-stream"}
            with server.http(headers=headers) as http, http.stream("GET", "/v1/kv/state") as got:
                assert got.headers["content-type"].startswith("text/event-stream")
                lines = (line for line in got.iter_lines() if line.startswith("data: "))
                first, second = (json.loads(next(lines).removeprefix("data: ")) for _ in range(2))
            assert first.keys() == second.keys() >= {"pages", "handles", "totals"}
            assert (first["totals"] is not None) is sees, "counters cover all keys"
            if sees:
                assert second["totals"]["steps"] >= 0
                assert isinstance(second["totals"]["tiers"], list)
