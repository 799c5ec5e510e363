"""Files: uploaded in pieces to disk, seen by their key alone, within its quotas; and the forms that bring them."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from running import KEY, Running, until

from kvilt.errors import ParamError
from kvilt.llm.offload import Offload
from kvilt.server.files.multipart import MAX_PART_HEADERS, MAX_PARTS, MultipartReader, PartBegin, PartData, PartEnd
from kvilt.server.files.store import FileLimits, FileStore
from kvilt.server.files.upload import Upload, safe_name
from kvilt.server.http.errors import HTTPError

Start = Callable[..., Any]
LIMITS = FileLimits(file_bytes=1000, files=4, bytes=2500, ttl_s=7200)


def form(*parts: tuple[str, bytes], boundary: str = "xyz") -> bytes:
    """A multipart body; a part is the rest of its disposition, and its content."""
    head = "--{}\r\nContent-Disposition: form-data; {}\r\n\r\n"
    return b"".join(head.format(boundary, name).encode() + data + b"\r\n" for name, data in parts) + (
        f"--{boundary}--\r\n".encode()
    )


KIND = "multipart/form-data; boundary=xyz"
GOOD = form(('name="purpose"', b"batch"), ('name="file"; filename="in.jsonl"', b"line\n"))


def folder(server: Running) -> Path:
    return server.listener.batches.files.folder


def files_of(server: Running) -> set[str]:
    return {path.name for path in folder(server).iterdir()} - {"lock"}


# The official client.


def test_a_file_is_stored_listed_read_and_deleted(server: Running) -> None:
    client = server.openai()
    data = b'{"custom_id": "a"}\n' * 50_000
    made = client.files.create(
        file=("in.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (made.filename, made.bytes, made.purpose, made.object) == ("in.jsonl", len(data), "batch", "file")
    assert made.expires_at == made.created_at + 3600
    assert client.files.retrieve(made.id) == made
    assert made in list(client.files.list())
    assert client.files.content(made.id).read() == data
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    assert files_of(server) == set()


def test_lists_go_on_page_by_page(start: Start) -> None:
    with start() as server:
        client = server.openai()
        made = [client.files.create(file=io.BytesIO(b"x"), purpose="batch").id for _ in range(5)]
        assert [one.id for one in client.files.list(order="asc", limit=2)] == made
        assert [one.id for one in client.files.list()] == made[::-1]
        first = client.files.list(order="asc", limit=2)
        assert (first.has_more, [one.id for one in first.data]) == (True, made[:2])
        assert list(client.files.list(purpose="batch_output")) == []
        with pytest.raises(openai.NotFoundError):
            client.files.list(after="file-" + "0" * 32)


def test_a_file_of_another_key_does_not_exist(start: Start) -> None:
    with start(api_keys=("one", "two")) as server:
        made = server.openai("one").files.create(file=io.BytesIO(b"x"), purpose="batch")
        other = server.openai("two")
        for ask in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        assert list(other.files.list()) == []
        assert server.openai("one").files.retrieve(made.id) == made


def test_files_are_there_after_a_restart(start: Start, tmp_path: Path) -> None:
    with start(files_dir=tmp_path) as server:
        made = server.openai().files.create(file=io.BytesIO(b"some bytes"), purpose="batch")
        with pytest.raises(ParamError, match="another server"):
            FileStore(tmp_path, LIMITS)
    (tmp_path / f"file-{'0' * 32}.data").write_bytes(b"of an upload that was cut off by a kill")
    (tmp_path / f"file-{'1' * 32}.json").write_bytes(b"{}")
    (tmp_path / "notes.txt").write_bytes(b"not ours")
    with start(files_dir=tmp_path) as server:
        client = server.openai()
        assert [one.id for one in client.files.list()] == [made.id]
        assert client.files.content(made.id).read() == b"some bytes"
    assert not (tmp_path / f"file-{'0' * 32}.data").exists()
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / f"{made.id}.data").stat().st_mode & 0o077 == 0


# Limits.


def test_quotas_are_for_each_key(start: Start) -> None:
    with start(api_keys=("one", "two"), max_files=2, max_files_bytes=3000, max_file_bytes=2000) as server:
        client = server.openai("one")

        def upload(size: int, key: str = "one") -> Any:
            return server.openai(key).files.create(file=io.BytesIO(b"x" * size), purpose="batch")

        with pytest.raises(openai.APIStatusError) as large:
            upload(2001)
        assert (large.value.status_code, large.value.code) == (413, "file_too_large")
        first = upload(2000)
        with pytest.raises(openai.ConflictError) as full:
            upload(1001)
        assert full.value.code == "files_limit"
        upload(1000)
        with pytest.raises(openai.ConflictError) as many:
            upload(0)
        assert many.value.code == "files_limit"
        upload(2000, "two")
        client.files.delete(first.id)
        upload(1500)
        assert len(files_of(server)) == 6


def test_expired_files_are_gone(tmp_path: Path) -> None:
    now = [1000.0]
    store = FileStore(tmp_path, LIMITS, clock=lambda: now[0])
    made = [store.create("me") for _ in range(2)]
    for file, ttl_s in zip(made, (3600, None), strict=True):
        file.write(b"x" * 900)
        file.finish("a", "batch", ttl_s)
    now[0] += 3600
    assert [one.id for one in store.files("me")] == [made[1].id]
    with pytest.raises(HTTPError):
        store.find(made[0].id, "me")
    now[0] += 3600
    file = store.create("me")
    file.write(b"y" * 1000)
    assert {path.name for path in tmp_path.glob("file-*")} == {f"{file.id}.data"}
    file.discard()
    file.write(b"too late")
    assert list(tmp_path.glob("file-*")) == []
    store.close()


def test_bodies_over_the_limit_are_refused_before_they_are_read(start: Start) -> None:
    with start(max_file_bytes=1000, max_body_bytes=1 << 20) as server, server.http() as http:
        body = form(('name="file"; filename="x"', b"x" * 200_000), ('name="purpose"', b"batch"))
        kind = {"content-type": KIND}
        told = http.post("/v1/files", content=body, headers=kind)
        assert (told.status_code, told.json()["error"]["code"]) == (413, "body_too_large")
        chunked = http.post("/v1/files", content=iter([body[:60_000], body[60_000:]]), headers=kind)
        assert chunked.status_code == 413
        assert files_of(server) == set()


def test_memory_does_not_grow_with_a_file(tmp_path: Path) -> None:
    """No more of an upload is held than is written at a time."""
    most = 0
    store = FileStore(tmp_path, FileLimits(1 << 26, 4, 1 << 26, 7200))
    upload = Upload(store, Offload(), "me")

    async def body() -> AsyncIterator[bytes]:
        nonlocal most
        whole = form(('name="purpose"', b"batch"), ('name="file"; filename="x"', b""))
        at = whole.index(b"\r\n--xyz--")
        yield whole[:at]
        for _ in range(200):
            yield b"z" * 65536
            most = max(most, len(upload._pending))
        yield whole[at:]

    made = asyncio.run(upload.receive(body(), KIND))
    assert made.bytes == 200 * 65536
    assert most <= 1 << 18
    store.close()


# Forms.


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(('name="file"; filename="x"', b"x")), "purpose"),
        (form(('name="purpose"', b"batch")), "file"),
        (form(('name="purpose"', b"fine-tune"), ('name="file"; filename="x"', b"x")), "purpose"),
        (form(('name="purpose"', b"batch"), ('name="file"', b"x")), "file"),
        (form(('name="purpose"', b"batch"), ('name="purpose"', b"batch")), "purpose"),
        (form(('name="file"; filename="x"', b"x"), ('name="file"; filename="y"', b"y")), "file"),
        (form(('name="purpose"', b"batch" * 100)), "purpose"),
        (form(('name="purpose"', b"\xff")), "purpose"),
        (form(('name="colour"', b"red")), "colour"),
        (form(('name="expires_after[anchor]"', b"now"), *[]), "purpose"),
        (GOOD.replace(b"--xyz--", b"--xyz\r\n" + form(('name="expires_after[anchor]"', b"x"))[7:]), "expires_after"),
    ],
)
def test_fields_that_are_wrong_are_refused_by_name(server: Running, body: bytes, param: str) -> None:
    with server.http() as http:
        refused = http.post("/v1/files", content=body, headers={"content-type": KIND})
    assert refused.status_code == 400, refused.text
    assert (refused.json()["error"]["param"] or "").startswith(param)
    assert files_of(server) == set()


@pytest.mark.parametrize("seconds", ["59", "1e9", "-3600", "99999999999", "", "3600.5"])
def test_times_that_no_file_lives_are_refused(server: Running, seconds: str) -> None:
    more = {"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
    with server.http() as http:
        refused = http.post("/v1/files", data={"purpose": "batch", **more}, files={"file": b"x"})
    assert refused.json()["error"]["param"] == "expires_after.seconds"
    assert files_of(server) == set()


MALFORMED = [
    b"",
    b"x",
    b"--xy",
    b"--other\r\n",
    GOOD[:-8],
    GOOD[:60],
    b"\r\n" + GOOD,
    b"--xyz junk\r\n",
    b"--xyz\r\n\r\nno disposition\r\n--xyz--\r\n",
    b'--xyz\r\nContent-Disposition: attachment; name="purpose"\r\n\r\nx\r\n--xyz--\r\n',
    b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx\r\n--xyz--\r\n",
    b"--xyz\r\nX: " + b"y" * MAX_PART_HEADERS,
    b'--xyz\r\nContent-Disposition: form-data; name="\xff"\r\n\r\n',
    GOOD.replace(b"\r\n\r\nbatch", b"\r\nContent-Transfer-Encoding: base64\r\n\r\nbatch"),
    form(*[('name="purpose"; x=1', b"")] * (MAX_PARTS + 2)),
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:30]))
def test_malformed_forms_are_refused(server: Running, body: bytes) -> None:
    with server.http() as http:
        refused = http.post("/v1/files", content=body, headers={"content-type": KIND})
    assert refused.status_code in (400, 415), refused.text
    assert files_of(server) == set()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 415),
        ("text/plain", 415),
        ("multipart/mixed; boundary=xyz", 415),
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=", 400),
        ("multipart/form-data; boundary=" + "x" * 71, 400),
    ],
)
def test_only_forms_are_taken_and_only_here(server: Running, kind: str, status: int) -> None:
    with server.http() as http:
        assert http.post("/v1/files", content=GOOD, headers={"content-type": kind}).status_code == status
        for path in ("/v1/batches", "/v1/files/x", "/v1/files/", "/v1/chat/completions"):
            assert http.post(path, content=GOOD, headers={"content-type": KIND}).status_code == 415
        assert http.post("/v1/files", content=b"").status_code == 400


def test_a_page_of_elsewhere_uploads_nothing(server: Running) -> None:
    """A browser sends a form to any server without asking; its Origin tells."""
    with server.http() as http:
        headers = {"content-type": KIND, "origin": "https://evil.example"}
        assert http.post("/v1/files", content=GOOD, headers=headers).status_code == 403
    assert files_of(server) == set()


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.binary(max_size=60)), min_size=1, max_size=4),
    st.integers(1, 40),
)
@settings(max_examples=examples(200))
def test_a_form_is_read_alike_however_it_is_cut(parts: list[tuple[str, bytes]], size: int) -> None:
    parts = [(name, data.replace(b"\r\n--xyz", b"")) for name, data in parts]
    body = form(*((f'name="{name}"', data) for name, data in parts))
    reader = MultipartReader(KIND)
    found: list[tuple[str, bytes]] = []
    for at in range(0, len(body), size):
        for event in reader.feed(body[at : at + size]):
            match event:
                case PartBegin(name):
                    found.append((name, b""))
                case PartData(data):
                    found[-1] = (found[-1][0], found[-1][1] + data)
                case PartEnd():
                    pass
        assert len(reader._held) <= MAX_PART_HEADERS
    reader.finish()
    assert found == parts


@given(st.binary(max_size=300))
@settings(max_examples=examples(300))
def test_any_bytes_are_a_form_or_refused(body: bytes) -> None:
    for text in (body, b"--xyz\r\n" + body, GOOD[: len(body)] + body):
        reader = MultipartReader(KIND)
        try:
            list(reader.feed(text))
            reader.finish()
        except HTTPError as refused:
            assert (refused.status_code, refused.code) == (400, "invalid_multipart")


@pytest.mark.parametrize(
    ("given_name", "kept"),
    [
        ("in.jsonl", "in.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("/etc/cron.d/x", "x"),
        ("C:\\Windows\\x.txt", "x.txt"),
        ("..", "file"),
        ("a/", "file"),
        ("", "file"),
        ("nul\0l\r\nSet-Cookie: x", "nullSet-Cookie: x"),
        ("größe 大.jsonl", "größe 大.jsonl"),
        ("x" * 1000, "x" * 255),
    ],
)
def test_a_filename_is_never_a_path(given_name: str, kept: str) -> None:
    assert safe_name(given_name) == kept


@pytest.mark.parametrize("name", ["../../escape", "/tmp/escape", "a\\..\\b", 'q"uote', "größe"])
def test_names_of_uploads_name_nothing_here(server: Running, name: str) -> None:
    client = server.openai()
    made = client.files.create(file=(name, b"x"), purpose="batch")
    assert made.filename == safe_name(name)
    assert files_of(server) == {f"{made.id}.json", f"{made.id}.data"}
    client.files.delete(made.id)


@pytest.mark.parametrize("name", ["..", "../x", "%2e%2e%2fx", "file-" + "0" * 32, "x" * 5000, "%00", "batch_x"])
def test_ids_that_are_none_are_not_found(server: Running, name: str) -> None:
    with server.http() as http:
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            assert http.get(path).status_code in (404, 405), path
        assert http.delete(f"/v1/files/{name}").status_code in (404, 405)


# Clients that leave.


@pytest.fixture
def sending(server: Running) -> Iterator[Callable[[bytes, int], socket.socket]]:
    opened: list[socket.socket] = []

    def send(data: bytes, length: int) -> socket.socket:
        one = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        opened.append(one)
        head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {KIND}\r\ncontent-length: {length}\r\n"
        one.sendall(f"{head}authorization: Bearer {KEY}\r\n\r\n".encode() + data)
        return one

    yield send
    for one in opened:
        one.close()


def test_an_upload_that_is_cut_off_leaves_nothing(
    server: Running, sending: Callable[[bytes, int], socket.socket]
) -> None:
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="x"', b"x" * 3_000_000))
    with closing(sending(body[:2_000_000], len(body))):
        until(lambda: any(name.endswith(".data") for name in files_of(server)), "the first bytes on disk")
    until(lambda: files_of(server) == set(), "their removal")
    assert server.listener.batches.files._open == {}


def test_an_upload_has_its_time(start: Start) -> None:
    with start(upload_timeout_s=5.0) as server:
        body = form(('name="purpose"', b"batch"), ('name="file"; filename="x"', b"x" * 1_000_000))
        with closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as one:
            head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {KIND}\r\n"
            one.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:600_000])
            until(lambda: any(name.endswith(".data") for name in files_of(server)))
            server.elapse(6)
            assert b"408" in one.recv(4096).split(b"\r\n")[0]
        until(lambda: files_of(server) == set())


def test_a_disk_that_is_full(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = server.listener.batches.files
    (tmp_path / "full").symlink_to("/dev/full")
    monkeypatch.setattr(files, "data_path", lambda name: tmp_path / "full")
    with server.http() as http:
        refused = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"x")})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "files_dir_full")
    monkeypatch.undo()
    assert files._open == {}
    assert files_of(server) == set()


def test_answers_have_types_that_no_browser_renders(server: Running) -> None:
    client = server.openai()
    made = client.files.create(file=("x.html", b"<script>alert(1)</script>"), purpose="batch")
    with server.http() as http:
        answer = http.get(f"/v1/files/{made.id}/content")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == "attachment"
    assert answer.headers["x-content-type-options"] == "nosniff"
    client.files.delete(made.id)


def test_notes_tell_nothing_but_what_is_shown(server: Running) -> None:
    client = server.openai()
    made = client.files.create(file=("x", b"x"), purpose="batch")
    note = json.loads((folder(server) / f"{made.id}.json").read_bytes())
    with server.http() as http:
        shown: httpx.Response = http.get(f"/v1/files/{made.id}")
    assert set(note) - set(shown.json()) == {"owner"}
    client.files.delete(made.id)


def test_head_is_get_without_its_body(server: Running) -> None:
    client = server.openai()
    made = client.files.create(file=("x", b"x" * 1_000_000), purpose="batch")
    with server.http() as http:
        paths = [path for path, methods in http.get("/openapi.json").json()["paths"].items() if "get" in methods]
        asked = [path.replace("{name}", made.id).replace("{handle}", "0" * 32) for path in paths]
        for path in ["/", "/openapi.json", f"/v1/files/{made.id}/content", *asked]:
            head, get = http.head(path), http.get(path)
            assert (head.status_code, head.content) == (get.status_code, b""), path
            assert head.headers["content-type"] == get.headers["content-type"]
        assert http.head(f"/v1/files/{made.id}/content").headers["content-length"] == "1000000"
        assert http.head("/v1/chat/completions").status_code == 405
        assert http.head("/nowhere").status_code == 404
    counted = server.service.metrics.snapshot()["kvilt_http_requests_total"]["series"]
    assert {"method": "HEAD", "route": "/v1/models", "status": "200"} in [one["labels"] for one in counted]
    client.files.delete(made.id)
