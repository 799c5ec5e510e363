"""`kvilt warm` and the options of a store: files become documents that others find, or are named with why not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from stores import Server
from tiny import write_tiny_of_bytes
from typer.testing import CliRunner

from kvilt.cli.app import app
from kvilt.cli.options import STORE
from kvilt.cli.store import check_store_options, open_store
from kvilt.cli.texts import TextFile, read_documents
from kvilt.cli.warm import WarmDocument, _groups
from kvilt.errors import InputError, ParamError
from kvilt.llm.warmup import AT_ONCE

SHORT = ("--temperature", "0", "--max-tokens", "3")
SECRET = "sixteen bytes or more\n"
ONE = "The Eiffel Tower is 330 metres tall.\r\nIt stands in Paris.\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model as a folder, with a vocabulary of bytes: a byte is a token."""
    return str(write_tiny_of_bytes(tmp_path_factory.mktemp("model")))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.txt").write_bytes(ONE.encode())
    (folder / "two.txt").write_text("Mount Everest is 8849 metres high. Ünïcödé.", encoding="utf-8")
    yield folder


def kvilt(*args: str | Path, stdin: str | bytes = "") -> Any:
    return CliRunner().invoke(app, [str(one) for one in args], input=stdin)


def warm(model: str, store: Path, *args: str | Path, stdin: str | bytes = "") -> Any:
    return kvilt("warm", *args, "--model", model, "--threads", "1", "--store", store, stdin=stdin)


def test_files_are_computed_once_and_found_from_then_on(model: str, files: Path, tmp_path: Path) -> None:
    first = warm(model, tmp_path / "kv", files / "one.txt", files / "two.txt", files / "one.txt")
    assert first.exit_code == 0, first.output
    tokens = [len(path.read_bytes()) for path in (files / "one.txt", files / "two.txt")]
    assert first.stdout.splitlines() == [
        f"computed {tokens[0]:>7} tokens  {files / 'one.txt'}",
        f"computed {tokens[1]:>7} tokens  {files / 'two.txt'}",
        f"found    {tokens[0]:>7} tokens  {files / 'one.txt'}",
    ]
    assert f"2 computed, {sum(tokens)} tokens" in first.stderr
    assert "1 found already" in first.stderr
    again = warm(model, tmp_path / "kv", files / "two.txt", "-", "--json", stdin=ONE.encode())
    assert again.exit_code == 0, again.output
    told = json.loads(again.stdout)
    assert [(one["tokens"], one["found"]) for one in told["documents"]] == [(tokens[1], True), (tokens[0], True)]
    assert [one["name"] for one in told["documents"]] == [str(files / "two.txt"), "-"]
    assert told["failed"] == told["not_stored"] == {}


def test_what_was_warmed_is_what_questions_reuse(model: str, files: Path, tmp_path: Path) -> None:
    """Under the very tokens that the prompt has: the answer's document is found on disk, not computed."""
    assert warm(model, tmp_path / "kv", files / "one.txt").exit_code == 0
    (record,) = (tmp_path / "kv").rglob("*.kv")
    asked = ("run", "So", "--raw", "--model", model, "--threads", "1", *SHORT, "--json")
    given = ("--document", files / "one.txt", "--blend-ratio", "0.1", "--store", tmp_path / "kv")
    done = kvilt(*asked, *given)
    assert done.exit_code == 0, done.output
    usage = json.loads(done.stdout)["usage"]
    assert usage["blended_reused"] + usage["blended_recomputed"] == len(ONE.encode())
    assert "ratio=0.1" in usage["recipe"]
    assert list((tmp_path / "kv").rglob("*.kv")) == [record]
    plain = kvilt(*asked, *given[:4])
    assert json.loads(plain.stdout)["token_ids"] == json.loads(done.stdout)["token_ids"]
    shown = kvilt(*asked[:-1], *given)
    assert f"({usage['blended_reused']} reused, {usage['blended_recomputed']} computed again)" in shown.stderr


