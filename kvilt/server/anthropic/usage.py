"""Token counts as the Messages API writes them: what was read from the cache, what was pinned, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...llm import Usage
from ..kv.pins import PinnedPrefix
from ..openai.usage import kvilt_usage

_LONG_S = 3600.0


def message_usage(usage: Usage, generated: int, prefixes: Sequence[PinnedPrefix]) -> dict[str, Any]:
    """The counts of an answer; those of the input add up to the prompt's tokens."""
    written = {300.0: 0, _LONG_S: 0}
    done = usage.cached_tokens
    for prefix in sorted(prefixes, key=lambda one: one.tokens):
        written[prefix.ttl_s] += max(0, prefix.tokens - done)
        done = max(done, prefix.tokens)
    created = sum(written.values())
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": written[300.0],
            "ephemeral_1h_input_tokens": written[_LONG_S],
        },
        "output_tokens": generated,
        "kvilt": kvilt_usage([usage]),
    }
