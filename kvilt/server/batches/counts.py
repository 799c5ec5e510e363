"""What the answers of a batch add up to, while they are made and when they are read again. Needs no extra."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError


@dataclass(slots=True)
class BatchCounts:
    """What a run has done."""

    answered: int = 0
    failed: int = 0
    computed: int = 0
    reused: int = 0
    generated: int = 0

    def add(self, answer: dict[str, Any]) -> None:
        """Count one line of the output."""
        response = answer["response"]
        if response is None or response["status_code"] != 200:
            self.failed += 1
            return
        self.answered += 1
        usage = response["body"]["usage"]
        prompt = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.generated += usage.get("completion_tokens", usage.get("output_tokens", 0))
        self.reused += details.get("cached_tokens", 0)
        self.computed += prompt - details.get("cached_tokens", 0)

    def usage(self) -> dict[str, Any]:
        """The tokens as a batch shows them."""
        prompt = self.computed + self.reused
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.reused},
            "output_tokens": self.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + self.generated,
        }


def finished_ids(out: Path, each: Callable[[dict[str, Any]], None] = lambda _: None) -> set[str]:
    """The requests that an earlier run has answered; `each` gets the answers. An incomplete last line is cut off."""
    if not out.exists():
        return set()
    whole, found = 0, set()
    with out.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            found.add(_answered_id(out, line, each))
            whole += len(line)
    with out.open("r+b") as file:
        file.truncate(whole)
    return found


def _answered_id(out: Path, line: bytes, each: Callable[[dict[str, Any]], None]) -> str:
    try:
        answer = json.loads(line)
        each(answer)
        return str(answer["custom_id"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{out} is no output of kvilt batch; give another file, or remove it") from None
