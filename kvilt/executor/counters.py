"""What an executor counts."""

from __future__ import annotations

from ..metrics import Counter

STEPS = Counter("kvilt_steps_total", "Forwards that were run.")
ROWS = Counter("kvilt_rows_total", "Rows of those forwards, by adapter.", ("adapter",))
TOKENS = Counter("kvilt_computed_tokens_total", "Tokens whose KV was computed.")

EXECUTOR_METRICS = (STEPS, ROWS, TOKENS)
