"""Commands on model files: pull, list, show, rm, inspect, quantize, lora merge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .errors import exit_on_error


def pull(
    name: Annotated[
        str, typer.Argument(help="A model's name, like smollm2, or hf:org/name[:file].")
    ] = opt.DEFAULT_MODEL,
) -> None:
    """Fetch a model into the cache folder, unless it is there, and print its path."""
    with exit_on_error():
        from .pull import fetch

        typer.echo(fetch(name))


def list_(json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the models that were fetched to this machine."""
    with exit_on_error():
        from .models import list_models

        list_models(json)


def show(
    name: Annotated[str, typer.Argument(help="A model's name, a path, or hf:org/name[:file].")] = opt.DEFAULT_MODEL,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a model is, on a few lines; inspect shows more."""
    with exit_on_error():
        from .models import show_model

        show_model(name, json)


def rm(
    names: Annotated[list[str], typer.Argument(help="Names of fetched models, as `kvilt list` shows them.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete fetched models from this machine, after asking."""
    with exit_on_error():
        from .models import remove

        remove(names, yes)


def inspect(
    path: Annotated[str, typer.Argument(help="A checkpoint or a saved cache; also hf:org/name or a model's name.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor with its shape and format.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the contents of a checkpoint or a saved KV cache, without loading it."""
    with exit_on_error():
        from .inspect import inspect as look

        look(path, tensors, json)


def quantize(
    source: Annotated[str, typer.Argument(help="A model: a path, a GGUF file or a name.")],
    out: Annotated[Path, typer.Argument(help="The GGUF file to write.")],
    type_name: Annotated[str, typer.Option("--type", "-t", help="Q8_0, Q6_K, Q5_K, Q4_K or Q4_0.")] = "Q4_K",
    imatrix: Annotated[
        Path | None, typer.Option(metavar="TEXT", help="A text file that shows which inputs matter most.")
    ] = None,
    imatrix_tokens: Annotated[int, typer.Option(min=2, help="Tokens of that text to read.")] = 16384,
) -> None:
    """Write a model's weights in fewer bits, as a GGUF file."""
    with exit_on_error():
        from .quantize import quantize as write

        write(source, out, type_name, imatrix, imatrix_tokens)


adapting = typer.Typer(help="LoRA adapters.")


@adapting.callback()
def adapters() -> None:
    """LoRA adapters."""


@adapting.command("merge")
def lora_merge(
    adapter: Annotated[str, typer.Argument(help="The adapter's PEFT folder.")],
    target: Annotated[str, typer.Argument(help="A new folder for the merged checkpoint.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    scale: Annotated[float, typer.Option(help="How strongly the adapter acts.")] = 1.0,
) -> None:
    """Merge an adapter into a checkpoint's weights; for float safetensors, not for quantized GGUF files."""
    with exit_on_error():
        from .lora import merge

        typer.echo(merge(model, adapter, target, scale))
