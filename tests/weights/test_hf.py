"""`hf:org/name[:file]` against a hub on the loopback interface, in fresh processes with the settings users set."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import FakeHub, serving
from safetensors.torch import save
from tiny import write_tiny

from kvilt.errors import ModelNotFound
from kvilt.weights.hf import HubReference
from kvilt.weights.hub import resolve
from kvilt.weights.source import open_checkpoint

Craft = Any  # conftest.Craft
GGUF = b"GGUF" + bytes(range(256)) * 20_000
ASK = (
    "import json, sys\n"
    "from kvilt.errors import ModelNotFound\n"
    "from kvilt.weights.hub import {call}\n"
    "told = []\n"
    "try: print(json.dumps({{'path': str({call}(sys.argv[1], lambda *step: told.append(step))), 'told': told}}))\n"
    "except ModelNotFound as error: print(json.dumps({{'refused': str(error)}}))\n"
)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def env(tmp_path: Path, hub: FakeHub) -> dict[str, str]:
    """What a user would set, and a cache of this test alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KVILT_"))}
    return {**kept, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}


def ask(name: str, env: dict[str, str], call: str = "resolve", **more: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(call=call), name],
        capture_output=True,
        text=True,
        timeout=120,
        env={**env, **more},
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def refused(answer: dict[str, Any], *words: str) -> None:
    assert set(answer) == {"refused"}, answer
    assert "\n" not in answer["refused"]
    for word in words:
        assert word in answer["refused"], answer


@pytest.fixture
def tiny_files(tmp_path: Path) -> dict[str, bytes]:
    """A safetensors repository with all that should, and much that should not, be fetched."""
    folder = write_tiny(tmp_path / "tiny")
    return {
        "config.json": (folder / "config.json").read_bytes(),
        "model.safetensors": (folder / "model.safetensors").read_bytes(),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"model_max_length": 256}',
        "consolidated.safetensors": b"the same once more",
        "pytorch_model.bin": b"a pickle",
        "model.pt": b"a pickle",
        "modeling_tiny.py": b"raise SystemExit",
        "onnx/model.onnx": b"onnx",
        "README.md": b"hello",
    }


WANTED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_a_safetensors_repository_is_fetched_without_pickles_code_or_copies(
    hub: FakeHub, env: dict[str, str], tiny_files: dict[str, bytes]
) -> None:
    hub.repositories["org/tiny"] = tiny_files
    path = Path(ask("hf:org/tiny", env)["path"])
    assert hub.fetched() == WANTED
    assert {file.name for file in path.parent.iterdir()} == WANTED
    checkpoint = open_checkpoint(path)
    with checkpoint.tensors as tensors:
        assert checkpoint.kind == "hf"
        assert "model.norm.weight" in tensors.names()


def test_once_fetched_it_is_not_fetched_again_and_is_found_without_a_connection(
    hub: FakeHub, env: dict[str, str], tiny_files: dict[str, bytes]
) -> None:
    hub.repositories["org/tiny"] = tiny_files
    first = ask("hf:org/tiny", env)["path"]
    sent = len([1 for method, _, _ in hub.asked if method == "FILE"])
    assert ask("hf:org/tiny", env)["path"] == first
    assert len([1 for method, _, _ in hub.asked if method == "FILE"]) == sent
    before = len(hub.asked)
    assert ask("hf:org/tiny", env, KVILT_OFFLINE="1")["path"] == first
    assert ask("hf:org/tiny", env, HF_HUB_OFFLINE="1")["path"] == first
    assert len(hub.asked) == before
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert ask("hf:org/tiny", env, HF_ENDPOINT=nowhere)["path"] == first


