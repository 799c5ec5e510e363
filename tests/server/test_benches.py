"""The soak and the attacks still run: a few requests each against a tiny model in this process."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))  # scripts, not part of the package

import hostile.measure
import soak
from hostile.parsing import ATTACKS
from hostile.serving import ADMIN, Serving
from soaking.mix import VISITS, Tally
from soaking.watch import Sample, flatness, quarters

Start = Callable[..., Any]
KEYS = ["sk-soak-00", "sk-soak-01", hostile.measure.ATTACKER, hostile.measure.VICTIM]


def _options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"requests": 60, "minutes": 0.0, "compare": 1.0, "clients": 4, "seed": 3, "every_s": 0.2, **changes}
    )


def test_a_short_soak_holds(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    even = {name: (visit, 1.0) for name, (visit, _) in VISITS.items()}  # sixty requests meet every kind
    monkeypatch.setattr("soaking.mix.VISITS", even)
    with start(api_keys=tuple(KEYS), admin_key=ADMIN, kv_dir=tmp_path) as server:
        serving = Serving(os.getpid(), "127.0.0.1", server.port, tmp_path)
        tally, samples = asyncio.run(soak.soak(serving, KEYS[:2], _options()))
        differing = asyncio.run(soak.cold(serving, KEYS[0], tally.compared))
    soak.report(tally, samples, differing, markdown=True)
    said = capsys.readouterr().out
    assert tally.sent >= 60
    assert len(tally.kinds) >= 10, tally.kinds
    assert tally.compared and not differing, said
    assert not tally.wrong, said
    assert samples[-1].running == samples[-1].handles == 0
    assert "| greedy answers, cold |" in said


def test_answers_that_differ_and_what_grows_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally(10, 0.0, 0.0)
    tally.sent = 10
    steady = [Sample(float(i), i, 400.0, 9, 20, 3, 5, 1, 1) for i in range(40)]
    end = Sample(40.0, 40, 400.0, 9, 20, 3, 0, 0, 0)
    assert soak.report(tally, [*steady, end], [], markdown=False)
    assert not soak.report(tally, [*steady, end], ["one differs"], markdown=False)
    leaking = [Sample(float(i), i, 400.0 + 2 * i, 9, 20, 3, 5, 1, 1) for i in range(80)]
    assert not soak.report(tally, [*leaking, end], [], markdown=False)
    assert not soak.report(tally, [*steady, Sample(40.0, 40, 400.0, 9, 20, 3, 0, 2, 0)], [], markdown=False)
    assert "one differs" in capsys.readouterr().out


def test_growth_is_of_the_second_half_alone() -> None:
    loaded = [Sample(float(i), i, 100.0 + 10 * min(i, 20), 9 + i // 30, 20, 3, 5, 1, 1) for i in range(60)]
    found = {one.name: one for one in flatness(loaded)}
    assert found["rss_mib"].growth == pytest.approx(0.0)
    assert all(one.holds for one in found.values())


def test_quantiles_are_of_each_quarter() -> None:
    times = [(float(i), 0.01 if i < 300 else 0.05) for i in range(400)]
    assert quarters(times) == [0.01, 0.01, 0.01, 0.05]


def test_an_attack_is_measured(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CALM_S", "LEAST_S", "AFTER_S"):
        monkeypatch.setattr(hostile.measure, name, 0.4)
    monkeypatch.setattr(hostile.measure, "FILL_REQUESTS", 1)
    (attack,) = [one for one in ATTACKS if one.name == "json_quotes_60k"]
    with start(api_keys=tuple(KEYS), admin_key=ADMIN) as server:
        serving = Serving(os.getpid(), "127.0.0.1", server.port, tmp_path)
        result = asyncio.run(hostile.measure.measured(serving, attack, 20))
    assert result.outcome == "4x 400 invalid_json"
    assert result.pause_ms > 0 and result.median_ratio > 0 and result.peak_mib >= result.before_mib > 0
    lines = hostile.measure.table([result], markdown=True).splitlines()
    assert len({line.count("|") for line in lines}) == 1
