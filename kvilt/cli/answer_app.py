"""Commands that answer prompts: run, chat, batch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as opt
from .errors import FAILURE, exit_on_error
from .imports import uncollected
from .starts import start_chat, start_run


@opt.with_options(sampling=opt.SAMPLING, grammar=opt.GRAMMAR, store=opt.STORE, drafts=opt.DRAFTS, config=opt.RUNTIME)
def run(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' or nothing reads it from a pipe.")] = "-",
    model: opt.Model = opt.DEFAULT_MODEL,
    system: Annotated[str, typer.Option(help="A system message for the chat template.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    lora: Annotated[str, typer.Option(metavar="PATH", help="A LoRA adapter's PEFT folder.")] = "",
    lora_scale: Annotated[float, typer.Option(help="How strongly the adapter acts.")] = 1.0,
    document: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A text file for the prompt to refer to; may be repeated.")
    ] = None,
    blend_ratio: Annotated[
        float | None, typer.Option(help="Share of the documents' tokens to recompute; default 0.15.")
    ] = None,
    template_option: opt.TemplateOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
    attach: opt.Attach = True,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all numbers.")] = False,
    *,
    sampling: dict[str, Any],
    grammar: dict[str, Any],
    store: dict[str, Any],
    drafts: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Answer one prompt: text to stdout, one line of numbers to stderr. Without one, a terminal gets a chat."""
    start_run(
        prompt=prompt,
        model=model,
        system=system,
        raw=raw,
        lora=lora,
        lora_scale=lora_scale,
        document=document,
        blend_ratio=blend_ratio,
        template_option=template_option,
        json=json,
        attach=attach,
        verbose=verbose,
        sampling=sampling,
        grammar=grammar,
        store=store,
        drafts=drafts,
        config=config,
    )


@opt.with_options(sampling=opt.SAMPLING.without("n", "logprobs"), drafts=opt.DRAFTS, config=opt.RUNTIME)
def chat(
    model: opt.Model = opt.DEFAULT_MODEL,
    system: Annotated[str, typer.Option(help="A system message for the chat template.")] = "",
    saved: Annotated[str, typer.Option("--load", metavar="NAME", help="Continue a saved chat.")] = "",
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour accepted draft tokens.")] = False,
    template_option: opt.TemplateOption = None,
    attach: opt.Attach = True,
    *,
    sampling: dict[str, Any],
    drafts: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Chat with a model; /help lists the commands."""
    start_chat(
        model=model,
        system=system,
        saved=saved,
        show_drafts=show_drafts,
        template_option=template_option,
        attach=attach,
        sampling=sampling,
        drafts=drafts,
        config=config,
    )


@opt.with_options(store=opt.STORE, drafts=opt.DRAFTS, config=opt.RUNTIME)
def batch(
    given: Annotated[Path, typer.Argument(metavar="IN", help="Requests, one JSON object a line; '-' reads a pipe.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Answers; a file that is there is continued.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    at_once: Annotated[int, typer.Option(min=1, max=1024, help="Requests in the engine at once.")] = 64,
    *,
    store: dict[str, Any],
    drafts: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Answer the requests of a file in OpenAI's batch format; prompts that begin alike are computed once."""
    with exit_on_error():
        with uncollected():
            from .batch import batch as answer_all
        counts = answer_all(given, out, model, at_once, store, {**config, **drafts})
        if counts.failed:
            raise typer.Exit(FAILURE)