def test_shards_are_those_the_index_names(hub: FakeHub, env: dict[str, str], tiny_files: dict[str, bytes]) -> None:
    shards = {f"model-0000{i}-of-00002.safetensors": save({f"t{i}": torch.full((2,), float(i))}) for i in (1, 2)}
    places = {"t1": "model-00001-of-00002.safetensors", "t2": "model-00002-of-00002.safetensors"}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": places}).encode()}
    other = {"consolidated-00001.safetensors": b"not named"}
    hub.repositories["org/big"] = {"config.json": b"{}", **shards, **index, **other}
    path = Path(ask("hf:org/big", env)["path"])
    assert path.is_dir()
    assert hub.fetched() == {"config.json", *shards, *index}
    with open_checkpoint(path).tensors as tensors:
        assert tensors.names() == ("t1", "t2")


def test_an_index_that_points_out_of_the_folder_fetches_nothing(hub: FakeHub, env: dict[str, str]) -> None:
    index = json.dumps({"weight_map": {"t": "../../evil.safetensors"}}).encode()
    hub.repositories["org/evil"] = {"config.json": b"{}", "a.safetensors": b"", "model.safetensors.index.json": index}
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(call="resolve"), "hf:org/evil"], capture_output=True, text=True, env=env
    )
    assert "WeightError: weight_map" in done.stderr
    assert hub.fetched() == {"model.safetensors.index.json"}


def test_the_only_gguf_needs_no_name_and_progress_reaches_its_end(hub: FakeHub, env: dict[str, str]) -> None:
    hub.repositories["org/one"] = {"README.md": b"x", "config.json": b"{}", "only.Q8_0.gguf": GGUF}
    answer = ask("hf:org/one", env, call="pull")
    assert Path(answer["path"]).read_bytes() == GGUF
    assert hub.fetched() == {"only.Q8_0.gguf"}
    assert answer["told"][-1] == ["downloading", len(GGUF), len(GGUF)]


def test_several_ggufs_are_listed_and_one_of_them_can_be_named(hub: FakeHub, env: dict[str, str]) -> None:
    hub.repositories["org/many"] = {"m.Q4_0.gguf": GGUF[:5000], "sub/m.Q8_0.gguf": GGUF[:9000]}
    refused(ask("hf:org/many", env), "hf:org/many:file", "m.Q4_0.gguf", "sub/m.Q8_0.gguf")
    assert hub.fetched() == set()
    path = Path(ask("hf:org/many:sub/m.Q8_0.gguf", env)["path"])
    assert path.read_bytes() == GGUF[:9000]
    assert hub.fetched() == {"sub/m.Q8_0.gguf"}
    refused(ask("hf:org/many:m.Q6_K.gguf", env), "has no file 'm.Q6_K.gguf'", "m.Q4_0.gguf")
    assert Path(ask("hf:org/many:sub/m.Q8_0.gguf", env, KVILT_OFFLINE="1")["path"]) == path
    refused(ask("hf:org/many:m.Q4_0.gguf", env, KVILT_OFFLINE="1"), "m.Q4_0.gguf", "KVILT_OFFLINE")


def test_all_parts_of_a_split_gguf_are_fetched_by_the_name_of_any(hub: FakeHub, env: dict[str, str]) -> None:
    parts = {f"m-0000{i}-of-00003.gguf": GGUF[: 1000 * i] for i in (1, 2, 3)}
    hub.repositories["org/split"] = {**parts, "m.gguf": GGUF}
    path = Path(ask("hf:org/split:m-00002-of-00003.gguf", env)["path"])
    assert path.name == "m-00001-of-00003.gguf"
    assert hub.fetched() == set(parts)
    assert {name: (path.parent / name).read_bytes() for name in parts} == parts
    del hub.repositories["org/split"]["m-00003-of-00003.gguf"]
    hub.repositories["org/lost"] = hub.repositories.pop("org/split")
    refused(ask("hf:org/lost:m-00001-of-00003.gguf", env), "m-00003-of-00003.gguf")


