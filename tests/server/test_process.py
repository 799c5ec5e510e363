"""`kvilt serve` as a process: it drains on SIGTERM, loses no request, and a killed one leaves nothing in the way."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from running import until
from tiny import write_tiny_of_bytes
from typer.testing import CliRunner

from kvilt.cli.app import app
from kvilt.cli.keys import read_keys
from kvilt.cli.options import SERVER
from kvilt.cli.serve import default_name, owner_weights, serve_config
from kvilt.errors import ParamError
from kvilt.server.auth import tenant_of_key
from kvilt.server.running import running_servers, stop
from kvilt.weights.file_identity import file_identity

LONG = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder, with a vocabulary of bytes."""
    return write_tiny_of_bytes(tmp_path_factory.mktemp("model"))


class Process:
    """A server that runs by itself."""

    def __init__(self, *options: str, port: int = 0) -> None:
        given = ["serve", "--port", str(port), "--threads", "1", *options]
        command = [sys.executable, "-m", "kvilt.cli.main", *given]
        self.own = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.own.stderr is not None
        self.said: list[str] = []
        for line in self.own.stderr:
            self.said.append(line)
            if found := re.search(r"is served at (http://\S+)", line):
                self.url = found[1]
                break
        else:
            self.own.wait()
            self.own.stderr.close()
            raise AssertionError("".join(self.said))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.own.stderr is not None
        self.said.extend(self.own.stderr)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def wait(self) -> int:
        code = self.own.wait(120)
        self._reader.join(300)
        assert self.own.stderr is not None
        self.own.stderr.close()
        return code


@contextmanager
def process(*options: str, port: int = 0) -> Iterator[Process]:
    one = Process(*options, port=port)
    try:
        yield one
    finally:
        if one.own.poll() is None:
            one.own.kill()
        one.wait()


def test_sigterm_under_load_loses_no_request(model: Path) -> None:
    """Eight clients in flight, streaming or not: after the signal all of them get all of their tokens, and it ends."""
    with process("--model", str(model), "--grace-s", "60") as server:
        answers: list[httpx.Response] = []
        streaming = threading.Semaphore(0)

        def ask(stream: bool) -> None:
            with server.http() as http, http.stream("POST", "/v1/completions", json={**LONG, "stream": stream}) as got:
                streaming.release()
                got.read()
                answers.append(got)

        threads = [threading.Thread(target=ask, args=(index % 2 == 0,)) for index in range(8)]
        with server.http() as http:
            for thread in threads:
                thread.start()
            until(lambda: running(http) >= 8)
            server.own.send_signal(signal.SIGTERM)
            for thread in threads:
                thread.join(300)
        assert [answer.status_code for answer in answers] == [200] * 8
        for answer in answers:
            if answer.headers["content-type"].startswith("text/event-stream"):
                chunks = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
                assert chunks[-1] == "[DONE]"
                assert json.loads(chunks[-2])["choices"][0]["finish_reason"] == "length"
            else:
                assert answer.json()["usage"]["completion_tokens"] == 200
        assert server.wait() == 0
        assert "Traceback" not in "".join(server.said)
        assert "leaked" not in "".join(server.said), "the native module is taken down in order"


def running(http: httpx.Client) -> int:
    return int(float(re.search(r"^kvilt_num_requests_running (\S+)", http.get("/metrics").text, re.M)[1]))  # type: ignore[index]


def test_a_second_signal_ends_at_once(model: Path) -> None:
    with process("--model", str(model), "--grace-s", "600") as server:
        thread = threading.Thread(target=abandoned, args=(server,))
        thread.start()
        with server.http() as http:
            until(lambda: running(http) >= 1)
        server.own.send_signal(signal.SIGINT)
        until(lambda: "shutting down" in "".join(server.said))
        server.own.send_signal(signal.SIGINT)
        server.wait()
        thread.join(300)


def test_kvilt_stop_waits_for_requests_and_a_second_one_does_not(model: Path) -> None:
    with process("--model", str(model), "--grace-s", "600") as server:
        thread = threading.Thread(target=abandoned, args=(server,))
        thread.start()
        with server.http() as http:
            until(lambda: running(http) >= 1)
        first = CliRunner().invoke(app, ["stop", str(server.own.pid), "--timeout-s", "0"])
        assert first.exit_code == 1 and f"kvilt stop {server.own.pid}" in first.output
        until(lambda: "shutting down" in "".join(server.said))
        assert server.own.poll() is None
        ended = threading.Thread(target=server.own.wait)  # else it stays as a zombie that the command waits for
        ended.start()
        second = CliRunner().invoke(app, ["stop", str(server.own.pid)])
        assert second.exit_code == 0 and f"(process {server.own.pid})" in second.output
        ended.join(300)
        thread.join(300)


