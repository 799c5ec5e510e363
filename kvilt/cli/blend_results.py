"""What methods made of questions: a file of lines that can be gone on from, and means over it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from ..blend.chunk import Chunks
from ..errors import InputError
from ..llm import LLM
from ..store.store import Store
from ..store.tier import Budget
from .blend_cases import Case
from .blend_measure import FULL, REUSE, Method, Outcome, compare
from .progress import tracked

_STORE_BYTES = 4 << 30  # the documents of one question at a time


@dataclass(frozen=True, slots=True)
class Line:
    """One question, one method, as a line of the file that a report goes on from."""

    case: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Summary:
    """One method over all questions."""

    method: str
    questions: int
    first_token_s: float  # median
    faster: float  # than the whole prefill of the same question, median
    recomputed: float  # share of the documents' tokens
    kl: float
    kl_of_reuse: float | None  # against that of plain reuse
    agreement: float
    nll: float | None
    f1: float | None


def lines(llm: LLM, cases: Sequence[Case], wanted: Sequence[Method], context: int, path: str | None) -> list[Line]:
    """Measure what the file does not have yet; each result is there as soon as it is known."""
    known = [line for line in _read(path) if line.case < len(cases)]
    done = {(line.case, line.outcome.method) for line in known}
    missing = [[one for one in wanted if (case, one.name) not in done] for case in range(len(cases))]
    with tracked("blending", sum(map(len, missing))) as show:
        for count, line in enumerate(_measured(llm, cases, missing, context), 1):
            known.append(line)
            if path is not None:
                _append(path, line)
            show(count, f"{line.outcome.method} {line.outcome.first_token_s:.2f} s, KL {line.outcome.kl:.3f}")
    names = {one.name for one in wanted}
    return [line for line in known if line.outcome.method in names]


def _measured(llm: LLM, cases: Sequence[Case], missing: Sequence[Sequence[Method]], context: int) -> Iterator[Line]:
    for number, (case, wanted) in enumerate(zip(cases, missing, strict=True)):
        if not wanted:
            continue
        with Store(Budget(_STORE_BYTES)) as store:
            chunks = Chunks(llm.executor, store, llm.tokenizer.head)
            for outcome in compare(llm, chunks, case, context, wanted):
                yield Line(number, outcome)


def summaries(found: Sequence[Line]) -> list[Summary]:
    """The methods in the order they came."""
    by_method: dict[str, list[Line]] = {}
    for line in found:
        by_method.setdefault(line.outcome.method, []).append(line)
    whole = {line.case: line.outcome.first_token_s for line in by_method.get(FULL.name, [])}
    reuse = {line.case: line.outcome.kl for line in by_method.get(REUSE.name, [])}
    return [_summary(name, mine, whole, reuse) for name, mine in by_method.items()]


def _summary(name: str, mine: Sequence[Line], whole: dict[int, float], reuse: dict[int, float]) -> Summary:
    """Ratios are over the questions that both have."""
    outcomes = [line.outcome for line in mine]
    faster = [whole[line.case] / line.outcome.first_token_s for line in mine if line.case in whole]
    both = [(line.outcome.kl, reuse[line.case]) for line in mine if line.case in reuse]
    plain = fmean(kl for _, kl in both) if both else 0.0
    return Summary(
        method=name,
        questions=len(mine),
        first_token_s=median(one.first_token_s for one in outcomes),
        faster=median(faster) if faster else 1.0,
        recomputed=fmean(one.recomputed / max(1, one.reused) for one in outcomes),
        kl=fmean(one.kl for one in outcomes),
        kl_of_reuse=fmean(kl for kl, _ in both) / plain if plain > 0 else None,
        agreement=fmean(one.agreement for one in outcomes),
        nll=_mean([one.nll for one in outcomes]),
        f1=_mean([one.f1 for one in outcomes]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _append(path: str, line: Line) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"case": line.case, **asdict(line.outcome)}) + "\n")


def _read(path: str | None) -> list[Line]:
    if path is None or not Path(path).exists():
        return []
    found = []
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            fields = json.loads(text)
            found.append(Line(fields.pop("case"), Outcome(**fields)))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(f"{path}, line {number}, is no line of a report; give --out another file") from None
    return found
