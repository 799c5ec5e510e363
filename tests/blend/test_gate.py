"""The quality gate by itself: what it makes of comparisons, and the file that keeps it."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvilt.blend.certificate import RECENT, Certificate, CertificateFile, Compared
from kvilt.blend.quality_gate import GateDecision, QualityGate, Trial, compare, ladder, strategy_of
from kvilt.blend.recipe import Recipe
from kvilt.config import GateConfig
from kvilt.errors import ParamError

CONFIG = GateConfig(every=1, max_kl=0.1, least=4)
RECIPE = Recipe(0.15, "query")
BAD, GOOD = Compared(0.5, False), Compared(0.01, True)


def gate(config: GateConfig = CONFIG, path: Path | None = None, model: str = "m") -> QualityGate:
    return QualityGate(config, lambda: model, CertificateFile(path) if path is not None else None)


def judge(one: QualityGate, recipe: Recipe = RECIPE, worth: bool = True) -> GateDecision:
    return one.judge(recipe, "base", lambda _: worth)


def feed(one: QualityGate, compared: Compared, count: int, recipe: Recipe = RECIPE) -> list[GateDecision]:
    """So many requests, each compared with the same result."""
    seen = []
    for _ in range(count):
        verdict = judge(one, recipe)
        assert verdict.trial is not None
        one.learn(verdict.trial, compared)
        seen.append(verdict)
    return seen


def only(one: QualityGate) -> Certificate:
    (certificate,) = one.certificates()
    return certificate


# Comparing.


def test_equal_logits_have_no_divergence() -> None:
    row = torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert compare(row, row.clone()) == Compared(0.0, True)
    assert compare(row, row + 3.0).kl == pytest.approx(0.0, abs=1e-12)  # type: ignore[union-attr]


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=9), st.lists(st.floats(-20, 20), min_size=2, max_size=9))
def test_divergence_is_what_its_definition_says(a: list[float], b: list[float]) -> None:
    size = min(len(a), len(b))
    found = compare(torch.tensor(a[:size]), torch.tensor(b[:size]))
    p, q = (torch.softmax(torch.tensor(x[:size]).double(), 0) for x in (a, b))
    assert found is not None
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-9)
    assert found.kl >= 0


def test_what_is_no_number_is_no_comparison() -> None:
    row = torch.zeros(4)
    assert compare(row, torch.full((4,), math.nan)) is None
    assert compare(torch.tensor([math.nan, 0.0, 0.0, 0.0]), row) is None
    assert compare(row, torch.tensor([-math.inf, 0.0, 0.0, 0.0])) is None  # infinitely far off
    banned = torch.tensor([-math.inf, 0.0, 0.0, 0.0])
    assert compare(banned, banned) == Compared(0.0, True)


# The ladder.


@given(st.floats(0, 1), st.floats(0.01, 1), st.floats(1.01, 10))
def test_ratios_rise_to_the_ceiling(ratio: float, ceiling: float, step: float) -> None:
    ratios = [one.ratio for one in ladder(Recipe(ratio), GateConfig(ceiling=ceiling, step=step))]
    assert ratios[0] == ratio
    assert all(a < b for a, b in pairwise(ratios))
    assert ratios[-1] == max(ratio, ceiling)


def test_a_floor_rises_with_the_ratio() -> None:
    floors = [one.load_floor for one in ladder(Recipe(0.2, load_floor=0.25), GateConfig(ceiling=0.5, step=1.5))]
    assert floors == [0.25, pytest.approx(0.3), pytest.approx(0.45), 0.5]


# Deciding.


@pytest.mark.parametrize("every", [1, 3, 50])
def test_one_in_so_many_is_compared(every: int) -> None:
    one = gate(GateConfig(every=every))
    compared = [judge(one).trial is not None for _ in range(100)]
    assert compared == [at % every == 0 for at in range(100)]


def test_every_recipe_is_counted_for_itself() -> None:
    one = gate(GateConfig(every=10))
    for ratio in (0.1, 0.2, 0.3):
        assert judge(one, Recipe(ratio)).trial is not None
        assert judge(one, Recipe(ratio)).trial is None
    assert [c.asked_ratio for c in one.certificates()] == [0.1, 0.2, 0.3]


def test_who_draws_nothing_is_not_compared_and_not_counted() -> None:
    one = gate(GateConfig(every=2))
    assert one.judge(RECIPE, "base", lambda _: True, draws=False).trial is None
    assert judge(one).trial is not None


def test_off_is_off() -> None:
    one = gate(GateConfig(every=0))
    assert judge(one) == GateDecision(RECIPE)
    assert one.certificates() == []


def test_a_good_recipe_stays_as_it_is_asked_for() -> None:
    one = gate()
    assert all(verdict.recipe == RECIPE for verdict in feed(one, GOOD, 200))
    known = only(one)
    assert (known.ratio, known.falls_back, known.count, len(known.recent)) == (0.15, False, 200, RECENT)
    assert (known.mean_kl, known.agreement) == (pytest.approx(0.01), 1.0)
    assert known.kl_bound == pytest.approx(0.01)


def test_a_bad_one_is_raised_in_steps_and_then_computed_as_a_whole() -> None:
    one, ratios = gate(), []
    for _ in range(100):
        verdict = feed(one, BAD, 1)[0]
        ratios.append(None if verdict.recipe is None else round(verdict.recipe.ratio, 4))
    assert list(dict.fromkeys(ratios)) == [0.15, 0.225, 0.3375, 0.5, None]
    assert ratios[:4] == [0.15] * 4  # not before enough was compared
    assert ratios[-1] is None
    assert only(one).falls_back


def test_it_comes_back_when_it_proves_good_and_not_before() -> None:
    one = gate()
    feed(one, BAD, 100)
    assert judge(one).recipe is None
    feed(one, Compared(0.08, True), 200)  # under the bound, but not by enough
    assert only(one).falls_back
    feed(one, GOOD, RECENT)
    assert not only(one).falls_back
    ratios = [v.recipe.ratio for v in feed(one, GOOD, 200) if v.recipe is not None]
    assert ratios == sorted(ratios, reverse=True)
    assert only(one).ratio == 0.15
    assert all(verdict.recipe == RECIPE for verdict in feed(one, GOOD, 10))


def test_a_raised_ratio_does_not_swing() -> None:
    """What is good at the higher ratio and bad at the lower one stays at the higher one."""
    one, seen = gate(), []
    for _ in range(500):
        verdict = judge(one)
        assert verdict.trial is not None
        one.learn(verdict.trial, BAD if verdict.trial.recipe.ratio < 0.3 else GOOD)
        seen.append(verdict.recipe.ratio if verdict.recipe is not None else 1.0)
    moves = sum(a != b for a, b in pairwise(seen))
    assert (moves, seen[-1]) == (2, pytest.approx(0.3375))


def test_without_acting_it_only_looks() -> None:
    one = gate(GateConfig(every=1, least=4, act=False))
    assert all(verdict.recipe == RECIPE for verdict in feed(one, BAD, 100))
    assert only(one).mean_kl == 0.5


def test_who_keeps_out_gets_what_is_asked_for() -> None:
    one = gate()
    feed(one, BAD, 100)
    own = Recipe(0.15, "query", gate=False)
    assert judge(one, own) == GateDecision(own)


def test_a_ratio_that_saves_too_little_is_computed_as_a_whole_and_the_lower_one_compared() -> None:
    one = gate()
    feed(one, BAD, 4)
    verdict = one.judge(RECIPE, "base", lambda recipe: recipe.ratio < 0.2)
    assert verdict.recipe is None
    assert verdict.trial is not None
    assert verdict.trial.recipe.ratio == 0.15


def test_late_news_of_another_ratio_count_for_nothing() -> None:
    one = gate()
    first = judge(one).trial
    assert first is not None
    feed(one, BAD, 100)
    before = only(one)
    one.learn(first, GOOD)
    assert only(one) == before
    assert one.learn(Trial(("m", "other", "x"), RECIPE), GOOD) is None


def test_the_minimum_gain_is_each_requests_own() -> None:
    one = gate()
    judge(one, Recipe(0.15, "query", min_gain=0.5))
    verdict = judge(one, Recipe(0.15, "query", min_gain=0.0))
    assert verdict.recipe is not None
    assert verdict.recipe.min_gain == 0.0


def test_recipes_without_end_are_not_remembered_without_end() -> None:
    one = gate(GateConfig(every=1, least=4))
    feed(one, BAD, 100)
    for at in range(500):
        judge(one, Recipe(at / 1000, "head"))
    assert len(one.certificates()) <= 64
    assert judge(one).recipe is None  # what was learnt is not pushed out by those


@pytest.mark.parametrize(
    ("strategy", "name"), [("query", "query"), ("head:0.2+query:0.6", "head:0.25+query:0.75"), ("head:3", "head")]
)
def test_a_strategy_has_one_spelling(strategy: str, name: str) -> None:
    assert strategy_of(Recipe(strategy=strategy)) == name


def test_the_bound_holds_for_small_samples() -> None:
    """Against Student's own quantiles."""
    for count, quantile in ((4, 2.353), (8, 1.895), (30, 1.699)):
        values = [float(at % 2) for at in range(count)]
        made = Certificate("m", "a", "s", "x", 0.1, 0.1, False, count, tuple(Compared(v, True) for v in values))
        error = float(torch.tensor(values).std()) / math.sqrt(count)
        assert (made.kl_bound - made.mean_kl) / error == pytest.approx(quantile, rel=0.02)
    assert Certificate("m", "a", "s", "x", 0.1, 0.1, False, 0).kl_bound == math.inf


