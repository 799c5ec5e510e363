"""What a caller asks of the engine. Knows tokens and sampling; refuses to know text and tensors."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..batch import Adapter, Base
from ..blend.recipe import Recipe, Span
from ..kv.owner import owner_of
from ..sampling.grammar import Grammar
from ..sampling.params import SamplingParams


def new_id() -> str:
    """An id nobody can guess."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Continue a prompt; `params.n` samples of it share the prompt's KV."""

    prompt: Sequence[int]  # all of it: what a lent cache holds stands first
    params: SamplingParams | None = None  # None: only the KV of the prompt is wanted
    id: str = field(default_factory=new_id)
    end_ids: frozenset[int] = frozenset()  # tokens that end a sample, besides the params' own
    priority: int = 0  # the lower, the sooner
    tenant: str = ""  # KV is found again only by the same tenant
    owner: str = ""  # quotas and fair shares count by it, whatever its tenants; "": the owner of the tenant
    reuse: bool = True  # whether the prompt may begin with KV that others computed
    keep_kv: bool = False  # hand each sample's KV over when it ends
    continued_tokens: int = 0  # tokens of the prompt whose log-probabilities nobody wants: it continues them
    progress: bool = False  # tell how much of the prompt is there, step by step
    grammar: Grammar | None = None  # that of the params, compiled
    documents: tuple[Span, ...] = ()  # parts of the prompt whose KV is reused wherever they stand
    recipe: Recipe = field(default_factory=Recipe)  # how they are blended
    adapter: Adapter = field(default_factory=Base)  # what it runs on
    discover: bool | None = None  # blend also documents that it does not name, if they are known; None: as the engine
    background: bool = False  # nobody waits for it: it is counted nowhere, and leaves no KV behind

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner", self.owner or owner_of(self.tenant))

    @property
    def samples(self) -> int:
        return self.params.n if self.params else 1
