"""Logits and requests' sampling states in, one token per row out.

A row's token depends on its own logits, state and position alone. Refuses to know caches and batches, and changes no
state: a state advances only when its owner commits the token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import GrammarFailed, InputError, NoTokenLeft, NumericsError, ParamError
from ..ops.contract import Reductions, RowLogprobs
from ..ops.logprobs import row_logprobs
from .bans import BadWords
from .draw import argmax, draw
from .history import History
from .matcher import Matcher, masks
from .noise import fold_seed, row_key
from .params import SamplingParams
from .transforms import PenalizedTokens, add_bias_, ban_, mask_, penalize_


class SamplingState:
    """What one sample of one request remembers between tokens; it advances only by `advance`."""

    __slots__ = ("_bad_words", "_folded", "end_ids", "history", "matcher", "params", "sample_index", "seed")

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
        return bool(self.params.no_repeat_ngram_size or self.params.bad_words_ids) or not self.may_end

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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities under the raw logits, before any transform."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest; among equals the lower id comes first
    top_ids: tuple[int, ...]  # likeliest first
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token per row, and its log-probabilities where the row's params ask for them."""

    tokens: Tensor  # [rows] int64
    logprobs: tuple[TokenLogprobs | None, ...]


def sample(
    logits: Tensor,
    states: Sequence[SamplingState],
    positions: Sequence[int],
    reductions: Reductions | None = None,
) -> SamplerOutput:
    """Choose a token for every row of logits [rows, vocab]; `positions` are the places the tokens will take.

    `reductions` of a backend do on the CPU what torch does otherwise.
    """
    _check(logits, states, positions)
    logits = logits.float()
    if logits.device.type != "cpu":
        reductions = None
    if reductions is not None:
        logits = logits.contiguous()
    tokens, peaks = _peaks(logits, reductions)
    _refuse(peaks, range(len(states)))
    chosen = {row: state for row, state in enumerate(states) if not is_argmax(state)}
    if chosen:
        keys = {row: state.noise_key(positions[row]) for row, state in chosen.items() if not state.params.greedy}
        drawn = _choose(logits, chosen, keys, reductions)
        tokens[list(drawn)] = torch.tensor(list(drawn.values()), device=tokens.device)
    return SamplerOutput(tokens, _logprobs(logits, tokens, states, reductions))