@pytest.mark.parametrize(
    "fields",
    [
        {"every": -1},
        {"every": 1.5},
        {"least": 1},
        {"patience": 0},
        {"max_kl": 0},
        {"max_kl": math.nan},
        {"step": 1},
        {"step": 1.0001},
        {"ceiling": 2},
        {"trusted": 0},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ParamError) as error:
        GateConfig(**fields)
    assert error.value.field in fields


# Remembering.


def restarted(path: Path, config: GateConfig = CONFIG, model: str = "m") -> QualityGate:
    return gate(config, path, model)


def test_a_restart_keeps_what_was_learnt(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "certificates.json"
    one = gate(path=path)
    feed(one, BAD, 5)
    feed(one, GOOD, 3)
    one.close()
    again = restarted(path)
    verdict = judge(again)
    assert verdict.recipe is not None
    assert verdict.recipe.ratio == pytest.approx(0.225)
    assert only(again) == only(one)
    feed(again, BAD, 100)
    again.close()
    assert judge(restarted(path)).recipe is None
    assert [child.name for child in path.parent.iterdir()] == [path.name]


def test_other_models_keep_theirs(tmp_path: Path) -> None:
    path = tmp_path / "certificates.json"
    for model in ("a", "b"):
        one = gate(path=path, model=model)
        feed(one, BAD, 100)
        one.close()
    for model in ("a", "b"):
        assert judge(restarted(path, model=model)).recipe is None
    assert judge(restarted(path, model="c")).recipe == RECIPE


def test_other_settings_take_the_next_step_up(tmp_path: Path) -> None:
    path = tmp_path / "certificates.json"
    one = gate(path=path)
    feed(one, BAD, 5)
    one.close()
    verdict = judge(restarted(path, GateConfig(every=1, step=2.0)))
    assert verdict.recipe is not None
    assert verdict.recipe.ratio == pytest.approx(0.3)
    assert judge(restarted(path, GateConfig(every=1, act=False))).recipe == RECIPE


def test_a_damaged_file_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    path = tmp_path / "certificates.json"
    one = gate(path=path)
    feed(one, BAD, 5)
    one.close()
    data, whole = path.read_bytes(), CertificateFile(path).read()
    assert whole == one.certificates()
    for at in range(0, len(data), 7):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            path.write_bytes(damaged)
            assert CertificateFile(path).read() in ([], whole)
    path.write_bytes(data[:100])
    assert judge(restarted(path)).recipe == RECIPE
    path.write_bytes(b"[" * 100_000)
    assert CertificateFile(path).read() == []


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "x"}, {"certificates": [{}]}, {"sha256": ""}], ids=str)
def test_another_format_is_not_read(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "certificates.json"
    one = gate(path=path)
    feed(one, GOOD, 1)
    one.close()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert CertificateFile(path).read() == []


def test_a_disk_that_cannot_be_written_costs_nothing_but_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one = gate(path=tmp_path / "file" / "certificates.json")
    feed(one, BAD, 100)
    one.close()
    assert judge(one).recipe is None
