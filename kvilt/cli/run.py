"""`kvilt run`: one prompt, one answer."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..blend.recipe import Recipe
from ..errors import InputError, ParamError
from ..llm import LLM, Completion, Message, Stream, load
from ..sampling.constraint import JsonSchema
from ..sampling.params import SamplingParams
from ..sampling.sampler import TokenLogprobs
from .answer_writer import AnswerWriter
from .progress import bars
from .sampling import describe_params, given_params, repetition_hint, sampling_params, with_short_seed
from .store import check_store_options, context_prefix, open_store
from .texts import read_text

ADAPTER = "adapter"  # the name of the adapter that --lora gives


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The prompt of `kvilt run`, what goes with it, and how the answer is shown."""

    prompt: str
    system: str
    raw: bool
    json: bool
    verbose: bool
    lora: str = ""  # the folder of an adapter
    lora_scale: float = 1.0
    documents: tuple[str, ...] = ()  # files
    ratio: float | None = None  # of their tokens that is computed again
    template_options: tuple[str, ...] = ()  # NAME=VALUE, variables of the chat template


def answer(
    request: RunRequest, model: str, sampling: dict[str, Any], store: dict[str, Any], config: dict[str, Any]
) -> None:
    """Load a model, send its answer to stdout and its numbers to stderr."""
    if given_params(sampling).logprobs is not None and not request.json:
        raise ParamError("logprobs", "are shown as JSON only; add --json")
    check_store_options(store)
    prompt, own = read_prompt(request.prompt), _keywords(request)
    started_s = time.perf_counter()
    with open_store(store) as kept:
        with bars() as shown:
            llm = load(model, on_fetch=shown.fetching, store=kept, context_prefix=context_prefix(store), **config)
        with llm:
            params = with_short_seed(sampling_params(sampling, llm))
            _answer(llm, request, prompt, params, own, model, time.perf_counter() - started_s)


def _answer(
    llm: LLM, request: RunRequest, prompt: str, params: SamplingParams, own: dict[str, Any], model: str, load_s: float
) -> None:
    if request.lora:
        llm.load_lora(request.lora, ADAPTER)
    if request.json:
        done = _complete(llm, request, prompt, params, own)
        shown = {**as_json(done, model, load_s), "seed": params.seed}
        print(json.dumps(shown, ensure_ascii=False, allow_nan=False))
        return
    if params.n > 1:
        done = _show_samples(_complete(llm, request, prompt, params, own))
    else:
        done = _show(_stream(llm, request, prompt, params, own))
    for line in _footer(llm, request, params, done, model, load_s):
        print(line, file=sys.stderr)


def _footer(
    llm: LLM, request: RunRequest, params: SamplingParams, done: Completion, model: str, load_s: float
) -> Iterator[str]:
    """The lines on stderr after an answer."""
    yield numbers(done)
    yield from (f"note: {warning}" for warning in done.warnings)
    if any(sample.finish_reason == "repetition" for sample in (done, *done.alternatives)):
        yield repetition_hint(params)
    if request.verbose:
        yield details(llm, model, load_s)
        yield f"sampling: {describe_params(params, llm)}"
        if said := drafts(done):
            yield said


