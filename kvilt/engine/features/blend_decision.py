"""How the documents of a prompt are blended: the decision, and the protocol of what may decide it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...blend.recipe import Recipe
from ..request import Request

OnLogits = Callable[[Tensor], None]  # gets logits [vocab] that it may keep


@dataclass(frozen=True, slots=True)
class BlendDecision:
    """What becomes of a prompt with documents."""

    recipe: Recipe | None  # it is blended with this; None: it is computed as a whole
    on_first_logits: OnLogits | None = None  # called once with the logits of the first token


class BlendJudge(Protocol):
    """Decides for each prompt with documents. May be asked from any thread."""

    def judge(self, request: Request, adapter: str, worth: Callable[[Recipe], bool], draws: bool) -> BlendDecision:
        """What becomes of a request; `worth` says whether a recipe saves enough, `draws` whether it draws a token."""
        ...
