"""Prompts that stay warm: pages that the prefix index gives up go to a store, and prompts look there for their
beginning before it is computed.

Only the prompt itself waits for that, and not long. Refuses to know tiers, and who is scheduled.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from ..errors import StoreMiss
from ..executor.executor import Executor
from ..kv.identity import Identity
from ..kv.prefix import EvictedPage
from ..kv.row import RowImage
from ..metrics import Metrics
from ..store.address import Address, page_addresses
from ..store.loading import Loading
from ..store.store import Store
from .counters import RESTORED
from .isolation import contained, quietly
from .plan import PrefixHit
from .sequence import SequenceState

_log = logging.getLogger(__name__)

MOST_SEEKS = 4  # that load at once; whoever comes next waits until one of them has ended
AHEAD_BYTES = 64 << 20  # of pages that one of them has on the way
_HEADER_BYTES = 512  # of a record, for each of its layers
WORTH_TOKENS_S = 1000  # a store that loads fewer tokens a second is given up, and the rest is computed


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """A prompt whose beginning is on its way from a store, page behind page."""

    seq: SequenceState
    addresses: Iterator[Address]  # of pages that nobody has asked for yet
    claims: frozenset[bytes]  # keys of all its pages: others who want them wait for it
    deadline_s: float
    coming: deque[Loading] = field(default_factory=deque)
    found: bool = False  # the first page is there, so that others may be


class PrefixRestore:
    """Prefixes of one executor in a store that outlives it. The engine calls it from its stepping thread."""

    def __init__(
        self,
        executor: Executor,
        store: Store,
        least_tokens: int,
        metrics: Metrics,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`least_tokens` are worth looking for; `wake` is called, from any thread, when something has come."""
        self._executor = executor
        self._store = store
        self._least = least_tokens
        self._metrics = metrics
        self._wake = wake
        self._clock = clock
        self._layout = executor.layout
        self._layers = len(executor.spec.layers)
        # This may hash all weights. Whoever loads a model waits for that, and not its first request, or a step.
        self._identity: Identity | None = executor.pool.identity()
        self._seeks: dict[SequenceState, PrefixLoad] = {}
        self._queue: dict[SequenceState, None] = {}  # those that wait for somebody else's to end
        executor.prefixes.on_evict = self._keep

    # Looking.

    def load_prefix(self, seq: SequenceState, hit: PrefixHit) -> bool:
        """Whether a prompt that could begin waits for more than `hit`; looks for it, if nobody has.

        A store that fails has nothing: the prompt is computed.
        """
        try:
            return self._look(seq, hit)
        except BaseException as error:
            contained(error)
            self._seeks.pop(seq, None)
            seq.sample.waits, seq.restored = False, True
            return False

    def _look(self, seq: SequenceState, hit: PrefixHit) -> bool:
        if seq.restored or self._identity is None or seq.prefix_keys is None or seq.job.base is not None:
            return False
        if seq.sample.scored or seq.job.request.background:  # computed as a whole, or nobody's business
            return False
        size, keys, sample = self._layout.page_tokens, seq.prefix_keys.keys, seq.sample
        most = sample.known - 1 if sample.blend_progress is None else min(sample.known - 1, sample.blend_progress.start)
        stop = min(len(keys), self._layout.pages_for(most))
        if stop * size - hit.tokens < self._least:
            return False
        first = self._executor.prefixes.missing(seq.prefix_keys, most)
        if (stop - first) * size < self._least:
            return False
        sample.waits = True
        if len(self._seeks) < MOST_SEEKS and not any(keys[first] in one.claims for one in self._seeks.values()):
            self._begin(seq, first, stop)
        else:
            self._queue[seq] = None
        return True

    @property
    def due(self) -> bool:
        """Whether something has come, or somebody has waited long enough."""
        return any(quietly(partial(self._due, one), True) for one in self._seeks.values())

    @property
    def patience_s(self) -> float | None:
        """Seconds after which that is so in any case; None where nobody waits."""
        return min((quietly(partial(self._patience_s, one), 0.0) for one in self._seeks.values()), default=None)

    def before_plan(self) -> None:
        """Place what has come; prompts that got all there is, or waited long enough, go on."""
        for one in list(self._seeks.values()):
            if not quietly(partial(self._load, one), False):  # a store that fails is a store without the rest
                self._end(one)
                one.seq.restored = True

    def forget(self, seq: SequenceState) -> None:
        """It has ended, or gives its pages up; should it come back, it may look again."""
        seq.restored = False
        self._queue.pop(seq, None)
        if (one := self._seeks.get(seq)) is not None:
            self._end(one)

    def doubt(self, seq: SequenceState) -> None:
        """Something is wrong with a prompt's KV: nobody shall find it in the store either."""
        if self._identity is not None and seq.prefix_keys is not None:
            for address in self._addresses(seq, 0, len(seq.prefix_keys.keys)):
                self._store.discard(address)

    def _begin(self, seq: SequenceState, first: int, stop: int) -> None:
        assert seq.prefix_keys is not None
        limits, tokens = self._store.limits, (stop - first) * self._layout.page_tokens
        deadline_s = self._clock() + limits.lookup_s + limits.layer_s + tokens / WORTH_TOKENS_S
        claims = frozenset(seq.prefix_keys.keys[first:stop])
        one = PrefixLoad(seq, self._addresses(seq, first, stop), claims, deadline_s)
        self._seeks[seq] = one
        self._open(one, 1)
        one.coming[0].watch(self._wake)

    def _addresses(self, seq: SequenceState, first: int, stop: int) -> Iterator[Address]:
        """Where pages [first, stop) of a prompt are; those before an adapter begins are the base model's."""
        prefix_keys, size = seq.prefix_keys, self._layout.page_tokens
        assert prefix_keys is not None
        assert self._identity is not None
        tokens = seq.ids[: stop * size]
        for scope, begin, end in (
            (prefix_keys.scope, first, min(stop, prefix_keys.adapted_page)),
            (prefix_keys.adapted_scope, max(first, prefix_keys.adapted_page), stop),
        ):
            if begin < end:
                own = replace(self._identity, adapter=scope.adapter, salt=scope.salt)
                yield from islice(page_addresses(own, tokens, self._layout, size, begin * size), end - begin)

    def _open(self, one: PrefixLoad, most: int) -> None:
        for address in islice(one.addresses, most - len(one.coming)):
            loading = self._store.open(address)
            loading.watch(self._wake, self._layers)
            one.coming.append(loading)

    def _load(self, one: PrefixLoad) -> bool:
        """Place the pages that are here, and ask for more; False once that is all."""
        images: list[RowImage] = []
        over = False
        while one.coming and not over and one.coming[0].settled(self._layers):
            try:
                images.append(one.coming.popleft().image(self._layout))
            except StoreMiss:  # what stands behind a page is of no use without it
                over = True
        one.found |= bool(images) or (bool(one.coming) and one.coming[0].settled() and not one.coming[0].reason)
        if images:
            assert one.seq.prefix_keys is not None
            placed = self._executor.prefixes.restore(one.seq.prefix_keys, images)
            self._metrics.add(RESTORED, placed * self._layout.page_tokens)
            over |= placed < len(images)
        if over or self._clock() >= one.deadline_s:
            return False
        if one.found:
            self._open(one, max(2, AHEAD_BYTES // self._layout.page_bytes))
        return bool(one.coming)

    def _due(self, one: PrefixLoad) -> bool:
        head = one.coming[0]
        return head.settled(self._layers) or (not one.found and head.settled()) or self._clock() >= one.deadline_s

    def _patience_s(self, one: PrefixLoad) -> float:
        return min(one.coming[0].patience_s(self._layers), max(0.0, one.deadline_s - self._clock()))

    def _end(self, one: PrefixLoad) -> None:
        del self._seeks[one.seq]
        one.seq.sample.waits = False
        for loading in one.coming:
            quietly(loading.cancel, None)
        for seq in self._queue:
            seq.sample.waits = False  # asked again by the next plan
        self._queue.clear()

    # Keeping.

    def _keep(self, page: EvictedPage) -> None:
        """A page is about to be lost. Copies nothing and waits for nothing."""
        if self._identity is not None:
            self._store.put_evicted(self._identity, self._layout, page)

    def close(self) -> None:
        """Put what is still known into the store, the latest used first, as far as its budgets and limits allow."""
        self._executor.prefixes.on_evict = None
        for one in list(self._seeks.values()):
            self._end(one)
        budget, limits = self._store.least_budget, self._store.limits
        if self._identity is None or budget is None:
            return
        deadline_s = self._clock() + limits.close_s
        used: Counter[str] = Counter()
        queued_bytes, queued = 0, 0
        for page in self._executor.prefixes.leaving():
            held = zip(self._layout.groups, page.kv, strict=True)
            nbytes = sum(group.shape.page_bytes for group, kv in held if kv is not None)
            nbytes += 8 * len(page.tokens) + _HEADER_BYTES * self._layers  # what a record has besides, or a little less
            if used.total() + nbytes > budget.total_bytes or self._clock() >= deadline_s:
                break
            if used[page.scope.owner] + nbytes > budget.tenant:
                continue
            if queued_bytes + nbytes > limits.queue_bytes // 2 or queued >= limits.queue_records // 2:
                self._store.flush(max(0.0, deadline_s - self._clock()))
                queued_bytes, queued = 0, 0
            self._keep(page)
            used[page.scope.owner] += nbytes
            queued_bytes, queued = queued_bytes + nbytes, queued + 1
        self._identity = None  # closing twice is fine
        _log.info("%d bytes of prefixes were given to the store", used.total())
