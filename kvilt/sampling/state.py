"""The sampling state of one sample of one request: its params, tokens, grammar and seed.

Refuses to know logits, and advances only when its owner commits a token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ..errors import InputError, ParamError
from .bans import BadWords
from .history import History
from .matcher import Matcher
from .noise import fold_seed, row_key
from .params import SamplingParams


class SamplingState:
    """What one sample of one request remembers between tokens; it advances only by `advance`."""

    __slots__ = (
        "_bad_words",
        "_folded",
        "_is_plain",
        "end_ids",
        "history",
        "matcher",
        "params",
        "record",
        "sample_index",
        "seed",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Iterable[int] = (),
        sample_index: int = 0,
        end_ids: Iterable[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """`end_ids` end this sample besides the params' own `stop_token_ids`; none is drawn before `min_tokens`.

        `matcher` follows the params' grammar and belongs to this state from here on.
        """
        if params.bad_words:
            raise ParamError("bad_words", "is text, which the sampler cannot read; give bad_words_ids, or use an LLM")
        if (params.grammar is None) != (matcher is None):
            raise ParamError("grammar", "needs a matcher for this vocabulary, and a matcher a grammar; or use an LLM")
        self.params = params.with_seed()
        assert self.params.seed is not None
        self.seed = self.params.seed
        self.sample_index = _counted(sample_index)
        self.history = History(prompt_ids)
        self.end_ids = frozenset([*params.stop_token_ids, *end_ids])
        self.matcher = matcher
        self._bad_words = BadWords.of(params.bad_words_ids)
        self._folded = fold_seed(self.seed)
        # Whether nothing but the logits decides the draws: asked several times in every step.
        self._is_plain = not (
            params.penalized
            or params.logit_bias
            or params.no_repeat_ngram_size
            or params.bad_words_ids
            or params.min_tokens
            or matcher is not None
        )
        self.record: tuple[int, bytes] | None = None  # this state in a `DrawTable`, and the size of its vocabulary

    def advance(self, token: int) -> None:
        """Commit a token that was drawn (or given) for the next position."""
        if self.matcher is not None:
            self.matcher.accept(token)
        self.history.append(token)

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back, as if they had never been committed: drafts that were not accepted."""
        self.history.check_rollback(count)
        if self.matcher is not None:
            self.matcher.rollback(count)
        self.history.rollback(count)

    def fork(self, sample_index: int | None = None) -> SamplingState:
        """The same state for another sample, or for drafts that may be rejected."""
        other = copy.copy(self)
        other.history = self.history.fork()
        other.matcher = self.matcher and self.matcher.fork()
        if sample_index is not None:
            other.sample_index = _counted(sample_index)
        return other

    @property
    def may_end(self) -> bool:
        """Whether enough tokens were generated for the next one to be the last."""
        return self.history.generated_tokens >= self.params.min_tokens

    @property
    def bans(self) -> bool:
        """Whether some tokens may be banned now."""
        if self._is_plain:
            return False
        return bool(self.params.no_repeat_ngram_size or self.params.bad_words_ids) or not self.may_end

    @property
    def reads_history(self) -> bool:
        """Whether the next draw depends on tokens drawn before it, other than through the logits."""
        return not self._is_plain and (self.params.penalized or self.bans or self.matcher is not None)

    @property
    def edited(self) -> bool:
        """Whether some scores of the row are changed before it is drawn from."""
        return not self._is_plain and (bool(self.params.logit_bias) or self.reads_history)

    def banned(self) -> npt.NDArray[np.int64]:
        """The ids that may not be drawn next; some may stand twice."""
        size = self.params.no_repeat_ngram_size
        repeated = self.history.repeats(size) if size else np.empty(0, np.int64)
        ends = [] if self.may_end else sorted(self.end_ids)
        return np.concatenate([repeated, np.array([*self._bad_words.next(self.history.ids), *ends], np.int64)])

    def noise_key(self, position: int) -> int:
        """The key of this sample's noise for the token at `position`."""
        return row_key(self._folded, self.sample_index, position)


def _counted(sample_index: int) -> int:
    if sample_index < 0:
        raise InputError(f"a sample index counts from 0, so it cannot be {sample_index}")
    return sample_index
