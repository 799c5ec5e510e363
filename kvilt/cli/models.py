"""`kvilt list`, `show` and `rm`: the models on this machine."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import InputError, KviltError
from ..server.running import running_servers
from ..weights.on_disk import DiskModel, model_on_disk, models_on_disk, remove_model
from .inspect_view import plain, size

_PIPE_COLUMNS = 400  # a pipe has no width of its own


def list_models(as_json: bool) -> None:
    """Print the models on disk: name, size, age."""
    models = models_on_disk()
    if as_json:
        print(json.dumps([_fields(model) for model in models]))
        return
    table = plain_table("name", "size", "modified")
    for model in models:
        table.add_row(Text(plain(model.name)), size(model.nbytes), f"{age(time.time() - model.modified_s)} ago")
    print_table(table)
    if not models:
        print("no model is on this machine; `kvilt pull` fetches the default one", file=sys.stderr)


def show_model(name: str, as_json: bool) -> None:
    """Print what a model is, on a few lines; `kvilt inspect` says more."""
    from ..weights.hub import resolve
    from .inspect import checkpoint_facts, is_saved_cache
    from .progress import bars

    with bars() as shown:
        path = resolve(name, shown.fetching)
    if is_saved_cache(path):
        raise InputError(f"{name} is a saved KV cache; `kvilt inspect` shows it")
    facts = checkpoint_facts(path)
    model = facts.model
    most = max(facts.formats, key=lambda each: each.nbytes) if facts.formats else None
    kv = facts.kv[0] if facts.kv else None
    fields: dict[str, Any] = {
        "name": facts.name or name,
        "path": facts.path,
        "architecture": facts.architecture if model is None else model.family,
        "parameters": facts.parameters,
        "quantization": None if most is None else most.format,
        "size_bytes": facts.nbytes,
        "context_tokens": None if model is None else model.context,
        "embedding_size": None if model is None else model.hidden,
        "layers": None if model is None else model.layers,
        "kv_bytes_per_token": None if kv is None else kv.token_bytes,
        "kv_dtype": None if kv is None else kv.dtype,
        "chat_template": facts.tokenizer.chat_template,
        "problem": facts.problem or facts.tokenizer.problem,
    }
    if as_json:
        print(json.dumps(fields, ensure_ascii=False))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for title, value in _shown(fields):
        table.add_row(Text(title, style="dim"), Text(plain(value)))
    print_table(table)
    if fields["problem"]:
        raise KviltError(plain(str(fields["problem"])))


def _shown(fields: dict[str, Any]) -> list[tuple[str, str]]:
    texts = {
        "model": fields["name"],
        "path": fields["path"],
        "architecture": fields["architecture"],
        "parameters": parameters(fields["parameters"]),
        "quantization": fields["quantization"],
        "size": size(fields["size_bytes"]),
        "context": _number(fields["context_tokens"], "tokens"),
        "embedding": _number(fields["embedding_size"], "values"),
        "layers": _number(fields["layers"], ""),
        "KV": None
        if not fields["kv_dtype"]
        else f"{size(fields['kv_bytes_per_token'])} a token ({fields['kv_dtype']})",
        "chat template": "yes" if fields["chat_template"] else "no",
    }
    return [(title, str(value)) for title, value in texts.items() if value is not None]


def _number(value: int | None, unit: str) -> str | None:
    return None if value is None else f"{value:,} {unit}".strip()


def remove(names: list[str], yes: bool) -> None:
    """Delete fetched models after asking."""
    known = models_on_disk()
    chosen = [model_on_disk(name, known) for name in names]
    for model in chosen:
        _check_unused(model)
    for model in chosen:
        question = f"Delete {model.name} ({size(model.nbytes)}, {model.path})?"
        if not yes and not sys.stdin.isatty():
            raise InputError(f"nothing was deleted: there is no terminal to ask on; add --yes to delete {model.name}")
        if not yes and not typer.confirm(question):
            print(f"{model.name} is kept", file=sys.stderr)
            continue
        print(f"deleted {model.name}, {size(remove_model(model))}")


def _check_unused(model: DiskModel) -> None:
    """Refuse to delete the files of a running server: they are mapped, and would be fetched again."""
    paths = {str(path.resolve()) for path in (model.path, *model.files)}
    for server in running_servers():
        if any(served.path in paths or served.source == model.name for served in server.models):
            raise KviltError(
                f"{model.name} is served by process {server.pid}; end that first with: kvilt stop {server.pid}"
            )


def _fields(model: DiskModel) -> dict[str, Any]:
    path = str(Path(model.path))
    return {"name": model.name, "path": path, "size_bytes": model.nbytes, "modified_s": int(model.modified_s)}


def plain_table(*columns: str) -> Table:
    """A table without lines."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Print to stdout; into a pipe as wide as it needs to be."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_COLUMNS)
    console.print(table)


def age(seconds: float) -> str:
    """A duration in one unit: 5 seconds, 3 hours."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (number := int(seconds // length)) >= 1:
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return f"{max(0, int(seconds))} seconds"


def parameters(number: int) -> str:
    """How many parameters: 135M, 8.03B."""
    for unit, each in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= each:
            return f"{number / each:.3g}{unit}"
    return str(number)
