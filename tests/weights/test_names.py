"""The strict match: all that is missing, unexpected or misshapen stands in one report."""

from __future__ import annotations

from typing import Any

import pytest

from kvilt.errors import WeightError
from kvilt.weights.names import ExpectedTensor, match


class Source:
    """Shapes alone: matching must not read a tensor."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._shapes = {name.replace("__", "."): shape for name, shape in shapes.items()}

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> Any:
        raise AssertionError("a tensor was read")

    digest = close = __enter__ = __exit__ = tensor


def test_what_fits_maps_the_models_names_to_the_checkpoints() -> None:
    needed = {"embed": ExpectedTensor("token_embd.weight", (8, 4)), "norm": ExpectedTensor("output_norm.weight", (4,))}
    source = Source(token_embd__weight=(8, 4), output_norm__weight=(4,))
    assert match(needed, source) == {"embed": "token_embd.weight", "norm": "output_norm.weight"}


def test_an_optional_tensor_may_be_absent_and_counts_when_present() -> None:
    needed = {"head": ExpectedTensor("output.weight", (8, 4), optional=True)}
    assert match(needed, Source()) == {}
    assert match(needed, Source(output__weight=(8, 4))) == {"head": "output.weight"}
    with pytest.raises(WeightError, match="another shape"):
        match(needed, Source(output__weight=(9, 4)))


def test_two_names_may_share_one_tensor() -> None:
    needed = {"embed": ExpectedTensor("e", (8, 4)), "head": ExpectedTensor("e", (8, 4))}
    assert match(needed, Source(e=(8, 4))) == {"embed": "e", "head": "e"}


def test_one_report_names_everything_that_does_not_fit() -> None:
    needed = {"a": ExpectedTensor("gone", (1,)), "b": ExpectedTensor("bent", (2, 3)), "c": ExpectedTensor("fine", (4,))}
    with pytest.raises(WeightError) as caught:
        match(needed, Source(bent=(3, 2), fine=(4,), extra=(1,)))
    assert caught.value.field == "tensors"
    assert str(caught.value) == (
        "tensors: the checkpoint does not fit its model: 1 missing (gone); 1 unexpected (extra); "
        "1 of another shape (bent is [3, 2] instead of [2, 3])"
    )


def test_a_long_list_is_cut_and_counted() -> None:
    needed = {str(i): ExpectedTensor(f"t{i}", (1,)) for i in range(30)}
    with pytest.raises(WeightError, match=r"30 missing \(t0, t1, t2, t3, t4 and 25 more\)"):
        match(needed, Source())


def test_ignored_patterns_excuse_unused_tensors_and_nothing_else() -> None:
    source = Source(rope_freqs__weight=(4,), layers__0__rotary_emb__inv_freq=(4,))
    assert match({}, source, ignored=("rope_freqs.weight", "*.rotary_emb.inv_freq")) == {}
    with pytest.raises(WeightError, match=r"1 unexpected \(layers.0.rotary_emb.inv_freq\)"):
        match({}, source, ignored=("rope_freqs.weight",))