def read_grammar(options: dict[str, Any]) -> dict[str, Any]:
    """The grammar options that were given, as SamplingParams takes them: schemas and grammars come from files."""
    given = {name: value for name, value in options.items() if value}
    for name in given.keys() & {"json_schema", "lark", "gbnf"}:
        try:
            given[name] = Path(given[name]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ParamError(name, f"{given[name]!r} cannot be read as a text file: {error}") from None
    if given.pop("close_objects", False):
        if "json_schema" not in given:
            raise ParamError("close_objects", "is about a schema; give --json-schema FILE")
        given["json_schema"] = JsonSchema(given["json_schema"], close_objects=True)
    return given


def _show(stream: Stream) -> Completion:
    """Text as it comes."""
    writer = AnswerWriter()
    for piece in stream:
        writer.piece(piece, reasoning=piece.reasoning)
    print(flush=True)
    return stream.completion


def _show_samples(done: Completion) -> Completion:
    """All samples, one numbered block after the other."""
    samples = (done, *done.alternatives)
    texts = [f"{one.reasoning}\n\n{one.text}" if one.reasoning else one.text for one in samples]
    blocks = [f"[{i}]\n{text}" for i, text in enumerate(texts, start=1)]
    print("\n\n".join(blocks), flush=True)
    return done


def opens_chat() -> bool:
    """Whether there is a user at a terminal who gave no prompt."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def read_prompt(given: str) -> str:
    """The prompt itself, or the text of a pipe for `-`."""
    if given != "-":
        return given
    if sys.stdin.isatty():
        raise InputError('no prompt was given; write it as an argument, or pipe it in: echo "..." | kvilt run')
    text = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not text:
        raise InputError("the pipe was empty; give a prompt as an argument or through the pipe")
    return text


def _stream(llm: LLM, request: RunRequest, prompt: str, params: SamplingParams, own: dict[str, Any]) -> Stream:
    messages = _messages(llm, request, prompt)
    return llm.stream(prompt, params, **own) if messages is None else llm.stream_chat(messages, params, **own)


def _complete(llm: LLM, request: RunRequest, prompt: str, params: SamplingParams, own: dict[str, Any]) -> Completion:
    messages = _messages(llm, request, prompt)
    return llm.generate(prompt, params, **own) if messages is None else llm.chat(messages, params, **own)


def _keywords(request: RunRequest) -> dict[str, Any]:
    """The keywords besides the prompt: adapter, template options, documents, recipe."""
    if request.ratio is not None and not request.documents:
        raise ParamError("blend_ratio", "is for documents; give one with --document")
    own: dict[str, Any] = {"lora": ADAPTER, "lora_scale": request.lora_scale} if request.lora else {}
    if request.template_options:
        from .template_options import read_template_options  # most runs have none

        own["chat_template_kwargs"] = read_template_options(request.template_options)
    if not request.documents:
        return own
    recipe = Recipe.of(None, **({} if request.ratio is None else {"ratio": request.ratio}))
    return {**own, "documents": [read_text(path) for path in request.documents], "recipe": recipe}


def _messages(llm: LLM, request: RunRequest, prompt: str) -> list[Message] | None:
    """The prompt as chat messages; None where it is continued without a template."""
    if request.raw or llm.tokenizer.chat_template is None:
        if request.template_options:
            raise ParamError("template_option", "is for a chat template, and none is used here")
        return None
    system = [{"role": "system", "content": request.system}] if request.system else []
    return [*system, {"role": "user", "content": prompt}]


def speed(completion: Completion) -> float:
    """Tokens per second after the first one; 0 where there is only one."""
    later, time_s = len(completion.token_ids) - 1, completion.timing.total_s - completion.timing.first_token_s
    return later / time_s if later > 0 and time_s > 0 else 0.0


def numbers(completion: Completion) -> str:
    """The line of numbers under an answer."""
    usage, timing = completion.usage, completion.timing
    samples = (completion, *completion.alternatives)
    generated = sum(sample.usage.completion_tokens for sample in samples)
    reasons = dict.fromkeys(sample.finish_reason for sample in samples)
    blended = f" ({usage.blended_reused} reused, {usage.blended_recomputed} computed again)" if usage.recipe else ""
    return (
        f"{usage.prompt_tokens} prompt tokens{blended} · {generated} generated · "
        f"{sum(map(speed, samples)):.1f} tok/s · first token {timing.first_token_s:.2f} s · {', '.join(reasons)}"
    )


def details(llm: LLM, model: str, load_s: float) -> str:
    """The lines of --verbose about the model and its KV pool."""
    executor = llm.executor
    spec, pool = executor.spec, executor.pool
    return (
        f"{model}: {spec.family}, {len(spec.layers)} layers, hidden {spec.hidden_size}, "
        f"vocabulary {spec.vocab_size}, context {executor.max_context} of {spec.context}\n"
        f"loaded in {load_s:.2f} s · {pool.ops.numerics} · "
        f"KV pool of {' and '.join(map(str, dict.fromkeys(pool.group_pages)))} pages, {pool.nbytes >> 20} MiB"
    )


def drafts(completion: Completion) -> str:
    """Accepted and rejected drafts of all samples together; empty without drafts."""
    each = [sample.usage for sample in (completion, *completion.alternatives)]
    drafted, accepted = sum(one.drafted_tokens for one in each), sum(one.accepted_tokens for one in each)
    if not drafted:
        return ""
    columns = zip_longest(*(one.accepted_places for one in each), fillvalue=0)
    places = " ".join(str(sum(column)) for column in columns)
    return f"drafts: {accepted} of {drafted} tokens accepted ({accepted / drafted:.0%}), by place {places}"


def as_json(completion: Completion, model: str, load_s: float) -> dict[str, Any]:
    """A completion as JSON; several samples have their texts under `texts`, and all but the first in `alternatives`."""
    samples = (completion, *completion.alternatives)
    result = {"model": model, **_sample_json(completion)}
    result["timing"] |= {"load_s": load_s, "tokens_per_s": sum(map(speed, samples))}
    if completion.alternatives:
        result["texts"] = [sample.text for sample in samples]
        result["alternatives"] = [_sample_json(sample) for sample in completion.alternatives]
    return result


def _sample_json(completion: Completion) -> dict[str, Any]:
    result = {
        "text": completion.text,
        **({"reasoning": completion.reasoning} if completion.reasoning else {}),
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "usage": {name: value for name, value in asdict(completion.usage).items() if name != "documents"},
        "timing": asdict(completion.timing),
    }
    if completion.logprobs is not None:
        result["logprobs"] = [_logprobs_json(entry) for entry in completion.logprobs]
    if completion.warnings:
        result["warnings"] = list(completion.warnings)
    return result


def _logprobs_json(entry: TokenLogprobs) -> dict[str, Any]:
    """The logprobs of one token; JSON has no infinity, so a token that cannot occur has null."""
    top = [value if math.isfinite(value) else None for value in entry.top_logprobs]
    own = entry.logprob if math.isfinite(entry.logprob) else None
    return {**asdict(entry), "logprob": own, "top_logprobs": top}
