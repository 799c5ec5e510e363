"""Tokens that each turn of an agent computes, through every API, beside llama.cpp's server on the same prompts.

    python bench/agent_traces.py [--model smollm2] [--turns 30] [--threads 2] [--xllama PYTHON] [--apis chat,messages]
                                 [--traces append,forks,stripped] [--json out.json]

A server of kvilt is started with the model. Traces, each with a system prompt and tool results:

 append    each turn adds the answer, a tool's result and a question
 forks     every fifth turn asks beside the conversation, from an earlier turn on, and returns to it
 stripped  answers carry reasoning, which the next question of the user leaves out

llama.cpp gets the prompts that kvilt rendered, as token ids, with one slot and `cache_prompt`. Every answer of kvilt is
compared with that of a run without any reuse, by a salt of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]
WORDS = ("river", "stone", "window", "letter", "garden", "market", "bridge", "winter", "silver", "paper", "engine")
ANSWER = 12  # tokens
APIS = ("chat", "completions", "responses", "messages", "ollama")


def text(dice: random.Random, words: int) -> str:
    """Some words of no meaning, which no cache has seen."""
    return " ".join(f"{dice.choice(WORDS)}{dice.randrange(100)}" for _ in range(words))


@dataclass
class Trace:
    """The requests of an agent; `ask` answers one."""

    name: str
    turns: int
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    def run(self, ask: Any) -> list[dict[str, Any]]:
        """All turns; what each computed."""
        system = {"role": "system", "content": f"You are an agent with tools. {text(self.dice, 120)}"}
        said: list[Message] = [system, {"role": "user", "content": text(self.dice, 20)}]
        early, done = list(said), []
        for turn in range(self.turns):
            if self.name == "forks" and turn % 5 == 4:
                done.append(ask([*early, {"role": "user", "content": text(self.dice, 20)}]))
                continue
            answer = ask(said)
            done.append(answer)
            thought = f"<think>{text(self.dice, 40)}</think>\n" if self.name == "stripped" else ""
            result = f"The tool says: {text(self.dice, 25)}"
            said = [
                *said,
                {"role": "assistant", "content": thought + answer["text"]},
                {"role": "user", "content": result},
            ]
            if self.name == "stripped" and turn % 5 == 4:
                said = [{**one, "content": one["content"].rpartition("</think>\n")[2]} for one in said]
            if turn == 2:
                early = list(said)
        return done


class Client:
    """Asks a server of kvilt through one API."""

    def __init__(self, url: str, api: str, session: Any, salt: str) -> None:
        self.url, self.api, self.session, self.salt = url, api, session, salt
        self.prompts: list[list[int]] = []

    def __call__(self, said: list[Message]) -> dict[str, Any]:
        ids = self.post("/tokenize", {"messages": said})["tokens"]
        self.prompts.append(ids)
        found = getattr(self, self.api)(said, ids)
        kvilt = found["kvilt"]
        return {
            "text": found["text"],
            "prompt": len(ids),
            "computed": kvilt["computed"] + kvilt["blended_recomputed"],
            "ids": ids,
        }

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=600) as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    @property
    def own(self) -> dict[str, Any]:
        return {} if self.session is None else {"session": self.session}

    def chat(self, said: list[Message], _ids: list[int]) -> dict[str, Any]:
        body = {"messages": said, "max_tokens": ANSWER, "temperature": 0, "cache_salt": self.salt, **self.own}
        done = self.post("/v1/chat/completions", body)
        return {"text": done["choices"][0]["message"]["content"], "kvilt": done["usage"]["kvilt"]}

    def completions(self, _said: list[Message], ids: list[int]) -> dict[str, Any]:
        body = {"prompt": ids, "max_tokens": ANSWER, "temperature": 0, "cache_salt": self.salt, **self.own}
        done = self.post("/v1/completions", body)
        return {"text": done["choices"][0]["text"], "kvilt": done["usage"]["kvilt"]}

    def responses(self, said: list[Message], _ids: list[int]) -> dict[str, Any]:
        body = {"input": said, "max_output_tokens": ANSWER, "temperature": 0, "store": False, "cache_salt": self.salt}
        done = self.post("/v1/responses", {**body, **self.own})
        texts = [part["text"] for item in done["output"] for part in item.get("content") or ()]
        return {"text": "".join(texts), "kvilt": done["usage"]["kvilt"]}

    def messages(self, said: list[Message], _ids: list[int]) -> dict[str, Any]:
        body = {
            "model": "m",
            "system": said[0]["content"],
            "messages": said[1:],
            "max_tokens": ANSWER,
            "temperature": 0,
        }
        done = self.post("/v1/messages", {**body, **self.own})
        return {"text": "".join(b.get("text", "") for b in done["content"]), "kvilt": done["usage"]["kvilt"]}

    def ollama(self, said: list[Message], _ids: list[int]) -> dict[str, Any]:
        options = {"num_predict": ANSWER, "temperature": 0}
        done = self.post("/api/chat", {"model": "m", "messages": said, "stream": False, "options": options, **self.own})
        return {"text": done["message"]["content"], "kvilt": done["kvilt"]}


def started(model: str, threads: int, port: int) -> subprocess.Popen[bytes]:
    """A server of kvilt that is ready."""
    serve = ["serve", "--model", model, "--port", str(port), "--threads", str(threads), "--alias", "m"]
    folder = str(Path(__file__).parent.parent)
    server = subprocess.Popen(
        [sys.executable, "-m", "kvilt", *serve, "--kv-memory", "2G"], env={**os.environ, "PYTHONPATH": folder}
    )
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
            return server
        except OSError:
            time.sleep(0.5)
    server.kill()
    sys.exit("the server did not start")


def llama(python: str, model: str, prompts: list[list[int]], threads: int) -> list[dict[str, Any]]:
    """What llama.cpp's server computes of the same prompts."""
    asked = json.dumps({"model": model, "prompts": prompts, "tokens": ANSWER, "threads": threads})
    script = Path(__file__).parent / "peers" / "llama_trace.py"
    run = subprocess.run([python, str(script)], input=asked, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"llama.cpp failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def line(name: str, who: str, counts: list[tuple[int, int]]) -> dict[str, Any]:
    """One row of the table: (prompt, computed) of each turn; the first turn is left out of the share."""
    later = counts[1:]
    prompt, computed = sum(one for one, _ in later), sum(two for _, two in later)
    shown = [computed for _, computed in counts]
    print(
        f"| {name} | {who} | {prompt:,} | {computed:,} | {computed / prompt:.1%} | {shown[:6]} ... {shown[-3:]} |",
        flush=True,
    )
    return {"trace": name, "who": who, "prompt": prompt, "computed": computed, "each": shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--gguf", help="the same model as a file, for llama.cpp")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--xllama", help="the Python that has xllamacpp")
    parser.add_argument("--apis", default=",".join(APIS))
    parser.add_argument("--traces", default="append,forks,stripped")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    server, rows = started(asked.model, asked.threads, asked.port), []
    url = f"http://127.0.0.1:{asked.port}"
    try:
        for name in asked.traces.split(","):
            rows += traced(name, url, asked)
    finally:
        server.terminate()
        server.wait()
    if asked.json:
        asked.json.write_text(json.dumps(rows))


def traced(name: str, url: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """One trace through every API, in a run without reuse, and beside llama.cpp."""
    rows, first = [], None
    for api in asked.apis.split(","):
        client = Client(url, api, f"{name}-{api}", f"{name}-{api}")
        done = Trace(name, asked.turns).run(client)
        rows.append(line(name, f"kvilt, {api}", [(one["prompt"], one["computed"]) for one in done]))
        first = first or (client, done)
    assert first is not None
    client, done = first
    if name == "stripped":
        loose = Client(url, "chat", {"name": "loose", "exact": False}, "loose")
        counts = Trace(name, asked.turns).run(loose)
        rows.append(line(name, "kvilt, exact: false", [(one["prompt"], one["computed"]) for one in counts]))
    same = 0
    for index in range(0, len(done), 5):  # a cold run of every fifth turn
        cold = Client(url, "completions", None, f"cold {name} {index}")
        same += cold.completions([], client.prompts[index])["text"] == done[index]["text"]
    print(f"{same} of {len(range(0, len(done), 5))} answers are those of a cold run", flush=True)
    if asked.xllama:
        theirs = llama(asked.xllama, asked.gguf or asked.model, client.prompts, asked.threads)
        counts = [(len(ids), one["computed"]) for ids, one in zip(client.prompts, theirs, strict=True)]
        rows.append(line(name, "llama.cpp", counts))
    return rows


if __name__ == "__main__":
    main()