def abandoned(server: Process) -> None:
    try:
        with server.http() as http:
            http.post("/v1/completions", json={**LONG, "max_tokens": 900, "n": 64})
    except httpx.HTTPError:
        pass


@pytest.mark.parametrize("folder", ["--kv-dir", "--store"])
def test_a_killed_server_can_be_started_again(model: Path, tmp_path: Path, folder: str) -> None:
    """Same port, same folder of saved KV: what was saved is there, and what was being written is not in the way."""
    options = ("--model", str(model), folder, str(tmp_path), "--api-key", "k1")
    headers = {"authorization": "Bearer k1"}
    with process(*options) as server:
        port = server.port
        with server.http() as http:
            made = http.post("/v1/kv", json={"prompt": "Once upon a time " * 20}, headers=headers).json()
            assert http.post(f"/v1/kv/{made['id']}/save", json={"name": "a"}, headers=headers).status_code == 200
        thread = threading.Thread(target=abandoned, args=(server,))
        thread.start()
        server.own.kill()
        assert server.wait() == -signal.SIGKILL
        thread.join(300)
    with process(*options, port=port) as again, again.http() as http:
        assert again.port == port
        back = http.post("/v1/kv/restore", json={"name": "a"}, headers=headers).json()
        assert back["tokens"] == made["tokens"]
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}, headers=headers).status_code == 200


def test_handles_and_sessions_are_known_again_after_a_restart(model: Path, tmp_path: Path) -> None:
    """After a kill and after a signal: same ids, tokens and answers, for the same key; what was deleted stays so."""
    options = (
        "--model",
        str(model),
        "--store",
        str(tmp_path),
        "--api-key",
        "k1",
        "--api-key",
        "k2",
        "--admin-key",
        "k3",
    )
    mine, other, owner = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2", "k3"))
    asked = {"prompt": " and", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with process(*options) as server:
        with server.http() as http:
            http.headers.update(mine)
            made = http.post("/v1/kv", json={"prompt": "Once upon a time " * 20, "ttl_s": 5000}).json()
            first = http.post("/v1/completions", json={**asked, "kv": made["id"], "kv_out": True}).json()
            kept = first["choices"][0]["kv"]
            gone = http.post(f"/v1/kv/{made['id']}/fork", json={}).json()
            assert http.post(f"/v1/kv/{kept['id']}/pin", json={"ttl_s": 9000}).json()["pinned"]
            assert http.delete(f"/v1/kv/{gone['id']}").status_code == 200  # all before it is on the disk, too
            for name in ("agent", "left"):
                assert http.post("/v1/completions", json={**asked, "session": name}).status_code == 200
            tree = http.get("/v1/sessions/agent").json()["turns"]
            assert http.delete("/v1/sessions/left").status_code == 200
        server.own.kill()
        assert server.wait() == -signal.SIGKILL
    for _ in range(2):
        with process(*options) as again, again.http() as http:
            listed = http.get("/v1/kv", headers=mine).json()["data"]
            assert {one["id"]: (one["tokens"], one["pinned"]) for one in listed} == {
                made["id"]: (made["tokens"], False),
                kept["id"]: (kept["tokens"], True),
            }
            assert [one["name"] for one in http.get("/v1/sessions", headers=mine).json()["data"]] == ["agent"]
            turns = http.get("/v1/sessions/agent", headers=mine).json()["turns"]
            assert turns == [{**turn, "resident": False} for turn in tree]
            assert http.get("/v1/sessions", headers=other).json()["data"] == []
            assert http.get(f"/v1/kv/{gone['id']}", headers=mine).status_code == 404
            assert http.get(f"/v1/kv/{made['id']}", headers=other).status_code == 404
            assert 0 < http.get(f"/v1/kv/{made['id']}", headers=mine).json()["expires_in_s"] <= 5000
            done = http.post("/v1/completions", json={**asked, "kv": made["id"]}, headers=mine).json()
            assert done["choices"][0]["text"] == first["choices"][0]["text"]
            assert "kvilt_kv_handles 2" in http.get("/metrics", headers=owner).text
            again.own.send_signal(signal.SIGTERM)
            assert again.wait() == 0
    (path,) = tmp_path.glob(f"notes/*{made['id']}*")
    path.write_bytes(b"damaged")
    with process(*options) as last, last.http() as http:
        assert [one["id"] for one in http.get("/v1/kv", headers=mine).json()["data"]] == [kept["id"]]
        counted = http.get("/metrics", headers=owner).text
        assert 'kvilt_store_refused_total{tier="notes",reason="size"} 1' in counted


def test_keys_come_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("# ours\n  # alice\nsk-#file\n\nsk-option \n")
    monkeypatch.setenv("KVILT_API_KEY", "sk-env, sk-other")
    given = {name: option.default for name, option in SERVER.options.items()}
    made = serve_config("smollm2", {**given, "api_key": ["sk-option"], "api_key_file": str(tmp_path / "keys")})
    assert made.api_keys == ("sk-option", "sk-#file", "sk-env", "sk-other")
    assert made.names == ("smollm2",)
    assert made.kv_dir is None


@pytest.mark.parametrize("text", ["", "\n\n", "# sk-1\n", "  \n#\n"])
@pytest.mark.parametrize("option", ["api_key_file", "admin_key_file"])
def test_a_file_without_keys_starts_no_open_server(tmp_path: Path, text: str, option: str) -> None:
    (tmp_path / "keys").write_text(text)
    given = {name: each.default for name, each in SERVER.options.items()}
    with pytest.raises(ParamError, match="holds no key") as refused:
        serve_config("smollm2", {**given, option: str(tmp_path / "keys")})
    assert refused.value.field == option


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
def test_an_environment_without_keys_starts_no_open_server(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("KVILT_API_KEY", value)
    with pytest.raises(ParamError, match="KVILT_API_KEY"):
        serve_config("smollm2", {name: option.default for name, option in SERVER.options.items()})


@pytest.mark.parametrize("line", ["sk-1 # alice", "sk-1 sk-2", "sk\t1"])
def test_a_key_is_a_whole_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(f"sk-0\n{line}\n")
    with pytest.raises(ParamError, match="whole line") as refused:
        read_keys(str(tmp_path / "keys"))
    assert "sk-1" not in str(refused.value)


def test_the_owners_key_stands_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "admin").write_text("sk-#owner\n")
    given = {name: option.default for name, option in SERVER.options.items()}
    assert serve_config("smollm2", given).admin_key is None
    assert serve_config("smollm2", {**given, "admin_key_file": str(tmp_path / "admin")}).admin_key == "sk-#owner"
    monkeypatch.setenv("KVILT_ADMIN_KEY", "sk-env")
    assert serve_config("smollm2", given).admin_key == "sk-env"
    with pytest.raises(ParamError, match="2 times"):
        serve_config("smollm2", {**given, "admin_key": "sk-option"})


def test_handles_are_saved_in_the_store_unless_they_have_a_folder_of_their_own(tmp_path: Path) -> None:
    given = {name: option.default for name, option in SERVER.options.items()}
    assert serve_config("smollm2", given, str(tmp_path)).kv_dir == tmp_path / "handles"
    assert serve_config("smollm2", {**given, "kv_dir": "own"}, str(tmp_path)).kv_dir == Path("own")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "99999"], "port"),
        (["--grace-s", "-1"], "grace_s"),
        (["--log-level", "loud"], "log_level"),
        (["--api-key", "a b"], "api_key"),
        (["--api-key-file", "/nonexistent"], "api_key_file"),
        (["--allowed-host", "http://x"], "allowed_host"),
        (["--max-rows", "0"], "max_rows"),
    ],
)
def test_wrong_options_are_named_before_a_model_is_loaded(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["serve", "--model", "/nonexistent", *options])
    assert done.exit_code != 0
    assert message in done.output


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("/home/me/Tiny-1.Q4.gguf", "Tiny-1.Q4"),
        ("hf:org/name", "org/name"),
        ("./a/", "a"),
    ],
)
def test_a_model_is_never_called_by_its_path(model: str, name: str) -> None:
    assert default_name(model) == name


