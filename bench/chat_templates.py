"""Public chat templates: what kvilt renders beside what transformers renders.

`python bench/chat_templates.py FOLDERS...` reads every `*.jinja` in folders: those of llama.cpp (`models/templates`),
trl (`trl/chat_templates`) or axolotl. Each renders conversations with systems, tools, calls, reasoning, and special
tokens in a user's text. A template that transformers refuses must be refused, and no other.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from kvilt.errors import KviltError
from kvilt.text.chat import ChatTemplate
from kvilt.text.specials import SpecialTexts
from kvilt.text.user_text import plain, spans_of

NAMED = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather of a city, in °C, "now" & <soon>',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name", "enum": ["Zürich", "東京"]},
                    "days": {"type": "integer", "default": 1},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
TURNS = {
    "question": [{"role": "user", "content": "Why is the sky blue? 1 < 2 <b>"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Why?\n"}],
    "turns": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And now?"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "parts"}]}],
    "calls": [
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": '{"celsius": 21.5}'},
    ],
    "thinking": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4"},
        {"role": "user", "content": "3+3?"},
    ],
}
Conversation = tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None]


def conversations(specials: Sequence[str]) -> Iterator[Conversation]:
    """Each with and without tools, and one with all special tokens of the template in a user's text."""
    for name, messages in TURNS.items():
        yield name, messages, None
        yield f"{name}, tools", messages, TOOLS
    yield "specials", [{"role": "user", "content": "".join(specials) + "<|im_start|>x</think>y<|im_end|>"}], None


def specials_of(source: str) -> list[str]:
    """What looks like a special token in a template."""
    return sorted({*re.findall(r"<[|｜]?[\w/▁]{1,40}[|｜]?>|\[/?[A-Z_]{3,20}\]", source), *NAMED.values()})


def theirs(source: str, messages: list[dict[str, Any]], tools: Any) -> str | None:
    try:
        texts, _ = render_jinja_template([messages], tools, None, source, add_generation_prompt=True, **NAMED)
    except Exception:  # the template's refusal, or its mistake
        return None
    return str(texts[0])


def compared(source: str, conversation: Conversation) -> str:
    """One word for what came out."""
    _, messages, tools = conversation
    expected = theirs(source, messages, tools)
    known = {text: i for i, text in enumerate(specials_of(source))}
    try:
        chat = ChatTemplate(source, NAMED, known)
        shown = chat._rendered(chat._values(messages, tools, None, {}), True)
    except KviltError as error:
        return "both refuse" if expected is None else f"refused: {error}"
    if expected is None:
        return "only kvilt renders"
    if plain(shown) != expected:
        at = next((i for i, (a, b) in enumerate(zip(shown, expected, strict=False)) if a != b), len(shown))
        return f"differs at {at}: {plain(shown)[at - 20 : at + 30]!r} instead of {expected[at - 20 : at + 30]!r}"
    written = SpecialTexts(known).split(plain(shown), spans_of(shown))
    return "equal" if added_none(written, chat, messages, tools, known) else "special tokens of a user"


def added_none(
    written: Sequence[str | int], chat: ChatTemplate, messages: Any, tools: Any, known: Mapping[str, int]
) -> bool:
    """The same special tokens as when the user's text has none."""
    quiet = [
        {**message, "content": re.sub(r"<\|?\w+\|?>|\[/?[A-Z_]+\]|<｜[^｜]*｜>", "x", message["content"])}
        if message["role"] == "user" and isinstance(message["content"], str)
        else message
        for message in messages
    ]
    shown = chat._rendered(chat._values(quiet, tools, None, {}), True)
    harmless = SpecialTexts(known).split(plain(shown), spans_of(shown))
    return [part for part in written if isinstance(part, int)] == [part for part in harmless if isinstance(part, int)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    warnings.simplefilter("ignore")
    paths = sorted({path for folder in parser.parse_args().folders for path in folder.rglob("*.jinja")})
    counts: Counter[str] = Counter()
    for path in paths:
        source = path.read_text(encoding="utf-8")
        for conversation in conversations(specials_of(source)):
            result = compared(source, conversation)
            counts[result.split(":")[0].split(" at ")[0]] += 1
            if result not in ("equal", "both refuse"):
                print(f"{path.name} ({conversation[0]}): {result}")
    print(f"{len(paths)} templates:", ", ".join(f"{count} {word}" for word, count in counts.most_common()))


if __name__ == "__main__":
    main()
