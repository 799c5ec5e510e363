"""A cache as HTML for notebooks: its pages, whether they are shared, its tokens and where it comes from.

The HTML stands alone: no script, no font, no request. Its colours are translucent, so that it fits a light page and a
dark one. Refuses to know text: what a token is called is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from .layout import Window
from .row import GONE, CacheRow, Token

if TYPE_CHECKING:
    from .cache import KVCache

TokenLabel = Callable[[Token], str]
_MOST_ROWS, _MOST_PAGES, _FIRST_TOKENS, _LAST_TOKENS = 16, 256, 96, 32
_LABEL_CHARS = 32
STYLE = """<style>
.kvilt{font:13px/1.45 system-ui,sans-serif;color:var(--jp-content-font-color1,inherit);max-width:60em}
.kvilt b{font-weight:600}.kvilt .kvilt-dim{opacity:.7}
.kvilt table{border-collapse:collapse;margin:.3em 0;color:inherit}
.kvilt td,.kvilt th{text-align:left;padding:.1em 1em .1em 0;color:inherit;background:none;border:0;font-size:13px}
.kvilt th{font-weight:400;opacity:.7}
.kvilt-badge{border:1px solid;border-radius:.6em;padding:0 .5em;font-size:11px;opacity:.85}
.kvilt-pages{display:flex;flex-wrap:wrap;gap:2px;margin:.35em 0}
.kvilt-pages i{display:block;width:12px;height:14px;border-radius:2px;box-sizing:border-box;border:1px solid #2f7de1}
.kvilt-own{background:#2f7de1}.kvilt-kept{background:#2f7de166}
.kvilt-pages .kvilt-shared{background:#d9822b;border-color:#d9822b}
.kvilt-pages .kvilt-gone{background:none;border:1px dashed #8888}
.kvilt-tokens{font:12px/1.7 ui-monospace,monospace;overflow-wrap:anywhere;white-space:pre-wrap}
.kvilt-tokens span{background:#2f7de11c;border-radius:2px;margin-right:1px}
.kvilt-tokens span.kvilt-odd{background:#2f7de133}.kvilt-tokens span.kvilt-adapted{background:#b455d144}
.kvilt-bar{display:flex;height:10px;border-radius:3px;overflow:hidden;background:#8883;max-width:36em;margin:.35em 0}
.kvilt-bar i{display:block}.kvilt-answer{white-space:pre-wrap;margin:.2em 0 .5em}
.kvilt-key{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:.35em}
</style>"""


@dataclass(frozen=True, slots=True)
class PageMark:
    """One page of a row in one layer group."""

    id: int  # GONE: a window gave it back
    caches: int  # that hold it
    is_kept: bool  # the prefix index keeps it, too

    @property
    def kind(self) -> str:
        if self.id == GONE:
            return "gone"
        return "shared" if self.caches > 1 else "kept" if self.is_kept else "own"


def draw_cache(kv: KVCache, label: TokenLabel | None = None) -> str:
    """The HTML of a cache; `label` names tokens, otherwise their ids stand there."""
    if kv.closed:
        return f'{STYLE}<div class="kvilt kvilt-kv"><b>KVCache</b> <span class="kvilt-dim">closed</span></div>'
    with kv.pool.lock:
        rows = kv.rows()
        shown = [_row(kv, index, label or _id_label) for index in range(min(len(rows), _MOST_ROWS))]
        head = _head(kv)
    more = f'<p class="kvilt-dim">and {len(rows) - _MOST_ROWS} more rows</p>' if len(rows) > _MOST_ROWS else ""
    return f'{STYLE}<div class="kvilt kvilt-kv">{head}{"".join(shown)}{more}{_LEGEND}</div>'


def _id_label(token: Token) -> str:
    return f"{token} " if isinstance(token, int) else "embedding "


def _head(kv: KVCache) -> str:
    pages = [(group, page) for group, held in enumerate(kv.pages()) for page in held]
    shared = kv.pool.shared(pages)
    nbytes = sum(kv.layout.shape_of(group).page_bytes for group, _ in pages)
    rows = f"{kv.batch_size} rows, " if kv.batch_size > 1 else ""
    line = f"{rows}{sum(kv.lengths):,} tokens · {len(pages):,} pages, {shared:,} of them shared · {in_units(nbytes)}"
    made = f"{badge(kv.origin)} {badge(kv.maker)}"
    lineage = " → ".join((*kv.lineage, f"now {', '.join(map(str, kv.lengths[:_MOST_ROWS]))} tokens"))
    return (
        f'<div><b>KVCache</b> {escape(line)} {made}</div><div class="kvilt-dim kvilt-lineage">{escape(lineage)}</div>'
    )


def _row(kv: KVCache, index: int, label: TokenLabel) -> str:
    row = kv.row(index)
    title = f'<div class="kvilt-dim">row {index}: {row.length:,} tokens</div>' if kv.batch_size > 1 else ""
    groups = "".join(_pages(kv, row, group) for group in range(len(kv.layout.groups)))
    return f'<div class="kvilt-row">{title}{groups}{_tokens(kv, row, label)}</div>'


def _pages(kv: KVCache, row: CacheRow, group: int) -> str:
    size, reach = kv.layout.page_tokens, kv.layout.groups[group].reach
    marks = [_mark(kv, group, page) for page in row.tables[group][:_MOST_PAGES]]
    boxes = "".join(_box(mark, number * size, size) for number, mark in enumerate(marks))
    left_out = len(row.tables[group]) - len(marks)
    more = f'<span class="kvilt-dim">+{left_out:,}</span>' if left_out > 0 else ""
    name = f"window of {reach.tokens:,} tokens: " if isinstance(reach, Window) else ""
    shown = f"{name}{sum(mark.kind == 'shared' for mark in marks)} shared of {len(marks)} pages of {size} tokens"
    return (
        f'<div class="kvilt-pages" role="img" aria-label="{escape(shown)}" title="{escape(shown)}">{boxes}{more}</div>'
    )


def _mark(kv: KVCache, group: int, page: int) -> PageMark:
    if page == GONE:
        return PageMark(GONE, 0, False)
    caches = kv.pool.caches(group, page)
    return PageMark(page, caches, kv.pool.holders(group, page) > caches)


def _box(mark: PageMark, first: int, size: int) -> str:
    told = {
        "gone": "given back by the window",
        "shared": f"shared by {mark.caches} caches",
        "kept": "of this cache, and known to the prefix index",
        "own": "of this cache alone",
    }[mark.kind]
    page = "" if mark.id == GONE else f"page {mark.id}, "
    return f'<i class="kvilt-{mark.kind}" title="{page}tokens {first} to {first + size - 1}: {told}"></i>'


def _tokens(kv: KVCache, row: CacheRow, label: TokenLabel) -> str:
    tokens, size = row.tokens(), kv.layout.page_tokens
    cut = len(tokens) > _FIRST_TOKENS + _LAST_TOKENS
    last = range(len(tokens) - _LAST_TOKENS, len(tokens)) if cut else range(0)
    first = range(_FIRST_TOKENS if cut else len(tokens))
    between = f' <span class="kvilt-cut">… {last.start - first.stop:,} tokens …</span> ' if cut else ""

    def spans(places: range) -> str:
        return "".join(_token(row, place, tokens[place], place // size % 2 == 1, label) for place in places)

    return f'<div class="kvilt-tokens">{spans(first)}{between}{spans(last)}</div>'


def _token(row: CacheRow, place: int, token: Token, odd: bool, label: TokenLabel) -> str:
    adapted = row.adapter != "base" and place >= row.adapted_from
    kind = "kvilt-adapted" if adapted else "kvilt-odd" if odd else ""
    origin = row.adapter if adapted else "base"
    name = f"id {token}" if isinstance(token, int) else f"embedding {token.hex()[:12]}"
    title = f"position {place}, {name}, {row.origin}, {origin}"
    text = label(token)[:_LABEL_CHARS].replace("\n", "↵")
    return f'<span class="{kind}" title="{escape(title)}">{escape(text)}</span>'


def badge(text: str) -> str:
    """A word in a frame."""
    return f'<span class="kvilt-badge">{escape(text)}</span>'


def in_units(nbytes: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


_LEGEND = (
    '<div class="kvilt-dim"><span class="kvilt-key" style="background:#2f7de1"></span>own '
    '<span class="kvilt-key" style="background:#2f7de166;border:1px solid #2f7de1"></span>own, in the prefix index '
    '<span class="kvilt-key" style="background:#d9822b"></span>shared</div>'
)
