"""What an engine counts and logs, under the names that dashboards know."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import InputError
from ..kv.pool import PagePool
from ..metrics import Counter, Gauge, Histogram, Metrics
from .event import Reason
from .features.quality_checks import GATE_METRICS
from .misses.miss import PrefixMiss
from .scheduling.scheduler import Scheduler
from .sequence import Job, SequenceState

_log = logging.getLogger(__name__)

RUNNING = Gauge("kvilt_num_requests_running", "Samples that have rows in steps.")
WAITING = Gauge("kvilt_num_requests_waiting", "Samples that wait for their first row, or their next after preemption.")
KV_USAGE = Gauge("kvilt_kv_cache_usage_perc", "Share of KV pages that are held, 0 to 1.")
PREFIX_QUERIES = Counter("kvilt_prefix_cache_queries_total", "Prompt tokens looked up in the prefix index.")
PREFIX_HITS = Counter("kvilt_prefix_cache_hits_total", "Prompt tokens whose KV was found there.")
RESTORED = Counter("kvilt_prefix_cache_restored_total", "Tokens whose KV came back to the prefix index from a store.")
MISSES = Counter("kvilt_prefix_cache_misses_total", "Prompts that reused less than they might have.", ("reason",))
MISSED = Counter("kvilt_prefix_cache_missed_tokens_total", "Tokens that they computed again.", ("reason",))
PROMPT_TOKENS = Counter("kvilt_prompt_tokens_total", "Tokens of prompts that were begun.")
GENERATED = Counter("kvilt_generation_tokens_total", "Tokens that were drawn.")
FIRST_TOKEN = Histogram("kvilt_time_to_first_token_seconds", "From arrival to the first token.")
NEXT_TOKEN = Histogram("kvilt_inter_token_latency_seconds", "From one token of a sample to the next.")
WHOLE = Histogram("kvilt_e2e_request_latency_seconds", "From arrival to the end of the last sample.")
QUEUED = Histogram("kvilt_request_queue_time_seconds", "From arrival to the first row.")
SUCCESS = Counter("kvilt_request_success_total", "Requests that ended, by why.", ("finished_reason",))
PREEMPTIONS = Counter("kvilt_num_preemptions_total", "Samples that gave their pages up.")
FORKS = Counter("kvilt_kv_forks_total", "Samples forked off a prompt's KV.")
HANDLES = Gauge("kvilt_kv_handles", "Named handles on KV.")
KV_BYTES = Gauge("kvilt_kv_bytes", "KV that is held, by tier.", ("tier",))
DRAFTS = Counter("kvilt_spec_decode_num_drafts_total", "Drafts that were computed, of one token or more.")
DRAFTED = Counter("kvilt_spec_decode_num_draft_tokens_total", "Tokens of these drafts.")
ACCEPTED = Counter("kvilt_spec_decode_num_accepted_tokens_total", "Those that were drawn.")
ACCEPTED_AT = Counter(
    "kvilt_spec_decode_num_accepted_tokens_per_pos_total", "The same by their place in a draft.", ("position",)
)

ENGINE_METRICS = (
    RUNNING,
    WAITING,
    KV_USAGE,
    PREFIX_QUERIES,
    PREFIX_HITS,
    RESTORED,
    MISSES,
    MISSED,
    PROMPT_TOKENS,
    GENERATED,
    FIRST_TOKEN,
    NEXT_TOKEN,
    WHOLE,
    QUEUED,
    SUCCESS,
    PREEMPTIONS,
    FORKS,
    HANDLES,
    KV_BYTES,
    DRAFTS,
    DRAFTED,
    ACCEPTED,
    ACCEPTED_AT,
    *GATE_METRICS,
)


@dataclass(slots=True)
class Counters:
    """The metrics of an engine, and one log line for each request that ends."""

    metrics: Metrics
    pool: PagePool
    scheduler: Scheduler
    clock: Callable[[], float]
    gauges: tuple[object, ...] = ()  # what they were set from
    between_s: list[float] = field(default_factory=list)  # of the tokens of a step

    def update_gauges(self) -> None:
        """Set the gauges after a step, or the end of a request; most decode steps change none of them."""
        free = self.pool.free_pages()
        if (now := (free, self.scheduler.running, self.scheduler.waiting)) == self.gauges:
            return
        self.gauges = now
        used = [total - pages for total, pages in zip(self.pool.group_pages, free, strict=True)]
        used_bytes = sum(n * group.shape.page_bytes for n, group in zip(used, self.pool.layout.groups, strict=True))
        self.metrics.set(RUNNING, self.scheduler.running)
        self.metrics.set(WAITING, self.scheduler.waiting)
        self.metrics.set(KV_USAGE, sum(used) / sum(self.pool.group_pages))
        self.metrics.set(KV_BYTES, used_bytes, tier="memory")

    def sample_started(self, seq: SequenceState) -> None:
        """A sample has its first row."""
        self.metrics.observe(QUEUED, self.clock() - seq.job.arrived_s)
        self.metrics.add(PROMPT_TOKENS, seq.sample.prompt)
        if seq.prefix_keys is not None:
            self.metrics.add(PREFIX_QUERIES, seq.sample.prompt)
            self.metrics.add(PREFIX_HITS, seq.cached or 0)

    def missed(self, miss: PrefixMiss) -> None:
        """A prompt reused less than it might have."""
        self.metrics.add(MISSES, reason=miss.reason)
        self.metrics.add(MISSED, miss.missed_tokens, reason=miss.reason)

    def token_drawn(self, seq: SequenceState, now_s: float) -> None:
        """A sample has one more token."""
        if seq.last_token_s:
            self.between_s.append(now_s - seq.last_token_s)
        elif seq.sample.index == 0:
            self.metrics.observe(FIRST_TOKEN, now_s - seq.job.arrived_s)
        seq.last_token_s = now_s

    def generated(self, tokens: int) -> None:
        """So many tokens were drawn in a step; the times between them and the last ones are counted at once."""
        self.metrics.add(GENERATED, tokens)
        between_s, self.between_s = self.between_s, []
        self.metrics.observe_all(NEXT_TOKEN, between_s)

    def verified(self, drafted: int, accepted: int) -> None:
        """The drafts of one row were verified."""
        for place in range(accepted):
            self.metrics.add(ACCEPTED_AT, position=str(place))
        self.metrics.add(DRAFTS)
        self.metrics.add(DRAFTED, drafted)
        self.metrics.add(ACCEPTED, accepted)

    def forked(self) -> None:
        self.metrics.add(FORKS)

    def preempted(self, seq: SequenceState) -> None:
        self.metrics.add(PREEMPTIONS)
        _log.info(
            "request %r gave its pages up after %d tokens",
            seq.sample.request,
            seq.sample.known,
            extra={"request_id": seq.sample.request, "sample": seq.sample.index},
        )

    def ended(self, job: Job, last: SequenceState, reason: Reason, error: BaseException | None = None) -> None:
        """The last sample of a request is over."""
        took_s = self.clock() - job.arrived_s
        self.metrics.observe(WHOLE, took_s)
        self.metrics.add(SUCCESS, finished_reason=reason)
        # %r: an id comes from a client, and a line of a log is one line.
        why = reason if error is None else f"{reason}: {type(error).__name__}"
        _log.log(
            logging.WARNING if isinstance(error, Exception) and not isinstance(error, InputError) else logging.INFO,
            "request %r ended (%s): %d prompt tokens, %d of them cached, %.3f s",
            job.request.id,
            why,
            last.sample.prompt,
            last.cached or 0,
            took_s,
            extra={"request_id": job.request.id, "finished_reason": reason, "error": error and type(error).__name__},
        )
