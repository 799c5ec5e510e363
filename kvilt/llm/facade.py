"""LLM: generate, stream, chat and prefill, all of them made of steps over runs.

Refuses to know HTTP and terminals, and how a model is found and built.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, overload

from torch import Tensor

from ..batch import Batch, Last
from ..errors import Cancelled, InputError, ParamError
from ..executor.executor import STEP_TOKENS, Executor
from ..executor.inputs import read_ids
from ..kv.cache import KVCache
from ..sampling.params import SamplingParams
from ..sampling.sampler import SampleState
from ..text.chat import ChatTemplate
from ..text.tokenizer import Tokenizer
from .completion import Completion, Stream
from .run import Run, closing

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


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

        With `kv` the prompt stands behind what that cache holds; the cache itself is forked, never changed. With `n`
        the prompt is computed once, and the samples after the first are the result's `alternatives`.
        """
        chosen = SamplingParams.of(params, **fields)
        one = _is_one(prompt)
        prompts: Sequence[Any] = [prompt] if one else list(prompt)
        ids = [self._ids(each, kv) for each in prompts]
        done = self._complete(ids, chosen, kv, kv.num_entries if kv else 0, keep_kv)
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
        chosen = SamplingParams.of(params, **fields)
        ids = self.chat_template.encode(self.tokenizer, messages, tools=tools)
        return self._complete([ids], chosen, kv, _shared(ids, kv), keep_kv)[0]

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
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special=kv is None)
        else:
            ids = read_ids(prompt, self.executor.spec.vocab_size)
        if not ids:
            raise InputError("the prompt is empty; give at least one token")
        if kv is None:
            return ids
        if kv.batch_size != 1:
            raise InputError(f"a prompt continues a cache of one row, this one has {kv.batch_size}")
        # A place that was embedded has no id; the place is counted, its 0 is not read.
        return [token if isinstance(token, int) else 0 for token in kv.tokens()] + ids

    def _complete(
        self, prompts: Sequence[list[int]], params: SamplingParams, kv: KVCache | None, reused: int, keep_kv: bool
    ) -> list[Completion]:
        """Run all prompts to their ends, each step one batch of everything that still runs."""
        runs: list[Run] = []
        with self.executor.call(), closing(runs):
            for ids in prompts:
                runs.append(self._start(ids, params, kv, reused))  # noqa: PERF401 (what has begun must be closed)
            try:
                while live := [run for first in runs for run in first.samples if run.finish_reason is None]:
                    self._step(live)
            except Cancelled:
                raise Cancelled([run.generated for first in runs for run in first.samples]) from None
            return [run.completion(keep_kv) for run in runs]

    def _start(self, ids: list[int], params: SamplingParams, kv: KVCache | None, reused: int) -> Run:
        """A run of `ids`, whose first `reused` tokens are taken from a fork of `kv`."""
        params = self._spelled(params)
        params.validate_vocab(self.executor.spec.vocab_size)
        own = kv.fork_to(reused) if kv is not None and reused else self.executor.create_kv_cache()
        try:
            own.check_fits(len(ids))  # before any work, though room is found step by step
            history = [token for token in own.tokens() if isinstance(token, int)] + ids[own.num_entries :]
            state = SampleState(params, history, end_ids=() if params.ignore_eos else self.stop_ids)
        except BaseException:
            own.close()
            raise
        return Run(ids=ids, kv=own, state=state, tokenizer=self.tokenizer, cached=own.num_entries)

    def _spelled(self, params: SamplingParams) -> SamplingParams:
        """These params with bad words as ids, each as it begins a text and as it follows a space."""
        if not params.bad_words:
            return params
        bare = [word.lstrip(" ") or word for word in params.bad_words]
        spelled = [self.tokenizer.encode(text, add_special=False) for word in bare for text in (word, f" {word}")]
        return SamplingParams.of(params, bad_words=(), bad_words_ids=[*params.bad_words_ids, *filter(None, spelled)])

    def _stream(self, ids: list[int], params: SamplingParams, kv: KVCache | None, reused: int, keep_kv: bool) -> Stream:
        if params.n > 1:
            raise ParamError("n", f"a stream shows one sample, not {params.n}; use generate or chat for several")
        run = self._start(ids, params, kv, reused)
        results: list[Completion] = []

        def result() -> Completion:
            if not results:
                raise InputError("this stream failed or was closed before its end, so it has no completion")
            return results[0]

        def pieces() -> Iterator[str]:
            with closing([run]):
                while text := self._piece(run):
                    yield text
                results.append(run.completion(keep_kv))

        return Stream(pieces(), result, run.stop)

    def _piece(self, run: Run) -> str:
        """The next text of a run, after as many steps as that takes; empty at its end."""
        try:
            with self.executor.call():
                while run.finish_reason is None and run.shown == len(run.text):
                    self._step([run])
        except Cancelled:
            if run.finish_reason is None:  # nobody stopped this stream: the caller must hear of it
                raise Cancelled([run.generated]) from None
        run.settle()
        return run.take_text()

    def _step(self, runs: Sequence[Run]) -> None:
        """One forward for all these runs; each is at its own place."""
        share = max(1, STEP_TOKENS // len(runs))
        rows = [run.row(share) for run in runs]
        logits = self.executor.run(Batch.of(rows))
        for run, row in zip(runs, rows, strict=True):
            run.kv.commit([[run.ids[p] for p in row.positions]])
        if ready := [run for run, row in zip(runs, rows, strict=True) if isinstance(row.want, Last)]:
            self._draw(logits.values, [run.drawing() for run in ready])

    def _draw(self, logits: Tensor, drawing: Sequence[Sequence[Run]]) -> None:
        """A token for each run; those of one entry draw from the same row of logits [entries, vocab]."""
        runs = [run for together in drawing for run in together]
        if len(runs) > len(logits):
            logits = logits[[row for row, together in enumerate(drawing) for _ in together]]
        drawn = self.executor.sample(logits, [run.state for run in runs], [len(run.ids) for run in runs])
        for run, token, logprobs in zip(runs, drawn.tokens.tolist(), drawn.logprobs, strict=True):
            run.accept(token, logprobs)


def _is_one(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Collection):
        raise InputError(f"a prompt is a text or token ids, or a list of these, not {type(prompt).__name__}")
    return len(prompt) > 0 and not any(isinstance(each, Sequence) or getattr(each, "ndim", 0) for each in prompt)


def _shared(ids: list[int], kv: KVCache | None) -> int:
    """How many tokens of `ids` a cache holds already; at least one is left to compute."""
    if kv is None:
        return 0
    if kv.batch_size != 1:
        raise InputError(f"a conversation continues a cache of one row, this one has {kv.batch_size}")
    return kv.shared_prefix(ids[:-1])
