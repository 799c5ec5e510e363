"""The output of `kvilt inspect`: a few tables on one screen. Control characters in the text of files are removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .inspect import CacheFacts, CheckpointFacts, FormatFacts, GroupFacts

_PIPE_COLUMNS = 120  # a pipe has no width of its own
_MOST_CHARS = 200


def show_checkpoint(facts: CheckpointFacts, tensors: bool) -> None:
    """Show architecture, formats, KV and tokenizer; with `tensors` every tensor too."""
    console = _console()
    console.print(_title(facts.name or facts.architecture, f"{facts.container}, {size(facts.nbytes)}"))
    console.print(_facts(_model_lines(facts)))
    console.print(_formats(facts))
    if facts.problem:
        console.print(Text(plain(facts.problem), style="red"))
    elif all(format_.backend == "reference" for format_ in facts.formats):
        copies = f"The reference backend computes on float32 copies of all weights: {size(4 * facts.parameters)}."
        console.print(Text(copies, style="dim"))
    if tensors:
        console.print(_tensors(facts))


def show_cache(facts: CacheFacts) -> None:
    """Show identity, layout and rows of a saved cache."""
    console = _console()
    console.print(_title("saved KV cache", f"version {facts.version}, {size(facts.nbytes)}, checksum {facts.checksum}"))
    lines = [("path", facts.path), *((name, value or "none") for name, value in facts.identity.items())]
    layout = [(f"layers ×{group.layers}", _group_line(group)) for group in facts.layout]
    console.print(_facts([*lines, *layout, ("KV per token", size(facts.token_bytes))]))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("row", "tokens", "embedded"):
        table.add_column(name, justify="right")
    table.add_column("first tokens")
    for i, row in enumerate(facts.rows):
        shown = " ".join("embedding" if token < 0 else str(token) for token in row.tokens)
        more = " ..." if row.length > len(row.tokens) else ""
        table.add_row(str(i), f"{row.length:,}", str(row.embedded), Text(shown + more))
    console.print(table)


def plain(text: str) -> str:
    """Text of a file for a terminal: one line of bounded length without control characters."""
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text[: _MOST_CHARS + 1])
    return shown if len(shown) <= _MOST_CHARS else shown[: _MOST_CHARS - 3] + "..."


def size(nbytes: int) -> str:
    """Bytes with a unit."""
    if nbytes < 1 << 10:
        return f"{nbytes} B"
    for unit, shift in (("KiB", 10), ("MiB", 20), ("GiB", 30)):
        if nbytes < 1 << (shift + 10):
            return f"{nbytes / (1 << shift):,.1f} {unit}"
    return f"{nbytes / (1 << 40):,.1f} TiB"


def count(number: int) -> str:
    """A number of parameters with a unit."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_COLUMNS)


def _title(name: str, what: str) -> Text:
    return Text.assemble((plain(name), "bold"), "  ", (plain(what), "dim"))


def _facts(lines: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(name, Text(plain(value)))
    return table


def _model_lines(facts: CheckpointFacts) -> list[tuple[str, str]]:
    lines = [("path", facts.path), ("architecture", facts.architecture)]
    model = facts.model
    if model is not None:
        lines += [
            ("family", model.family),
            ("layers", f"{model.layers} · hidden {model.hidden:,} · feed-forward {model.feed_forward}"),
            ("heads", f"{model.heads} · KV heads {model.kv_heads} · head size {model.head_dim}"),
            ("attention", model.attention),
            ("context", f"{model.context:,} tokens"),
            ("rope", model.rope),
            ("deterministic", "on the CPU always, on a GPU with --deterministic"),
            ("vocabulary", f"{model.vocabulary:,} · {'tied' if model.tied_head else 'separate'} head"),
        ]
    lines.append(("parameters", f"{count(facts.parameters)} ({facts.parameters:,})"))
    lines.append(("tokenizer", _tokenizer_line(facts)))
    return [*lines, *_kv_lines(facts)]


def _kv_lines(facts: CheckpointFacts) -> list[tuple[str, str]]:
    """One line for each size of KV; dtypes of one size share it."""
    costs: dict[str, list[str]] = {}
    for kv in facts.kv:
        each = f"{size(kv.token_bytes)} per token · {kv.tokens_per_gib:,} tokens per GiB"
        costs.setdefault(f"{each} · {size(kv.context_bytes)} for a full context", []).append(kv.dtype)
    return [("KV " + ", ".join(dtypes), cost) for cost, dtypes in costs.items()]


def _tokenizer_line(facts: CheckpointFacts) -> str:
    tokenizer = facts.tokenizer
    if tokenizer.problem is not None:
        return f"none that kvilt reads: {tokenizer.problem}"
    template = "chat template" if tokenizer.chat_template else "no chat template"
    return f"{tokenizer.kind} · {tokenizer.tokens:,} tokens · {template}"


def _formats(facts: CheckpointFacts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("format")
    for name in ("tensors", "parameters", "bytes", "share"):
        table.add_column(name, justify="right")
    table.add_column("backend")
    for format_ in facts.formats:
        table.add_row(*_format_cells(format_, facts.nbytes))
    return table


def _format_cells(format_: FormatFacts, total: int) -> tuple[str, str, str, str, str, Text]:
    share = f"{100 * format_.nbytes / max(1, total):.1f} %"
    backend = Text(format_.backend) if format_.backend else Text("none: cannot be unpacked yet", style="red")
    if format_.kernel:
        backend.append(f", {format_.kernel}")
    if format_.expanded:
        backend.append(f", as float32: {size(4 * format_.parameters)}", style="yellow")
    cells = (format_.format, f"{format_.tensors:,}", count(format_.parameters), size(format_.nbytes), share)
    return (*cells, backend)


def _tensors(facts: CheckpointFacts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("format", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for tensor in facts.tensors:
        shape = " × ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(Text(plain(tensor.name)), shape, tensor.format, size(tensor.nbytes))
    return table


def _group_line(group: GroupFacts) -> str:
    sizes = f"keys of {group.key_dim}, values of {group.value_dim}"
    return f"{group.reach} · {group.kv_heads} KV heads · {sizes} · {group.dtype}"
