"""The features that drafters and quality gates bring into an engine."""

from __future__ import annotations

from dataclasses import dataclass

from ..blend.quality_gate import QualityGate
from ..engine.features.blend_decision import BlendJudge
from ..engine.features.drafting import Drafting
from ..engine.features.feature import Feature
from ..engine.features.quality_checks import QualityChecks
from ..executor.protocol import Executor
from ..metrics import Metrics
from ..speculative.drafter import Drafter


@dataclass(frozen=True, slots=True)
class Plugins:
    """The features of an engine, and the one that judges blended prompts."""

    features: tuple[Feature, ...] = ()
    judge: BlendJudge | None = None


def plugins_for(drafter: Drafter | None, gate: QualityGate | None, executor: Executor, metrics: Metrics) -> Plugins:
    """Drafts where there is a drafter, comparisons where there is a gate."""
    drafts = () if drafter is None else (Drafting(drafter, executor.spec.vocab_size),)
    if gate is None:
        return Plugins(drafts)
    checks = QualityChecks(gate, executor, metrics)
    return Plugins((checks, *drafts), checks)