def test_a_download_that_breaks_off_is_resumed_where_it_stopped(hub: FakeHub, env: dict[str, str]) -> None:
    large = GGUF * 5  # the hub's package writes 10 MiB at a time
    hub.repositories["org/one"] = {"m.gguf": large}
    hub.cut.add("m.gguf")
    answer = ask("hf:org/one", env)
    if "refused" in answer:  # releases before 2.0 do not try again by themselves; what came is kept for the next time
        answer = ask("hf:org/one", env)
    assert Path(answer["path"]).read_bytes() == large
    ranges = [asked for method, _, asked in hub.asked if method == "FILE"]
    assert len(ranges) == 2
    assert ranges[0] == ""
    assert 0 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= len(large) // 2


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "RepoNotFound", ("has no model 'org/x'", "HF_TOKEN")),
        (401, "RepoNotFound", ("has no model 'org/x'", "private")),
        (401, "GatedRepo", ("org/x is gated", "ask for access", "HF_TOKEN")),
        (403, "GatedRepo", ("org/x is gated", "ask for access", "HF_TOKEN")),
        (403, "", ("does not let you read org/x", "HF_TOKEN")),
    ],
)
def test_a_refusal_of_the_hub_is_one_sentence_that_says_what_to_do(
    hub: FakeHub, env: dict[str, str], status: int, code: str, words: tuple[str, ...]
) -> None:
    hub.refused["org/x"] = (status, code)
    refused(ask("hf:org/x:m.gguf", env), *words)


def test_a_token_from_the_environment_is_sent(hub: FakeHub, env: dict[str, str]) -> None:
    hub.repositories["org/one"] = {"m.gguf": GGUF[:100]}
    ask("hf:org/one", env, HF_TOKEN="hf_secret")
    assert "Bearer hf_secret" in hub.tokens


def test_without_connection_and_cache_the_sentence_names_both_ways_out(env: dict[str, str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        refused(ask("hf:org/x", env, HF_ENDPOINT=nowhere), "cannot be fetched now", "HF_ENDPOINT")
    refused(ask("hf:org/x", env, KVILT_OFFLINE="1"), "org/x is not whole in the hub's cache", "forbids")


def test_a_repository_with_nothing_to_read_is_refused(hub: FakeHub, env: dict[str, str]) -> None:
    hub.repositories["org/old"] = {"config.json": b"{}", "pytorch_model.bin": b"a pickle"}
    refused(ask("hf:org/old", env), "holds neither", "pickles are never read")
    assert hub.fetched() == set()


def test_without_the_package_the_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match=r'pip install "kvilt\[hub\]"'):
        resolve("hf:org/name")


def test_the_package_is_not_imported_before_a_model_of_the_hub_is_asked_for() -> None:
    code = "import kvilt.weights.hub, sys; sys.exit('huggingface_hub' in sys.modules or 'tqdm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_reference_is_read() -> None:
    assert HubReference.parse("hf:org/name") == HubReference("org/name", None)
    assert HubReference.parse("hf:Org-1/na.me_2:sub/f.gguf") == HubReference("Org-1/na.me_2", "sub/f.gguf")


@pytest.mark.parametrize(
    "name",
    [
        *("hf:", "hf:name", "hf:a/b/c", "hf:/name", "hf:org/", "hf:../name", "hf:org/..", "hf:org/.", "hf:org/a..b"),
        *("hf:org/a--b", "hf:org/-a", "hf:org/a.git", "hf:org/na me", "hf:org/n\0", "hf:org/n\n", "hf:o%2f/n"),
        *("hf:org/ñ", "hf:https://x.org/a", "hf:org/" + "x" * 5000),
        *("hf:org/n:", "hf:org/n:../m.gguf", "hf:org/n:/m.gguf", "hf:org/n:a/../m.gguf", "hf:org/n:a//m.gguf"),
        *("hf:org/n:..\\m.gguf", "hf:org/n:C:m.gguf", "hf:org/n:m.bin", "hf:org/n:m.safetensors", "hf:org/n:a\0.gguf"),
        *("hf:org/n:./m.gguf", "hf:org/n:*.gguf", "hf:org/n:.. /m.gguf", "hf:org/n:" + "x" * 5000 + ".gguf"),
    ],
)
def test_a_name_that_is_none_or_would_leave_the_repository_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFound, match="hf:"):
        resolve(name)