def test_a_key_file_may_give_keys_weights(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-light\nsk#heavy weight=2.5\n# weight=9\nsk-weight=4\n")
    assert read_keys(str(file)) == ["sk-light", "sk#heavy", "sk-weight=4"]
    assert owner_weights(str(file)) == {tenant_of_key("sk#heavy"): 2.5}
    assert owner_weights(None) == {}


@pytest.mark.parametrize("line", ["sk weight=", "sk weight=x", "sk weight=1e9", "sk weight=2 more", "sk heavy"])
def test_what_is_no_weight_is_no_key_file(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(line)
    with pytest.raises(ParamError, match="weight=NUMBER"):
        read_keys(str(tmp_path / "keys"))


def test_a_running_server_is_listed_for_its_user(model: Path) -> None:
    """Other commands find it, with the identity of the files it has loaded; when it ends, it is gone."""
    with process("--model", str(model), "--served-model-name", "own", "--kv-dtype", "float16") as server:
        listed = [one for one in running_servers() if one.pid == server.own.pid]
        assert [one.url for one in listed] == [server.url]
        found = listed[0].model_with(file_identity(model))
        assert found is not None and found.names == ("own",) and found.source == str(model)
        assert not listed[0].needs_key and listed[0].options == {"threads": 1, "kv_dtype": "float16"}
        assert stop(listed[0])
        assert server.wait() == 0
        assert not [one for one in running_servers() if one.pid == server.own.pid]
