"""The quality gate: decides by comparisons with whole prefills with which ratio a recipe is blended.

Refuses to know how prompts are run: the caller compares, and reports the result here.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..config import GateConfig
from .certificate import RECENT, Certificate, CertificateFile, Compared, mean
from .recipe import Recipe

_log = logging.getLogger(__name__)
_MOST_RECIPES = 64  # that are remembered: a client may ask for as many as it likes
_LEAST_RATIO = 0.05  # a ratio of 0 has to be raised from somewhere
Key = tuple[str, str, str]  # model, adapter, the recipe's name as it is asked for


def compare(whole: Tensor, blended: Tensor) -> Compared | None:
    """Two rows of logits [vocab] for the same place; None where they are no numbers."""
    ours, theirs = (torch.log_softmax(row.detach().cpu().double(), 0) for row in (whole, blended))
    kl = float(torch.where(ours == -torch.inf, 0.0, ours.exp() * (ours - theirs)).sum())
    if not abs(kl) < float("inf"):
        return None
    return Compared(max(0.0, kl), int(whole.argmax()) == int(blended.argmax()))


@dataclass(frozen=True, slots=True)
class Trial:
    """A recipe that is to be compared with a whole prefill, for one that is asked for."""

    key: Key
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class GateDecision:
    """What becomes of a request."""

    recipe: Recipe | None  # it is blended with this; None: it is computed as a whole
    trial: Trial | None = None  # and this is compared


def ladder(recipe: Recipe, config: GateConfig) -> list[Recipe]:
    """A recipe, and the same with higher and higher ratios up to the ceiling."""
    made = [recipe]
    while (ratio := made[-1].ratio) < config.ceiling:
        higher = min(config.ceiling, round(max(_LEAST_RATIO, ratio) * config.step, 6))
        floor = None if recipe.load_floor is None else max(recipe.load_floor, higher)
        made.append(replace(recipe, ratio=higher, load_floor=floor))
    return made


@dataclass(slots=True, eq=False)
class _RecipeState:
    """What is known of one recipe that is asked for."""

    key: Key
    steps: list[Recipe]
    at: int = 0  # the step it is blended with
    falls_back: bool = False
    count: int = 0
    recent: deque[Compared] = field(default_factory=deque)
    below: deque[Compared] = field(default_factory=deque)  # of the step below
    requests: int = 0
    trials: int = 0

    def certificate(self) -> Certificate:
        asked, ratio = self.steps[0], self.steps[self.at].ratio
        return Certificate(
            *self.key[:2],
            strategy=strategy_of(asked),
            asked=self.key[2],
            asked_ratio=asked.ratio,
            ratio=ratio,
            falls_back=self.falls_back,
            count=self.count,
            recent=tuple(self.recent),
            below=tuple(self.below),
        )


def strategy_of(recipe: Recipe) -> str:
    """A recipe's strategy in one spelling."""
    parts = recipe.parts
    return parts[0].strategy if len(parts) == 1 else "+".join(f"{one.strategy}:{one.share:.4g}" for one in parts)


