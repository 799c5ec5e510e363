"""What a caller may put in the place of the engine's own parts of blending: where KV comes from, what is selected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ParamError
from .interfaces import BlendExecutor, BlendRetriever
from .recipe_blend import check_selection_layers

MakeBlendExecutor = Callable[[], BlendExecutor]  # one for each prompt, such as the class itself


@dataclass(frozen=True, slots=True)
class BlendPlugins:
    """A retriever and an executor of the caller's; None: the engine's own."""

    retriever: BlendRetriever | None = None
    executor: MakeBlendExecutor | None = None

    def __bool__(self) -> bool:
        return self.retriever is not None or self.executor is not None

    @property
    def name(self) -> str:
        """What they add to the origin of blended KV."""
        parts = [] if self.retriever is None else [f" retriever={type(self.retriever).__name__}"]
        if self.executor is not None:
            parts.append(f" executor={getattr(self.executor, '__name__', type(self.executor).__name__)}")
        return "".join(parts)

    def check(self, layers: int) -> None:
        """Raise unless they are what the interfaces promise."""
        if self.retriever is not None and not isinstance(self.retriever, BlendRetriever):
            raise ParamError("retriever", f"must be a kvilt.blend.BlendRetriever, not {type(self.retriever).__name__}")
        if self.executor is None:
            return
        made = self.executor() if callable(self.executor) else self.executor
        if not callable(self.executor) or not isinstance(made, BlendExecutor):
            raise ParamError("blend_executor", "must make a kvilt.blend.BlendExecutor: give the class, or a function")
        check_selection_layers(made, layers)
