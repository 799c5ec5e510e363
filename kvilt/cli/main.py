"""The `kvilt` command: its subcommands, and what an error looks like in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from . import options as opt
from .cluster_app import clusters
from .errors import FAILURE, exit_on_error

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


@app.command()
@opt.with_options(sampling=opt.SAMPLING.without("n", "logprobs"), drafts=opt.DRAFTS, config=opt.RUNTIME)
def chat(
    model: opt.Model = opt.DEFAULT_MODEL,
    system: Annotated[str, typer.Option(help="A system message for the chat template.")] = "",
    saved: Annotated[str, typer.Option("--load", metavar="NAME", help="Continue a saved chat.")] = "",
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour accepted draft tokens.")] = False,
    template_option: opt.TemplateOption = None,
    *,
    sampling: dict[str, Any],
    drafts: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Chat with a model; /help lists the commands."""
    with exit_on_error():
        from .chat import chat as run_chat

        if not run_chat(model, system, saved, sampling, {**config, **drafts}, show_drafts, template_option or ()):
            raise typer.Exit(FAILURE)


@app.command()
@opt.with_options(options=opt.SERVER, engine=opt.ENGINE, store=opt.STORE, drafts=opt.DRAFTS, config=opt.RUNTIME)
def serve(
    model: opt.Model = opt.DEFAULT_MODEL,
    *,
    options: dict[str, Any],
    engine: dict[str, Any],
    store: dict[str, Any],
    drafts: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    with exit_on_error():
        from .serve import serve as listen

        listen(model, options, engine, store, {**config, **drafts})


@app.command()
@opt.with_options(store=opt.STORE, drafts=opt.DRAFTS, config=opt.RUNTIME)
def mcp(
    model: opt.Model = opt.DEFAULT_MODEL,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve HTTP on this machine; default: stdin and stdout.")
    ] = None,
    kv_dir: Annotated[str | None, typer.Option(metavar="PATH", help="The folder that KV is saved in.")] = None,
    *,
    store: dict[str, Any],
    drafts: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Offer a model and its KV to agents as tools of the Model Context Protocol."""
    with exit_on_error():
        from .mcp import mcp as offer

        offer(model, port, kv_dir, store, {**config, **drafts})


@app.command()
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


@app.command()
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
        from .batch import batch as answer_all

        counts = answer_all(given, out, model, at_once, store, {**config, **drafts})
        if counts.failed:
            raise typer.Exit(FAILURE)


@app.command()
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


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(help="A model's name, like smollm2, or hf:org/name[:file].")
    ] = opt.DEFAULT_MODEL,
) -> None:
    """Fetch a model into the cache folder, unless it is there, and print its path."""
    with exit_on_error():
        from .pull import fetch

        typer.echo(fetch(name))


@app.command()
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


@app.command("blend-report")
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


measures = typer.Typer(invoke_without_command=True)
app.add_typer(measures, name="bench")


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


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A checkpoint or a saved cache; also hf:org/name or a model's name.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor with its shape and format.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the contents of a checkpoint or a saved KV cache, without loading it."""
    with exit_on_error():
        from .inspect import inspect as look

        look(path, tensors, json)


@app.command()
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


@app.command()
def session(
    action: Annotated[str, typer.Argument(help="list, show, export, import, fork or delete.")],
    name: Annotated[str, typer.Argument(help="The session's name or id; for import, the file.")] = "",
    target: Annotated[str, typer.Argument(help="The file of an export, or the name of a new session.")] = "",
    kv: Annotated[bool, typer.Option("--kv/--no-kv", help="Whether the file has the KV too.")] = True,
    turn: Annotated[str | None, typer.Option(help="Fork only the turns that lead to this one.")] = None,
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    api_key: opt.ClientKey = None,
    api_key_file: opt.ClientKeyFile = None,
) -> None:
    """Sessions of a running server: list, show NAME, export NAME FILE, import FILE, fork NAME NEW, delete NAME."""
    with exit_on_error():
        from .keys import client_key
        from .session import SessionClient, act

        act(SessionClient(url, client_key(api_key, api_key_file)), action, name, target, kv, turn)


app.add_typer(clusters, name="cluster")

adapting = typer.Typer(help="LoRA adapters.")
app.add_typer(adapting, name="lora")


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


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
