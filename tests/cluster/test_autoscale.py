"""How many replicas the load needs."""

from __future__ import annotations

from typing import Any

import pytest

from kvilt.cli.cluster import checked_size
from kvilt.cluster.autoscale import CALM_S, TARGET, decide
from kvilt.errors import ParamError


def test_more_replicas_come_at_once_and_fewer_after_a_calm_time() -> None:
    state: dict[str, Any] = {}
    wanted, state = decide(3.5 * TARGET, 1, state, 0.0)
    assert wanted == 4
    wanted, state = decide(0.0, 4, state, 1.0)
    assert wanted == 4
    wanted, state = decide(0.0, 4, state, CALM_S)
    assert wanted == 4
    wanted, state = decide(0.0, 4, state, 1.0 + CALM_S)
    assert wanted == 3
    wanted, state = decide(3 * TARGET, 3, state, 2.0 + CALM_S)  # busy again: the calm time begins anew
    wanted, state = decide(0.0, 3, state, 3.0 + CALM_S)
    assert wanted == 3
    wanted, _ = decide(0.0, 1, {}, 1e9)
    assert wanted == 1


def test_numbers_of_replicas_fit_each_other() -> None:
    assert checked_size()["replicas"] == 2
    assert checked_size(least=1, most=4) == {
        "replicas": 1,
        "least": 1,
        "most": 4,
        "prefill_replicas": 0,
        "doors": 1,
    }
    for wrong in ({"least": 2}, {"most": 2}, {"least": 3, "most": 2}, {"replicas": 2, "least": 1, "most": 2}):
        with pytest.raises(ParamError):
            checked_size(**wrong)
