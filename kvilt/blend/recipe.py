"""How documents are blended, as a request may ask for it. A value: its name is the origin of the KV that it makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self, get_args

from ..errors import InputError, ParamError, warn_renamed

Strategy = Literal["deviation", "head", "query"]
REPAIR = 0.8
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True)
class StrategyShare:
    """A strategy, and its share of the tokens that are computed again."""

    strategy: Strategy
    share: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which tokens of reused documents are computed again, and when blending is worth it.

    `strategy` is `deviation` (the values that change most), `head` (the first tokens of each document), `query` (what
    the question attends to) or a mix such as `head:0.2+query:0.8`.
    """

    ratio: float = 0.15  # of the tokens of reused documents
    strategy: str = "query"
    check_layer: int = 1  # deviation: all tokens run through the layers up to this one
    gradual: tuple[float, ...] = ()  # deviation: so many times the ratio at the check layer, and at those after it
    mass_layers: tuple[int, ...] = ()  # query: layers in which attention is measured; if none, some of all
    repair: float = REPAIR  # tokens not computed again take this share of the change of those around them; 0: none
    first_tokens: int = 0  # of each document, always computed again
    last_segment: bool = True  # the whole last segment is computed, and never kept
    min_gain: float = 0.2  # below this share of saved work the prompt is computed as a whole; 0: never
    load_floor: float | None = None  # the ratio adapts to loading times, but not below this; None: it is fixed
    gate: bool = True  # a quality gate, where there is one, may compare the answer and raise the ratio

    mend: dataclasses.InitVar[float | None] = None  # the former name of `repair`

    def __post_init__(self, mend: float | None) -> None:
        if mend is not None:
            warn_renamed("Recipe(mend=...)", "Recipe(repair=...)", stacklevel=3)
            object.__setattr__(self, "repair", mend)
        _share("ratio", self.ratio)
        _share("min_gain", self.min_gain)
        _share("repair", self.repair)
        for name in ("gate", "last_segment"):
            if not isinstance(value := getattr(self, name), bool):
                raise ParamError(name, f"must be true or false, not {value!r}")
        for name in ("gradual", "mass_layers"):
            if not isinstance(value := getattr(self, name), tuple):
                raise ParamError(name, f"must be a list of numbers, not {value!r}")
        if self.load_floor is not None:
            _share("load_floor", self.load_floor)
        for name in ("check_layer", "first_tokens"):
            _count(name, getattr(self, name))
        for layer in self.mass_layers:
            _count("mass_layers", layer)
        numbers = all(isinstance(one, int | float) and one < float("inf") for one in self.gradual)  # NaN is not below
        if not numbers or any(b > a for a, b in pairwise((*self.gradual, 1.0))):
            raise ParamError("gradual", f"must fall towards 1, not {list(self.gradual)}")
        if self.gradual and not self.needs("deviation"):
            raise ParamError("gradual", "filters by deviation, so it needs that strategy")
        self.parts  # noqa: B018 (raises where the strategy cannot be read)

    @classmethod
    def of(cls, recipe: Recipe | None = None, **fields: Any) -> Recipe:
        """A recipe with some of its fields changed."""
        if recipe is not None and not isinstance(recipe, cls):
            raise ParamError("recipe", f"is a Recipe, such as Recipe(ratio=0.3), not {recipe!r}")
        known = [one.name for one in dataclasses.fields(cls)]
        for name in fields:
            if name not in (*known, "mend"):
                raise ParamError(name, f"there is no such field of a recipe; the fields are {', '.join(known)}")
        given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return dataclasses.replace(recipe or cls(), **given)

    @property
    def parts(self) -> tuple[StrategyShare, ...]:
        """The strategies of the mix, with shares that add up to 1."""
        if not isinstance(self.strategy, str):
            raise ParamError("strategy", f"must be a text like query or head:0.2+query:0.8, not {self.strategy!r}")
        pieces = [piece.partition(":") for piece in self.strategy.split("+")]
        found = [_part(name.strip(), share or "1") for name, _, share in pieces]
        total = sum(part.share for part in found)
        if len({part.strategy for part in found}) < len(found):
            raise ParamError("strategy", f"a mix names each strategy once, not {self.strategy!r}")
        return tuple(StrategyShare(part.strategy, part.share / total) for part in found)

    def check_layers(self, layers: int) -> None:
        """Raise unless a model of so many layers has those that are named here."""
        if self.needs("deviation") and self.check_layer + len(self.gradual) >= layers - 1:
            raise InputError(f"check_layer {self.check_layer} leaves nothing to save of {layers} layers")
        if any(layer >= layers for layer in self.mass_layers):
            raise InputError(f"mass_layers {list(self.mass_layers)} are not all of this model's {layers} layers")

    def needs(self, strategy: Strategy) -> bool:
        return any(part.strategy == strategy for part in self.parts)

    @property
    def name(self) -> str:
        """The origin of KV that is made this way."""
        parts = "+".join(f"{part.strategy}:{part.share:.4g}" for part in self.parts)
        more = [f"ratio={self.ratio:.6g}", f"check={self.check_layer}", f"first={self.first_tokens}"]
        more += [f"gradual={','.join(f'{x:.4g}' for x in self.gradual)}"] if self.gradual else []
        more += [f"mass={','.join(map(str, self.mass_layers))}"] if self.mass_layers else []
        more += [f"mend={self.repair:.4g}"] if self.repair else []  # the name it was given first stays in stored keys
        more += [] if self.last_segment else ["last=reused"]
        more += [f"floor={self.load_floor:.4g}"] if self.load_floor is not None else []
        return f"blend/1 {parts} {' '.join(more)}"

    def gain(self, tokens: int, reused: int, question: int, layers: int, always: int = 0) -> float:
        """The share of work that blending saves: of `tokens` in all layers, where `reused` have KV.

        `always` of these are computed again whatever the ratio.
        """
        if not tokens:
            return 0.0
        lower = min(1.0, (self.check_layer + 1) / layers) if self.needs("deviation") else 0.0
        ratio = self.ratio if self.load_floor is None else self.load_floor
        computed = (tokens - reused + max(ratio * reused, always)) / tokens
        probe = question / tokens if self.needs("query") else 0.0
        return 1 - lower - (1 - lower) * computed - probe


