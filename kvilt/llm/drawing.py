"""Completions and models as HTML for notebooks; the style is that of `kvilt.kv.drawing`."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from ..kv.drawing import STYLE, badge, in_units

if TYPE_CHECKING:
    from .completion import Completion, Usage
    from .model import Model

_MOST_CHARS = 20_000
# Where the KV of a prompt's tokens came from, and the colours of the bar.
_SOURCES = (
    ("computed", "computed", "#2f7de1"),
    ("prefix_hit", "from the prefix index or a cache", "#3a9d5d"),
    ("blended_reused", "reused from documents", "#d9822b"),
    ("blended_recomputed", "recomputed in documents", "#b455d1"),
)


class HTMLDrawing:
    """Something that a notebook draws."""

    def __init__(self, html: str) -> None:
        self.html = html

    def _repr_html_(self) -> str:
        return self.html


def draw_completion(completion: Completion) -> str:
    """The HTML of a completion: its text, what its tokens cost, and how long they took."""
    text = completion.text[:_MOST_CHARS] + ("…" if len(completion.text) > _MOST_CHARS else "")
    parts = [
        f"<details><summary>reasoning</summary><div>{escape(completion.reasoning[:_MOST_CHARS])}</div></details>"
        if completion.reasoning
        else "",
        f'<div class="kvilt-answer">{escape(text)}</div>',
        *(
            f"<div>{badge('tool call')} {escape(f'{call.name} {call.arguments}')}</div>"
            for call in completion.tool_calls
        ),
        _usage_bar(completion.usage),
        table(_completion_lines(completion)),
        *(f"<div>{badge('warning')} {escape(warning)}</div>" for warning in completion.warnings),
    ]
    return f'{STYLE}<div class="kvilt kvilt-completion">{"".join(parts)}</div>'


def _completion_lines(completion: Completion) -> Iterable[tuple[str, str]]:
    usage, timing = completion.usage, completion.timing
    yield "prompt", f"{usage.prompt_tokens:,} tokens, {usage.cached_tokens:,} of them not computed"
    yield "answer", f"{usage.completion_tokens:,} tokens, ended by {completion.finish_reason}"
    after_s = timing.total_s - timing.first_token_s
    rate = f", then {(usage.completion_tokens - 1) / after_s:,.0f} tokens/s" if after_s > 0 else ""
    yield "time", f"{timing.total_s:.2f} s, the first token after {timing.first_token_s:.2f} s{rate}"
    if usage.documents_computed:
        yield "documents", f"{usage.documents_computed:,} tokens computed once and kept"
    if usage.recipe:
        yield "recipe", usage.recipe
    if usage.drafted_tokens:
        yield "drafts", f"{usage.accepted_tokens:,} of {usage.drafted_tokens:,} accepted"
    if usage.miss is not None:
        yield "miss", f"{usage.miss.expected:,} tokens could have been reused: {usage.miss.reason}"
    if completion.alternatives:
        yield "samples", f"{1 + len(completion.alternatives)}"


def _usage_bar(usage: Usage) -> str:
    counts = [(getattr(usage, name), told, colour) for name, told, colour in _SOURCES]
    total = sum(count for count, _, _ in counts)
    if not total:
        return ""
    shown = [each for each in counts if each[0]]
    cells = "".join(
        f'<i style="width:{100 * count / total:.2f}%;background:{colour}" title="{count:,} {told}"></i>'
        for count, told, colour in shown
    )
    keys = " ".join(
        f'<span class="kvilt-key" style="background:{colour}"></span>{count:,} {told}' for count, told, colour in shown
    )
    return f'<div class="kvilt-bar">{cells}</div><div class="kvilt-dim">{keys}</div>'


def draw_model(model: Model) -> str:
    """The HTML of a model: what it is, where it runs, and how much of its KV memory is in use."""
    executor, name = model.executor, type(model).__name__
    if executor.closed:
        return f'{STYLE}<div class="kvilt kvilt-llm"><b>{name}</b> <span class="kvilt-dim">closed</span></div>'
    pool, spec = executor.pool, executor.spec
    usage = pool.usage()
    kernels = ", ".join(f"{form}: {kernel}" for form, kernel in executor.weight_kernels.items())
    adapters = ", ".join(one.name for one in executor.adapters.all())
    lines = [
        ("model", f"{spec.family}, {len(spec.layers)} layers of {spec.hidden_size}, {spec.vocab_size:,} tokens"),
        ("weights", f"{in_units(executor.weight_bytes)} ({kernels})"),
        ("context", f"{executor.max_context:,} tokens"),
        ("runs on", f"{pool.device}, {pool.ops.name}: {pool.ops.numerics}"),
        (
            "KV",
            f"{in_units(pool.nbytes)} of {pool.layout.groups[0].shape.dtype.name}, pages of {pool.page_tokens} tokens",
        ),
        (
            "KV in use",
            f"{in_units(usage.used_bytes)}, {usage.shared:,} pages shared, {usage.cached:,} kept for prefixes",
        ),
        ("chat template", "yes" if model.tokenizer.chat_template else "no"),
        *([("adapters", adapters)] if adapters else []),
    ]
    used = 100 * usage.used / max(1, usage.total)
    kept = 100 * usage.cached / max(1, usage.total)
    bar = (
        '<div class="kvilt-bar">'
        f'<i style="width:{used:.2f}%;background:#2f7de1" title="{usage.used:,} pages in use"></i>'
        f'<i style="width:{kept:.2f}%;background:#2f7de166" title="{usage.cached:,} pages kept"></i></div>'
    )
    return f'{STYLE}<div class="kvilt kvilt-llm"><b>{name}</b>{table(lines)}{bar}</div>'


def table(lines: Iterable[tuple[str, str]]) -> str:
    """Names and values, one pair on a line."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in lines)
    return f"<table>{rows}</table>"
