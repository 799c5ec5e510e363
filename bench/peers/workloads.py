"""What is timed: the same prompts and lengths for every runtime."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

DEFAULT = (
    *("prefill:128", "prefill:512", "prefill:1024", "decode:16", "decode:1024"),
    *("batch:4", "batch:8", "batch:16", "batch:32", "cold", "memory"),
)
# Measured in a new process each time: prompt and new tokens. The first cold start fills the page cache, so that the
# median of three is one of a warm cache.
FRESH = MappingProxyType({"cold": (16, 1), "memory": (1024, 64)})
FRESH_ROUNDS = MappingProxyType({"cold": 3, "memory": 1})
_IDS = json.loads((Path(__file__).parent / "prompt_tokens.json").read_text())


@dataclass(frozen=True, slots=True)
class Workload:
    """`rows` prompts of `prompt` tokens, `new` tokens for each."""

    name: str
    rows: int
    prompt: int
    new: int

    def rate(self, first_s: float, total_s: float) -> float:
        """Tokens per second: of the prompt if one token is asked for, else of those after the first."""
        if self.new == 1:
            return self.rows * self.prompt / first_s
        return self.rows * (self.new - 1) / (total_s - first_s)


def prompts(rows: int, length: int) -> list[list[int]]:
    """A fixed English text in SmolLM2's ids, from a different place for each row; a long prompt repeats it."""
    ids = _IDS * (1 + (7 * rows + length) // len(_IDS))
    return [ids[7 * row : 7 * row + length] for row in range(rows)]


def parse(name: str) -> Workload:
    """`prefill:N`, `decode:CONTEXT` or `batch:ROWS`."""
    kind, _, size = name.partition(":")
    if not size.isdecimal() or int(size) < 1:
        raise SystemExit(f"cannot read the workload {name!r}; known are {', '.join(DEFAULT)}")
    number = int(size)
    match kind:
        case "prefill":
            return Workload(name, 1, number, 1)
        case "decode":
            return Workload(name, 1, number, 96)
        case "batch":
            return Workload(name, number, 16, 64 if number <= 8 else 32)
    raise SystemExit(f"cannot read the workload {name!r}; known are {', '.join(DEFAULT)}")


def chosen(text: str) -> list[str]:
    """The names of a comma-separated choice; `decode` alone means all decodes."""
    names: list[str] = []
    for part in text.split(","):
        found = [name for name in DEFAULT if name == part or name.startswith(f"{part}:")]
        names += found or [parse(part).name]
    return names
