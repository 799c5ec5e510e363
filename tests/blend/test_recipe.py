"""Recipes as requests may write them, and the controller that follows loading times."""

from __future__ import annotations

from typing import Any

import pytest

from kvilt.blend.controller import LoadMeter, load_ratio
from kvilt.blend.recipe import BlendPrompt, Recipe, StrategyShare
from kvilt.errors import ParamError


def test_mixes() -> None:
    assert Recipe(strategy="head").parts == (StrategyShare("head", 1.0),)
    assert Recipe(strategy="head:1+query:3").parts == (StrategyShare("head", 0.25), StrategyShare("query", 0.75))
    assert Recipe(strategy="deviation + query").parts == (StrategyShare("deviation", 0.5), StrategyShare("query", 0.5))


@pytest.mark.parametrize(
    "fields",
    [
        {"ratio": -0.1},
        {"ratio": 1.1},
        {"ratio": float("nan")},
        {"ratio": True},
        {"ratio": "0.2"},
        {"strategy": "tail"},
        {"strategy": ""},
        {"strategy": "head:0"},
        {"strategy": "head:x"},
        {"strategy": "head:inf"},
        {"strategy": "head+head"},
        {"strategy": None},
        {"first_tokens": -1},
        {"first_tokens": 1.5},
        {"check_layer": -1},
        {"mass_layers": [-1]},
        {"gradual": [1.0, 2.0], "strategy": "deviation"},
        {"gradual": [0.5], "strategy": "deviation"},
        {"gradual": [2.0], "strategy": "head"},
        {"min_gain": 2},
        {"load_floor": -1},
        {"gate": 1},
        {"budget": 3},
        {"gradual": 5, "strategy": "deviation"},
        {"gradual": ["a"], "strategy": "deviation"},
        {"gradual": [float("nan")], "strategy": "deviation"},
        {"gradual": [float("inf"), 1.5], "strategy": "deviation"},
        {"mass_layers": 5},
        {"mass_layers": "12"},
        {"last_segment": "no"},
        {"last_segment": None},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ParamError) as error:
        Recipe.of(None, **fields)
    assert error.value.field in fields


def test_a_recipe_is_a_recipe() -> None:
    with pytest.raises(ParamError, match="recipe"):
        Recipe.of("query")  # type: ignore[arg-type]


def test_what_is_computed_again_in_any_case_saves_nothing() -> None:
    blend_prompt = BlendPrompt.of([[1] * 4, [2] * 100, [3] * 100, [4] * 6], [False, True, True, False])
    assert blend_prompt.worth(Recipe(0.1, "head"), 12)
    assert not blend_prompt.worth(Recipe(0.1, "head", first_tokens=99), 12)
    assert not blend_prompt.worth(Recipe(0.1, "head", load_floor=0.9), 12)


def test_different_recipes_have_different_names() -> None:
    made = [
        Recipe(),
        Recipe(0.2),
        Recipe(strategy="head"),
        Recipe(strategy="head:0.4+query:0.6"),
        Recipe(check_layer=2),
        Recipe(strategy="deviation", gradual=(2.0,)),
        Recipe(first_tokens=3),
        Recipe(mass_layers=(1,)),
        Recipe(last_segment=False),
        Recipe(load_floor=0.1),
    ]
    assert len({one.name for one in made}) == len(made)
    assert Recipe.of(made[1], first_tokens=0) == made[1]


def test_the_ratio_follows_what_can_be_computed_while_a_layer_loads() -> None:
    assert load_ratio(0.02, 0.1, 0.15) == pytest.approx(0.2)
    assert load_ratio(0.001, 0.1, 0.15) == 0.15  # never under the floor
    assert load_ratio(1.0, 0.1, 0.15) == 1.0
    assert load_ratio(1.0, 0.0, 0.15) == 0.15


def test_the_meter_reads_the_clock() -> None:
    now = 0.0
    meter = LoadMeter(lambda: now)
    meter.begin()
    now = 2.0
    meter.end(tokens=100, layers=2)  # a layer of 100 tokens takes 1 s
    assert meter.ratio(layers_loaded=4, layers=8, tokens=100, floor=0.1) == pytest.approx(0.5)  # 2 s for 4 layers
    assert meter.ratio(layers_loaded=8, layers=8, tokens=100, floor=0.1) == 0.1


def test_the_former_name_of_repair_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="repair") as warned:
        assert Recipe(mend=0.25) == Recipe(repair=0.25)
    assert warned[0].filename == __file__  # the line that used the old name
    with pytest.warns(DeprecationWarning, match="repair"):
        assert Recipe.of(None, mend=0.25).name == Recipe(repair=0.25).name
    with pytest.warns(DeprecationWarning), pytest.raises(ParamError, match="repair"):
        Recipe(mend=2.0)
    assert "mend=0.25" in Recipe(repair=0.25).name  # stored keys keep the name they have
