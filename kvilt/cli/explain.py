"""`kvilt explain`: where the prompt of a request differs from that of another one. No model runs."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ..engine.misses.miss import MissReason
from ..engine.misses.past_prompts import shared_tokens, token_array
from ..errors import InputError, Unsupported
from ..llm.build import load_tokenizer
from ..text.tokenizer import Tokenizer
from ..text.volatile_lines import VolatileLine, volatile_lines

if TYPE_CHECKING:
    from ..server.request_prompt import RequestPrompt

PAGE_TOKENS = 32
_AROUND = 16  # tokens on each side of the first different one
_MOST_LINES = 200  # of the diff


@dataclass(frozen=True, slots=True)
class Explanation:
    """What of one prompt the KV of another one spares."""

    prompt_tokens: int
    earlier_tokens: int
    reusable: int  # tokens that are not computed again
    expected: int  # tokens that would not be, if nothing differed
    reason: MissReason | None
    first_different_token: int | None
    before: str
    now: str
    earlier: str


def explain(path: Path, against: Path | None, model: str, as_json: bool) -> None:
    """Print what a request shares with an earlier one, or which of its lines may change from request to request."""
    tokenizer = load_tokenizer(model)
    asked = _read(path, tokenizer)
    text = tokenizer.decode(asked.ids, skip_special=False)
    lines = volatile_lines(text)
    if against is None:
        _show_alone(asked, lines, as_json)
        return
    earlier = _read(against, tokenizer)
    found = compared(asked, earlier, tokenizer)
    if as_json:
        print(json.dumps({**asdict(found), "volatile_lines": [asdict(line) for line in lines]}))
        return
    _show(found, lines, text, tokenizer.decode(earlier.ids, skip_special=False))


def compared(asked: RequestPrompt, earlier: RequestPrompt, tokenizer: Tokenizer) -> Explanation:
    """A request beside an earlier one whose KV is all there."""
    at, most = shared_tokens(token_array(asked.ids), token_array(earlier.ids)), len(asked.ids) - 1
    differs = at < min(len(earlier.ids), most)
    elsewhere: MissReason | None = None
    if asked.model != earlier.model:
        elsewhere = "other_adapter"
    elif asked.salt != earlier.salt:
        elsewhere = "other_salt"
    reusable = 0 if elsewhere else min(at, most) // PAGE_TOKENS * PAGE_TOKENS
    expected = min(len(earlier.ids), most)
    boundary: MissReason | None = "page_boundary" if reusable < expected else None
    return Explanation(
        prompt_tokens=len(asked.ids),
        earlier_tokens=len(earlier.ids),
        reusable=reusable,
        expected=expected,
        reason=elsewhere or ("tokens_differ" if differs else boundary),
        first_different_token=at if differs else None,
        before=_text(tokenizer, asked.ids[max(0, at - _AROUND) : at]) if differs else "",
        now=_text(tokenizer, asked.ids[at : at + _AROUND]) if differs else "",
        earlier=_text(tokenizer, earlier.ids[at : at + _AROUND]) if differs else "",
    )


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special=False)


def _read(path: Path, tokenizer: Tokenizer) -> RequestPrompt:
    try:
        from ..server.request_prompt import request_prompt
    except ImportError as error:
        raise Unsupported(f"explain needs {error.name}; install it with: pip install 'kvilt[server]'") from None
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        fields: Any = json.loads(data)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    return request_prompt(fields, tokenizer)


def _show_alone(asked: RequestPrompt, lines: Sequence[VolatileLine], as_json: bool) -> None:
    pages = (len(asked.ids) - 1) // PAGE_TOKENS
    if as_json:
        found = {"prompt_tokens": len(asked.ids), "whole_pages": pages}
        print(json.dumps({**found, "volatile_lines": [asdict(line) for line in lines]}))
        return
    console = Console()
    console.print(f"{len(asked.ids):,} tokens ({asked.api}); sent again, {pages * PAGE_TOKENS:,} of them are reused")
    _show_volatile(console, lines)


def _show(found: Explanation, lines: Sequence[VolatileLine], text: str, earlier: str) -> None:
    console = Console()
    reason = found.reason or "nothing is missed"
    console.print(
        f"{reason}: {found.reusable:,} of {found.prompt_tokens:,} tokens are reused, {found.expected:,} could be",
        style="bold green" if found.reason in (None, "page_boundary") else "bold red",
    )
    if found.first_different_token is not None:
        console.print(f"first different token: {found.first_different_token:,}")
        console.print(Text("  " + _line(found.before), style="dim"))
        console.print(Text("- " + _line(found.earlier), style="red"))
        console.print(Text("+ " + _line(found.now), style="green"))
        _show_diff(console, earlier, text)
    _show_volatile(console, lines)


def _show_diff(console: Console, earlier: str, now: str) -> None:
    """The lines that differ, with one line around them."""
    diff = difflib.unified_diff(earlier.splitlines(), now.splitlines(), "earlier", "now", n=1, lineterm="")
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for number, line in enumerate(diff):
        if number >= _MOST_LINES:
            console.print(f"... and more; only {_MOST_LINES} lines are shown", style="dim")
            return
        console.print(Text(_line(line), style=styles.get(line[:1], "dim")))


def _show_volatile(console: Console, lines: Sequence[VolatileLine]) -> None:
    for line in lines:
        console.print(
            Text(f"line {line.number + 1} may change ({line.kind}): {_line(line.text)[:120]}", style="yellow")
        )


def _line(text: str) -> str:
    """Text of a request for a terminal: one line without control characters."""
    return "".join(char if char.isprintable() else "↵" if char == "\n" else "\ufffd" for char in text)
