"""Attacks through what is parsed, checked and compiled for a request: JSON, grammars, stop strings, texts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable

from .client import Answer
from .measure import Attack, Site, body

COMPLETIONS = "/v1/completions"


def said(answers: Iterable[Answer]) -> str:
    """How often which status came."""
    names = Counter(_name(answer) for answer in answers)
    return ", ".join(f"{count}x {name}" for name, count in sorted(names.items()))


def _name(answer: Answer) -> str:
    error = answer.json.get("error") if answer.status >= 400 else None
    return f"{answer.status} {error.get('code') or ''}".strip() if error else str(answer.status or answer.why)


def shaped(prompt: str, tokens: int, kind: str, value: object, **more: object) -> dict[str, object]:
    """A request whose answer has a format; a grammar ends by itself."""
    asked = body(prompt, tokens, response_format={"type": kind, kind: value}, **more)
    del asked["ignore_eos"]
    return asked


async def at_once(site: Site, count: int, path: str, content: object) -> str:
    """The same request so many times at once."""
    site.attacker.timeout_s = site.seconds
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return said(await asyncio.gather(*(site.attacker.post(path, raw) for _ in range(count))))


async def regex(site: Site) -> str:
    pattern = "[a-z ]*[aeiou][a-z ]{18}[aeiou][a-z ]*"
    asked = shaped("once upon a time", 96, "regex", pattern, n=16, temperature=1.0)
    return await at_once(site, 2, COMPLETIONS, asked)


def _quotes(nbytes: int) -> bytes:
    """A string of escaped quotes that does not end, and brackets enough to be counted."""
    return b'{"a":[' + b"[" * 64 + b'"' + b'\\"' * (nbytes // 2)


async def json_quotes_60k(site: Site) -> str:
    return await at_once(site, 4, COMPLETIONS, _quotes(60_000))


async def json_quotes_1m(site: Site) -> str:
    return await at_once(site, 4, COMPLETIONS, _quotes(1_000_000))


async def json_honest_8m(site: Site) -> str:
    text = "The list [1] of {things} and \\ more. " * (8_000_000 // 42)
    return await at_once(site, 2, COMPLETIONS, body(text[:7_900_000], 4))


async def _left(site: Site, kind: str, value: object) -> str:
    """Six of them at once by clients that leave after a moment, then one that waits."""
    asked = shaped("x", 8, kind, value)
    site.attacker.timeout_s = 3
    answers = await asyncio.gather(*(site.attacker.post(COMPLETIONS, asked) for _ in range(6)))
    site.attacker.timeout_s = site.seconds
    return said([*answers, await site.attacker.post(COMPLETIONS, asked)])


async def lark_and(site: Site) -> str:
    joined = " & ".join(f"/[^{chr(97 + i % 26)}]*b.*/" for i in range(130))
    return await _left(site, "lark", f"start: A\nA: {joined}")


async def all_of(site: Site) -> str:
    schema = {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{i % 20 + 1}}}"} for i in range(130)]}
    return await _left(site, "json_schema", {"name": "x", "schema": schema})


async def lark_80k(site: Site) -> str:
    return await at_once(site, 2, COMPLETIONS, shaped("x", 4, "lark", 'start: "' + '\\"' * 40_000))


async def stops(site: Site) -> str:
    texts = [f"{i:04}" * 255 for i in range(64)]
    asked = body("x", 16, stop=texts, n=128)
    asked["prompt"] = [f"Prompt {i} is" for i in range(4)]
    return await at_once(site, 1, COMPLETIONS, asked)


async def prompts_8m(site: Site) -> str:
    return await at_once(site, 12, COMPLETIONS, body("word " * 1_590_000, 1))


async def tokenize_8m(site: Site) -> str:
    return await at_once(site, 12, "/tokenize", {"prompt": "ab cd " * 1_320_000})


async def upgrade(site: Site) -> str:
    """A request that offers another protocol is answered in this one, body and all."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAARAAAAAAAIAAAAA"}
    answers = [await site.attacker.post(COMPLETIONS, body("Hello", 4), headers) for _ in range(5)]
    return said(answers)


ATTACKS = (
    Attack("regex", "1", "regex whose matchers disagreed, n=16", regex),
    Attack("json_quotes_60k", "2", "60 KB of quotes without an end", json_quotes_60k),
    Attack("json_quotes_1m", "2", "1 MB of quotes without an end", json_quotes_1m),
    Attack("json_honest_8m", "2", "honest text of 8 MB", json_honest_8m),
    Attack("lark_and", "3", "130 Lark patterns joined by &", lark_and),
    Attack("all_of", "3", "allOf of 130 patterns", all_of),
    Attack("lark_80k", "3", "80 KB of Lark", lark_80k),
    Attack("stops", "4", "64 stop strings of 1 KB, 4 prompts, n=128", stops),
    Attack("prompts_8m", "8", "12 clients with 8 MB prompts", prompts_8m),
    Attack("tokenize_8m", "8", "12 clients at /tokenize with 8 MB", tokenize_8m),
    Attack("upgrade", "12", "POST with Upgrade: h2c", upgrade),
)
