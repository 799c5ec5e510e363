"""One sample in progress: its tokens, its KV, its text, and when it is over. Refuses to know forwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..batch import Ids, Last, Nothing, Row
from ..kv.cache import KVCache
from ..sampling.sampler import SampleState, TokenLogprobs
from ..text.detokenizer import Detokenizer
from ..text.stops import Emitted, StopChecker
from ..text.tokenizer import Tokenizer
from .completion import Completion, FinishReason, Timing, Usage


@dataclass(slots=True)
class Run:
    """One sample of one prompt. Sample 0 computes the prompt and holds the samples that are forked off behind it."""

    ids: list[int]  # prompt and generated
    kv: KVCache
    state: SampleState
    tokenizer: Tokenizer
    cached: int
    started_s: float = field(default_factory=time.perf_counter)
    others: list[Run] = field(default_factory=list)
    prompt_tokens: int = field(init=False)
    detokenizer: Detokenizer = field(init=False)
    checker: StopChecker = field(init=False)
    finish_reason: FinishReason | None = None
    text: str = ""
    shown: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_token_s: float = 0.0

    def __post_init__(self) -> None:
        params = self.state.params
        self.prompt_tokens = len(self.ids)
        self.detokenizer = Detokenizer(self.tokenizer, at_start=False)
        self.checker = StopChecker(params.stop, params.include_stop_str_in_output)

    @property
    def samples(self) -> list[Run]:
        """This run and those forked off it."""
        return [self, *self.others]

    @property
    def generated(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.ids[self.prompt_tokens :]

    def row(self, most: int) -> Row:
        """This run's share of a step: the next tokens that are not in the cache yet."""
        start = self.kv.num_entries
        stop = min(start + most, len(self.ids))
        self.kv.reserve(stop - start)
        want = Last() if stop == len(self.ids) else Nothing()
        return Row(Ids(self.ids[start:stop]), range(start, stop), self.kv, want=want)

    def drawing(self) -> list[Run]:
        """Who draws from the logits behind this run's cache: at the end of the prompt all its samples, later itself."""
        if len(self.ids) > self.prompt_tokens:
            return [self]
        for index in range(1, self.state.params.n):
            self.others.append(self._fork(index))
        return self.samples

    def _fork(self, sample_index: int) -> Run:
        """Another sample behind the same prompt, whose pages it shares."""
        return Run(
            ids=list(self.ids),
            kv=self.kv.fork(),
            state=self.state.fork(sample_index),
            tokenizer=self.tokenizer,
            cached=self.prompt_tokens,
            started_s=self.started_s,
        )

    def accept(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take in a drawn token, and see whether it is the last one."""
        self.first_token_s = self.first_token_s or time.perf_counter() - self.started_s
        may_end = self.state.may_end
        self.ids.append(token)
        self.state.advance(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token in self.state.end_ids:
            self._finish("stop")
            return
        text = self.detokenizer.add(token)
        emitted = self.checker.add(text) if may_end else Emitted(text)  # no stop is looked for before min_tokens
        self.text += emitted.text
        if emitted.stopped:
            self.finish_reason = "stop"
        elif self._full():
            self._finish("length")

    def _full(self) -> bool:
        return len(self.ids) - self.prompt_tokens == self.state.params.max_tokens or len(self.ids) > self.kv.capacity

    def _finish(self, reason: FinishReason) -> None:
        """The end of the text without a stop string: what was held back comes out."""
        emitted = self.checker.add(self.detokenizer.finish())
        self.text += emitted.text + self.checker.finish()
        self.finish_reason = reason

    def stop(self) -> None:
        """End here, unless it has ended already. From any thread, so the text is left to `settle`."""
        self.finish_reason = self.finish_reason or "cancelled"

    def settle(self) -> None:
        """After a stop what was held back comes out, so that the text is that of all tokens."""
        if self.finish_reason == "cancelled":
            self._finish("cancelled")

    def take_text(self) -> str:
        """Text that has not been shown yet."""
        text, self.shown = self.text[self.shown :], len(self.text)
        return text

    def completion(self, keep_kv: bool) -> Completion:
        """The result, with those of the other samples inside."""
        assert self.finish_reason is not None
        generated = self.generated
        return Completion(
            text=self.text,
            token_ids=generated,
            finish_reason=self.finish_reason,
            usage=Usage(self.prompt_tokens, len(generated), self.cached),
            logprobs=self.logprobs if self.state.params.logprobs is not None else None,
            timing=Timing(self.first_token_s, time.perf_counter() - self.started_s),
            kv=self.kv.fork() if keep_kv else None,
            alternatives=tuple(other.completion(keep_kv) for other in self.others),
        )


@contextmanager
def closing(runs: Sequence[Run]) -> Iterator[None]:
    """Close the caches of these runs and of their samples however the block ends."""
    try:
        yield
    finally:
        for first in runs:
            for run in first.samples:
                run.kv.close()
