"""LLM: text in, text out, over one executor. The facade most people start with.

One of the two places that build things from configuration. Refuses to know HTTP and terminals.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from .batch import Batch, Ids, Last, Nothing, Row
from .config import DEFAULT_MODEL, RunConfig, parse_bytes
from .errors import Cancelled, ContextOverflow, InputError, ParamError, TruncateError
from .executor.executor import STEP_TOKENS, Executor
from .executor.load import build_executor
from .kv.cache import KVCache
from .models.families.registry import recognise
from .sampling.params import SamplingParams
from .sampling.sampler import SampleState, TokenLogprobs
from .text import tokenizer as tokenizers
from .text.chat import ChatTemplate
from .text.detokenizer import Detokenizer
from .text.stops import StopChecker
from .text.tokenizer import Tokenizer
from .weights.hub import Progress, resolve
from .weights.source import Checkpoint, open_checkpoint

FinishReason = Literal["stop", "length", "cancelled"]
Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a completion took."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, not computed again


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the call."""

    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation. `token_ids` end with the token that stopped it, `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[TokenLogprobs] | None
    timing: Timing
    kv: KVCache | None = None  # with keep_kv: prompt and all generated tokens but the last; yours to close


class Stream:
    """Pieces of text as they are certain; after the last one `completion` has the rest."""

    def __init__(self, pieces: Iterator[str], result: Callable[[], Completion], stop: Callable[[], None]) -> None:
        self._pieces = pieces
        self._result = result
        self._stop = stop

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def completion(self) -> Completion:
        """The whole result; reads the stream to its end first."""
        for _ in self._pieces:
            pass
        return self._result()

    def stop(self) -> None:
        """Generate nothing after the step in progress: `completion` then has what there is, its KV too if kept.

        May be called from a signal's callback or another thread.
        """
        self._stop()


class LLM:
    """A model with its tokenizer and chat template. Close it, or use it as a context manager."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer, stop_ids: Sequence[int] = ()) -> None:
        self.executor = executor
        self.tokenizer = tokenizer
        self.stop_ids = frozenset([*tokenizer.eos_ids, *stop_ids])  # tokens that end an answer
        self._template: ChatTemplate | None = None

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        **fields: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        **fields: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        **fields: Any,
    ) -> Completion | list[Completion]:
        """Continue a prompt, or each of a list of them in one batch.

        With `kv` the prompt stands behind what that cache holds; the cache itself is forked, never changed.
        """
        chosen = SamplingParams.of(params, **fields)
        one = _is_one(prompt)
        prompts: Sequence[Any] = [prompt] if one else list(prompt)
        runs = [self._start(self._ids(each, kv), chosen, kv, kv.num_entries if kv else 0) for each in prompts]
        with _closing(runs):
            while live := [run for run in runs if run.finish_reason is None]:
                self._step(live)
            done = [run.completion(keep_kv) for run in runs]
        return done[0] if one else done

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        **fields: Any,
    ) -> Stream:
        """`generate` for one prompt, piece by piece."""
        chosen = SamplingParams.of(params, **fields)
        return self._stream(self._ids(prompt, kv), chosen, kv, kv.num_entries if kv else 0, keep_kv)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        **fields: Any,
    ) -> Completion:
        """Answer a conversation. With `kv`, what it shares with the conversation's beginning is not computed again."""
        return self.stream_chat(messages, params, tools=tools, kv=kv, keep_kv=keep_kv, **fields).completion

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        **fields: Any,
    ) -> Stream:
        """`chat`, piece by piece."""
        chosen = SamplingParams.of(params, **fields)
        ids = self.chat_template.encode(self.tokenizer, messages, tools=tools)
        return self._stream(ids, chosen, kv, _shared(ids, kv), keep_kv)

    def prefill(self, prompt: Prompt) -> KVCache:
        """The KV of a prompt, to fork and generate from as often as you like."""
        kv = self.executor.create_kv_cache()
        try:
            self.executor.prefill(self._ids(prompt, None), kv)
        except BaseException:
            kv.close()
            raise
        return kv

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's template, compiled when first needed."""
        if self._template is None:
            self._template = ChatTemplate.of(self.tokenizer)
        return self._template

    def close(self) -> None:
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _ids(self, prompt: Prompt, kv: KVCache | None) -> list[int]:
        """All tokens of a prompt, those in `kv` first."""
        ids = self.tokenizer.encode(prompt, add_special=kv is None) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InputError("the prompt is empty; give at least one token")
        if kv is None:
            return ids
        if kv.batch_size != 1:
            raise InputError(f"a prompt continues a cache of one row, this one has {kv.batch_size}")
        # A place that was embedded has no id; it is never read again, only counted.
        return [token if isinstance(token, int) else 0 for token in kv.tokens()] + ids

    def _start(self, ids: list[int], params: SamplingParams, kv: KVCache | None, reused: int) -> _Run:
        """A run of `ids`, whose first `reused` tokens are taken from a fork of `kv`."""
        params.validate_vocab(self.executor.spec.vocab_size)
        if len(ids) > self.executor.max_context:
            raise ContextOverflow(len(ids), self.executor.max_context)
        own = self._reuse(kv, reused) if kv is not None and reused else self.executor.create_kv_cache()
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_ids)
        return _Run(
            ids=ids,
            kv=own,
            state=SampleState(params, ids),
            detokenizer=Detokenizer(self.tokenizer, at_start=False),
            checker=StopChecker(params.stop, params.include_stop_str_in_output),
            stop_ids=stops,
            cached=own.num_entries,
        )

    def _reuse(self, kv: KVCache, length: int) -> KVCache:
        fork = kv.fork()
        try:
            fork.truncate(length)
        except TruncateError:  # a window gave that part back: compute it again
            fork.truncate(0)
        return fork

    def _stream(self, ids: list[int], params: SamplingParams, kv: KVCache | None, reused: int, keep_kv: bool) -> Stream:
        run = self._start(ids, params, kv, reused)
        results: list[Completion] = []

        def pieces() -> Iterator[str]:
            with _closing([run]):
                while run.finish_reason is None:
                    try:
                        self._step([run])
                    except Cancelled:
                        if run.finish_reason is None:  # nobody stopped this stream: the caller must hear of it
                            raise
                    if text := run.take_text():
                        yield text
                results.append(run.completion(keep_kv))

        return Stream(pieces(), lambda: results[0], run.stop)

    def _step(self, runs: Sequence[_Run]) -> None:
        """One forward for all these runs; each is at its own place."""
        share = max(1, STEP_TOKENS // len(runs))
        rows = [run.row(share) for run in runs]
        logits = self.executor.run(Batch.of(rows))
        drawing = [run for run, row in zip(runs, rows, strict=True) if isinstance(row.want, Last)]
        drawn = (
            self.executor.sample(logits.values, [run.state for run in drawing], [len(run.ids) for run in drawing])
            if drawing
            else None
        )
        for run, row in zip(runs, rows, strict=True):
            run.kv.commit([[run.ids[p] for p in row.positions]])
        if drawn is not None:
            for run, token, logprobs in zip(drawing, drawn.tokens.tolist(), drawn.logprobs, strict=True):
                run.accept(token, logprobs)


@dataclass(slots=True)
class _Run:
    """One generation in progress."""

    ids: list[int]  # prompt and generated
    kv: KVCache
    state: SampleState
    detokenizer: Detokenizer
    checker: StopChecker
    stop_ids: frozenset[int]
    cached: int
    prompt_tokens: int = field(init=False)
    finish_reason: FinishReason | None = None
    text: str = ""
    shown: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)
    first_token_s: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.ids)

    def row(self, most: int) -> Row:
        """This run's share of a step: the next tokens that are not in the cache yet."""
        start = self.kv.num_entries
        stop = min(start + most, len(self.ids))
        self.kv.reserve(stop - start)
        want = Last() if stop == len(self.ids) else Nothing()
        return Row(Ids(self.ids[start:stop]), range(start, stop), self.kv, want=want)

    def accept(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take in a drawn token, and see whether it is the last one."""
        self.first_token_s = self.first_token_s or time.perf_counter() - self.started_s
        self.ids.append(token)
        self.state.advance(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        params = self.state.params
        if token in self.stop_ids:
            self._finish("stop")
            return
        emitted = self.checker.add(self.detokenizer.add(token))
        self.text += emitted.text
        if emitted.stopped:
            self.finish_reason = "stop"
        elif len(self.ids) - self.prompt_tokens == params.max_tokens or len(self.ids) > self.kv.capacity:
            self._finish("length")

    def _finish(self, reason: FinishReason) -> None:
        """The end of the text without a stop string: what was held back comes out."""
        emitted = self.checker.add(self.detokenizer.finish())
        self.text += emitted.text + self.checker.finish()
        self.finish_reason = reason

    def stop(self) -> None:
        """End here, unless it has ended already."""
        self.finish_reason = self.finish_reason or "cancelled"

    def take_text(self) -> str:
        """Text that has not been shown yet."""
        text, self.shown = self.text[self.shown :], len(self.text)
        return text

    def completion(self, keep_kv: bool) -> Completion:
        assert self.finish_reason is not None
        generated = self.ids[self.prompt_tokens :]
        return Completion(
            text=self.text,
            token_ids=generated,
            finish_reason=self.finish_reason,
            usage=Usage(self.prompt_tokens, len(generated), self.cached),
            logprobs=self.logprobs if self.state.params.logprobs is not None else None,
            timing=Timing(self.first_token_s, time.perf_counter() - self.started_s),
            kv=self.kv.fork() if keep_kv else None,
        )


@contextmanager
def _closing(runs: Sequence[_Run]) -> Iterator[None]:
    """Close the caches of these runs however the block ends."""
    try:
        yield
    finally:
        for run in runs:
            run.kv.close()


def load(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    on_fetch: Progress | None = None,
    on_load: Callable[[int, int], None] | None = None,
    **options: Any,
) -> LLM:
    """A model by name or path, ready to use. Options: device, threads, kv_memory, max_context, kv_dtype, backend."""
    config = run_config(**options)
    checkpoint = open_checkpoint(resolve(os.fspath(model), on_fetch))
    try:
        recognise(checkpoint)  # what it is comes before what is wrong with it
        tokenizer = _tokenizer(checkpoint)
        executor = build_executor(checkpoint, config, on_load)
    except BaseException:
        checkpoint.tensors.close()
        raise
    return LLM(executor, tokenizer, _generation_stops(checkpoint))


def run_config(**options: Any) -> RunConfig:
    """A RunConfig from options as users write them; kv_memory may be a size like 2G."""
    known = {option.name for option in dataclasses.fields(RunConfig)}
    for name in options:
        if name not in known:
            raise ParamError(name, f"there is no such option; the options are {', '.join(sorted(known))}")
    if isinstance(options.get("kv_memory"), str):
        options["kv_memory"] = parse_bytes(options["kv_memory"])
    return RunConfig(**options)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.kind == "gguf":
        return tokenizers.from_metadata(checkpoint.config)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return tokenizers.from_file(Path(folder) / "tokenizer.json")


def _generation_stops(checkpoint: Checkpoint) -> list[int]:
    """End tokens that a Hugging Face folder names besides the tokenizer's own."""
    named = checkpoint.generation.get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    return [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or (len(prompt) > 0 and all(hasattr(item, "__index__") for item in prompt))


def _shared(ids: list[int], kv: KVCache | None) -> int:
    """How many tokens of `ids` a cache holds already; at least one is left to compute."""
    if kv is None:
        return 0
    if kv.batch_size != 1:
        raise InputError(f"a conversation continues a cache of one row, this one has {kv.batch_size}")
    return kv.shared_prefix(ids[:-1])
