"""Options that several commands share, as typer takes them.

A command asks for a whole group with `@with_options(config=RUNTIME)` and gets it as one dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from ..config import DEFAULT_MODEL as DEFAULT_MODEL
from ..errors import ParamError
from .option_groups import DRAFTS as DRAFTS
from .option_groups import ENGINE as ENGINE
from .option_groups import GRAMMAR as GRAMMAR
from .option_groups import LOAD as LOAD
from .option_groups import RUNTIME as RUNTIME
from .option_groups import SAMPLING as SAMPLING
from .option_groups import SERVER as SERVER
from .option_groups import STORE as STORE
from .option_groups import Option, OptionGroup

ClientKey = Annotated[
    str | None, typer.Option(help="Sent as a bearer token; other users see it. Better: KVILT_API_KEY.")
]
ClientKeyFile = Annotated[str | None, typer.Option(metavar="FILE", help="A file whose first key is sent.")]
Attach = Annotated[
    bool,
    typer.Option(
        "--attach/--no-attach", help="Let a running `kvilt serve` of yours with the same model answer, if there is one."
    ),
]
TemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A variable of the chat template, like enable_thinking=false; the value is JSON or text. Repeatable.",
    ),
]


def model_names(incomplete: str) -> list[str]:
    """Names for the shell to complete: those that kvilt knows, and what was fetched."""
    from ..weights.hub import MODELS
    from ..weights.on_disk import models_on_disk

    names = dict.fromkeys([*MODELS, *(model.name for model in models_on_disk())])
    return [name for name in names if name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Option("--model", "-m", help="A model's name, a path, or hf:org/name[:file].", autocompletion=model_names),
]

Models = Annotated[
    list[str],
    typer.Option(
        "--model",
        "-m",
        help="A model's name, a path, or hf:org/name[:file]. Several are loaded on demand.",
        autocompletion=model_names,
    ),
]


def with_options(**groups: OptionGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every option of these groups; it receives each group as a dict under the keyword's name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name not in groups]
        for group in groups.values():
            parameters += [_parameter(name, option, group.panel) for name, option in group.options.items()]

        @wraps(command)
        def gathered(**given: Any) -> None:
            packed = {key: {name: given.pop(name) for name in group.options} for key, group in groups.items()}
            command(**given, **packed)

        del gathered.__wrapped__  # typer would read the signature of the wrapped function
        gathered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        gathered.__annotations__ = {p.name: p.annotation for p in parameters}
        return gathered

    return decorate


def _parameter(name: str, option: Option, panel: str) -> inspect.Parameter:
    """An option of a group as a parameter of a command."""
    shown = typer.Option(*option.flags, help=option.help, rich_help_panel=panel)
    annotation = Annotated[option.type, shown]  # type: ignore[name-defined]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas; an empty text has none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise ParamError(name, f"must be whole numbers separated by commas, not {text!r}")
    return tuple(int(part) for part in parts)
