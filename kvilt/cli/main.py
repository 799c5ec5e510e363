"""The `kvilt` command: its subcommands, and what an error looks like in a terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import options as opt
from .report import reported

app = typer.Typer(
    name="kvilt",
    help="An LLM runtime in which the KV cache is a value you hold.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvilt {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """An LLM runtime in which the KV cache is a value you hold."""


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' or nothing reads it from a pipe.")] = "-",
    model: opt.Model = opt.DEFAULT_MODEL,
    system: Annotated[str, typer.Option(help="A system message for the chat template.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all numbers.")] = False,
    max_tokens: opt.MaxTokens = 512,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    device: opt.Device = "cpu",
    threads: opt.Threads = None,
    kv_memory: opt.KVMemory = None,
    max_context: opt.MaxContext = None,
    kv_dtype: opt.KVDtype = "float32",
    backend: opt.Backend = "auto",
) -> None:
    """Answer one prompt: text to stdout, one line of numbers to stderr."""
    with reported():
        from .run import Ask, answer

        ask = Ask(prompt=prompt, system=system, raw=raw, json=json, verbose=verbose)
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "seed": seed,
            "stop": tuple(stop or ()),
        }
        config = {
            "device": device,
            "threads": threads,
            "kv_memory": kv_memory,
            "max_context": max_context,
            "kv_dtype": kv_dtype,
            "backend": backend,
        }
        answer(ask, model, sampling, config)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A model's name, for example smollm2.")] = opt.DEFAULT_MODEL,
) -> None:
    """Fetch a model into the cache folder, once, and print where it is."""
    with reported():
        from .pull import fetch

        typer.echo(fetch(name))


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
