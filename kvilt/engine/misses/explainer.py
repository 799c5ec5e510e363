"""Compares each request with earlier ones when it is prepared, and says at its end why it reused no more KV.

A request that borrows a cache, or has embedding rows, is not compared. Refuses to know text.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ...executor.protocol import Executor
from ...kv.row import EXACT
from ..isolation import quietly
from ..sequence import Job, SequenceState
from .explain import ReuseFacts, explain
from .miss import PrefixMiss
from .past_prompts import HowShared, PastPrompt, PastPrompts, PromptScope, token_array


class MissExplainer:
    """Explains the misses of one engine."""

    def __init__(self, executor: Executor, past: PastPrompts) -> None:
        self._executor = executor
        self._past = past

    def compare(self, job: Job) -> None:
        """Compare a request with earlier ones; in the thread that prepares it, and never the reason why it fails."""
        request = job.request
        if not request.background and request.embeds is None and request.pooling is None:
            quietly(partial(self._compare, job), None)

    def _compare(self, job: Job) -> None:
        request, keys = job.request, job.first.prefix_keys
        adapter = self._executor.adapters.identity(request.adapter) if keys is None else keys.adapted_scope.adapter
        scope = PromptScope(request.owner, request.tenant, adapter)
        job.comparison = self._past.compare(scope, token_array(request.prompt))

    def explained(self, seq: SequenceState) -> PrefixMiss | None:
        """Why a sequence that has begun reused no more."""
        job, comparison = seq.job, seq.job.comparison
        if comparison is None or seq.sample.index or seq.cached is None:
            return None
        if not job.explained and (job.base is None or job.request.session):
            job.miss = explain(comparison, self._facts(seq), self._past.clock())
        job.explained = True
        return job.miss

    def ended(self, seq: SequenceState) -> PrefixMiss | None:
        """Note the prompt of a sequence that ends, and say why it reused no more; once for each request."""
        job, comparison = seq.job, seq.job.comparison
        if comparison is None or seq.sample.index or seq.cached is None:
            return None
        miss, job.comparison = self.explained(seq), None
        length = seq.kv.num_entries if seq.kv is not None else seq.prompt_ready
        drawn = token_array(seq.ids[seq.sample.prompt : length])
        ids = np.concatenate([comparison.ids, drawn])[:length]
        if length:
            prompt = min(length, seq.sample.prompt)
            past = PastPrompt(job.request.id, comparison.scope, ids, prompt, _shared(seq), self._past.clock())
            self._past.add(past, comparison.compared)
        return miss

    def _facts(self, seq: SequenceState) -> ReuseFacts:
        layout = self._executor.layout
        return ReuseFacts(
            reused=seq.cached or 0,
            known=seq.known_prefix,
            page_tokens=layout.page_tokens,
            recurrent=layout.recurrent is not None,
            scored=seq.scoring is not None,
            blended=seq.blending is not None,
        )


def _shared(seq: SequenceState) -> HowShared:
    """Whether the KV of a sequence is in the prefix index."""
    if seq.blending is not None or (seq.kv is not None and seq.kv.row(0).origin != EXACT):
        return "blended"
    return "unshared" if seq.prefix_keys is None else "exact"
