"""A request to the engine. Knows tokens, embedding rows and sampling; refuses to know text."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..batch import Adapter, Base
from ..blend.plugins import BlendPlugins
from ..blend.recipe import Recipe, Span
from ..kv.owner import owner_of
from ..kv.row import Token
from ..sampling.params import SamplingParams
from .prompt_embeds import PromptEmbeds

if TYPE_CHECKING:
    from ..sampling.grammar import Grammar


def new_id() -> str:
    """A random id that cannot be guessed."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Continue a prompt; `params.n` samples of it share the prompt's KV."""

    prompt: Sequence[int]  # all of it: the tokens of a borrowed cache come first
    params: SamplingParams | None = None  # None: only the KV of the prompt is wanted
    id: str = field(default_factory=new_id)
    end_ids: frozenset[int] = frozenset()  # tokens that end a sample, besides the params' own
    priority: int = 0  # the lower, the sooner
    tenant: str = ""  # KV is found again only by the same tenant
    owner: str = ""  # quotas and fair shares count by it, whatever its tenants; "": the owner of the tenant
    reuse: bool = True  # whether the prompt may use KV from the prefix index
    keep_kv: bool = False  # give each sample's KV to the listener when it ends
    continued_tokens: int = 0  # first tokens of the prompt, without log-probabilities: it continues them
    progress: bool = False  # send PromptProgress events
    grammar: Grammar | None = None  # that of the params, compiled
    documents: tuple[Span, ...] = ()  # parts of the prompt whose stored KV is reused at any position
    recipe: Recipe = field(default_factory=Recipe)  # how they are blended
    blend_plugins: BlendPlugins = field(default_factory=BlendPlugins)  # the caller's parts of blending
    adapter: Adapter = field(default_factory=Base)  # the base model or an adapter
    discover: bool | None = None  # blend also known documents that it does not name; None: the engine's default
    background: bool = False  # no caller waits for it: no metric counts it, and it adds no KV to the prefix index
    max_step_tokens: int = 0  # the most of its tokens in one step; 0: no limit
    embeds: PromptEmbeds | None = None  # rows that stand in the prompt instead of tokens
    predicted: tuple[int, ...] = ()  # tokens that the answer is expected to repeat, for drafts
    session: str = ""  # the name of its session, if it has one
    pooling: Literal["mean", "last"] | None = None  # send a PooledPrompt; a mean needs `reuse` to be off

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner", self.owner or owner_of(self.tenant))

    @property
    def tokens(self) -> Sequence[Token]:
        """What KV knows the tokens of the prompt by."""
        return self.prompt if self.embeds is None else self.embeds.tokens(self.prompt)

    def ids_from(self, start: int) -> list[int]:
        """The ids of the prompt from position `start` on; an embedding row has none."""
        ids = self.prompt[start:]
        return list(ids) if self.embeds is None else self.embeds.ids_only(ids, start)

    @property
    def samples(self) -> int:
        return self.params.n if self.params else 1
