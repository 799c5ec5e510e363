"""Token counts and log-probabilities as the OpenAI API writes them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...blend.report import BlendedDocument
from ...llm import Completion, ReadingProgress, Usage
from ...sampling.sampler import TokenLogprobs
from ...text.detokenizer import Detokenizer
from ...text.tokenizer import Tokenizer
from .fields import GenerationRequest

LOWEST = -9999.0  # JSON has no infinity
OnUsage = Callable[[Mapping[str, Any], Sequence[str]], None]  # gets token counts, and why each sample ended


def completion_usage(completions: Sequence[Completion], blended: Tokenizer | None = None) -> dict[str, Any]:
    """The token counts of completions; a prompt counts once for all of its samples.

    With the tokenizer `blended` they say which tokens of documents were computed again.
    """
    samples = [sample for done in completions for sample in (done, *done.alternatives)]
    counts = usage_json([done.usage for done in completions], sum(len(sample.token_ids) for sample in samples))
    if blended is not None:
        shown = [document_json(blended, one) for done in completions for one in done.usage.documents]
        counts["kvilt"] = {**counts["kvilt"], "documents": shown}
    return {**counts, "completion_tokens_details": _drafts([sample.usage for sample in samples])}


def blended_tokenizer(tokenizer: Tokenizer, body: GenerationRequest) -> Tokenizer | None:
    """What decodes the tokens of documents, where a request wants to know which were computed again."""
    return tokenizer if body.return_blended_tokens else None


def document_json(tokenizer: Tokenizer, document: BlendedDocument) -> dict[str, Any]:
    """A blended document as pieces of text, each of tokens that were all computed again, or all reused."""
    stops = [place for span in document.recomputed for place in (span.start, span.stop)]
    detokenizer = Detokenizer(tokenizer, at_start=False)
    pieces: list[dict[str, Any]] = []
    for at, token in enumerate(document.ids, document.start):
        again = bisect_right(stops, at) % 2 == 1
        if not pieces or pieces[-1]["recomputed"] != again:
            pieces.append({"text": "", "recomputed": again, "tokens": 0})
        pieces[-1]["text"] += detokenizer.add(token)  # a character belongs to the token that completes it
        pieces[-1]["tokens"] += 1
    if pieces:
        pieces[-1]["text"] += detokenizer.finish()
    return {"start": document.start, "tokens": len(document.ids), "pieces": pieces}


def finish_reasons(completions: Sequence[Completion]) -> list[str]:
    """Why each sample ended."""
    return [sample.finish_reason for done in completions for sample in (done, *done.alternatives)]


def usage_json(prompts: Sequence[Usage], generated: int) -> dict[str, Any]:
    """OpenAI's usage object, with kvilt's counts of where the prompt's KV came from."""
    prompt = sum(one.prompt_tokens for one in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(one.cached_tokens for one in prompts),
            "cache_write_tokens": sum(one.computed for one in prompts),
            "blended_tokens": sum(one.blended_reused for one in prompts),
        },
        "completion_tokens_details": _drafts(()),
        "kvilt": kvilt_usage(prompts),
    }


def kvilt_usage(prompts: Sequence[Usage]) -> dict[str, Any]:
    """kvilt's own counts: where the prompt's KV came from, and why no more of it was reused."""
    counted = ("computed", "prefix_hit", "blended_reused", "blended_recomputed", "documents_computed")
    recipes = dict.fromkeys(one.recipe for one in prompts if one.recipe)
    missed = [one for one in prompts if one.miss is not None]
    worst = max(missed, key=lambda one: one.miss.expected - one.cached_tokens if one.miss else 0, default=None)
    return {
        **{name: sum(getattr(one, name) for one in prompts) for name in counted},
        "recipe": " | ".join(recipes) or "exact",
        "miss": None if worst is None or worst.miss is None else asdict(worst.miss),
    }


def _drafts(samples: Sequence[Usage]) -> dict[str, int]:
    """Accepted and rejected draft tokens, under OpenAI's names for predicted outputs."""
    drafted, accepted = sum(one.drafted_tokens for one in samples), sum(one.accepted_tokens for one in samples)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}


def running_usage(progress: Sequence[ReadingProgress], generated: int) -> dict[str, Any]:
    """The token counts so far of a stream that runs."""
    return usage_json([one.usage for one in progress], generated)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; a token that is no valid UTF-8 as `bytes:` and its bytes."""
    spelled = tokenizer.shown_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def json_logprob(logprob: float) -> float:
    """A logprob as a finite number, because JSON has no infinity."""
    return logprob if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Logprobs in the format of chat completions."""
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
        "logprob": json_logprob(logprob),
        "bytes": list(tokenizer.shown_bytes(token)),
    }


class CompletionLogprobs:
    """Logprobs of one choice in the format of completions: four lists over its tokens, taken piece by piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, at_start=False)
        self._offset = 0  # characters before the next token
        self._fresh: dict[str, list[Any]] = _empty()

    def add_prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        """Add the tokens of an echoed prompt. The first has no logprob; tokens of a KV handle are not shown."""
        self._detokenizer = Detokenizer(self._tokenizer)
        own = logprobs[len(logprobs) - len(ids) :] if logprobs else [None] * len(ids)
        for token, entry in zip(ids, own, strict=True):
            self._add(token, entry)

    def add_generated(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add generated tokens."""
        for entry in logprobs:
            self._add(entry.token, entry)

    def take_new(self) -> dict[str, list[Any]]:
        """The lists since the last call."""
        fresh, self._fresh = self._fresh, _empty()
        return fresh

    def _add(self, token: int, entry: TokenLogprobs | None) -> None:
        self._fresh["tokens"].append(token_text(self._tokenizer, token))
        self._fresh["token_logprobs"].append(None if entry is None else json_logprob(entry.logprob))
        self._fresh["top_logprobs"].append(None if entry is None else self._likely(entry))
        self._fresh["text_offset"].append(self._offset)
        self._offset += len(self._detokenizer.add(token))

    def _likely(self, entry: TokenLogprobs) -> dict[str, float]:
        """The top tokens and the sampled one by their texts; of two tokens with one text, the more likely."""
        pairs = [(entry.token, entry.logprob), *reversed([*zip(entry.top_ids, entry.top_logprobs, strict=True)])]
        return {token_text(self._tokenizer, token): json_logprob(logprob) for token, logprob in pairs}


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
