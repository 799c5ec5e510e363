"""Logits and requests' sampling states in, one token per row out.

A row's token depends on its own logits, state and position alone. Refuses to know caches and batches, and changes no
state: a state advances only when its owner commits the token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import GrammarFailed, InputError, NoTokenLeft, NumericsError, ParamError
from .bans import BadWords
from .grammar import Matcher, masks
from .history import History
from .noise import fold_seed, gumbel, row_key
from .params import SamplingParams
from .transforms import Filters, Touched, add_bias, ban, confine, filter_rows, penalize, take_rows, temper

# Rows whose whole vocabulary gets noise go through in pieces of about this many float64 values.
_NOISE_VALUES = 1 << 18


class SampleState:
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

    def fork(self, sample_index: int | None = None) -> SampleState:
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
        """Whether some tokens may be out of reach now."""
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
class Sampled:
    """One token per row, and its log-probabilities where the row's params ask for them."""

    tokens: Tensor  # [rows] int64
    logprobs: tuple[TokenLogprobs | None, ...]


def sample(logits: Tensor, states: Sequence[SampleState], positions: Sequence[int]) -> Sampled:
    """Choose a token for every row of logits [rows, vocab]; `positions` are the places the tokens will take."""
    _check(logits, states, positions)
    logits = logits.float()
    tokens = argmax(logits)
    _refuse(_at(logits, tokens), range(len(states)))
    rows = [row for row, state in enumerate(states) if not is_argmax(state)]
    if rows:
        tokens[rows] = _choose(
            take_rows(logits, rows), rows, [states[row] for row in rows], [positions[row] for row in rows]
        )
    return Sampled(tokens, _logprobs(logits, tokens, states))


def _check(logits: Tensor, states: Sequence[SampleState], positions: Sequence[int]) -> None:
    if logits.dim() != 2 or not len(states) == len(positions) == len(logits):
        raise InputError(
            f"sample takes logits [rows, vocab] with one state and one position per row, "
            f"not {tuple(logits.shape)} with {len(states)} states and {len(positions)} positions"
        )
    for position in positions:
        if position < 0:
            raise InputError(f"a position counts from 0, so it cannot be {position}")


def argmax(scores: Tensor) -> Tensor:
    """The place of each row's largest score [rows]; ties go to the first, and NaN wins over everything.

    On the CPU by numpy, which compares a whole register at a time; torch's own takes thirteen times as long.
    """
    return torch.from_numpy(scores.numpy().argmax(-1)) if scores.device.type == "cpu" else scores.argmax(-1)


def _at(scores: Tensor, tokens: Tensor) -> list[float]:
    """Each row's score of its token. Through numpy on the CPU, like `argmax`: this runs in every step."""
    if scores.device.type == "cpu":
        picked: list[float] = scores.numpy()[np.arange(len(tokens)), tokens.numpy()].tolist()
        return picked
    return scores.gather(1, tokens[:, None])[:, 0].tolist()


def _refuse(peak: Sequence[float], rows: Sequence[int]) -> None:
    """Raise for rows whose largest score is no number: NaN, +inf, or -inf everywhere."""
    if not all(map(math.isfinite, peak)):
        raise NumericsError([row for row, score in zip(rows, peak, strict=True) if not math.isfinite(score)])


def is_argmax(state: SampleState) -> bool:
    """Whether the next token is simply the likeliest one."""
    params = state.params
    free = not state.bans and state.matcher is None
    return params.greedy and not params.penalized and not params.logit_bias and free


def _choose(scores: Tensor, rows: Sequence[int], states: Sequence[SampleState], positions: Sequence[int]) -> Tensor:
    """The tokens of rows that need more than the argmax of their logits [rows]."""
    scores = _ban(_adjust(scores, states), rows, states)
    drawn = [i for i, state in enumerate(states) if not state.params.greedy]
    greedy = [i for i, state in enumerate(states) if state.params.greedy]
    tokens = torch.empty(len(states), dtype=torch.int64, device=scores.device)
    if greedy:
        tokens[greedy] = argmax(take_rows(scores, greedy))
    if drawn:
        picked = [states[i] for i in drawn]
        tempered = temper(take_rows(scores, drawn), _column([s.params.temperature for s in picked], scores))
        _refuse(tempered.amax(-1).tolist(), [rows[i] for i in drawn])
        keys = [state.noise_key(positions[i]) for i, state in zip(drawn, picked, strict=True)]
        tokens[drawn] = _draw(tempered, [s.params for s in picked], torch.tensor(keys, device=scores.device))
    return tokens


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def _adjust(scores: Tensor, states: Sequence[SampleState]) -> Tensor:
    """Bias, then penalties, on the rows that have them."""
    entries = [(i, token, bias) for i, state in enumerate(states) for token, bias in state.params.logit_bias.items()]
    if entries:
        for state in states:
            if state.params.logit_bias:
                state.params.validate_vocab(scores.shape[-1])
        rows, ids, values = zip(*entries, strict=True)
        index = torch.tensor([rows, ids], device=scores.device)
        scores = add_bias(scores, index[0], index[1], _column(values, scores))
    if any(state.params.penalized for state in states):
        scores = penalize(scores, _touched(scores, states))
    return scores


