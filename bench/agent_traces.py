"""Tokens that each turn of an agent computes, through every API, beside llama.cpp's server on the same prompts.

    python bench/agent_traces.py [--model smollm2] [--turns 30] [--threads 2] [--xllama PYTHON] [--apis chat,messages]
                                 [--traces append,forks,stripped] [--slots 1,4] [--json out.json]

A server of kvilt is started with the model; the traces are those of bench/agent_trace_shapes.py. With `--apis python`
the model is loaded into this process and prompts are token ids, for models without a chat template; `--model hybrid` is
a small Granite 4 hybrid with random weights (needs the package gguf).

llama.cpp gets the prompts that kvilt got, as token ids, with `cache_prompt` and its defaults, once for each number of
slots. Answers of kvilt are compared with those of a run without any reuse. "new" are tokens of a prompt that no
earlier prompt or answer begins with: an exact server computes at least these.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from agent_trace_shapes import TRACES, Message, Turn, played

APIS = ("chat", "completions", "responses", "messages", "ollama")


@dataclass
class Asked:
    """What a client was asked, and what it found out."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def add(self, prompt: list[int], answer: list[int], computed: int) -> None:
        self.prompts.append(prompt)
        self.answers.append(answer)
        self.computed.append(computed)

    def new(self) -> list[int]:
        """Of each prompt the tokens behind the longest part that an earlier prompt with its answer begins with."""
        seen: list[list[int]] = []
        found = []
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            found.append(len(prompt) - max((common(prompt[:-1], one) for one in seen), default=0))
            seen.append([*prompt, *answer])
        return found


def common(one: list[int], other: list[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Client:
    """Asks a server of kvilt through one API."""

    def __init__(self, url: str, api: str, session: Any, salt: str) -> None:
        self.url, self.api, self.session, self.salt = url, api, session, salt
        self.asked = Asked()

    def __call__(self, said: list[Message], tokens: int) -> str:
        ids = self.post("/tokenize", {"messages": said})["tokens"]
        found = getattr(self, self.api)(said, ids, tokens)
        text, kvilt = found["text"], found["kvilt"]
        answer = self.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        self.asked.add(ids, answer, kvilt["computed"] + kvilt["blended_recomputed"])
        return text

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=600) as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    @property
    def own(self) -> dict[str, Any]:
        return {} if self.session is None else {"session": self.session}

    def chat(self, said: list[Message], _ids: list[int], tokens: int) -> dict[str, Any]:
        body = {"messages": said, "max_tokens": tokens, "temperature": 0, "cache_salt": self.salt, **self.own}
        done = self.post("/v1/chat/completions", body)
        return {"text": done["choices"][0]["message"]["content"], "kvilt": done["usage"]["kvilt"]}

    def completions(self, _said: list[Message], ids: list[int], tokens: int) -> dict[str, Any]:
        body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "cache_salt": self.salt, **self.own}
        done = self.post("/v1/completions", body)
        return {"text": done["choices"][0]["text"], "kvilt": done["usage"]["kvilt"]}

    def responses(self, said: list[Message], _ids: list[int], tokens: int) -> dict[str, Any]:
        body = {"input": said, "max_output_tokens": tokens, "temperature": 0, "store": False, "cache_salt": self.salt}
        done = self.post("/v1/responses", {**body, **self.own})
        texts = [part["text"] for item in done["output"] for part in item.get("content") or ()]
        return {"text": "".join(texts), "kvilt": done["usage"]["kvilt"]}

    def messages(self, said: list[Message], _ids: list[int], tokens: int) -> dict[str, Any]:
        body = {"model": "m", "system": said[0]["content"], "messages": said[1:], "max_tokens": tokens}
        done = self.post("/v1/messages", {**body, "temperature": 0, **self.own})
        return {"text": "".join(b.get("text", "") for b in done["content"]), "kvilt": done["usage"]["kvilt"]}

    def ollama(self, said: list[Message], _ids: list[int], tokens: int) -> dict[str, Any]:
        options = {"num_predict": tokens, "temperature": 0, "repeat_penalty": 1.0}  # its default is 1.1
        done = self.post("/api/chat", {"model": "m", "messages": said, "stream": False, "options": options, **self.own})
        return {"text": done["message"]["content"], "kvilt": done["kvilt"]}

    def cold(self, index: int, tokens: int) -> bool:
        """Whether a prompt says the same where nothing is reused."""
        other = Client(self.url, "completions", None, f"cold {self.salt} {index}")
        text = other.completions([], self.asked.prompts[index], tokens)["text"]
        answer = self.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return bool(answer == self.asked.answers[index])


class Direct:
    """Asks a model in this process with token ids: no chat template, and answers are taken as they were drawn."""

    def __init__(self, llm: Any, name: str, exact: bool = True) -> None:
        self.llm, self.session = llm, llm.session(name, exact=exact)
        self.asked = Asked()
        self.ids: dict[str, list[int]] = {}

    def __call__(self, said: list[Message], tokens: int) -> str:
        prompt = [token for one in said for token in self.tokens_of(one)]
        done = self.session.generate(prompt, self.params(tokens))
        used = done.usage
        self.asked.add(prompt, done.token_ids, used.computed + used.blended_recomputed)
        self.ids[done.text] = list(done.token_ids)
        return done.text

    def tokens_of(self, message: Message) -> list[int]:
        if message["role"] == "assistant" and message["content"] in self.ids:
            return self.ids[message["content"]]
        return self.llm.prompt_ids(f"\n{message['role']}: {message['content']}\n", begins=message["role"] == "system")

    def params(self, tokens: int) -> Any:
        import kvilt

        return kvilt.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def cold(self, index: int, tokens: int) -> bool:
        done = self.llm.generate(self.asked.prompts[index], self.params(tokens), tenant=f"cold {index}")
        return bool(list(done.token_ids) == list(self.asked.answers[index]))


