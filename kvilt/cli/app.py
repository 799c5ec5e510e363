"""The subcommands of `kvilt`, as typer shows and reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from .. import __version__
from . import answer_app, machine_app, measure_app, model_app, serve_app, store_app
from .cluster_app import clusters
from .errors import exit_on_error

app = typer.Typer(
    name="kvilt",
    help="An LLM runtime in which the KV cache is a value you hold.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvilt {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """An LLM runtime in which the KV cache is a value you hold."""
    del version  # its callback has printed it
    if context.resilient_parsing:  # of a shell that completes a word
        return
    with exit_on_error():
        from .settings import default_map

        context.default_map = default_map(context.command)


# In the order of the help, under the headings of it.
COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Answers": {"run": answer_app.run, "chat": answer_app.chat, "batch": answer_app.batch},
    "Servers": {
        "serve": serve_app.serve,
        "ps": serve_app.ps,
        "stop": serve_app.stop,
        "top": serve_app.top,
        "mcp": serve_app.mcp,
        "session": serve_app.session,
        "cluster": clusters,
    },
    "Models": {
        "pull": model_app.pull,
        "list": model_app.list_,
        "show": model_app.show,
        "rm": model_app.rm,
        "inspect": model_app.inspect,
        "quantize": model_app.quantize,
        "lora": model_app.adapting,
    },
    "Stored KV": {"warm": store_app.warm},
    "Measurements": {
        "bench": measure_app.measures,
        "perplexity": measure_app.perplexity,
        "blend-report": measure_app.blend_report,
        "explain": measure_app.explain,
    },
    "This machine": {
        "doctor": machine_app.doctor,
        "config": machine_app.config,
        "completion": machine_app.completion,
    },
}

for heading, commands in COMMANDS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=heading)
        else:
            app.command(name, rich_help_panel=heading)(command)
