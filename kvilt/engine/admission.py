"""From a request to a job that can run: everything that can be wrong with it is found here, in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from ..batch import Adapted
from ..blend.blender import Blending
from ..blend.cache_retriever import CacheRetriever
from ..blend.chunk import ChunkCache
from ..blend.recipe import BlendPrompt
from ..errors import InputError, ParamError, TruncateError
from ..executor.kv_maker import check_maker
from ..executor.protocol import Executor
from ..kv.cache import KVCache
from ..kv.prefix_keys import PrefixKeys, PrefixScope
from ..sampling.sampler import SamplingState
from .event import Listener
from .features.blend_decision import BlendDecision, BlendJudge, OnLogits
from .features.discovery import discovered, wants_discovery
from .pooling import Pooling
from .request import Request
from .scheduling.plan import BlendProgress, Sample
from .scoring import Scoring
from .sequence import Job, SequenceState


@dataclass(frozen=True, slots=True)
class BorrowedKV:
    """A cache that holds the beginning of a prompt; a fork, for the engine to close."""

    kv: KVCache
    exact: bool = False  # computed by this executor from these tokens, for this tenant: it may enter the prefix index


@dataclass(frozen=True, slots=True)
class JobMaker:
    """Makes the jobs of one engine."""

    executor: Executor
    chunks: Callable[[], ChunkCache] | None  # gives what documents of prompts are found in
    judge: BlendJudge | None
    discover: bool  # where a request does not say

    def make(
        self,
        request: Request,
        listener: Listener,
        borrowed: BorrowedKV | None = None,
        on_first_logits: OnLogits | None = None,
    ) -> Job:
        """A checked job; owns the borrowed cache, also if this raises."""
        if request.discover is None and self.discover:
            request = replace(request, discover=True)
        try:
            chunks = self._chunks_for(request)
            return make_job(self.executor, request, listener, borrowed, chunks, self.judge, on_first_logits)
        except BaseException:
            if borrowed is not None:
                borrowed.kv.close()
            raise

    def _chunks_for(self, request: Request) -> ChunkCache | None:
        """What the documents of a request are found in; None where it has none and looks for none."""
        if self.chunks is None or not (request.documents or wants_discovery(request)):
            return None
        return self.chunks()


def make_job(
    executor: Executor,
    request: Request,
    listener: Listener,
    borrowed: BorrowedKV | None = None,
    chunks: ChunkCache | None = None,
    judge: BlendJudge | None = None,
    on_first_logits: OnLogits | None = None,
) -> Job:
    """A checked job; closes the borrowed cache only if the job does not use it.

    `judge` decides how documents are blended; without one that is done as the request asks.
    """
    if not request.prompt:
        raise InputError("the prompt is empty; give at least one token")
    if request.embeds is not None:
        request.embeds.check(len(request.prompt), executor.spec.hidden_size)
        _refuse_beside_embeds(request)
    adapter_lease = executor.adapters.hold(request.adapter)
    try:
        job = _job(executor, request, listener, borrowed, chunks, judge, on_first_logits)
    except BaseException:
        if adapter_lease is not None:
            adapter_lease.release()
        raise
    job.adapter_lease = adapter_lease
    return job


def _job(
    executor: Executor,
    request: Request,
    listener: Listener,
    borrowed: BorrowedKV | None,
    chunks: ChunkCache | None,
    judge: BlendJudge | None,
    on_first_logits: OnLogits | None,
) -> Job:
    scoring = _scoring(request, borrowed)
    capacity, reused, history = _room(executor, request, borrowed)
    state = _sampling_state(executor, request, history)
    if chunks is not None and borrowed is None and wants_discovery(request):
        request = discovered(executor, request, chunks, _indexed_tokens(executor, request))
    decision = _decision(executor, request, borrowed, chunks, judge)
    blending = None
    if decision is not None and decision.recipe is not None and chunks is not None:
        blend_prompt = BlendPrompt(tuple(request.prompt), request.documents)
        given = (request.tenant, request.adapter, request.blend_plugins)
        blending = Blending(executor, chunks, blend_prompt, decision.recipe, *given)
    prefix_keys = None
    if request.reuse and (borrowed is None or borrowed.exact):
        prefix_keys = _prefix_keys(executor, request)
        exact = request.tokens if blending is None else request.tokens[: blending.blend_prompt.exact]
        prefix_keys.extend(exact, executor.layout.page_tokens)
    if borrowed is not None and not reused:
        borrowed.kv.close()
    base = borrowed.kv if borrowed is not None and reused else None
    sample = _sample(executor, request, state, prefix_keys, capacity, blending)
    watcher = on_first_logits if decision is None else decision.on_first_logits or on_first_logits
    ids = list(request.prompt)
    pooling = None if request.pooling is None else Pooling(request.pooling, len(ids))
    first = SequenceState(sample, ids, state, prefix_keys, scoring, pooling, blending=blending, on_first_logits=watcher)
    job = Job(request, listener, first, base, capacity, unforked=request.samples - 1, blend_decision=decision)
    first.job = job
    return job


def _refuse_beside_embeds(request: Request) -> None:
    """What needs the id of every token of a prompt."""
    params = request.params
    if request.documents:
        raise InputError("documents cannot be blended into a prompt with embedding rows; give one or the other")
    if params is not None and params.prompt_logprobs is not None:
        raise ParamError("prompt_logprobs", "cannot be given for prompts with embedding rows, which have no ids")
    if params is not None and params.draft_tokens:
        raise ParamError("draft_tokens", "cannot be given for prompts with embedding rows; leave it out or give 0")


def _sampling_state(executor: Executor, request: Request, history: list[int]) -> SamplingState | None:
    """How tokens are drawn; None where only the KV of the prompt, or its log-probabilities, are wanted."""
    if request.params is None:
        return None
    request.params.validate_vocab(executor.spec.vocab_size)
    if request.params.max_tokens == 0:
        return None
    matcher = request.grammar.matcher() if request.grammar is not None else None
    return SamplingState(request.params, history, end_ids=request.end_ids, matcher=matcher)


def _prefix_keys(executor: Executor, request: Request) -> PrefixKeys:
    """Its keys in the prefix index."""
    begins = request.adapter.begins if isinstance(request.adapter, Adapted) else 0
    scope = PrefixScope(executor.adapters.identity(request.adapter), request.tenant)
    return PrefixKeys(scope, begins, executor.layout.page_tokens)


def _indexed_tokens(executor: Executor, request: Request) -> int:
    """Tokens of a prompt that the prefix index has now."""
    prefix_keys = _prefix_keys(executor, request)
    prefix_keys.extend(request.prompt, executor.layout.page_tokens)
    return executor.prefixes.match(prefix_keys, len(request.prompt) - 1).tokens


def _decision(
    executor: Executor,
    request: Request,
    borrowed: BorrowedKV | None,
    chunks: ChunkCache | None,
    judge: BlendJudge | None,
) -> BlendDecision | None:
    """How the documents of a prompt are blended; None where there are none, or where that is not worth it."""
    if not request.documents:
        if request.blend_plugins and not request.discover:
            raise InputError("a retriever and a blend_executor are for prompts with documents; give some")
        return None
    if chunks is None:
        raise InputError("documents need a store of chunks; give the engine one")
    # Spans that moved come from the cache that the prompt begins with, and stand behind it.
    if borrowed is not None and not isinstance(request.blend_plugins.retriever, CacheRetriever):
        raise InputError("documents stand in a prompt of their own; leave out the cache to continue")
    if request.params is not None and request.params.prompt_logprobs is not None:
        raise ParamError("prompt_logprobs", "cannot be given for blended prompts, which are not computed as a whole")
    blend_prompt, layers = BlendPrompt(tuple(request.prompt), request.documents), len(executor.spec.layers)
    request.blend_plugins.check(layers)
    if not blend_prompt.worth(request.recipe, layers) or not _windows_hold(executor, request, chunks):
        return None
    if judge is None or request.blend_plugins:  # a gate knows recipes, not what a caller's parts make of them
        return BlendDecision(request.recipe)
    adapter = executor.adapters.identity(request.adapter)
    draws = request.params is not None and request.params.max_tokens != 0
    return judge.judge(request, adapter, lambda recipe: blend_prompt.worth(recipe, layers), draws)


def _windows_hold(executor: Executor, request: Request, chunks: ChunkCache) -> bool:
    """Whether a prompt can be blended in window groups with few pages: it is written as a whole.

    Beside it there must be room for a document that is not stored. What does not fit can be computed step by step.
    """
    pool, scratch_tokens = executor.pool, max(map(len, request.documents)) + len(chunks.context_prefix)
    need = pool.layout.pages_for(len(request.prompt) + 1) + pool.layout.pages_for(scratch_tokens)
    return all(need <= pool.group_pages[group] for group in pool.small_groups)


def _scoring(request: Request, borrowed: BorrowedKV | None) -> Scoring | None:
    """Which tokens get log-probabilities. The first needs the logits of the token before: a borrowed cache drops it."""
    if request.params is None or request.params.prompt_logprobs is None:
        return None
    begins = max(0, request.continued_tokens - 1)
    if borrowed is not None and borrowed.kv.batch_size == 1:
        there = borrowed.kv.tokens()
        if there and isinstance(there[-1], int):
            with suppress(TruncateError):  # a sliding window may not allow that: then the first has none
                borrowed.kv.truncate(len(there) - 1)
        begins = max(begins, borrowed.kv.num_entries)
    return Scoring(request.params.prompt_logprobs, begins, len(request.prompt) - 1)


def _room(executor: Executor, request: Request, borrowed: BorrowedKV | None) -> tuple[int, int, list[int]]:
    """The most tokens of a sample, those in the borrowed cache, and the ids that penalties count."""
    if borrowed is None:
        with executor.create_kv_cache() as empty:
            empty.check_fits(len(request.prompt))
            return empty.capacity, 0, request.ids_from(0)
    kv = borrowed.kv
    if kv.pool is not executor.pool:
        raise InputError("this KV cache belongs to another executor; copy it over with select_and_copy_from")
    if kv.batch_size != 1:
        raise InputError(f"a prompt continues a cache of one row, this one has {kv.batch_size}")
    check_maker(kv.row(0), request.adapter, executor.adapters)
    kv.check_fits(len(request.prompt))
    if kv.num_entries >= len(request.prompt):
        raise InputError("the cache that was lent holds the whole prompt; leave at least one token to compute")
    # A position that was embedded has no id; penalties do not count it.
    there = [token for token in kv.tokens() if isinstance(token, int)]
    return kv.capacity, kv.num_entries, there + request.ids_from(kv.num_entries)


def _sample(
    executor: Executor,
    request: Request,
    state: SamplingState | None,
    prefix_keys: PrefixKeys | None,
    capacity: int,
    blending: Blending | None,
) -> Sample:
    """A request's first sample in counts."""
    prompt = len(request.prompt)
    limit = prompt + 1 if state is None else capacity + 1
    if state is not None and state.params.max_tokens is not None:
        limit = min(limit, prompt + state.params.max_tokens)
    wants_scores = request.params is not None and request.params.prompt_logprobs is not None
    return Sample(
        request=request.id,
        prompt=prompt,
        limit=limit,
        owner=request.owner,
        priority=request.priority,
        width=request.samples,
        keys=prefix_keys.keys if prefix_keys is not None and not request.background else (),
        end_ids=state.end_ids if state is not None else frozenset(),
        draws=state is not None,
        max_step_tokens=min(filter(None, (request.max_step_tokens, executor.pool.step_tokens)), default=0),
        # The next token is drawn from the last token's logits, so that token has a row of its own.
        scored=(prompt if state is None else prompt - 1) if wants_scores else 0,
        blend_progress=None
        if blending is None
        else BlendProgress(blending.blend_prompt.exact, prompt, blending.scratch_tokens),
    )