def _ban(scores: Tensor, rows: Sequence[int], states: Sequence[SampleState]) -> Tensor:
    """Without the tokens that repeat an n-gram, complete a bad word, end a sample too early, or break its grammar."""
    at = [i for i, state in enumerate(states) if state.bans or state.matcher is not None]
    if not at:
        return scores
    banned = [states[i].banned() for i in at]
    ids = np.concatenate(banned)
    if len(ids):
        owners = np.repeat(np.array(at, np.int64), [len(one) for one in banned])
        index = torch.from_numpy(np.stack([owners, ids])[:, ids < scores.shape[-1]]).to(scores.device)
        scores = ban(scores, index[0], index[1])
    scores = _confine(scores, rows, states)
    left = (take_rows(scores, at).amax(-1) > float("-inf")).tolist()
    if not all(left):
        raise NoTokenLeft([rows[i] for i, some in zip(at, left, strict=True) if not some])
    return scores


def _confine(scores: Tensor, rows: Sequence[int], states: Sequence[SampleState]) -> Tensor:
    """Scores [rows, vocab] of the tokens alone that each row's grammar allows, where it has one."""
    held = [(i, state.matcher) for i, state in enumerate(states) if state.matcher is not None]
    if not held:
        return scores
    at = [i for i, _ in held]
    try:
        allowed = masks([matcher for _, matcher in held], scores.shape[-1]).to(scores.device)
    except GrammarFailed as error:
        raise GrammarFailed([rows[at[row]] for row in error.rows], error.reason) from None
    return confine(scores, at, allowed)


def _touched(scores: Tensor, states: Sequence[SampleState]) -> Touched:
    """The histories of the penalized rows, end to end."""
    rows = [i for i, state in enumerate(states) if state.params.penalized]
    params = [states[i].params for i in rows]
    tallies = [states[i].history.tally(scores.shape[-1]) for i in rows]
    lengths = torch.tensor([len(ids) for ids, _ in tallies], device=scores.device)

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(lengths)

    return Touched(
        rows=spread(torch.tensor(rows, device=scores.device)),
        ids=torch.cat([ids for ids, _ in tallies]).to(scores.device),
        counts=torch.cat([counts for _, counts in tallies]).to(scores.device),
        repetition=spread(_column([p.repetition_penalty for p in params], scores)),
        frequency=spread(_column([p.frequency_penalty for p in params], scores)),
        presence=spread(_column([p.presence_penalty for p in params], scores)),
    )


def _draw(scores: Tensor, params: Sequence[SamplingParams], keys: Tensor) -> Tensor:
    """Gumbel-max over tempered scores [rows, vocab]: the argmax of score plus noise is a draw from their softmax."""
    vocab = scores.shape[-1]
    filtered = [0 < p.top_k < vocab or p.top_p < 1 or p.min_p > 0 or p.typical_p < 1 for p in params]
    tokens = torch.empty(len(params), dtype=torch.int64, device=scores.device)
    if whole := [i for i, on in enumerate(filtered) if not on]:
        tokens[whole] = _draw_whole(take_rows(scores, whole), keys[whole])
    if narrow := [i for i, on in enumerate(filtered) if on]:
        filters = Filters.of([params[i] for i in narrow], vocab, scores.device)
        tokens[narrow] = _draw_filtered(take_rows(scores, narrow), filters, keys[narrow])
    return tokens


def _draw_whole(scores: Tensor, keys: Tensor) -> Tensor:
    """Draws from the whole vocabulary, a few rows at a time, since noise is float64 [rows, vocab]."""
    ids = torch.arange(scores.shape[-1], device=scores.device)
    at_once = max(1, _NOISE_VALUES // len(ids))
    pieces = [slice(start, start + at_once) for start in range(0, len(keys), at_once)]
    return torch.cat([argmax(gumbel(keys[rows], ids).add_(scores[rows])) for rows in pieces])


def _draw_filtered(scores: Tensor, filters: Filters, keys: Tensor) -> Tensor:
    """Draws from what the filters leave; noise is made for the candidates alone."""
    tokens = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    for group in filter_rows(scores, filters):
        best = gumbel(keys[group.rows], group.ids).add_(group.scores).argmax(-1, keepdim=True)
        tokens[group.rows] = group.ids.gather(1, best)[:, 0]
    return tokens


def _logprobs(logits: Tensor, tokens: Tensor, states: Sequence[SampleState]) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities for the rows that want them, one row at a time: rows seldom do."""
    return tuple(
        None if (top := state.params.logprobs) is None else token_logprobs(logits[row], int(tokens[row]), top)
        for row, state in enumerate(states)
    )


def token_logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """The log-probability and rank of a token under raw logits [vocab], with the `top` likeliest beside it."""
    # As prompts are scored. torch's own log_softmax is off by 1e-5 where a vocabulary is large.
    logprobs = logits.float() - logits.max()
    logprobs -= logprobs.logsumexp(-1)
    chosen = logprobs[token]
    ahead = (logprobs > chosen).sum() + (logprobs[:token] == chosen).sum()
    ids = _likeliest(logprobs, min(top, len(logprobs)))
    return TokenLogprobs(
        token=token,
        logprob=float(chosen),
        rank=int(ahead) + 1,
        top_ids=tuple(ids.tolist()),
        top_logprobs=tuple(logprobs[ids].tolist()),
    )


def _likeliest(logprobs: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest, and among equals the lower ids first: topk alone promises no order."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=logprobs.device)
    ids = (logprobs >= logprobs.topk(count).values[-1]).nonzero()[:, 0]
    return ids[logprobs[ids].sort(descending=True, stable=True).indices[:count]]
