"""Sequences by id over any decoder-only model, which keeps their caches itself and may do nothing but loop.

What a model cannot do is made of what it can: a chunk that is not final waits for the final one, and a sequence that
was cut, or whose model failed, is computed again from its tokens when it goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import ContextOverflow, InputError, TruncateError, Unsupported
from ..executor.call import CallQueue, ExecutorCall, observe
from ..executor.inputs import read_ids
from .exchange import UnifiedBatch, UnifiedItem
from .interfaces import DecoderOnlyLLM, DecoderSteps
from .sequence_table import CacheInput, check_distinct, unknown_cache


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    held: int = 0  # the first so many tokens have KV in the model


@dataclass(slots=True)
class _Part:
    """A checked part of a batch, and the logits that came of it."""

    cache_id: str
    tokens: list[int]
    want: int
    sequence: _Sequence
    logits: list[Tensor] = field(default_factory=list)

    @property
    def start(self) -> int:
        return len(self.sequence.tokens)

    @property
    def continues(self) -> bool:
        """Whether the model's cache is just where the part goes on."""
        return 0 < self.sequence.held == self.start

    @property
    def all_tokens(self) -> list[int]:
        return [*self.sequence.tokens, *self.tokens]


class ModelTable:
    """The sequences of one model that is not kvilt's."""

    def __init__(self, model: DecoderSteps) -> None:
        self._model = model
        config = model.config()
        self._vocab, self._max_tokens = config.vocab_size, config.max_seq_len
        self.lock = threading.RLock()
        self._calls = CallQueue(lambda: None, nullcontext, lambda: None)
        self._stop = threading.Event()
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def busy(self) -> bool:
        return self._calls.busy

    def call(self) -> ExecutorCall:
        return self._calls.call()

    def length(self, cache_id: str) -> int:
        return len(self._sequences[cache_id].tokens) if cache_id in self._sequences else 0

    def known_length(self, cache_id: str) -> int:
        return len(self._get(cache_id).tokens)

    def tokens(self) -> int:
        return sum(len(one.tokens) for one in list(self._sequences.values()))

    def release(self, cache_id: str) -> None:
        with self.lock:
            if self._sequences.pop(cache_id, None) is not None:
                self._model.release(cache_id)

    def clear(self) -> None:
        for cache_id in list(self._sequences):
            self.release(cache_id)

    def truncate(self, cache_id: str, length: int) -> None:
        """Go back to `length` tokens: by the model's own `truncate`, or by computing them again when it goes on."""
        with self.lock:
            sequence = self._get(cache_id)
            held = len(sequence.tokens)
            if not 0 <= length <= held:
                raise TruncateError(
                    f"cannot truncate to {length}: the cache holds {held} tokens; choose 0 to {held}", 0
                )
            del sequence.tokens[length:]
            if sequence.held > length:
                self._cut(cache_id, sequence, length)

    def _cut(self, cache_id: str, sequence: _Sequence, length: int) -> None:
        cut = getattr(self._model, "truncate", None)
        if cut is None or not length:
            self._forget(cache_id, sequence)
            return
        cut(cache_id, length)
        sequence.held = length

    def prefill(self, prompts: Sequence[CacheInput]) -> list[Tensor]:
        """Each prompt from its beginning, in one `unified_forward` or one by one."""
        with self.lock:
            check_distinct(prompts)
            parts = [self._checked(part, _Sequence()) for part in prompts]
            old = {part.cache_id: self._sequences.get(part.cache_id) for part in parts}
            for cache_id, sequence in old.items():
                if sequence is not None:  # the model has one cache of an id; the old one comes back from its tokens
                    self._forget(cache_id, sequence)
            self._run(parts)
            self._sequences |= {part.cache_id: part.sequence for part in parts}
            return [part.logits[-1] for part in parts]

    def extend(self, parts: Sequence[CacheInput], create: bool = False) -> list[Tensor]:
        """Append tokens: decodes in one `decode_batch`, prompts by `prefill`, drafts one position after the other."""
        with self.lock:
            check_distinct(parts)
            if create:
                checked = [self._checked(part, self._sequences.get(part.cache_id) or _Sequence()) for part in parts]
            else:
                checked = [self._checked(part, self._get(part.cache_id)) for part in parts]
            self._run(checked)
            self._sequences |= {part.cache_id: part.sequence for part in checked}
            empty = torch.empty(0, self._vocab)
            return [torch.stack(part.logits[-part.want :]) if part.want else empty for part in checked]

    def _run(self, parts: Sequence[_Part]) -> None:
        """Run parts in the model and commit their tokens, or change nothing."""
        with self.call() as self._stop:
            try:
                if not self._unified(parts):
                    self._one_by_one(parts)
            except BaseException:
                for part in parts:  # what the model holds of them now is not known
                    self._forget(part.cache_id, part.sequence)
                raise
        for part in parts:
            ran = part.want > 0 or part.sequence.held > part.start
            part.sequence.tokens = part.all_tokens
            if ran:
                part.sequence.held = len(part.sequence.tokens)

    def _unified(self, parts: Sequence[_Part]) -> bool:
        """All parts in one call of the model, where it has one and takes these."""
        forward = getattr(self._model, "unified_forward", None)
        if forward is None or not all(part.want < 2 and (part.continues or not part.start) for part in parts):
            return False
        items = [UnifiedItem(part.cache_id, part.tokens, part.start, part.want > 0) for part in parts]
        observe(self._stop)
        try:
            logits = forward(UnifiedBatch(items))
        except Unsupported:
            return False
        for part, one in zip(parts, logits, strict=True):
            part.logits = [self._logits(one)] if part.want else []
            part.sequence.held = part.start + len(part.tokens)
        return True

    def _one_by_one(self, parts: Sequence[_Part]) -> None:
        """By `prefill`, `decode_batch` and `decode` alone."""
        for part in parts:
            if part.want == 1 and (len(part.tokens) > 1 or not part.continues):
                part.logits = [self._prefilled(part, part.all_tokens)]
            elif part.want > 1 and not part.continues and part.start:
                self._prefilled(part, part.sequence.tokens)
            elif part.want > 1 and not part.start:
                part.logits = [self._prefilled(part, part.tokens[:1])]
        while waiting := [part for part in parts if len(part.logits) < part.want]:
            self._decode(waiting)

    def _prefilled(self, part: _Part, tokens: list[int]) -> Tensor:
        observe(self._stop)
        if part.sequence.held:
            self._forget(part.cache_id, part.sequence)
        return self._logits(self._model.prefill(part.cache_id, tokens))

    def _decode(self, parts: Sequence[_Part]) -> None:
        """The next token of each part."""
        observe(self._stop)
        batch = [(part.cache_id, part.tokens[n := len(part.logits)], part.start + n) for part in parts]
        decode_batch = getattr(self._model, "decode_batch", self._decode_each)
        for part, one in zip(parts, decode_batch(batch), strict=True):
            part.logits.append(self._logits(one))

    def _decode_each(self, batch: Sequence[tuple[str, int, int]]) -> list[Any]:
        """The default of `DecoderOnlyLLM`, for a model that does not derive from it."""
        return DecoderOnlyLLM.decode_batch(cast(DecoderOnlyLLM, self._model), batch)

    def _forget(self, cache_id: str, sequence: _Sequence) -> None:
        """Drop what the model holds; the sequence is computed again from its tokens when it goes on."""
        sequence.held = 0
        self._model.release(cache_id)

    def _logits(self, raw: Any) -> Tensor:
        logits = torch.as_tensor(raw, dtype=torch.float32)
        if logits.shape != (self._vocab,):
            raise InputError(f"the model gave logits {list(logits.shape)}; its config() promises [{self._vocab}]")
        return logits

    def _get(self, cache_id: str) -> _Sequence:
        if cache_id not in self._sequences:
            raise unknown_cache(cache_id)
        return self._sequences[cache_id]

    def _checked(self, part: CacheInput, sequence: _Sequence) -> _Part:
        if part.lora_id is not None:
            raise Unsupported(f"cache {part.cache_id!r}: this model takes no adapters; leave lora_id out")
        ids = read_ids(part.tokens, self._vocab)
        if not ids:
            raise InputError("the input is empty; give at least one token")
        if len(sequence.tokens) + len(ids) > self._max_tokens:
            raise ContextOverflow(len(sequence.tokens) + len(ids), self._max_tokens)
        return _Part(part.cache_id, ids, part.want, sequence)
