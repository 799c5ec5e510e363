"""A prompt as tokens, and a cache that holds their beginning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.admission import BorrowedKV
from ..engine.handles.handle import HandleLoan
from ..engine.prompt_embeds import PromptEmbeds


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as tokens, and a cache with its beginning."""

    ids: Sequence[int]
    borrowed: BorrowedKV | None
    continued_tokens: int = 0  # tokens of the cache that the prompt continues
    blend_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fields of the request about documents
    loan: HandleLoan | None = None  # of the handle that the prompt continues
    embeds: PromptEmbeds | None = None  # rows that stand in it instead of tokens

    def without_cache(self) -> PreparedPrompt:
        """The same prompt, all of which is computed."""
        if self.borrowed is not None:
            self.borrowed.kv.close()
        return dataclasses.replace(self, borrowed=None)
