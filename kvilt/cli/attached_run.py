"""`kvilt run` on a server that has the model loaded: the same text and the same line of numbers, without torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from .answer_writer import AnswerWriter
from .attach import RemoteAnswer, Unavailable, attached


def answer_attached(
    prompt: str, model: str, system: str, raw: bool, sampling: Mapping[str, Any], config: Mapping[str, Any]
) -> bool:
    """Answer a prompt on a running server; False where there is none, or where it refuses, and nothing was written."""
    if sampling.get("n", 1) != 1 or sampling.get("logprobs") is not None or (found := attached(model, config)) is None:
        return False
    fields = found.sampling(sampling)
    if raw:
        asked = RemoteAnswer(found, "/v1/completions", {"prompt": prompt, **fields})
    else:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        asked = RemoteAnswer(found, "/v1/chat/completions", {"messages": messages, **fields})
    writer = AnswerWriter()
    try:
        for piece, reasoning in asked.pieces():
            writer.piece(piece, reasoning=reasoning)
    except Unavailable as reason:
        print(f"note: {reason}; the model is loaded here", file=sys.stderr)
        return False
    print(flush=True)
    print(asked.numbers, file=sys.stderr)
    print(found.note, file=sys.stderr)
    return True
