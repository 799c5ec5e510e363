"""`kvilt run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import InputError
from ..llm import LLM, Completion, Stream, load
from ..sampling.params import SamplingParams
from .progress import bars


@dataclass(frozen=True, slots=True)
class Ask:
    """What the user wants answered, and how it is to be shown."""

    prompt: str
    system: str
    raw: bool
    json: bool
    verbose: bool


def answer(ask: Ask, model: str, sampling: dict[str, Any], config: dict[str, Any]) -> None:
    """Load a model, stream its answer to stdout and its numbers to stderr."""
    params = SamplingParams.of(**sampling)  # before the model: a typo should not cost a load
    prompt = read_prompt(ask.prompt)
    started_s = time.perf_counter()
    with bars() as shown:
        llm = load(model, on_fetch=shown.fetching, **config)
    load_s = time.perf_counter() - started_s
    with llm:
        stream = _stream(llm, ask, prompt, params)
        if ask.json:
            print(json.dumps(as_json(stream.completion, model, load_s), ensure_ascii=False))
            return
        for piece in stream:
            print(piece, end="", flush=True)
        print(flush=True)
        print(numbers(stream.completion), file=sys.stderr)
        if ask.verbose:
            print(details(llm, model, load_s), file=sys.stderr)


def read_prompt(given: str) -> str:
    """The prompt itself, or what a pipe says."""
    if given != "-":
        return given
    if sys.stdin.isatty():
        raise InputError('no prompt was given; write it as an argument, or pipe it in: echo "..." | kvilt run')
    text = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not text:
        raise InputError("the pipe was empty; give a prompt as an argument or through the pipe")
    return text


def _stream(llm: LLM, ask: Ask, prompt: str, params: SamplingParams) -> Stream:
    if ask.raw or llm.tokenizer.chat_template is None:
        return llm.stream(prompt, params)
    system = [{"role": "system", "content": ask.system}] if ask.system else []
    return llm.stream_chat([*system, {"role": "user", "content": prompt}], params)


def speed(completion: Completion) -> float:
    """Tokens per second after the first one; 0 where there is only one."""
    later, time_s = len(completion.token_ids) - 1, completion.timing.total_s - completion.timing.first_token_s
    return later / time_s if later > 0 and time_s > 0 else 0.0


def numbers(completion: Completion) -> str:
    """The one line under an answer."""
    usage, timing = completion.usage, completion.timing
    return (
        f"{usage.prompt_tokens} prompt tokens · {usage.completion_tokens} generated · "
        f"{speed(completion):.1f} tok/s · first token {timing.first_token_s:.2f} s · {completion.finish_reason}"
    )


def details(llm: LLM, model: str, load_s: float) -> str:
    """More than most people want to know."""
    executor = llm.executor
    spec, pool = executor.spec, executor.pool
    return (
        f"{model}: {spec.family}, {len(spec.layers)} layers, hidden {spec.hidden_size}, "
        f"vocabulary {spec.vocab_size}, context {executor.max_context} of {spec.context}\n"
        f"loaded in {load_s:.2f} s · {pool.ops.numerics} · "
        f"KV pool of {pool.pages} pages, {pool.pages * pool.layout.page_bytes >> 20} MiB"
    )


def as_json(completion: Completion, model: str, load_s: float) -> dict[str, Any]:
    """A completion for programs."""
    return {
        "model": model,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "usage": asdict(completion.usage),
        "timing": {**asdict(completion.timing), "load_s": load_s, "tokens_per_s": speed(completion)},
    }
