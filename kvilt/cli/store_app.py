"""Commands on stored KV: warm."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import options as opt
from .errors import FAILURE, exit_on_error


@opt.with_options(store=opt.STORE.without("store_memory"), config=opt.RUNTIME)
def warm(
    files: Annotated[list[str], typer.Argument(help="Text files, one document each; '-' reads a pipe.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    split: Annotated[str | None, typer.Option(metavar="LINE", help="The line between two documents of a file.")] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="A file with the API key that the documents are stored for.")
    ] = None,
    lora: Annotated[str, typer.Option(metavar="PATH", help="A LoRA adapter's PEFT folder.")] = "",
    lora_scale: Annotated[float, typer.Option(help="How strongly the adapter acts.")] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    store: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Compute the KV of documents in advance, and store it for other processes."""
    with exit_on_error():
        from .warm import WarmRequest
        from .warm import warm as compute

        request = WarmRequest(files, split, api_key_file, lora, lora_scale, json)
        if not compute(request, model, {**store, "store_memory": None}, config):
            raise typer.Exit(FAILURE)