def test_documents_behind_a_system_text(model: str, files: Path, tmp_path: Path) -> None:
    """They are found by who begins chats with it, computed again by who does not, and alike for both commands."""
    chats = tmp_path / "chats"
    shutil.copytree(model, chats)
    shown = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    (chats / "tokenizer_config.json").write_text(json.dumps({"chat_template": shown}))
    model, system = str(chats), ("--context-prefix", "Be brief.")
    assert warm(model, tmp_path / "kv", files / "one.txt", *system).exit_code == 0
    (record,) = (tmp_path / "kv").rglob("*.kv")
    asked = ("run", "So", "--system", "Be brief.", "--model", model, "--threads", "1", *SHORT, "--json")
    given = ("--document", files / "one.txt", "--blend-ratio", "0", "--store", tmp_path / "kv")
    done = kvilt(*asked, *given, *system)
    assert done.exit_code == 0, done.output
    assert list((tmp_path / "kv").rglob("*.kv")) == [record]
    whole = kvilt(*asked, *given[:3], "1")
    assert json.loads(whole.stdout)["token_ids"] == json.loads(done.stdout)["token_ids"]
    assert kvilt(*asked, *given).exit_code == 0
    assert len(list((tmp_path / "kv").rglob("*.kv"))) == 2
    empty = warm(model, tmp_path / "kv", files / "one.txt", "--behind", "x" * 2000)
    assert empty.exit_code == 2
    assert "context_prefix: has" in empty.stderr


def test_files_that_cannot_be_are_named_and_the_others_stored(model: str, files: Path, tmp_path: Path) -> None:
    (files / "binary").write_bytes(b"\x00\x01\x02")
    (files / "latin").write_bytes("Zürich".encode("latin-1"))
    (files / "long").write_text("a" * 2000)
    (files / "blank").write_text(" \n")
    bad = [files / name for name in ("absent", "binary", "latin", "long", "blank")]
    done = warm(model, tmp_path / "kv", *bad, files, files / "one.txt")
    assert done.exit_code == 1
    said = done.stderr.splitlines()
    for name, why in (
        ("absent", "cannot be read: No such file"),
        ("binary", "holds a NUL byte"),
        ("latin", "is not UTF-8 text (byte 1)"),
        ("long", "has at least 2000 tokens, and with a max_context this small 1023 fit"),
        ("blank", "is empty"),
    ):
        assert any(line.startswith(f"kvilt: {files / name}: {why}") for line in said), said
    assert any(line.startswith(f"kvilt: {files}: cannot be read: Is a directory") for line in said)
    assert done.stdout.splitlines() == [f"computed {len(ONE.encode()):>7} tokens  {files / 'one.txt'}"]
    assert said[-1].endswith("6 failed")
    nothing = warm(model, tmp_path / "kv", files / "absent", "--json")
    assert nothing.exit_code == 1
    assert list(json.loads(nothing.stdout)["failed"]) == [str(files / "absent")]


def test_a_file_of_several_documents(model: str, tmp_path: Path) -> None:
    text = "\n---\nfirst\n--- no\n---\r\n\n---\nsecond"
    done = warm(model, tmp_path / "kv", "-", "--split", "---", "--json", stdin=text.encode())
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["documents"]
    assert [(one["name"], one["tokens"]) for one in found] == [("-#1", len("first\n--- no\n")), ("-#2", len("second"))]


def test_separators_alone_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("---\n---\n")
    with pytest.raises(InputError, match="nothing but separators"):
        read_documents(str(tmp_path / "x"), "---")


def test_documents_that_the_store_does_not_take_are_told_of(model: str, files: Path, tmp_path: Path) -> None:
    done = warm(model, tmp_path / "kv", files / "one.txt", "--store-disk", "1K")
    assert done.exit_code == 1
    assert "1 document was not taken by the store (disk: too_large)" in done.stderr


