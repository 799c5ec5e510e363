"""More ranks, more kinds of layers, real weights, the engine above and the server: the same answers as one process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from families import random_model, write_checkpoint
from tiny import write_tiny_of_bytes

import kvilt
from kvilt.store.disk import Disk
from kvilt.store.store import Store
from kvilt.store.tier import Budget

from .conftest import load_ranks
from .test_ranks import GREEDY, SEEDED, answers, check_family

pytestmark = pytest.mark.slow
# Each has something that is split, or left whole, in its own way.
KINDS = (
    "qwen2-moe", "gpt-oss", "gemma3", "gemma3n", "gemma4-e", "deepseek-v3", "olmo2", "falcon-h1", "qwen3-next-moe",
    "nemotron-h-moe", "phi3", "gpt2", "cohere2", "llama4", "starcoder2",
)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_layers(name: str, tmp_path: Path) -> None:
    check_family(write_checkpoint(random_model(name), tmp_path), 2)


@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks(folder: Path, ranks: int) -> None:
    check_family(folder, ranks)


@pytest.mark.parametrize("kv_dtype", ["int8", "float16", "k8v4"])
def test_other_numbers_in_pages(folder: Path, kv_dtype: str) -> None:
    """Scales of single heads travel with their heads."""
    executor = load_ranks(folder, 2, kv_dtype=kv_dtype)
    with executor.create_kv_cache() as kv, executor.create_kv_cache() as twin:
        executor.prefill(list(range(40)), kv)
        twin.load(kv.serialize())
        assert twin.serialize() == kv.serialize()
        assert executor.sample_tokens(9, [1], twin, params=GREEDY) == executor.sample_tokens(9, [1], kv, params=GREEDY)
    executor.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_smollm2(smollm2_path: Path, ranks: int) -> None:
    """Nine heads and three KV heads in packed weights: two ranks have unequal parts, three have equal ones.

    The native backend rounds what it multiplies packed weights with to 8 bits, where the last bit of a sum counts.
    """
    said, prompt = [], [1, 504, 1575, 314, 260, 6376, 4461, 47]
    for count in (1, ranks):
        executor = load_ranks(smollm2_path, count, kv_memory=1 << 28, max_context=512, backend="reference")
        said.append((answers(executor, [prompt, prompt[:3]], GREEDY), answers(executor, [prompt], SEEDED)))
        if count == ranks:
            assert executor._group is not None
            assert [len(split.heads[0].kv) for split in executor._group.splits] == ([1, 2] if ranks == 2 else [1] * 3)
        executor.close()
    assert said[0] == said[1]


def test_the_facade(tmp_path: Path) -> None:
    """Requests of all kinds through the engine: prefixes, forks, documents, a store on disk."""
    model = write_tiny_of_bytes(tmp_path / "model")
    said = []
    for ranks in (1, 2):
        store = Store(Budget(1 << 26), [Disk(tmp_path / f"store-{ranks}", Budget(1 << 26))])
        with kvilt.load(
            model, tensor_parallel=ranks, threads=1, device="cpu", kv_dtype="float32", kv_memory="4M", store=store
        ) as llm:
            first = llm.generate("a long prompt that fills more than one page of KV", max_tokens=20, temperature=0)
            again = llm.generate("a long prompt that fills more than one page of KV!", max_tokens=20, seed=3, n=2)
            documents = ["the first document, about whales", "the second document, about birds"]
            blended = llm.generate("what?", documents=documents, max_tokens=12, temperature=0)
            texts = [one.text for one in (again, *again.alternatives)]
            said.append((first.text, texts, again.usage.prefix_hit, blended.text))
        store.close()
    assert said[0] == said[1]
    assert said[0][2] >= 32  # tokens of a page that the second request found


@contextmanager
def served(model: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "kvilt.cli.main", "serve", "--port", "0", "--threads", "1", "--model", str(model)]
    own = subprocess.Popen([*command, "--kv-memory", "8M", *options], stderr=subprocess.PIPE, text=True)
    assert own.stderr is not None
    reader = None
    try:
        for line in own.stderr:
            if found := re.search(r"is served at (http://\S+)", line):
                reader = threading.Thread(target=own.stderr.read, daemon=True)
                reader.start()
                yield found[1], own
                break
        else:
            raise AssertionError("the server did not start")
    finally:
        own.terminate()
        own.wait(120)
        if reader is not None:
            reader.join(60)
        own.stderr.close()


def post(url: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def status_of(url: str) -> tuple[int, dict[str, object]]:
    try:
        with urlopen(url, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


BODIES: list[dict[str, object]] = [
    {"prompt": "kvilt", "max_tokens": 20, "temperature": 0},
    {"prompt": ["one", "another one"], "max_tokens": 12, "seed": 5, "temperature": 1.0, "logprobs": 2},
]


def texts(answer: dict[str, object]) -> list[str]:
    choices = answer["choices"]
    assert isinstance(choices, list)
    return [one["text"] for one in choices]


def is_worker(pid: int) -> bool:
    return b"parallel.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_server_answers_like_one_process_until_a_rank_is_killed(tmp_path: Path) -> None:
    model = write_tiny_of_bytes(tmp_path / "model")
    with served(model, "--kv-dtype", "float32") as (url, _):
        wanted = [texts(post(f"{url}/v1/completions", body)[1]) for body in BODIES]
    with served(model, "--kv-dtype", "float32", "--tensor-parallel", "2") as (url, own):
        assert [texts(post(f"{url}/v1/completions", body)[1]) for body in BODIES] == wanted
        assert status_of(f"{url}/health") == (200, {"status": "ok"})
        (worker,) = [pid for pid in children(own.pid) if is_worker(pid)]
        os.kill(worker, signal.SIGKILL)
        end = time.monotonic() + 60
        while status_of(f"{url}/health")[0] == 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert status_of(f"{url}/health") == (503, {"status": "failed"})
        code, answer = post(f"{url}/v1/completions", BODIES[0])
        assert code == 503 and answer["error"]["code"] == "rank_failed"  # type: ignore[index]