class QualityGate:
    """Certificates of one model's recipes. May be asked from any thread."""

    def __init__(self, config: GateConfig, model: Callable[[], str], file: CertificateFile | None = None) -> None:
        """`model` is the fingerprint of its weights, asked for when it is first needed."""
        self.config = config
        self._model = model
        self._file = file
        self._lock = threading.Lock()
        self._states: OrderedDict[Key, _RecipeState] = OrderedDict()
        self._kept: dict[Key, Certificate] | None = None  # what the file had, other models' too

    def judge(self, recipe: Recipe, adapter: str, worth: Callable[[Recipe], bool], draws: bool = True) -> GateDecision:
        """What a request for a recipe gets, and whether it is compared.

        `worth` says whether a recipe saves enough to be blended; a request that draws no token is not compared.
        """
        if not self.config.every or not recipe.gate:
            return GateDecision(recipe)
        with self._lock:
            state = self._state(recipe, adapter)
            compared = draws and state.requests % self.config.every == 0
            state.requests += draws
            used = replace(state.steps[state.at], min_gain=recipe.min_gain)
            served = None if state.falls_back or not worth(used) else used
            return GateDecision(served, self._trial(state, served) if compared else None)

    def _trial(self, state: _RecipeState, served: Recipe | None) -> Trial:
        """What to compare: what is served, and of a raised ratio every other time the one below it."""
        state.trials += 1
        lower = state.at > 0 and not state.falls_back and (served is None or state.trials % 2 == 0)
        if lower:
            return Trial(state.key, state.steps[state.at - 1])
        return Trial(state.key, state.steps[state.at] if served is None else served)

    def learn(self, trial: Trial, compared: Compared) -> Certificate | None:
        """A comparison was made; what is known now, or None where the recipe was forgotten."""
        with self._lock:
            state = self._states.get(trial.key)
            if state is None:
                return None
            if trial.recipe.ratio == state.steps[state.at].ratio:
                self._push(state.recent, compared)
                state.count += 1
            elif state.at and trial.recipe.ratio == state.steps[state.at - 1].ratio:
                self._push(state.below, compared)
            else:
                return state.certificate()  # it was for a ratio that is no longer of interest
            if self.config.act:
                self._act(state)
            self._save()
            return state.certificate()

    def certificates(self) -> list[Certificate]:
        """What is known of this model's recipes, the latest asked for last."""
        with self._lock:
            return [state.certificate() for state in self._states.values()]

    def close(self) -> None:
        """Wait until all results are written."""
        if self._file is not None:
            self._file.flush()

    # Acting.

    def _act(self, state: _RecipeState) -> None:
        config = self.config
        enough, again = config.max_kl, config.max_kl * config.trusted
        if state.falls_back:
            if len(state.recent) >= 2 * config.least and mean(state.recent) <= again:
                self._move(state, state.at, False)
        elif len(state.recent) >= config.least and mean(state.recent) > enough:
            last = state.at == len(state.steps) - 1
            state.recent.clear()
            self._move(state, state.at if last else state.at + 1, last)
        elif len(state.below) >= 2 * config.least and mean(state.below) <= again:
            state.recent = state.below
            self._move(state, state.at - 1, False)

    def _move(self, state: _RecipeState, at: int, falls_back: bool) -> None:
        state.at, state.falls_back, state.count, state.below = at, falls_back, len(state.recent), deque()
        _log.warning(
            "%s of %s is now %s",
            state.key[2],
            state.key[1],
            "computed as a whole" if falls_back else f"blended with a ratio of {state.steps[at].ratio:.3g}",
        )

    def _push(self, seen: deque[Compared], compared: Compared) -> None:
        seen.append(compared)
        while len(seen) > max(RECENT, 2 * self.config.least):
            seen.popleft()

    # Remembering.

    def _state(self, recipe: Recipe, adapter: str) -> _RecipeState:
        key = (self._model(), adapter, recipe.name)
        if (state := self._states.get(key)) is None:
            state = self._restored(_RecipeState(key, ladder(recipe, self.config)))
            self._states[key] = state
            self._forget()
        self._states.move_to_end(key)
        return state

    def _forget(self) -> None:
        """Too many recipes: those with the least raised ratio go first, among them those without comparisons."""
        while len(self._states) > _MOST_RECIPES:
            others = list(self._states.values())[:-1]
            gone = min(others, key=lambda state: (state.falls_back, state.at, bool(state.count)))
            del self._states[gone.key]
            if gone.count and self._kept is not None:
                self._kept[gone.key] = gone.certificate()
                for key in list(self._kept)[: -4 * _MOST_RECIPES]:
                    del self._kept[key]

    def _restored(self, state: _RecipeState) -> _RecipeState:
        """A recipe as it was left by a process before this one."""
        if self._kept is None:
            read = self._file.read() if self._file is not None else []
            self._kept = {one.key: one for one in read[-4 * _MOST_RECIPES :]}
        if (kept := self._kept.pop(state.key, None)) is None:
            return state
        ratios = [one.ratio for one in state.steps]
        if self.config.act:  # with other settings the steps are others too: then the next higher one
            state.at = next((at for at, ratio in enumerate(ratios) if ratio >= kept.ratio), len(ratios) - 1)
            state.falls_back = kept.falls_back and state.at == len(ratios) - 1
        if ratios[state.at] == kept.ratio:
            state.count, state.recent = kept.count, deque(kept.recent)
            state.below = deque(kept.below) if state.at else deque()
        return state

    def _save(self) -> None:
        if self._file is not None:
            self._file.write([*(self._kept or {}).values(), *(state.certificate() for state in self._states.values())])
