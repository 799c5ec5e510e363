"""Commands that answer prompts: run, chat, batch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as opt
from .errors import FAILURE, exit_on_error
from .imports import defer_meta_kernels, uncollected


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
    with exit_on_error():
        plain = opt.STORE.is_default(store) and opt.GRAMMAR.is_default(grammar) and not any((lora, document, verbose))
        if attach and plain and not json and not template_option and prompt != "-":
            from .attached_run import answer_attached

            if answer_attached(prompt, model, system, raw, sampling, {**config, **drafts}):
                return
        defer_meta_kernels()
        with uncollected():
            from .run import RunRequest, answer, opens_chat, read_grammar

        usual = opt.STORE.is_default(store) and opt.GRAMMAR.is_default(grammar) and sampling["n"] == 1
        if prompt == "-" and usual and not any((raw, lora, document, json, verbose)) and opens_chat():
            from .chat import chat as run_chat

            drawn = {name: value for name, value in sampling.items() if name not in ("n", "logprobs")}
            run_chat(model, system, "", drawn, {**config, **drafts}, False, template_option or ())
            return
        shown = {"json": json, "verbose": verbose}
        request = RunRequest(
            prompt=prompt,
            system=system,
            raw=raw,
            **shown,
            lora=lora,
            lora_scale=lora_scale,
            documents=tuple(document or ()),
            ratio=blend_ratio,
            template_options=tuple(template_option or ()),
        )
        answer(request, model, {**sampling, **read_grammar(grammar)}, store, {**config, **drafts})


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
    with exit_on_error():
        if attach and not saved and not show_drafts:
            from .attached_chat import chat_attached
            from .template_options import read_template_options

            well = chat_attached(
                model, system, sampling, {**config, **drafts}, read_template_options(template_option or ())
            )
            if well is not None:
                if not well:
                    raise typer.Exit(FAILURE)
                return
        defer_meta_kernels()
        with uncollected():
            from .chat import chat as run_chat
        if not run_chat(model, system, saved, sampling, {**config, **drafts}, show_drafts, template_option or ()):
            raise typer.Exit(FAILURE)


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
