"""Options that several commands share, with the names they have in `kvilt.load` and `SamplingParams`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..config import DEFAULT_MODEL as DEFAULT_MODEL
from ..errors import ParamError

_SAMPLING = "Sampling"
_RUNTIME = "Runtime"

Model = Annotated[str, typer.Option("--model", "-m", help="A model's name, a path, or hf:org/name[:file].")]

MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option(help="Keep tokens this likely against the best.", rich_help_panel=_SAMPLING)]
TypicalP = Annotated[float, typer.Option(help="Keep tokens of typical surprise.", rich_help_panel=_SAMPLING)]
MinTokens = Annotated[int, typer.Option(help="Fewest tokens to generate.", rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 discourages repeats.", rich_help_panel=_SAMPLING)]
PresencePenalty = Annotated[float, typer.Option(help="Discourages what was said.", rich_help_panel=_SAMPLING)]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, by how often.", rich_help_panel=_SAMPLING)]
Logprobs = Annotated[
    int | None,
    typer.Option(help="With --json: log-probabilities, and the n likeliest tokens.", rich_help_panel=_SAMPLING),
]
Samples = Annotated[int, typer.Option("-n", "--n", help="Samples behind one prompt.", rich_help_panel=_SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=_SAMPLING)]
Stop = Annotated[list[str] | None, typer.Option(help="Stop at this text; may be repeated.", rich_help_panel=_SAMPLING)]

Device = Annotated[str, typer.Option(help="Where to run: cpu.", rich_help_panel=_RUNTIME)]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default all.", rich_help_panel=_RUNTIME)]
KVMemory = Annotated[
    str | None,
    typer.Option(help="Memory for KV, like 2G; default a quarter of what is free.", rich_help_panel=_RUNTIME),
]
MaxContext = Annotated[int | None, typer.Option(help="Longest sequence in tokens.", rich_help_panel=_RUNTIME)]
KVDtype = Annotated[str, typer.Option(help="float32, float16 or bfloat16.", rich_help_panel=_RUNTIME)]
Backend = Annotated[str, typer.Option(help="auto or reference.", rich_help_panel=_RUNTIME)]


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas; nothing is no numbers."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise ParamError(name, f"must be whole numbers separated by commas, not {text!r}")
    return tuple(int(part) for part in parts)