def test_documents_that_make_room_for_each_other_are_told_of(model: str, files: Path, tmp_path: Path) -> None:
    assert warm(model, tmp_path / "kv", files / "one.txt").exit_code == 0
    (record,) = (tmp_path / "kv").rglob("*.kv")
    room = str(int(record.stat().st_size * 1.5))
    done = warm(model, tmp_path / "kv", files / "two.txt", "--store-disk", room)
    assert done.exit_code == 0
    assert "1 document was removed from the disk tier to make room" in done.stderr


@pytest.mark.parametrize("place", ["file/kv", os.devnull, "/proc/kv"])
def test_a_folder_that_cannot_be_costs_no_computation(files: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("no folder")
    done = warm("/no/model/is/looked/for", tmp_path / place, files / "one.txt")
    assert done.exit_code == 2
    assert "kvilt: store: " in done.stderr
    assert "folder" in done.stderr


def test_no_more_is_computed_at_once_than_the_stores_queue_holds() -> None:
    sizes = [3, 3, 3, 1, 1, 1, 1, 1, 99, 1]
    documents = [WarmDocument(TextFile(str(at), ""), [0] * size) for at, size in enumerate(sizes)]
    groups = [[len(one.ids) for one in group] for group in _groups(documents, most_tokens=8)]
    assert groups == [[3, 3], [3, 1, 1, 1], [1, 1], [99], [1]]
    assert list(_groups([], 8)) == []


INTERRUPTED = """
import signal, sys
from kvilt.cli.main import main
from kvilt.llm import LLM

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start jobs with interrupts ignored
honest, calls = LLM.warm, []

def warm(self, documents, *, on_progress, **own):
    def interrupted(done, total):
        on_progress(done, total)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)

    calls.append(len(documents))
    return honest(self, documents, on_progress=interrupted, **own)

LLM.warm = warm
sys.exit(main())
"""


def test_an_interrupt_leaves_what_was_stored(model: str, tmp_path: Path) -> None:
    """The signal comes while the third group of documents is computed: two groups are stored, and maybe some of it."""
    text = "\n---\n".join(f"{i} " + "word " * 20 for i in range(5 * AT_ONCE))
    (tmp_path / "many.txt").write_text(text)
    given = ["--model", model, "--threads", "1", "--store", str(tmp_path / "kv"), "--split", "---"]
    command = [sys.executable, "-c", INTERRUPTED, "warm", str(tmp_path / "many.txt"), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 130, done.stderr
    assert [line for line in done.stderr.splitlines() if "KeyboardInterrupt" in line] == []
    assert "kvilt: interrupted" in done.stderr
    assert len(done.stdout.splitlines()) == 2 * AT_ONCE
    stored = len(list((tmp_path / "kv").rglob("*.kv")))
    assert 2 * AT_ONCE <= stored <= 3 * AT_ONCE
    again = warm(model, tmp_path / "kv", tmp_path / "many.txt", "--split", "---", "--json")
    assert again.exit_code == 0, again.output
    assert sum(one["found"] for one in json.loads(again.stdout)["documents"]) == stored


def test_a_server_finds_what_was_warmed_for_its_key(model: str, files: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("# ours\nsk-alice-0123\n")
    assert warm(model, tmp_path / "kv", files / "one.txt").exit_code == 0
    assert warm(model, tmp_path / "kv", files / "two.txt", "--api-key-file", key).exit_code == 0
    command = [sys.executable, "-m", "kvilt.cli.main", "serve", "--port", "0", "--threads", "1", "--model", model]
    options = ["--store", str(tmp_path / "kv"), "--api-key-file", str(key), "--store-memory", "16M"]
    environment = {**os.environ, "KVILT_ADMIN_KEY": "sk-owner-0123"}
    own = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert own.stderr is not None
        url = next(line.split()[-1] for line in own.stderr if "is served at" in line)
        owner = {"authorization": "Bearer sk-owner-0123"}
        with httpx.Client(base_url=url, headers={"authorization": "Bearer sk-alice-0123"}, timeout=300) as http:
            texts = [(files / name).read_bytes().decode() for name in ("one.txt", "two.txt")]
            found = http.post("/v1/kv/chunks", json={"documents": texts}).json()["data"]
            assert [one["found"] for one in found] == [False, True]
            assert 'kvilt_store_hits_total{tier="disk",kind="chunk"} 1' in http.get("/metrics", headers=owner).text
    finally:
        own.terminate()
        own.communicate(timeout=300)
    assert warm(model, tmp_path / "kv", files / "one.txt", "--api-key-file", key, "--json").stdout.count("true") == 1


@pytest.mark.needs("redis")
def test_machines_share_documents_in_redis(model: str, files: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    server = Server(tmp_path)
    given = ("warm", files / "one.txt", "--model", model, "--threads", "1", "--store-redis", server.url, "--json")
    sealed = ("--store-secret-file", secret, "--store-codec", "zstd")
    try:
        found = []
        for more in (sealed, sealed, ()):  # who has no secret neither finds nor replaces what others sealed
            done = kvilt(*given, *more)
            assert done.exit_code == 0, done.output
            found.append(json.loads(done.stdout)["documents"][0]["found"])
        assert found == [False, True, False]
    finally:
        server.kill()
    down = kvilt(*given)
    assert down.exit_code == 1
    assert json.loads(down.stdout)["not_stored"] != {}


DEFAULTS = {name: option.default for name, option in STORE.options.items()}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"store_disk": "1G"}, "store_disk: limits the folder"),
        ({"store_redis_memory": "1G"}, "store_redis_memory: limits"),
        ({"store": "x", "store_disk": "many"}, "store_disk: cannot read 'many'"),
        ({"store_memory": "-1"}, "store_memory: cannot read"),
        ({"store": __file__}, "store: .* is a file"),
        ({"store": os.devnull}, "store: .* is a file"),
        ({"store": ""}, "store: is empty; name a folder"),
        ({"store_codec": "int4"}, "store_codec: must be one of raw, zstd, int8, k8v4"),
        ({"store_redis": "http://kv"}, "store_redis: begins with redis://"),
        ({"store_redis": "redis://kv:99999999"}, "store_redis: cannot be read"),
        ({"store_redis": "redis://:hush@kv:6379/0"}, "KVILT_STORE_REDIS"),
        ({"store_redis": "redis://kv:6379/0?password=hush"}, "KVILT_STORE_REDIS"),
        ({"store_secret_file": "/nonexistent"}, "store_secret_file: .* cannot be read"),
        ({"store_secret_file": os.devnull}, "fewer than 16 bytes"),
    ],
)
def test_wrong_options_of_a_store_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ParamError, match=says) as caught:
        check_store_options({**DEFAULTS, **options})
    assert "hush" not in str(caught.value)


def test_warming_needs_a_store_that_outlives_it(model: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = kvilt("warm", files / "one.txt", "--model", model)
    assert done.exit_code == 2
    assert "give --store PATH or --store-redis URL" in done.stderr
    assert kvilt("run", "So", "--model", model, "--blend-ratio", "0.1").exit_code == 2


def test_the_store_that_options_describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.setenv("KVILT_STORE_REDIS", "redis://:hush@127.0.0.1:1/0")
    options = {"store": str(tmp_path / "kv"), "store_codec": "int8", "store_secret_file": str(tmp_path / "secret")}
    with open_store({**DEFAULTS, **options, "store_memory": "1M"}) as store:
        assert store is not None
        assert [channel.tier.name for channel in store._channels] == [
            "disk",
            "redis",
        ]  # one that is down is still asked later
    monkeypatch.delenv("KVILT_STORE_REDIS")
    with open_store({**DEFAULTS, "store_memory": "1M"}) as store:
        assert store is not None
        assert list(store.usage()) == ["memory"]
    with open_store(DEFAULTS) as store:
        assert store is None