def started(model: str, threads: int, port: int) -> subprocess.Popen[bytes]:
    """A server of kvilt that is ready."""
    serve = ["serve", "--model", model, "--port", str(port), "--threads", str(threads), "--alias", "m"]
    folder = str(Path(__file__).parent.parent)
    server = subprocess.Popen(
        [sys.executable, "-m", "kvilt", *serve, "--kv-memory", "2G"],
        env={**os.environ, "PYTHONPATH": folder},
        stderr=subprocess.DEVNULL,  # a line for each request
    )
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
            return server
        except OSError:
            time.sleep(0.5)
    server.kill()
    sys.exit("the server did not start")


def llama(python: str, model: str, prompts: list[list[int]], tokens: int, slots: int, threads: int) -> list[int]:
    """What llama.cpp's server computes of the same prompts."""
    asked = {"model": model, "prompts": prompts, "tokens": tokens, "threads": threads, "slots": slots}
    script = Path(__file__).parent / "peers" / "llama_trace.py"
    run = subprocess.run([python, str(script)], input=json.dumps(asked), capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"llama.cpp failed:\n{run.stderr[-2000:]}")
    return [one["computed"] for one in json.loads(run.stdout.splitlines()[-1])]


def line(trace: str, server: str, asked: Asked, computed: list[int], turns: list[Turn]) -> dict[str, Any]:
    """One row of the table; the first turn is left out."""
    new, prompt = asked.new(), sum(map(len, asked.prompts[1:]))
    special = [i for i, turn in enumerate(turns) if turn.special and i]
    row = {"trace": trace, "server": server, "prompt": prompt, "new": sum(new[1:]), "computed": sum(computed[1:])}
    row |= {"special": [sum(new[i] for i in special), sum(computed[i] for i in special), len(special)]}
    shown = (
        f"| {trace} | {server} | {prompt:,} | {row['new']:,} | {row['computed']:,} | {row['computed'] / prompt:.1%} "
    )
    print(
        f"{shown}| {row['special']} | {computed} | {new} |",
        flush=True,
    )
    return {**row, "each": computed, "each_new": new}


def traced(name: str, clients: dict[str, Any], asked: argparse.Namespace, gguf: str) -> list[dict[str, Any]]:
    """One trace through every client, a run without reuse, and llama.cpp's server."""
    rows: list[dict[str, Any]] = []
    tokens = TRACES[name].answer
    first: tuple[Any, list[Turn]] | None = None
    for api, client in clients.items():
        turns = played(name, asked.turns, client)
        rows.append(line(name, f"kvilt, {api}", client.asked, client.asked.computed, turns))
        first = first or (client, turns)
    assert first is not None
    client, turns = first
    some = range(0, len(turns), asked.cold_every)
    print(f"{sum(client.cold(i, tokens) for i in some)} of {len(some)} answers are those of a cold run", flush=True)
    for slots in map(int, asked.slots.split(",") if asked.xllama else ()):
        theirs = llama(asked.xllama, gguf, client.asked.prompts, tokens, slots, asked.threads)
        rows.append(line(name, f"llama.cpp, {slots} slots", client.asked, theirs, turns))
    return rows


def over_http(asked: argparse.Namespace) -> list[dict[str, Any]]:
    server, rows = started(asked.model, asked.threads, asked.port), []
    url = f"http://127.0.0.1:{asked.port}"
    try:
        for name in asked.traces.split(","):
            clients = {api: Client(url, api, f"{name}-{api}", f"{name}-{api}") for api in asked.apis.split(",")}
            if name == "stripped":
                clients["exact: false"] = Client(url, "chat", {"name": "moved", "exact": False}, "moved")
            rows += traced(name, clients, asked, asked.gguf or asked.model)
    finally:
        server.terminate()
        server.wait()
    return rows


def in_process(asked: argparse.Namespace) -> list[dict[str, Any]]:
    import kvilt

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model
        if model == "hybrid":
            from hybrid_gguf import write_hybrid

            model = str(write_hybrid(Path(folder) / "hybrid.gguf"))
        with kvilt.load(model, kv_memory="1G", threads=asked.threads) as llm:
            for name in asked.traces.split(","):
                rows += traced(name, {"python": Direct(llm, name)}, asked, asked.gguf or model)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--gguf", help="the same model as a file, for llama.cpp")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--xllama", help="the Python that has xllamacpp")
    parser.add_argument("--slots", default="1,4", help="numbers of llama.cpp's slots")
    parser.add_argument("--apis", default=",".join(APIS), help="or python")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--cold-every", type=int, default=5, help="turns between two that are compared with a cold run")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = in_process(asked) if asked.apis == "python" else over_http(asked)
    if asked.json:
        asked.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
