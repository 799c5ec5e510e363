"""Results of a report: a file with one line for each question and method, which can be continued, and its means."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ..blend.chunk import ChunkCache
from ..blend.recipe import REPAIR
from ..config import GateConfig
from ..errors import InputError
from ..llm import LLM
from ..store.store import Store
from ..store.tier import Budget
from .blend_measure import FULL, PREFIX, REUSE, BlendCase, BlendMethod, BlendOutcome, compare
from .progress import Track, untracked

_STORE_BYTES = 4 << 30  # the documents of one question at a time


@dataclass(frozen=True, slots=True)
class ReportLine:
    """One question and one method: a line of the file that a report continues."""

    case: str  # `BlendCase.name`
    outcome: BlendOutcome


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """The settings that all results of a file share; its first line."""

    model: str
    context: int
    codec: str = "raw"  # of stored documents
    repair: float = REPAIR
    context_prefix: bool = False  # whether documents are computed after the system text


@dataclass(frozen=True, slots=True)
class MethodSummary:
    """One method over all questions."""

    method: str
    questions: int
    first_token_s: float  # median
    faster: float  # than the whole prefill of the same question, median
    recomputed: float  # share of the documents' tokens
    kl: float
    kl_of_reuse: float | None  # relative to plain reuse
    agreement: float
    nll: float | None
    f1: float | None


def lines(
    llm: LLM,
    cases: Sequence[BlendCase],
    wanted: Sequence[BlendMethod],
    setting: ReportSettings,
    path: str | None,
    track: Track = untracked,
) -> list[ReportLine]:
    """Measure what the file does not have yet; each result is appended at once."""
    asked = {case.name: case for case in cases}
    known = [line for line in _read(path, setting) if line.case in asked]
    done = {(line.case, line.outcome.method) for line in known}
    missing = {name: [one for one in wanted if (name, one.name) not in done] for name in asked}
    with track("blending", sum(map(len, missing.values()))) as show:
        for count, line in enumerate(_measured(llm, asked, missing, setting), 1):
            known.append(line)
            if path is not None:
                _append(path, {"case": line.case, **asdict(line.outcome)})
            show(count, f"{line.outcome.method} {line.outcome.first_token_s:.2f} s, KL {line.outcome.kl:.3f}")
    names = {one.name for one in wanted}
    return [line for line in known if line.outcome.method in names]


def _measured(
    llm: LLM, asked: Mapping[str, BlendCase], missing: Mapping[str, Sequence[BlendMethod]], setting: ReportSettings
) -> Iterator[ReportLine]:
    for name, case in asked.items():
        if not missing[name]:
            continue
        with Store(Budget(_STORE_BYTES), chunk_codec=setting.codec) as store:
            chunks = ChunkCache(llm.executor, store, llm.documents.context_prefix)
            for outcome in compare(llm, chunks, case, setting.context, missing[name]):
                yield ReportLine(name, outcome)


def summaries(found: Sequence[ReportLine]) -> list[MethodSummary]:
    """The mean results of each method, in the order of the file."""
    by_method: dict[str, list[ReportLine]] = {}
    for line in found:
        by_method.setdefault(line.outcome.method, []).append(line)
    whole = {line.case: line.outcome.first_token_s for line in by_method.get(FULL.name, [])}
    reuse = {line.case: line.outcome.kl for line in by_method.get(REUSE.name, [])}
    return [_summary(name, mine, whole, reuse) for name, mine in by_method.items()]


def _summary(name: str, mine: Sequence[ReportLine], whole: dict[str, float], reuse: dict[str, float]) -> MethodSummary:
    """The means of one method; ratios are over the questions that both methods have."""
    outcomes = [line.outcome for line in mine]
    faster = [whole[line.case] / line.outcome.first_token_s for line in mine if line.case in whole]
    both = [(line.outcome.kl, reuse[line.case]) for line in mine if line.case in reuse]
    plain = fmean(kl for _, kl in both) if both else 0.0
    return MethodSummary(
        method=name,
        questions=len(mine),
        first_token_s=median(one.first_token_s for one in outcomes),
        faster=median(faster) if faster else 1.0,
        recomputed=1.0 if name in (FULL.name, PREFIX.name) else _mean_share(outcomes),
        kl=fmean(one.kl for one in outcomes),
        kl_of_reuse=fmean(kl for kl, _ in both) / plain if plain > 0 else None,
        agreement=fmean(one.agreement for one in outcomes),
        nll=_mean([one.nll for one in outcomes]),
        f1=_mean([one.f1 for one in outcomes]),
    )


def _mean_share(outcomes: Sequence[BlendOutcome]) -> float:
    return fmean(one.recomputed / max(1, one.reused) for one in outcomes)


WORTHWHILE = 1.1  # times sooner, below which the difference is noise


def verdict(found: Sequence[MethodSummary], max_kl: float = GateConfig().max_kl) -> str:
    """Which method is safe for these documents, in a sentence: the fastest whose KL a quality gate would accept."""
    blended = [one for one in found if one.method not in (FULL.name, PREFIX.name, REUSE.name)]
    if not blended:
        return "only whole prefills and plain reuse were measured; give --strategies and --ratios for a verdict"
    safe = [one for one in blended if one.kl <= max_kl]
    best = max(safe, key=lambda one: one.faster) if safe else min(blended, key=lambda one: one.kl)
    asked = f"{best.questions} question{'' if best.questions == 1 else 's'}"
    measured = f"mean KL {best.kl:.3f} over {asked}, the likeliest token agrees in {best.agreement:.0%}"
    if safe and best.faster < WORTHWHILE:
        return f"{best.method} is safe for these documents and not faster: they are too short to gain; {measured}"
    if safe:
        return f"{best.method} is safe for these documents: {best.faster:.1f}x sooner to the first token; {measured}"
    return f"nothing here is safe (KL above {max_kl:g}); the nearest is {best.method}: {measured}; try larger --ratios"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _append(path: str, fields: dict[str, Any]) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def _settings(fields: dict[str, Any]) -> ReportSettings:
    """The first line of a file, also of an earlier version."""
    former = {"mend": "repair", "behind": "context_prefix"}
    return ReportSettings(**{former.get(name, name): value for name, value in fields.items()})


def _read(path: str | None, setting: ReportSettings) -> list[ReportLine]:
    """The results of a file with the same settings; a file that does not exist is started."""
    if path is None:
        return []
    if not Path(path).exists():
        _append(path, asdict(setting))
        return []
    found: list[ReportLine | ReportSettings] = []
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            fields = json.loads(text)
            found.append(ReportLine(fields.pop("case"), BlendOutcome(**fields)) if found else _settings(fields))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(f"{path}, line {number}, is no line of a report; give --out another file") from None
    if found and found[0] != setting:
        raise InputError(f"{path} has results of {found[0]}, not of {setting}; give --out another file")
    return [line for line in found if isinstance(line, ReportLine)]
