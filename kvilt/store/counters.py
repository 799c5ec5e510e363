"""What a store counts, and the one place that knows the names."""

from __future__ import annotations

from ..metrics import Counter, Gauge, Histogram, Metrics

LOOKUPS = Counter("kvilt_store_lookups_total", "Records that were looked for, by kind.", ("kind",))
HITS = Counter("kvilt_store_hits_total", "Records that were found and could be trusted, by where.", ("tier", "kind"))
MISSES = Counter("kvilt_store_misses_total", "Lookups that no tier could answer, by why.", ("reason",))
REFUSED = Counter("kvilt_store_refused_total", "Records and answers of a tier that were not used.", ("tier", "reason"))
WRITTEN = Counter("kvilt_store_written_total", "Records that a tier took.", ("tier",))
DROPPED = Counter("kvilt_store_dropped_total", "Records that a tier did not take, by why.", ("tier", "reason"))
EVICTED = Counter("kvilt_store_evicted_total", "Records that made room for others.", ("tier",))
BYTES = Gauge("kvilt_store_bytes", "Bytes of records, as far as the tier knows.", ("tier",))
RECORDS = Gauge("kvilt_store_records", "Records, as far as the tier knows.", ("tier",))
UP = Gauge("kvilt_store_tier_up", "1 while a tier is asked, 0 while it is left alone after failures.", ("tier",))
LOOKUP_S = Histogram("kvilt_store_lookup_seconds", "From the question to a trusted header, or to a miss.", ("tier",))

STORE_METRICS = (LOOKUPS, HITS, MISSES, REFUSED, WRITTEN, DROPPED, EVICTED, BYTES, RECORDS, UP, LOOKUP_S)


def new_metrics() -> Metrics:
    """A metrics object of its own, for a store that shares none."""
    return Metrics(STORE_METRICS)
