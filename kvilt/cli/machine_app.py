"""Commands on this machine and its settings: doctor, config, completion."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import FAILURE, exit_on_error

_SHELLS = ("bash", "zsh", "fish")


def config(
    context: typer.Context,
    command: Annotated[str | None, typer.Argument(help="Only the settings of this command, like serve.")] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that are not the default.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Show every setting with its value and where it comes from: environment, kvilt.toml, or default."""
    with exit_on_error():
        from .settings import show_settings

        show_settings(context.find_root().command, command, changed, json)


def doctor(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show what this machine has, what kvilt uses of it, and what is wrong. Exits with 1 if something is broken."""
    with exit_on_error():
        from .doctor import report

        if not report(json):
            raise typer.Exit(FAILURE)


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
) -> None:
    """Print the script that lets a shell complete commands, options and names of models."""
    with exit_on_error():
        from typer._completion_shared import get_completion_script

        from ..errors import ParamError

        if shell not in _SHELLS:
            raise ParamError("shell", f"must be {', '.join(_SHELLS[:-1])} or {_SHELLS[-1]}, not {shell!r}")
        typer.echo(get_completion_script(prog_name="kvilt", complete_var="_KVILT_COMPLETE", shell=shell))
