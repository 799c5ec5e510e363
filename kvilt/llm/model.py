"""A model with its tokenizer and chat template: prompts and messages in, requests for the engine out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..batch import Adapter, Base
from ..blend.chunk import ChunkCache
from ..blend.recipe import Recipe
from ..blend.retriever import StoreRetriever
from ..config import EngineConfig, GateConfig
from ..engine.counters import ENGINE_METRICS
from ..engine.engine import Engine
from ..engine.misses.past_prompts import PastPrompts
from ..engine.request import Request, new_id
from ..engine.sequence import ReclaimPages
from ..errors import ContextOverflow, InputError, ParamError
from ..executor.inputs import Inputs, RowInput, read_ids, read_inputs
from ..executor.protocol import Executor, OnWarmup
from ..kv.cache import KVCache
from ..kv.drawing import draw_cache
from ..metrics import Metrics
from ..sampling.params import SamplingParams
from ..speculative.drafter import Drafter
from ..store.store import Store
from ..text.chat import ChatTemplate, RenderedChat
from ..text.parse import Parser, Tools, parser_for
from ..text.stops import StopCache
from ..text.tokenizer import Tokenizer
from ..weights.assets import AssetsLike
from .answer import AnswerConfig
from .blend import Documents, PromptParts
from .chat_parsing import ChatParsing
from .drawing import HTMLDrawing, draw_model
from .embedding_config import EmbeddingConfig
from .features import plugins_for
from .generation import SamplingDefaults
from .grammars import Grammars
from .quality import gate_for

if TYPE_CHECKING:
    from ..sampling.grammar import Grammar

Prompt = str | Sequence[int]
PromptInput = Prompt | Inputs  # with embedding rows, such as those of an image, in places of their own
Message = Mapping[str, Any]
Chat = Sequence[Message] | RenderedChat  # messages, or messages that the template has rendered already
PROMPT_END_TOKENS = 256  # in which a prompt that opens reasoning or a message does so
ContextPrefix = str | Sequence[Message]  # a text, or the messages before the question


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """An adapter as a caller names it; None: the base model."""

    which: int | str | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class DiscoveryChoice:
    """Whether known documents in a prompt that names none are blended, and how; None: the engine's default."""

    discover: bool | None = None
    recipe: Recipe | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a request that carry this choice."""
        return {"discover": self.discover, **({} if self.recipe is None else {"recipe": self.recipe})}


class Model:
    """What `LLM` and `AsyncLLM` have in common."""

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int] = (),
        config: EngineConfig | None = None,
        metrics: Metrics | None = None,
        drafter: Drafter | None = None,
        store: Store | None = None,
        gate: GateConfig | None = None,
        context_prefix: ContextPrefix | None = None,
        defaults: SamplingDefaults | None = None,
        embedding: EmbeddingConfig | None = None,
    ) -> None:
        """`store` keeps documents; without one they are kept in memory. It is the caller's to close.

        `context_prefix` is what most prompts with documents begin with. `defaults` are the sampling settings of the
        model's author; only callers that ask for them use them. `embedding` is how that author embeds texts. The model
        and the drafter are closed with this object.
        """
        self.executor = executor
        self.tokenizer = tokenizer
        self.config = config or EngineConfig()
        self.stop_ids = frozenset([*tokenizer.eos_ids, *stop_ids])  # tokens that end an answer
        self.sampling_defaults = defaults or SamplingDefaults()
        self.embedding_config = embedding or EmbeddingConfig()
        self.grammars = Grammars(tokenizer, self.stop_ids)
        self._stops = StopCache()
        self._template: ChatTemplate | None = None
        self._parser: Parser | None = None
        try:
            begins = None if context_prefix is None else self._context_prefix_ids(context_prefix)
        except ContextOverflow as error:
            raise ParamError("context_prefix", f"has at least {error.tokens} tokens; shorten it") from error
        self.documents = Documents(executor, tokenizer, store, begins)
        self._store = store
        self.past_prompts = PastPrompts()
        self._gate = gate_for(gate, executor, store)
        self._drafter = drafter
        self._start(metrics or Metrics(ENGINE_METRICS))
        if self.config.discover:
            self.documents.chunks.read()

    def _start(self, metrics: Metrics) -> None:
        """Make the engine, and what drives it; the last part of the construction."""
        raise NotImplementedError

    def _new_engine(self, metrics: Metrics, reclaim: ReclaimPages | None = None) -> Engine:
        """The engine of this model; `reclaim` is asked for pages where none are free."""
        plugins = plugins_for(self._drafter, self._gate, self.executor, metrics)
        return Engine(
            self.executor,
            self.config,
            metrics,
            features=plugins.features,
            judge=plugins.judge,
            chunks=self._chunks,
            store=self._store,
            reclaim=reclaim,
            past_prompts=self.past_prompts,
        )

    def warm_up(self, on_progress: OnWarmup | None = None) -> None:
        """Make ready what the first requests would wait for: tables of the vocabulary and, on a GPU, kernels."""
        self.tokenizer.max_bytes(1)
        sizes = self.config.step_sizes(self.executor.pool.device.type)
        self.executor.warm_up(sizes.step_tokens, sizes.max_rows, on_progress)

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's template, compiled when first needed."""
        if self._template is None:
            self._template = ChatTemplate.of(self.tokenizer, calls=self.parser.calls)
        return self._template

    @property
    def parser(self) -> Parser:
        """How the model writes reasoning and tool calls."""
        if self._parser is None:
            self._parser = parser_for(self.tokenizer.chat_template, self.executor.spec.family)
        return self._parser

    def chat_parsing(self, ids: Sequence[int], tools: Tools) -> ChatParsing:
        """How the answer to a prompt is parsed, when it may call these tools."""
        end = self.tokenizer.decode(ids[-PROMPT_END_TOKENS:], skip_special=False)
        return ChatParsing(self.parser, self.parser.special_markers(self.tokenizer.special), tools, end)

    def _chunks(self) -> ChunkCache:
        """The chunk cache of documents; the store is opened when a prompt has some."""
        return self.documents.chunks

    def prompt_ids(self, prompt: Prompt, begins: bool = True) -> list[int]:
        """The tokens of a prompt; `begins` is False where it continues earlier text."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special=begins, limit=self.executor.max_context)
        else:
            ids = read_ids(prompt, self.executor.spec.vocab_size)
        if not ids:
            raise InputError("the prompt is empty; give at least one token")
        return ids

    def decoded(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self.tokenizer.decode(ids, skip_special=False)

    def embedded_ids(self, prompt: Prompt, truncate: bool = False, prompt_name: str | None = None) -> list[int]:
        """The tokens of a text that is embedded; with `truncate` as many of the first as the context holds.

        The model's prompt of that name, or its default one, stands before a text. Tokens are taken as they are.
        """
        if not isinstance(prompt, str):
            if prompt_name is not None:
                raise ParamError("prompt_name", "a prompt stands before texts; put its tokens before yours")
            return self.prompt_ids(list(prompt)[: self.executor.max_context] if truncate else prompt)
        if not prompt:
            raise InputError("the text is empty; give at least one character")
        text = self.embedding_config.prompt(prompt_name) + prompt
        if not truncate:
            return self.prompt_ids(text)
        head, tail = self.tokenizer.head, self.tokenizer.tail  # kept: the last one may be what is pooled
        most = max(1, self.executor.max_context - len(head) - len(tail))
        ids = self.tokenizer.encode(text[: self.tokenizer.max_bytes(most)], add_special=False)
        return [*head, *ids[:most], *tail]

    def prompt_input(self, prompt: PromptInput, begins: bool = True) -> RowInput:
        """The tokens and embedding rows of a prompt; `begins` is False where it continues earlier text."""
        if not isinstance(prompt, Inputs):
            return RowInput(tuple(self.prompt_ids(prompt, begins)), {})
        return read_inputs(prompt, 1, self.executor.spec.vocab_size, self.executor.spec.hidden_size)[0]

    def render_chat(
        self,
        messages: Chat,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: int = 0,
        answers: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> RenderedChat:
        """A conversation rendered by its template, with places for so many documents; a rendered one stays as it is.

        Without `answers` it ends with the last message, not where an answer begins. `continue_final_message` ends it in
        the text of the last message, which an answer then goes on with. `template_kwargs` are variables for the
        template, like `enable_thinking`; those that it does not read have no effect.
        """
        if isinstance(messages, RenderedChat):
            return messages
        return self.chat_template.render_prompt(
            self.tokenizer,
            messages,
            tools=tools,
            places=documents,
            add_generation_prompt=answers,
            continue_final_message=continue_final_message,
            limit=self.executor.max_context,
            **self.chat_template.options_read(template_kwargs or {}),
        )

    def chat_ids(
        self,
        messages: Chat,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answers: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation, up to where an answer begins; without `answers`, up to the last message."""
        rendered = self.render_chat(messages, tools, answers=answers, template_kwargs=template_kwargs)
        return rendered.encode(self.tokenizer, self.executor.max_context)[0]

    def chat_pieces(
        self,
        messages: Chat,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Prompt],
        recipe: Recipe,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> PromptParts:
        """A conversation with documents where its template puts them, else before the last user's text."""
        rendered = self.render_chat(messages, tools, len(documents), template_kwargs=template_kwargs)
        pieces = rendered.encode(self.tokenizer, self.executor.max_context)
        return self.documents.between(pieces, documents, recipe)

    def _context_prefix_ids(self, context_prefix: ContextPrefix) -> list[int]:
        """The tokens that stand before the first document of such prompts."""
        if not context_prefix:
            raise ParamError(
                "context_prefix", "is empty; leave it out, or give the text or messages that prompts begin with"
            )
        if isinstance(context_prefix, str):
            return [
                *self.tokenizer.head,
                *self.tokenizer.encode(context_prefix, add_special=False, limit=self.executor.max_context),
            ]
        messages = [*context_prefix, {"role": "user", "content": "?"}]  # documents stand before any question
        return self.chat_template.encode_around(self.tokenizer, messages, 1)[0]

    def draw(self, kv: KVCache) -> HTMLDrawing:
        """A cache as a notebook draws it, with the text of its tokens; a cache by itself knows their ids alone."""
        return HTMLDrawing(draw_cache(kv, lambda token: self.decoded([token]) if isinstance(token, int) else "▢"))

    def _repr_html_(self) -> str:
        return draw_model(self)

    def load_lora(self, path: AssetsLike, name: str | None = None) -> int:
        """Load an adapter, under its own name if not given, and return its id; `path` as in `executor.load_lora`."""
        return self.executor.load_lora(path, name)

    def unload_lora(self, which: int | str) -> None:
        """Unload an adapter: new requests cannot use it, and those that do run to their end."""
        self.executor.unload_lora(self.executor.adapters.find(which).id)

    def adapter(self, chosen: AdapterChoice, ids: Sequence[int]) -> Adapter:
        """The adapter of a prompt, or the base model."""
        if chosen.which is None:
            return Base()
        return self.executor.adapters.choose(chosen.which, chosen.scale, ids)

    def document_adapter(self, chosen: AdapterChoice) -> Adapter:
        """What documents are computed with: the base model where an adapter begins only at certain tokens."""
        if chosen.which is None:
            return Base()
        adapters = self.executor.adapters
        adapter = adapters.choose(chosen.which, chosen.scale)
        return Base() if adapters.find(chosen.which).invocation else adapter

    def retriever(
        self,
        *,
        tenant: str = "",
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        device: torch.device | str | None = None,
    ) -> StoreRetriever:
        """Finds what `warm` and blended prompts have stored, for another engine; keys as they were before rotation.

        Its tensors are on `device`, by default that of the executor. It works as long as the store is open.
        """
        maker = self.executor.adapters.identity(self.document_adapter(AdapterChoice(lora, lora_scale)))
        return self.documents.chunks.retriever(tenant, maker, None if device is None else torch.device(device))

    def request(
        self, ids: Sequence[int], params: SamplingParams, grammar: Grammar | None = None, **fields: Any
    ) -> tuple[Request, AnswerConfig]:
        """A request for these tokens, and what its answer must know; `fields` are other fields of `Request`.

        `grammar` is that of the params, where it is compiled already.
        """
        self.embedding_config.check_generates()
        params = self._spelled(params)
        own = frozenset() if params.ignore_eos else self.stop_ids
        grammar = grammar or self.grammars.compile(params.grammar)
        request = Request(ids, params, end_ids=own, grammar=grammar, **{"id": new_id(), **fields})
        ends = own | {*params.stop_token_ids}
        warnings = () if grammar is None else grammar.warnings
        stops = self._stops.of(params.stop)
        return request, AnswerConfig(self.tokenizer, params, ends, len(ids), stops, warnings=warnings)

    def _spelled(self, params: SamplingParams) -> SamplingParams:
        """These params with bad words as token ids, tokenized as at the start of a text and as after a space."""
        if not params.bad_words:
            return params
        bare = [word.lstrip(" ") or word for word in params.bad_words]
        spelled = [self.tokenizer.encode(text, add_special=False) for word in bare for text in (word, f" {word}")]
        return SamplingParams.of(params, bad_words=(), bad_words_ids=[*params.bad_words_ids, *filter(None, spelled)])


