"""Completions as the numbers and the logprobs that clients read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..llm import Completion, Reading, Usage
from ..sampling.sampler import TokenLogprobs
from ..text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity
Count = Callable[[Mapping[str, Any]], None]


def usage_of(completions: Sequence[Completion]) -> dict[str, Any]:
    """The counts of all answers to some prompts; a prompt counts once, whatever its answers share."""
    samples = [sample for done in completions for sample in (done, *done.alternatives)]
    counts = usage([done.usage for done in completions], sum(len(sample.token_ids) for sample in samples))
    return {**counts, "completion_tokens_details": _drafts([sample.usage for sample in samples])}


def usage(prompts: Sequence[Usage], generated: int) -> dict[str, Any]:
    """Counts of tokens as OpenAI has them, with where the prompt's KV came from."""
    prompt = sum(one.prompt_tokens for one in prompts)
    own = {
        name: sum(getattr(one, name) for one in prompts)
        for name in ("computed", "prefix_hit", "blended_reused", "blended_recomputed", "documents_computed")
    }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(one.cached_tokens for one in prompts),
            "cache_write_tokens": own["computed"],
            "blended_tokens": own["blended_reused"],
        },
        "completion_tokens_details": _drafts(()),
        "kvilt": {**own, "recipe": " | ".join(dict.fromkeys(one.recipe for one in prompts if one.recipe)) or "exact"},
    }


def _drafts(samples: Sequence[Usage]) -> dict[str, int]:
    """What became of drafts, under OpenAI's names for predicted outputs."""
    drafted, accepted = sum(one.drafted_tokens for one in samples), sum(one.accepted_tokens for one in samples)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}


def running_usage(read: Sequence[Reading], generated: int) -> dict[str, Any]:
    """The counts while a stream runs."""
    return usage([one.usage for one in read], generated)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is no text of its own as its bytes."""
    spelled = tokenizer.shown_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def finite(logprob: float) -> float:
    """A logprob that JSON can write."""
    return logprob if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Logprobs as chat has them."""
    return {"content": [_entry(tokenizer, entry) for entry in entries], "refusal": None}


def _entry(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    top = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {
        **_likely(tokenizer, entry.token, entry.logprob),
        "top_logprobs": [_likely(tokenizer, token, logprob) for token, logprob in top],
    }


def _likely(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.shown_bytes(token)),
    }
