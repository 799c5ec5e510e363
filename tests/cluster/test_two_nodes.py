"""Two Ray nodes in two network namespaces, with addresses of their own: one cluster over both."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from absent import skip_without

import kvilt

pytestmark = [pytest.mark.slow, pytest.mark.privileged]
ROOT = Path(kvilt.__file__).parents[1]
PATIENCE_S = 600.0
NAMES, ADDRESSES = ("kvilt-left", "kvilt-right"), ("10.77.41.1", "10.77.41.2")
_ASK = """
import sys
from urllib.request import Request, urlopen
asked = Request(sys.argv[1], sys.argv[2].encode() or None, {"content-type": "application/json"})
print(urlopen(asked, timeout=300).read().decode())
"""
TOKEN = secrets.token_hex(32)
HEAD = f"{ADDRESSES[0]}:6399"


def _ip(*words: str, check: bool = True) -> int:
    return subprocess.run(["ip", *words], check=check, capture_output=True, timeout=60).returncode


@pytest.fixture
def namespaces() -> Iterator[None]:
    """Two namespaces and a cable between them."""
    if importlib.util.find_spec("ray") is None:
        skip_without("ray")
    if os.geteuid() or shutil.which("ip") is None or _ip("netns", "add", NAMES[0], check=False):
        pytest.skip("the system does not let this user make network namespaces")
    try:
        _ip("netns", "add", NAMES[1])
        _ip("link", "add", "kvilt0", "netns", NAMES[0], "type", "veth", "peer", "kvilt1", "netns", NAMES[1])
        for name, address, link in zip(NAMES, ADDRESSES, ("kvilt0", "kvilt1"), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in NAMES:
            _ip("netns", "del", name, check=False)


@contextmanager
def _running(name: str, command: list[str], log: Path, until: str) -> Iterator[re.Match[str]]:
    """A command in a namespace, once it has printed what `until` matches; ended with all its children at the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}  # all nodes must have the same one
    with log.open("wb") as out:
        inside = ["ip", "netns", "exec", name, *command]
        process = subprocess.Popen(inside, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        end_s = time.monotonic() + PATIENCE_S
        while (found := re.search(until, log.read_text())) is None:
            assert time.monotonic() < end_s and process.poll() in (None, 0), log.read_text()
            time.sleep(0.2)
        yield found
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)


def _asked(url: str, path: str, body: Any = None) -> Any:
    """A request from inside the first namespace."""
    given = "" if body is None else json.dumps(body)
    command = ["ip", "netns", "exec", NAMES[0], sys.executable, "-c", _ASK, url + path, given]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S).stdout)


def test_replicas_on_two_nodes_answer_alike(namespaces: None, tmp_path: Path) -> None:
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "2", "--object-store-memory"]
    ray += [str(100 << 20), "--disable-usage-stats"]
    head = [*ray, "--head", "--port", "6399", "--include-dashboard", "false"]
    up = [sys.executable, "-m", "kvilt", "cluster", "up", "--ray", HEAD, "--threads", "1", "--port", "8000"]
    with ExitStack() as stack:
        head += ["--temp-dir", stack.enter_context(TemporaryDirectory(prefix="ray"))]  # its sockets need a short path
        for name, address, start, log in (
            (NAMES[0], ADDRESSES[0], head, "left"),
            (NAMES[1], ADDRESSES[1], [*ray, "--address", HEAD], "right"),
        ):
            command = [*start, "--node-ip-address", address]
            stack.enter_context(_running(name, command, tmp_path / log, r"Ray runtime started|--block"))
        command = [*up, "--host", ADDRESSES[0], "--replicas", "2"]
        url = stack.enter_context(_running(NAMES[0], command, tmp_path / "up", r"served at (http://\S+)"))[1]
        urls = [one["url"] for one in _asked(url, "/v1/cluster")["replicas"]]
        # Ray chooses the nodes; whichever it chose, they are reached at the addresses of their own.
        assert {one.rpartition(":")[0].removeprefix("http://") for one in urls} <= set(ADDRESSES)
        assert len(urls) == 2
        body = {"messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 8, "temperature": 0}
        texts = [_asked(one, "/v1/chat/completions", body)["choices"][0]["message"]["content"] for one in (url, *urls)]
        assert len(set(texts)) == 1