def _part(name: str, share: str) -> StrategyShare:
    if name not in STRATEGIES:
        raise ParamError("strategy", f"{name!r} is not one of {', '.join(STRATEGIES)}")
    try:
        number = float(share)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise ParamError("strategy", f"the share of {name} must be a number above 0, not {share!r}")
    return StrategyShare(name, number)


def _share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ParamError(name, f"must be a number between 0 and 1, not {value!r}")


def _count(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise ParamError(name, f"must be a whole number and not negative, not {value!r}")


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens [start, stop) of a prompt."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BlendPrompt:
    """A prompt with documents in it."""

    ids: tuple[int, ...]
    documents: tuple[Span, ...]  # in order, not empty, apart from each other
    begins: int | None = None  # where blending begins; None: at the first document

    @classmethod
    def of(cls, segments: Sequence[Sequence[int]], documents: Sequence[bool]) -> Self:
        """A prompt of consecutive segments, some of which are documents."""
        ids: list[int] = []
        spans = []
        for segment, is_document in zip(segments, documents, strict=True):
            if is_document and len(segment):
                spans.append(Span(len(ids), len(ids) + len(segment)))
            ids.extend(segment)
        return cls(tuple(ids), tuple(spans))

    @property
    def exact(self) -> int:
        """Tokens before the first document: nothing is blended there."""
        if self.begins is not None:
            return self.begins
        return self.documents[0].start if self.documents else len(self.ids)

    @property
    def reused(self) -> int:
        return sum(map(len, self.documents))

    @property
    def question(self) -> Span:
        """The tokens after the last document or, if there are none, the last token."""
        stop = len(self.ids)
        start = self.documents[-1].stop if self.documents else 0
        return Span(min(start, stop - 1), stop)

    def worth(self, recipe: Recipe, layers: int) -> bool:
        """Whether blending saves enough; depends on lengths alone, so that every store gives the same answer."""
        if not self.documents:
            return False
        tokens = len(self.ids) - self.exact
        always = sum(min(recipe.first_tokens, len(one)) for one in self.documents)
        gain = recipe.gain(tokens, self.reused, len(self.question), layers, always)
        return not recipe.min_gain or gain >= recipe.min_gain