def is_one(prompt: Any) -> bool:
    """Whether this is one prompt, and not a list of them."""
    if isinstance(prompt, str | Inputs):
        return True
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Collection):
        raise InputError(f"a prompt is a text or token ids, or a list of these, not {type(prompt).__name__}")
    return len(prompt) > 0 and not any(_is_prompt(each) for each in prompt)


def each_prompt(prompt: Any) -> list[Any]:
    """The prompts of a list; one prompt is a list of itself."""
    return [prompt] if is_one(prompt) else list(prompt)


def _is_prompt(part: Any) -> bool:
    return isinstance(part, Sequence | Inputs) or getattr(part, "ndim", 0) > 0


def after_cache(kv: KVCache, ids: list[int]) -> list[int]:
    """These tokens after those of a cache."""
    if kv.batch_size != 1:
        raise InputError(f"a prompt continues a cache of one row, this one has {kv.batch_size}")
    # A position that was embedded has no id; it is counted, and its 0 is not read.
    return [token if isinstance(token, int) else 0 for token in kv.tokens()] + ids


def shared(ids: list[int], kv: KVCache | None) -> int:
    """How many tokens of `ids` a cache holds already; at least one is left to compute."""
    if kv is None:
        return 0
    if kv.batch_size != 1:
        raise InputError(f"a conversation continues a cache of one row, this one has {kv.batch_size}")
    return kv.shared_prefix(ids[:-1])
