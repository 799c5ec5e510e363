"""What drafts cost and gain on a machine whose steps take exactly so long: nobody is made late by anybody's drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from drafters import Oracle
from effort import some
from small import Ask, Ear, asks, finish, load_small, start
from tiny import VOCAB

from kvilt.batch import Batch, Logits
from kvilt.config import EngineConfig
from kvilt.engine.engine import Engine
from kvilt.engine.event import Ended, Event
from kvilt.engine.features.drafting import Drafting
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.speculative.drafter import Draft, DraftContext

TOKENS = 200


@dataclass
class Machine:
    """Seconds of a step: for the weights, for each token of decodes, and for having several tokens in a row."""

    read_s: float
    token_s: float
    rows_s: float = 0.0
    now_s: float = 0.0

    def run(self, batch: Batch) -> None:
        if batch.num_tokens < 20 * len(batch.rows):  # a prompt is nobody's business here
            drafted = batch.num_tokens > len(batch.rows)
            self.now_s += self.read_s + self.token_s * batch.num_tokens + (self.rows_s if drafted else 0.0)


@dataclass(eq=False)
class Timed(Ear):
    """Knows when it was over."""

    machine: Machine = field(default_factory=lambda: Machine(0, 0))
    over_s: float = 0.0

    def on_event(self, event: Event) -> bool:
        if isinstance(event, Ended):
            self.over_s = self.machine.now_s
        return super().on_event(event)


class Mixed(Oracle):
    """Is right about some requests and wrong about the others; drafting may take time."""

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]], good: set[tuple[int, ...]]) -> None:
        super().__init__(answers, 1.0, VOCAB, 12)
        self._good = good
        self.machine: Machine | None = None
        self.token_s = 0.0

    def propose(self, draft_contexts: Sequence[DraftContext], k: Sequence[int]) -> list[Draft]:
        if self.machine is not None:
            self.machine.now_s += self.token_s * sum(k)
        return super().propose(draft_contexts, k)

    def _draft(self, draft_context: DraftContext, count: int) -> Draft:
        known = len(draft_context.ids) - len(draft_context.memory)
        right = [*self._answers[draft_context.memory]][known : known + count]
        return Draft(right if draft_context.memory in self._good else [(token + 1) % VOCAB for token in right])


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("time"), 200, None, "native")


@pytest.fixture(scope="module")
def crowd(executor: Executor) -> list[tuple[Ask, list[int]]]:
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0)
    many = [Ask(ask.prompt[-10:], SamplingParams.of(params, seed=i)) for i, ask in enumerate(asks(8, 3))]
    return [(ask, ask.alone(executor)) for ask in many]


@pytest.fixture
def watched(executor: Executor) -> Iterator[list[Machine]]:
    """The executor, whose steps take as long as the machine in here says."""
    machines: list[Machine] = []
    run = executor.run

    def timed(batch: Batch) -> Logits:
        machines[-1].run(batch)
        return run(batch)

    executor.run = timed  # type: ignore[method-assign]
    yield machines
    executor.run = run  # type: ignore[method-assign]


def ends(
    executor: Executor,
    machine: Machine,
    machines: list[Machine],
    many: Sequence[tuple[Ask, list[int]]],
    good: Sequence[int] | None,
    drafting_s: float = 0.0,
) -> list[float]:
    """When each request is over; without drafts if there are no good ones to know."""
    machines.append(machine)
    features: list[Drafting] = []
    if good is not None:
        answers: dict[tuple[int, ...], Sequence[int]] = {ask.prompt: said for ask, said in many}
        drafter = Mixed(answers, {many[i][0].prompt for i in good})
        drafter.machine, drafter.token_s = machine, drafting_s
        features.append(Drafting(drafter, VOCAB, clock=lambda: machine.now_s))
    engine = Engine(executor, EngineConfig(step_tokens=512, max_rows=8), features=features)
    ears = [start(engine, ask, ear=Timed(machine=machine)) for ask, _ in many]
    finish(engine)
    assert [ear.tokens[0] for ear in ears] == [said for _, said in many]
    return [ear.over_s for ear in ears if isinstance(ear, Timed)]


MACHINES = {
    "reads": (0.010, 0.0002, 0.0),
    "both": (0.0065, 0.002, 0.0),
    "computes": (0.0005, 0.002, 0.0),
    "dear rows": (0.006, 0.0005, 0.003),
}
GOOD = {"none": [], "one": [3], "six": [0, 1, 2, 3, 4, 5], "all": [*range(8)]}


@pytest.mark.parametrize("good", some(["six", "none", "one", "all"]))
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("drafting_s", some([0.001, 0.0]))
def test_nobody_is_late(
    executor: Executor,
    crowd: list[tuple[Ask, list[int]]],
    watched: list[Machine],
    name: str,
    good: str,
    drafting_s: float,
) -> None:
    """Whatever the machine, whoever is right: each request is over as soon as without drafts, but for a few percent."""
    plain = ends(executor, Machine(*MACHINES[name]), watched, crowd, None)
    drafted = ends(executor, Machine(*MACHINES[name]), watched, crowd, GOOD[good], drafting_s)
    step_s = plain[0] / TOKENS
    assert all(late <= 1.01 * due + 2 * step_s for late, due in zip(drafted, plain, strict=True))


@pytest.mark.parametrize(("name", "gain"), [("reads", 4.0), ("both", 1.2), ("dear rows", 1.3)])
def test_who_is_right_is_early(
    executor: Executor, crowd: list[tuple[Ask, list[int]]], watched: list[Machine], name: str, gain: float
) -> None:
    plain = ends(executor, Machine(*MACHINES[name]), watched, crowd, None)
    drafted = ends(executor, Machine(*MACHINES[name]), watched, crowd, GOOD["all"])
    assert max(plain) > gain * max(drafted)


@pytest.mark.parametrize("name", MACHINES)
def test_one_alone(executor: Executor, crowd: list[tuple[Ask, list[int]]], watched: list[Machine], name: str) -> None:
    (plain,) = ends(executor, Machine(*MACHINES[name]), watched, crowd[:1], None)
    (right,) = ends(executor, Machine(*MACHINES[name]), watched, crowd[:1], [0])
    (wrong,) = ends(executor, Machine(*MACHINES[name]), watched, crowd[:1], [])
    assert plain > (1.9 if name != "computes" else 0.98) * right
    assert wrong < 1.03 * plain
