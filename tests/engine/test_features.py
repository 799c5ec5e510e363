"""A feature of the tests' own: when the engine asks it, and what becomes of its proposals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from small import Ask, Ear, asks, finish, load_small, start

from kvilt.batch import Batch, Logits
from kvilt.config import EngineConfig
from kvilt.engine.counters import PREEMPTIONS, SUCCESS
from kvilt.engine.engine import Engine
from kvilt.engine.features.feature import (
    Abort,
    Fail,
    Feature,
    FinishedStep,
    Forgotten,
    MakeRow,
    Proposal,
    Sequences,
    Submit,
)
from kvilt.engine.request import Request
from kvilt.engine.rows import row_task
from kvilt.engine.scheduling.plan import Sample, StepPlan
from kvilt.engine.scheduling.proposals import HoldRows
from kvilt.engine.sequence import SequenceState
from kvilt.errors import InputError, NumericsError
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams

CONFIG = EngineConfig(step_tokens=32, max_rows=8)
ASK = Ask(tuple((7 * i) % 60 for i in range(20)), SamplingParams(max_tokens=3, temperature=0.0))


@dataclass
class Plugin(Feature):
    """Notes what it is asked, and proposes what a test gives it, once."""

    said: list[str] = field(default_factory=list)
    propose: Callable[[Sequences], Iterable[Proposal]] | None = None
    makes_rows: bool = False

    def before_plan(self, seqs: Sequences) -> Iterable[Proposal]:
        self.said.append("before_plan")
        if self.propose is None or not seqs:
            return ()
        propose, self.propose = self.propose, None
        return propose(seqs)

    def begin(self, seq: SequenceState) -> Iterable[Proposal]:
        assert seq.kv is not None
        self.said.append("begin")
        return ()

    def rows(self, plan: StepPlan, seqs: Sequences) -> Mapping[Sample, MakeRow]:
        self.said.append("rows")
        if not self.makes_rows:
            return {}
        return {work.sample: partial(row_task, seqs[work.sample], work) for work in plan.work}

    def after_step(self, step: FinishedStep, seqs: Sequences) -> Iterable[Proposal]:
        assert len(step.plan.work) == len(step.tasks) == len(step.results)
        self.said.append("after_step")
        return ()

    def forget(self, seq: SequenceState, why: Forgotten) -> None:
        self.said.append(why)

    def stop(self) -> Iterable[Proposal]:
        self.said.append("stop")
        return ()


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("features"), 40, None, "native")


def test_the_engine_asks_in_the_order_of_a_step(executor: Executor, nothing_left: None) -> None:
    plugin = Plugin()
    engine = Engine(executor, CONFIG, features=[plugin])
    ear = start(engine, ASK)
    finish(engine)
    step = ["before_plan", "rows", "after_step"]
    assert plugin.said == ["before_plan", "begin", "rows", "after_step", *step, *step, "ended", "before_plan"]
    engine.fail_all(InputError("over"))
    assert plugin.said[-1] == "stop"
    assert ear.tokens == [ASK.alone(executor)]


def test_rows_may_be_made_by_a_feature(executor: Executor, nothing_left: None) -> None:
    engine = Engine(executor, CONFIG, features=[Plugin(makes_rows=True)])
    every = asks(4, seed=2, longest=90)
    ears = [start(engine, one) for one in every]
    finish(engine)
    assert [ear.tokens for ear in ears] == [[one.alone(executor)] for one in every]


def test_a_preempted_sequence_is_forgotten_and_begins_again(tmp_path: Path) -> None:
    executor, plugin = load_small(tmp_path, 6, None, "native"), Plugin()
    engine = Engine(executor, CONFIG, features=[plugin])
    for one in asks(5, seed=4, longest=90):
        start(engine, one)
    finish(engine)
    preempted = int(engine.metrics.snapshot()[PREEMPTIONS.name]["series"][0]["value"])
    assert plugin.said.count("preempted") == preempted > 0
    assert (plugin.said.count("begin"), plugin.said.count("ended")) == (5 + preempted, 5)


def test_kv_that_may_be_wrong_is_named(executor: Executor, nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plugin = executor.run, Plugin()

    def broken(batch: Batch) -> Logits:
        logits = run(batch)
        logits.values.fill_(torch.nan)
        return logits

    monkeypatch.setattr(executor, "run", broken)
    engine = Engine(executor, CONFIG, features=[plugin])
    ear = start(engine, ASK)
    finish(engine)
    assert isinstance(ear.error, NumericsError)
    assert plugin.said[-2:] == ["unsound", "before_plan"]


def test_proposals_about_a_sequence(executor: Executor, nothing_left: None) -> None:
    def hold(seqs: Sequences) -> Iterable[Proposal]:
        return [HoldRows(sample, True) for sample in seqs]

    def fail(seqs: Sequences) -> Iterable[Proposal]:
        return [Fail(seq, InputError("no")) for seq in seqs.values()]

    plugin = Plugin(propose=hold)
    engine = Engine(executor, CONFIG, features=[plugin])
    ear = start(engine, ASK)
    assert finish(engine) == 0
    assert not engine.ready
    plugin.propose = fail
    engine.step()
    assert isinstance(ear.error, InputError)
    assert engine.requests == 0


def test_a_request_of_its_own_is_an_ordinary_one_that_no_caller_sees(executor: Executor, nothing_left: None) -> None:
    own, logits = Ear(), []
    request = Request(ASK.prompt, None, background=True, id="own", max_step_tokens=8)
    plugin = Plugin(propose=lambda _: [Submit(request, own, logits.append)])
    engine = Engine(executor, CONFIG, features=[plugin])
    ear = start(engine, Ask((1, 2, 3), SamplingParams(max_tokens=9, temperature=0.0)))
    engine.step()
    assert engine.requests == 1
    assert [sample.request for sample in engine.view("").samples] != ["own"]
    finish(engine)
    assert own.reasons == ["length"]
    assert [one.shape for one in logits] == [(executor.spec.vocab_size,)]
    assert int(logits[0].argmax()) == ASK.alone(executor)[0]
    assert ear.over
    assert engine.metrics.snapshot()[SUCCESS.name]["series"][0]["value"] == 1


def test_a_refused_request_hears_why_and_an_aborted_one_ends(executor: Executor, nothing_left: None) -> None:
    refused, aborted = Ear(), Ear()
    long = Request(ASK.prompt, None, background=True, id="long", max_step_tokens=1)
    plugin = Plugin(propose=lambda _: [Submit(Request((), None, background=True), refused), Submit(long, aborted)])
    engine = Engine(executor, CONFIG, features=[plugin])
    start(engine, ASK)
    engine.step()
    assert isinstance(refused.error, InputError)
    assert not aborted.over
    plugin.propose = lambda _: [Abort("long"), Abort("long"), Abort("never")]
    finish(engine)
    assert aborted.reasons == ["cancelled"]
