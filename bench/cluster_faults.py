"""Requests to a cluster of kvilt while every kind of fault happens; each answer is compared with that of one process.

    python bench/cluster_faults.py [--requests 10000] [--replicas 2] [--clients 8] [--kinds kill,hang,store,door,roll]

It starts `kvilt serve` as the reference and asks it each different request once (half of them greedy, half with a
seed), then `kvilt cluster up` with a shared folder and, where there is a Redis or Valkey program, a server. While
clients send the requests, faults happen one after the other, each in its part of the run:

 kill   a replica gets SIGKILL
 hang   a replica is stopped with SIGSTOP for 10 seconds
 store  the Redis server gets SIGKILL, and is started again later
 door   the door gets SIGKILL; Ray starts it again
 roll   `kvilt cluster up` is called again, which replaces all replicas

Every answer must be that of the reference, token for token, or a clean error: an error object with a code, as a status
or as the last event of a stream, or, while the door is restarted, a connection that breaks. Each handle whose creation
was confirmed must be there at the end, and answer as the reference does. The command fails where one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

KINDS = ("kill", "hang", "store", "door", "roll")
PATIENCE_S = 600.0
ANSWER = 4


class Requests:
    """The different requests of a run, and what the reference answers to them."""

    def __init__(self, count: int) -> None:
        self.bodies = [self._body(n) for n in range(count)]
        self.documents = [f"Document {n}: the river of the number {n * 7} flows to the sea. " * 3 for n in range(8)]
        self.answers: list[str] = []
        self.continued: list[str] = []

    @staticmethod
    def _body(n: int) -> dict[str, Any]:
        system = "You answer in a few words, and you never say more than was asked. " * (1 + n % 3)
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"What comes after {n % 40}, please?"},
        ]
        sampling = {"temperature": 0.9, "seed": n} if n % 2 else {"temperature": 0}
        return {"messages": messages, "max_tokens": ANSWER, "ignore_eos": True, **sampling}

    def ask_reference(self, url: str) -> None:
        with client(url) as http:
            self.answers = [answer_of(http, {**body, "stream": False})[0] for body in self.bodies]
            for document in self.documents:
                made = http.post("/v1/kv", json={"prompt": document}).json()["id"]
                self.continued.append(continued(http, made)[0])


def client(url: str) -> httpx.Client:
    """A client without certificates, which take longer to load than a request takes."""
    return httpx.Client(base_url=url, timeout=PATIENCE_S, verify=False)


def answer_of(http: httpx.Client, body: dict[str, Any]) -> tuple[str, str]:
    """The text of a chat, and the code of its error."""
    reply = http.post("/v1/chat/completions", json=body)
    if reply.status_code != 200:
        return "", reply.json()["error"]["code"]
    if not body["stream"]:
        return reply.json()["choices"][0]["message"]["content"], ""
    text = ""
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return text, event["error"]["code"]
            text += event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
    if not reply.text.rstrip().endswith("data: [DONE]"):
        raise ValueError("a stream ends without an end")
    return text, ""


def continued(http: httpx.Client, handle: str) -> tuple[str, str]:
    body = {"prompt": " And so", "kv": handle, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    reply = http.post("/v1/completions", json=body)
    if reply.status_code != 200:
        return "", reply.json()["error"]["code"]
    return reply.json()["choices"][0]["text"], ""


class Run:
    """All requests of a run, their outcomes, and the handles that were confirmed."""

    def __init__(self, url: str, requests: Requests, count: int) -> None:
        self.url, self.requests, self.count = url, requests, count
        self.outcomes: Counter[str] = Counter()
        self.done = 0
        self.wrong: list[str] = []
        self.handles: dict[str, int] = {}  # the number of its document
        self.door_restarts = False
        self.lock = threading.Lock()

    def ask(self, n: int) -> None:
        """One request; one whose connection breaks while the door is restarted is sent again."""
        try:
            outcome = self._outcome(n)
        except httpx.TransportError as error:
            outcome = f"broken: {type(error).__name__}"
            if self.door_restarts:
                with self.lock:
                    self.outcomes["connection lost, sent again"] += 1
                time.sleep(0.5)
                self.ask(n)
                return
        except Exception as error:
            outcome = f"broken: {type(error).__name__}: {error}"
        with self.lock:
            self.done += 1
            self.outcomes[outcome] += 1

    def _outcome(self, n: int) -> str:
        with client(self.url) as http:
            if n % 50 == 49:
                return self._make(http, n // 50 % len(self.requests.documents))
            if n % 10 == 9 and self.handles:
                handle, document = random.Random(n).choice(list(self.handles.items()))
                return self._compared(n, *continued(http, handle), self.requests.continued[document])
            at = n % len(self.requests.bodies)
            body = {**self.requests.bodies[at], "stream": n % 3 == 0}
            return self._compared(n, *answer_of(http, body), self.requests.answers[at])

    def _make(self, http: httpx.Client, document: int) -> str:
        reply = http.post("/v1/kv", json={"prompt": self.requests.documents[document]})
        if reply.status_code != 200:
            return f"error {reply.json()['error']['code']}"
        with self.lock:
            self.handles[reply.json()["id"]] = document
        return "handle made"

    def _compared(self, n: int, text: str, code: str, expected: str) -> str:
        if code:
            return f"error {code}" if expected.startswith(text) else "wrong"
        if text == expected:
            return "equal"
        self.wrong.append(f"request {n}: {text!r} in place of {expected!r}")
        return "wrong"

    def lost_handles(self) -> int:
        """Handles that are not there any more, or continue in another way."""
        lost = 0
        with client(self.url) as http:
            for handle, document in self.handles.items():
                lost += continued(http, handle) != (self.requests.continued[document], "")
        return lost


class Faults:
    """Makes faults happen while a run goes on."""

    def __init__(self, run: Run, kinds: list[str], redis: Redis | None, again: list[str]) -> None:
        self.run, self.kinds, self.redis, self.again = run, kinds, redis, again
        self.happened: Counter[str] = Counter()

    def go(self) -> None:
        """Each kind once, when its part of the requests is done."""
        for number, kind in enumerate(self.kinds):
            while self.run.done < (number + 0.3) * self.run.count / len(self.kinds):
                time.sleep(0.05)
            print(f"{self.run.done} requests are done: {kind}", flush=True)
            getattr(self, kind)()
            self.happened[kind] += 1

    def kill(self) -> None:
        os.kill(self._replica(), signal.SIGKILL)

    def hang(self) -> None:
        pid = self._replica()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(10)
        with suppress(ProcessLookupError):  # Ray Serve may have replaced it
            os.kill(pid, signal.SIGCONT)

    def store(self) -> None:
        if self.redis is not None:
            self.redis.kill()
            time.sleep(10)
            self.redis.start()

    def door(self) -> None:
        self.run.door_restarts = True
        os.kill(httpx.get(f"{self.run.url}/v1/cluster", timeout=60).json()["door_pid"], signal.SIGKILL)
        until(lambda: replicas_of(self.run.url) > 0)
        self.run.door_restarts = False

    def roll(self) -> None:
        subprocess.run(self.again, check=True, timeout=PATIENCE_S)

    def _replica(self) -> int:
        until(lambda: replicas_of(self.run.url) > 1)  # the last fault is over
        return int(httpx.get(f"{self.run.url}/v1/cluster", timeout=60).json()["replicas"][0]["pid"])


class Redis:
    """A server without files; None where the system has no such program."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.port = free_port()
        self.start()

    def start(self) -> None:
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen([*command, "--dir", str(self.folder)], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def replicas_of(url: str) -> int:
    try:
        return len(httpx.get(f"{url}/v1/cluster", timeout=5).json()["replicas"])
    except (httpx.TransportError, ValueError, KeyError):
        return 0


def until(true: Any) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end_s:
            raise TimeoutError("the cluster does not come back")
        time.sleep(0.1)


@contextmanager
def started(command: list[str], log: Path) -> Iterator[str]:
    """A command that serves; its address."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            end_s = time.monotonic() + PATIENCE_S
            while (found := re.search(r"served at (http://\S+)", log.read_text())) is None:
                if process.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(log.read_text())
                time.sleep(0.1)
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--different", type=int, default=120, help="requests that differ from each other")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if wrong := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"{wrong[0]!r} is no kind of fault; there are {', '.join(KINDS)}")
    kvilt = [sys.executable, "-m", "kvilt"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        requests = Requests(options.different)
        with started([*kvilt, "serve", "--port", "0", "--threads", "1"], folder / "serve.log") as url:
            requests.ask_reference(url)
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        redis = None if program is None else Redis(program, folder)
        same = ["--threads", "1", "--store", str(folder / "store")]
        if redis is not None:
            stack.callback(redis.kill)
            same += ["--store-redis", f"redis://127.0.0.1:{redis.port}/0"]
        up = [*kvilt, "cluster", "up", "--replicas", str(options.replicas), *same]
        up += ["--port", str(free_port())]  # the same after the door was started again
        url = stack.enter_context(started(up, folder / "up.log"))
        run = Run(url, requests, options.requests)
        faults = Faults(run, kinds, redis, [*up, "--ray", "auto"])
        breaking = threading.Thread(target=faults.go, daemon=True)
        breaking.start()
        with ThreadPoolExecutor(options.clients) as threads:
            list(threads.map(run.ask, range(options.requests)))
            while breaking.is_alive():  # every fault happens under load
                list(threads.map(run.ask, range(run.done, run.done + 8 * options.clients)))
        breaking.join(PATIENCE_S)
        until(lambda: replicas_of(url) >= options.replicas)
        lost = run.lost_handles()
    report(options, run, faults, lost)


def report(options: argparse.Namespace, run: Run, faults: Faults, lost: int) -> None:
    bad = sum(count for outcome, count in run.outcomes.items() if outcome == "wrong" or outcome.startswith("broken"))
    shown = {
        "requests": run.done,
        "faults": dict(faults.happened),
        "outcomes": dict(run.outcomes.most_common()),
        "handles": len(run.handles),
        "handles lost": lost,
    }
    print(json.dumps(shown, indent=1))
    print("\n".join(run.wrong[:10]))
    if options.json:
        options.json.write_text(json.dumps(shown, indent=1))
    if bad or lost or len(faults.happened) < len(faults.kinds):
        sys.exit(1)


if __name__ == "__main__":
    main()
