"""Commands that measure and explain: bench, perplexity, blend-report, explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as opt
from .errors import exit_on_error

measures = typer.Typer(invoke_without_command=True)


@measures.callback()
@opt.with_options(config=opt.RUNTIME)
def bench(
    context: typer.Context,
    model: opt.Model = opt.DEFAULT_MODEL,
    prefill: Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")] = "128,512,1024",
    contexts: Annotated[str, typer.Option(help="Contexts to decode at.")] = "16,1024",
    batches: Annotated[str, typer.Option(help="Rows of batched decodes.")] = "4,8,16,32",
    steps: Annotated[int, typer.Option(help="Tokens per decode.")] = 32,
    runs: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 3,
    cold: Annotated[bool, typer.Option(help="Also start a fresh process: time to first token, peak memory.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    config: dict[str, Any],
) -> None:
    """Tokens per second of prefill, decode and batches, and their share of the machine's limits."""
    if context.invoked_subcommand is not None:
        return
    with exit_on_error():
        from ..bench.throughput import BenchPlan
        from .bench import bench as measure

        plan = BenchPlan(
            prefill=opt.numbers("prefill", prefill),
            contexts=opt.numbers("contexts", contexts),
            batches=opt.numbers("batches", batches),
            steps=steps,
            runs=runs,
            cold=cold,
        )
        measure(model, plan, json, config)


@measures.command("serve")
@opt.with_options(load=opt.LOAD)
def bench_serve(
    url: Annotated[str, typer.Option(help="The server's address, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Default: the first that the server lists.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat/--completions", help="Which of the two routes.")] = True,
    api_key: opt.ClientKey = None,
    api_key_file: opt.ClientKeyFile = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Goodput: the first token within this.")] = None,
    slo_itl_ms: Annotated[float | None, typer.Option(help="Goodput: later tokens within this on average.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Also plot to a file: out.png, out.svg.")] = None,
    *,
    load: dict[str, Any],
) -> None:
    """Latency and throughput of any server with an OpenAI-compatible API."""
    with exit_on_error():
        from ..bench.serve_client import ServerTarget
        from ..bench.serve_load import LoadPlan
        from ..bench.serve_stats import SLO
        from .bench_serve import bench_serve as measure
        from .keys import client_key

        target = ServerTarget(url, chat, client_key(api_key, api_key_file), timeout_s)
        measure(target, LoadPlan(**load), SLO(slo_ttft_ms, slo_itl_ms), model, json, plot)


@opt.with_options(config=opt.RUNTIME)
def perplexity(
    file: Annotated[str, typer.Argument(help="A text file; '-' reads a pipe.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    chunk: Annotated[int, typer.Option(help="Tokens that are scored together.")] = 1024,
    limit: Annotated[int | None, typer.Option(help="Use only this many tokens.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    config: dict[str, Any],
) -> None:
    """How well a model predicts a text."""
    with exit_on_error():
        from .perplexity import report

        report(file, model, chunk, limit, json, config)


@opt.with_options(config=opt.RUNTIME)
def blend_report(
    files: Annotated[
        list[str], typer.Argument(help="Text files, a document each; or JSON: question, documents, answers.")
    ],
    model: opt.Model = opt.DEFAULT_MODEL,
    question: Annotated[list[str] | None, typer.Option(help="Asked about the text files; may be repeated.")] = None,
    questions: Annotated[str | None, typer.Option(metavar="FILE", help="More of them, one on each line.")] = None,
    documents: Annotated[int, typer.Option(help="Text files for each question, in a random order.")] = 10,
    strategies: Annotated[str, typer.Option(help="Separated by commas.")] = "query,head,deviation",
    ratios: Annotated[str, typer.Option(help="Percentages of the documents' tokens to recompute.")] = "5,15,30",
    limit: Annotated[int | None, typer.Option(help="Ask only this many questions.")] = None,
    context: Annotated[int | None, typer.Option(help="Cut all documents to one length until prompts fit.")] = None,
    codec: Annotated[str, typer.Option(help="Codec of stored documents: raw, zstd, int8 or k8v4.")] = "raw",
    repair: Annotated[
        float | None,
        typer.Option("--repair", "--mend", help="How strongly tokens between recomputed ones are repaired."),
    ] = None,
    context_prefix: Annotated[
        bool, typer.Option("--context-prefix", "--behind", help="Compute documents after the system text.")
    ] = False,
    seed: Annotated[int, typer.Option(help="For the order of documents.")] = 0,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Append results to a file, and continue it.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Also plot to a file: out.png, out.svg.")] = None,
    *,
    config: dict[str, Any],
) -> None:
    """Compare blending of your documents with whole prefills: time to first token and quality."""
    with exit_on_error():
        from .blend_report import BlendQuestions, ReportOutput, report

        asked = BlendQuestions(
            files, question or [], questions, documents, seed, limit, context, codec, repair, context_prefix
        )
        output = ReportOutput(out, json, plot)
        report(asked, model, strategies.split(","), opt.numbers("ratios", ratios), output, config)


def explain(
    request: Annotated[Path, typer.Argument(help="The body of a request of any API, as JSON; '-' reads stdin.")],
    against: Annotated[Path | None, typer.Option(help="The body of an earlier request to compare it with.")] = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show why a request reuses less KV than an earlier one left behind, without running the model."""
    with exit_on_error():
        from .explain import explain as compare

        compare(request, against, model, json)
