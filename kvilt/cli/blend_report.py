"""`kvilt blend-report`: the speed and quality of blending on a user's own documents, by strategy and ratio."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..bench.blend_curve import curve
from ..bench.blend_measure import SYSTEM, BlendCase, methods
from ..bench.blend_plot import plot
from ..bench.blend_results import MethodSummary, ReportSettings, lines, summaries, verdict
from ..bench.serve_plot import check_plot
from ..blend.recipe import REPAIR
from ..errors import ParamError
from ..llm import LLM, load
from ..store.codec_registry import codec_named
from .blend_cases import read_cases, read_questions
from .progress import bars, tracked


@dataclass(frozen=True, slots=True)
class BlendQuestions:
    """The questions and the documents of a report."""

    files: Sequence[str]
    questions: Sequence[str]
    questions_file: str | None
    documents: int  # for each question
    seed: int
    limit: int | None
    context: int | None
    codec: str = "raw"
    repair: float | None = None  # None: as recipes do
    context_prefix: bool = False  # whether documents are computed after the system text

    def cases(self) -> list[BlendCase]:
        for name in ("documents", "limit", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ParamError(name, f"must be at least 1, not {value}")
        codec_named(self.codec)  # raises where there is no such codec
        more = read_questions(self.questions_file) if self.questions_file is not None else []
        return read_cases(self.files, [*self.questions, *more], self.documents, self.seed)[: self.limit]


@dataclass(frozen=True, slots=True)
class ReportOutput:
    """Where and how results are written."""

    out: str | None
    as_json: bool
    plot: str | None


def report(
    questions: BlendQuestions,
    model: str,
    strategies: Sequence[str],
    percents: Sequence[int],
    output: ReportOutput,
    config: dict[str, Any],
) -> None:
    """Measure and print. Wrong questions are refused before a model is loaded."""
    if output.plot is not None:
        check_plot()
    repair = REPAIR if questions.repair is None else questions.repair
    cases, wanted = questions.cases(), methods(strategies, [percent / 100 for percent in percents], repair)
    begins = [{"role": "system", "content": SYSTEM}] if questions.context_prefix else None
    with bars() as shown:
        llm = load(model, on_fetch=shown.fetching, context_prefix=begins, **config)
    with llm:
        setting = ReportSettings(
            model, _context(questions.context, llm), questions.codec, repair, questions.context_prefix
        )
        found = summaries(lines(llm, cases, wanted, setting, output.out, tracked))
    _show(found, output.as_json)
    if output.plot is not None:
        plot(_points(found), f"{model}, {len(cases)} questions", output.plot)


def _points(found: Sequence[MethodSummary]) -> list[tuple[str, float, float]]:
    return [(one.method, one.recomputed, one.kl) for one in found]


def _show(found: Sequence[MethodSummary], as_json: bool) -> None:
    """The table, and the curve of quality against ratio."""
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    heads = ("way", "questions", "first token, s", "faster", "recomputed", "KL", "of reuse", "agreement", "NLL", "F1")
    table = Table(*heads, box=box.MARKDOWN)
    for one in found:
        cells = (
            one.method,
            str(one.questions),
            f"{one.first_token_s:.2f}",
            f"{one.faster:.2f}x",
            f"{one.recomputed:.1%}",
            f"{one.kl:.3f}",
            _cell(one.kl_of_reuse, ".2f"),
            f"{one.agreement:.1%}",
            _cell(one.nll, ".3f"),
            _cell(one.f1, ".3f"),
        )
        table.add_row(*cells)
    wide = Console(width=None if os.isatty(1) else 140)
    wide.print(table)
    wide.print(curve(_points(found)), markup=False, highlight=False)
    wide.print(verdict(found), markup=False, highlight=False)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _context(context: int | None, llm: LLM) -> int:
    if context is not None and not 1 <= context <= llm.executor.max_context:
        raise ParamError("context", f"this model reads 1 to {llm.executor.max_context} tokens here, not {context}")
    return context or llm.executor.max_context
