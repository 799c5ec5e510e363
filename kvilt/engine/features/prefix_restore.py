"""Prefixes in a store: pages that the prefix index evicts go there, and prompts load their prefix from there.

Only the prompt itself waits for that, and not long. Refuses to know tiers, and which samples are scheduled.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from ...errors import StoreMiss
from ...executor.protocol import Executor
from ...kv.identity import Identity
from ...kv.prefix import EvictedPage
from ...kv.row import RowImage
from ...metrics import Metrics
from ...store.address import Address, page_addresses
from ...store.loading import Loading
from ...store.store import Store
from ..counters import RESTORED
from ..isolation import contained, quietly
from ..scheduling.plan import PrefixHit
from ..scheduling.proposals import WaitForStore
from ..sequence import SequenceState
from .feature import Feature, Forgotten, Proposal, Sequences

_log = logging.getLogger(__name__)

MAX_LOADS = 4  # at once; the next prompt waits until one of them has ended
AHEAD_BYTES = 64 << 20  # of pages that one of them loads at once
_HEADER_BYTES = 512  # of a record, for each of its layers
WORTH_TOKENS_S = 1000  # below this many tokens a second the load ends, and the rest is computed


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """A prompt whose prefix is being loaded from a store, page after page."""

    seq: SequenceState
    addresses: Iterator[Address]  # of pages whose loading has not begun
    claims: frozenset[bytes]  # keys of all its pages: other prompts that want them wait
    deadline_s: float
    pending: deque[Loading] = field(default_factory=deque)
    found: bool = False  # the first page was found, so further pages may be


class PrefixRestore(Feature):
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
        """A load needs at least `least_tokens`; `wake` is called, from any thread, when a page was loaded."""
        self._executor = executor
        self._store = store
        self._least = least_tokens
        self._metrics = metrics
        self._wake = wake
        self._clock = clock
        self._layout = executor.layout
        self._layers = len(executor.spec.layers)
        # This may hash all weights. Loading a model waits for that, not its first request or a step.
        self._identity: Identity | None = executor.pool.identity()
        self._loads: dict[SequenceState, PrefixLoad] = {}
        self._queue: dict[SequenceState, None] = {}  # those that wait until another load ends
        self._checked: set[SequenceState] = set()  # what the store has of their prefixes is here; only asked
        self._released: list[SequenceState] = []  # those that the next plan may start

    # Loading.

    def load_prefix(self, seq: SequenceState, hit: PrefixHit) -> bool:
        """Whether a prompt that could start waits for a longer prefix than `hit`; starts the load if there is none.

        If the store fails, the prompt is computed.
        """
        try:
            return self._try_load(seq, hit)
        except BaseException as error:
            contained(error)
            self._loads.pop(seq, None)
            self._queue.pop(seq, None)
            self._checked.add(seq)
            return False

    def _try_load(self, seq: SequenceState, hit: PrefixHit) -> bool:
        if seq in self._checked or self._identity is None or seq.prefix_keys is None or seq.job.base is not None:
            return False
        if seq.sample.scored or seq.job.request.background:  # computed as a whole, or not shared
            return False
        size, keys, sample = self._layout.page_tokens, seq.prefix_keys.keys, seq.sample
        most = sample.known - 1 if sample.blend_progress is None else min(sample.known - 1, sample.blend_progress.start)
        stop = min(len(keys), self._layout.pages_for(most))
        if stop * size - hit.tokens < self._least:
            return False
        first = self._executor.prefixes.missing(seq.prefix_keys, most)
        if (stop - first) * size < self._least:
            return False
        if len(self._loads) < MAX_LOADS and not any(keys[first] in load.claims for load in self._loads.values()):
            self._begin(seq, first, stop)
        else:
            self._queue[seq] = None
        return True

    @property
    def has_ready(self) -> bool:
        """Whether a page was loaded, a load is past its deadline, or a prompt need not wait any more."""
        return bool(self._released) or any(
            quietly(partial(self._is_ready, load), True) for load in self._loads.values()
        )

    @property
    def wait_timeout_s(self) -> float | None:
        """Seconds after which that is so in any case; None where nothing is loaded."""
        return min((quietly(partial(self._timeout_s, load), 0.0) for load in self._loads.values()), default=None)

    def before_plan(self, seqs: Sequences) -> Iterable[Proposal]:
        """Write loaded pages into the prefix index. Prompts whose load has ended, or took too long, continue."""
        for load in list(self._loads.values()):
            if not quietly(partial(self._advance, load), False):  # if the store fails, the rest is computed
                self._end(load)
                self._checked.add(load.seq)
        released, self._released = self._released, []
        return [WaitForStore(seq.sample, False) for seq in released]

    def forget(self, seq: SequenceState, why: Forgotten) -> None:
        """A sequence has ended, or gives its pages up; if it starts again, it may load again."""
        self._checked.discard(seq)
        self._queue.pop(seq, None)
        if (load := self._loads.get(seq)) is not None:
            self._end(load)
        if seq in self._released:
            self._released.remove(seq)
        if why == "unsound":
            self._discard(seq)

    def _discard(self, seq: SequenceState) -> None:
        """A prompt's KV is not sound: remove it from the store as well."""
        if self._identity is not None and seq.prefix_keys is not None:
            for address in self._addresses(seq, 0, len(seq.prefix_keys.keys)):
                self._store.discard(address)

    def _begin(self, seq: SequenceState, first: int, stop: int) -> None:
        assert seq.prefix_keys is not None
        limits, tokens = self._store.limits, (stop - first) * self._layout.page_tokens
        deadline_s = self._clock() + limits.lookup_s + limits.layer_s + tokens / WORTH_TOKENS_S
        claims = frozenset(seq.prefix_keys.keys[first:stop])
        load = PrefixLoad(seq, self._addresses(seq, first, stop), claims, deadline_s)
        self._loads[seq] = load
        self._open(load, 1)
        load.pending[0].watch(self._wake)

    def _addresses(self, seq: SequenceState, first: int, stop: int) -> Iterator[Address]:
        """Where pages [first, stop) of a prompt are; those before an adapter begins are the base model's."""
        prefix_keys, size = seq.prefix_keys, self._layout.page_tokens
        assert prefix_keys is not None
        assert self._identity is not None
        tokens = seq.tokens(0, stop * size)
        for scope, begin, end in (
            (prefix_keys.scope, first, min(stop, prefix_keys.adapted_page)),
            (prefix_keys.adapted_scope, max(first, prefix_keys.adapted_page), stop),
        ):
            if begin < end:
                own = replace(self._identity, adapter=scope.adapter, salt=scope.salt)
                yield from islice(page_addresses(own, tokens, self._layout, size, begin * size), end - begin)

    def _open(self, load: PrefixLoad, most: int) -> None:
        for address in islice(load.addresses, most - len(load.pending)):
            loading = self._store.open(address)
            loading.watch(self._wake, self._layers)
            load.pending.append(loading)

    def _advance(self, load: PrefixLoad) -> bool:
        """Write the loaded pages into the prefix index, and start to load more; False once the load has ended."""
        images: list[RowImage] = []
        over = False
        while load.pending and not over and load.pending[0].settled(self._layers):
            try:
                images.append(load.pending.popleft().image(self._layout))
            except StoreMiss:  # the pages after it are of no use without it
                over = True
        load.found |= bool(images) or (bool(load.pending) and load.pending[0].settled() and not load.pending[0].reason)
        if images:
            assert load.seq.prefix_keys is not None
            placed = self._executor.prefixes.restore(load.seq.prefix_keys, images, self.store_page)
            self._metrics.add(RESTORED, placed * self._layout.page_tokens)
            over |= placed < len(images)
        if over or self._clock() >= load.deadline_s:
            return False
        if load.found:
            self._open(load, max(2, AHEAD_BYTES // self._layout.page_bytes))
        return bool(load.pending)

    def _is_ready(self, load: PrefixLoad) -> bool:
        head = load.pending[0]
        return head.settled(self._layers) or (not load.found and head.settled()) or self._clock() >= load.deadline_s

    def _timeout_s(self, load: PrefixLoad) -> float:
        return min(load.pending[0].patience_s(self._layers), max(0.0, load.deadline_s - self._clock()))

    def _end(self, load: PrefixLoad) -> None:
        """End a load. The prompts that waited for it are asked for again by the next plan."""
        del self._loads[load.seq]
        for loading in load.pending:
            quietly(loading.cancel, None)
        self._released += [load.seq, *self._queue]
        self._queue.clear()

    # Storing.

    def store_page(self, page: EvictedPage) -> None:
        """Store a page that the prefix index evicts, until this is closed. Copies nothing and waits for nothing."""
        if self._identity is not None:
            self._store.put_evicted(self._identity, self._layout, page)

    def close(self) -> None:
        """Put all known prefixes into the store, the latest used first, as far as its budgets and limits allow."""
        for load in list(self._loads.values()):
            self._end(load)
        budget, limits = self._store.least_budget, self._store.limits
        if self._identity is None or budget is None:
            return
        deadline_s = self._clock() + limits.close_s
        used: Counter[str] = Counter()
        queued_bytes, queued = 0, 0
        for page in self._executor.prefixes.leaving():
            held = zip(self._layout.groups, page.kv, strict=True)
            nbytes = sum(group.shape.page_bytes for group, kv in held if kv is not None)
            nbytes += 8 * len(page.tokens) + _HEADER_BYTES * self._layers  # the rest of a record, or a little less
            if used.total() + nbytes > budget.total_bytes or self._clock() >= deadline_s:
                break
            if used[page.scope.owner] + nbytes > budget.tenant:
                continue
            if queued_bytes + nbytes > limits.queue_bytes // 2 or queued >= limits.queue_records // 2:
                self._store.flush(max(0.0, deadline_s - self._clock()))
                queued_bytes, queued = 0, 0
            self.store_page(page)
            used[page.scope.owner] += nbytes
            queued_bytes, queued = queued_bytes + nbytes, queued + 1
        self._identity = None  # closing twice is fine
        _log.info("%d bytes of prefixes were given to the store", used.total())