def _check(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> None:
    if logits.dim() != 2 or not len(states) == len(positions) == len(logits):
        raise InputError(
            f"sample takes logits [rows, vocab] with one state and one position per row, "
            f"not {tuple(logits.shape)} with {len(states)} states and {len(positions)} positions"
        )
    for position in positions:
        if position < 0:
            raise InputError(f"a position counts from 0, so it cannot be {position}")


def _peaks(scores: Tensor, reductions: Reductions | None) -> tuple[Tensor, list[float]]:
    """The first largest token of each row [rows], and its score; NaN wins over everything."""
    if reductions is not None:
        tokens, peaks = reductions.argmax(scores)
        return tokens, peaks.tolist()
    tokens = argmax(scores)
    if scores.device.type == "cpu":  # through numpy, like argmax: this runs in every step
        return tokens, scores.numpy()[np.arange(len(tokens)), tokens.numpy()].tolist()
    return tokens, scores.gather(1, tokens[:, None])[:, 0].tolist()


def _refuse(peak: Sequence[float], rows: Sequence[int]) -> None:
    """Raise for rows whose largest score is no number: NaN, +inf, or -inf everywhere."""
    if not all(map(math.isfinite, peak)):
        raise NumericsError([row for row, score in zip(rows, peak, strict=True) if not math.isfinite(score)])


def is_argmax(state: SamplingState) -> bool:
    """Whether the next token is the argmax of the logits."""
    return state.params.greedy and not _edited(state)


def _choose(
    logits: Tensor, states: Mapping[int, SamplingState], keys: Mapping[int, int], reductions: Reductions | None
) -> dict[int, int]:
    """The tokens of rows that need more than the argmax of their logits; `keys` of those that draw."""
    edited = [row for row, state in states.items() if _edited(state)]
    plain = sorted(states.keys() - set(edited))
    tokens = _draw(logits, plain, plain, states, keys, reductions)
    if edited:
        scores = logits[edited]  # a copy, the only one
        own = [states[row] for row in edited]
        _ban(_adjust(scores, own), edited, own)
        likeliest, peaks = _peaks(scores, reductions)
        if spent := [row for row, peak in zip(edited, peaks, strict=True) if peak == -math.inf]:
            raise NoTokenLeft(spent)  # only bans and grammars take a row's last token
        tokens |= dict(zip(edited, likeliest.tolist(), strict=True))
        drawn = [i for i, row in enumerate(edited) if row in keys]
        tokens |= _draw(scores, drawn, [edited[i] for i in drawn], states, keys, reductions)
    if bad := [row for row in sorted(tokens) if tokens[row] < 0]:
        raise NumericsError(bad)
    return tokens


def _edited(state: SamplingState) -> bool:
    """Whether some scores of the row are changed before it is drawn from."""
    return state.params.penalized or bool(state.params.logit_bias) or state.bans or state.matcher is not None


def _draw(
    scores: Tensor,
    at: Sequence[int],
    rows: Sequence[int],
    states: Mapping[int, SamplingState],
    keys: Mapping[int, int],
    reductions: Reductions | None,
) -> dict[int, int]:
    """Draws for `rows` of the batch, which stand `at` these places of scores."""
    if not rows:
        return {}
    drawn = draw(scores, at, [states[row].params for row in rows], [keys[row] for row in rows], reductions)
    return dict(zip(rows, drawn.tolist(), strict=True))


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def _adjust(scores: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Bias, then penalties, on the rows that have them; into `scores`."""
    entries = [(i, token, bias) for i, state in enumerate(states) for token, bias in state.params.logit_bias.items()]
    if entries:
        for state in states:
            if state.params.logit_bias:
                state.params.validate_vocab(scores.shape[-1])
        rows, ids, values = zip(*entries, strict=True)
        index = torch.tensor([rows, ids], device=scores.device)
        add_bias_(scores, index[0], index[1], _column(values, scores))
    if any(state.params.penalized for state in states):
        penalize_(scores, _touched(scores, states))
    return scores


def _ban(scores: Tensor, rows: Sequence[int], states: Sequence[SamplingState]) -> None:
    """Mask tokens that repeat an n-gram, complete a bad word, end a sample too early, or break its grammar."""
    at = [i for i, state in enumerate(states) if state.bans]
    banned = [states[i].banned() for i in at]
    if any(len(ids) for ids in banned):
        ids = np.concatenate(banned)
        owners = np.repeat(np.array(at, np.int64), [len(one) for one in banned])
        index = torch.from_numpy(np.stack([owners, ids])[:, ids < scores.shape[-1]]).to(scores.device)
        ban_(scores, index[0], index[1])
    held = [(i, state.matcher) for i, state in enumerate(states) if state.matcher is not None]
    if not held:
        return
    at = [i for i, _ in held]
    try:
        allowed = masks([matcher for _, matcher in held], scores.shape[-1]).to(scores.device)
    except GrammarFailed as error:
        raise GrammarFailed([rows[at[row]] for row in error.rows], error.reason) from None
    mask_(scores, at, allowed)


def _touched(scores: Tensor, states: Sequence[SamplingState]) -> PenalizedTokens:
    """The histories of the penalized rows, end to end."""
    rows = [i for i, state in enumerate(states) if state.params.penalized]
    params = [states[i].params for i in rows]
    tallies = [states[i].history.tally(scores.shape[-1]) for i in rows]
    lengths = torch.tensor([len(ids) for ids, _ in tallies], device=scores.device)

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(lengths)

    return PenalizedTokens(
        rows=spread(torch.tensor(rows, device=scores.device)),
        ids=torch.cat([ids for ids, _ in tallies]).to(scores.device),
        counts=torch.cat([counts for _, counts in tallies]).to(scores.device),
        repetition=spread(_column([p.repetition_penalty for p in params], scores)),
        frequency=spread(_column([p.frequency_penalty for p in params], scores)),
        presence=spread(_column([p.presence_penalty for p in params], scores)),
    )


def _logprobs(
    logits: Tensor, tokens: Tensor, states: Sequence[SamplingState], reductions: Reductions | None
) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities for the rows that want them."""
    tops = {row: state.params.logprobs for row, state in enumerate(states) if state.params.logprobs is not None}
    if not tops:
        return (None,) * len(states)
    rows, chosen = list(tops), tokens.tolist()
    if reductions is None:  # row by row: a sum by torch may depend on the shape of the batch
        each = {row: token_logprobs(logits[row], chosen[row], tops[row]) for row in rows}
    else:
        most = min(max(tops.values()), logits.shape[-1])
        found = reductions.logprobs(logits, rows, [chosen[row] for row in rows], most)
        entries = _entries(found, [chosen[row] for row in rows], [tops[row] for row in rows])
        each = dict(zip(rows, entries, strict=True))
    return tuple(each.get(row) for row in range(len(states)))


def token_logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """The log-probability and rank of a token under raw logits [vocab], with the `top` likeliest beside it."""
    at = torch.tensor([token], device=logits.device)
    return _entries(row_logprobs(logits[None].float(), at, min(top, len(logits))), [token], [top])[0]


def _entries(found: RowLogprobs, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """One entry for each row of what was found, with as many of the likeliest as it asked for."""
    columns = (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
    rows = zip(tokens, tops, *[column.tolist() for column in columns], strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(ids[:top]), tuple(logprobs[:top]))
        for token, top, logprob, rank, ids, logprobs in rows
    ]
