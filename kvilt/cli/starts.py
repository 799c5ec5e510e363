"""What `kvilt run` and `kvilt chat` do with their options: a running server answers, else the model is loaded here.

Knows neither typer nor torch: an answer of a server needs none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..server.running import running_servers
from .errors import FAILURE, exit_on_error
from .imports import quick_imports
from .option_groups import GRAMMAR, STORE


def start_run(
    prompt: str,
    model: str,
    system: str = "",
    raw: bool = False,
    lora: str = "",
    lora_scale: float = 1.0,
    document: Sequence[str] | None = None,
    blend_ratio: float | None = None,
    template_option: Sequence[str] | None = None,
    json: bool = False,
    attach: bool = True,
    verbose: bool = False,
    *,
    sampling: dict[str, Any],
    grammar: dict[str, Any],
    store: dict[str, Any],
    drafts: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Answer one prompt; without one, a terminal gets a chat."""
    with exit_on_error():
        plain = STORE.is_default(store) and GRAMMAR.is_default(grammar) and not any((lora, document, verbose))
        if attach and plain and not json and not template_option and prompt != "-" and running_servers():
            from .attached_run import answer_attached

            if answer_attached(prompt, model, system, raw, sampling, {**config, **drafts}):
                return
        with quick_imports():
            from .run import RunRequest, answer, opens_chat, read_grammar

        usual = STORE.is_default(store) and GRAMMAR.is_default(grammar) and sampling["n"] == 1
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


def start_chat(
    model: str,
    system: str = "",
    saved: str = "",
    show_drafts: bool = False,
    template_option: Sequence[str] | None = None,
    attach: bool = True,
    *,
    sampling: dict[str, Any],
    drafts: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Chat until the user leaves; a pipe whose commands failed ends with an error."""
    with exit_on_error():
        if attach and not saved and not show_drafts and running_servers():
            from .attached_chat import chat_attached
            from .template_options import read_template_options

            well = chat_attached(
                model, system, sampling, {**config, **drafts}, read_template_options(template_option or ())
            )
            if well is not None:
                if not well:
                    raise SystemExit(FAILURE)
                return
        with quick_imports():
            from .chat import chat as run_chat
        if not run_chat(model, system, saved, sampling, {**config, **drafts}, show_drafts, template_option or ()):
            raise SystemExit(FAILURE)
