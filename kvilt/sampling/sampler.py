"""Logits and requests' sampling states in, one token per row out.

A row's token depends on its own logits, state and position alone. Refuses to know caches and batches, and changes no
state: a state advances only when its owner commits the token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import GrammarFailed, InputError, NoTokenLeft, NumericsError
from ..ops.contract import Reductions, SamplingKernels
from .draw import argmax, draw
from .matcher import masks
from .output import SamplerOutput as SamplerOutput
from .output import TokenLogprobs as TokenLogprobs
from .output import logprob_entries
from .output import token_logprobs as token_logprobs
from .pending import PendingSample
from .prepare import prepare
from .state import SamplingState as SamplingState
from .transforms import PenalizedTokens, add_bias_, ban_, mask_, penalize_


def sample(
    logits: Tensor,
    states: Sequence[SamplingState],
    positions: Sequence[int],
    reductions: Reductions | None = None,
    kernels: SamplingKernels | None = None,
) -> SamplerOutput:
    """Choose a token for every row of logits [rows, vocab]; `positions` are the places the tokens will take.

    `reductions` of a backend do on the CPU what torch does otherwise; `kernels` do all of it on their own device.
    """
    return start_sample(logits, states, positions, reductions, kernels).wait()


def start_sample(
    logits: Tensor,
    states: Sequence[SamplingState],
    positions: Sequence[int],
    reductions: Reductions | None = None,
    kernels: SamplingKernels | None = None,
) -> PendingSample:
    """`sample`, without waiting for a device. Errors of a row are raised by `wait`.

    Until then no state may advance. Where there are no kernels the sample is complete at once.
    """
    _check(logits, states, positions)
    if kernels is None or not len(states):
        return PendingSample.of(_sample(logits, states, positions, reductions))
    prepared = prepare(states, positions, logits.shape[-1])
    return PendingSample.launch(kernels, logits, prepared, [state.params.logprobs for state in states])


def _sample(
    logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int], reductions: Reductions | None
) -> SamplerOutput:
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
    return state.params.greedy and not state.edited


def _choose(
    logits: Tensor, states: Mapping[int, SamplingState], keys: Mapping[int, int], reductions: Reductions | None
) -> dict[int, int]:
    """The tokens of rows that need more than the argmax of their logits; `keys` of those that draw."""
    edited = [row for row, state in states.items() if state.edited]
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
        entries = logprob_entries(found, [chosen[row] for row in rows], [tops[row] for row in rows])
        each = dict(zip(rows, entries, strict=True))
    return tuple(each.get(row) for row in range(len(states)))
