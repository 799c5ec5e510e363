"""What holds of blending holds with drafts, on adapters and not: the same answers, the same sums, cold and warm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafters import Free
from effort import some

from kvilt.blend.recipe import Recipe
from kvilt.llm import LLM, Completion, load
from kvilt.speculative.cost import DraftCosts
from kvilt.speculative.ngram import NgramDrafter

ADAPTERS = Path(__file__).parent.parent / "adapters"
ONE = "The Eiffel Tower is 330 metres tall. It stands in Paris and was finished in 1889 for the world's fair.\n"
TWO = "Mount Everest is 8849 metres high. It was first climbed in 1953 by Edmund Hillary and Tenzing Norgay.\n"
PARTS = ["Facts:\n", ONE, TWO, ONE, "Again, the facts:\nThe Eiffel Tower is"]
DRAWS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 7}}


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> Iterator[LLM]:
    with load(smollm2_path, threads=1, kv_memory="256M", max_context=1024) as made:
        for name in ("pirate", "letter"):
            made.load_lora(ADAPTERS / name)
        yield made


@pytest.fixture(scope="module")
def drafted(plain: LLM) -> LLM:
    """The same executor with prompt lookup, and documents of its own."""
    return LLM(plain.executor, plain.tokenizer, tuple(plain.stop_ids), drafter=NgramDrafter(6))


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as may be is drafted, however long a step takes here."""
    monkeypatch.setattr(DraftCosts, "price", Free.price)


@pytest.fixture(params=some(["pirate", None, "letter"]), ids=str)
def lora(request: pytest.FixtureRequest) -> str | None:
    name: str | None = request.param
    return name


@pytest.mark.parametrize("draw", DRAWS)
def test_everything_computed_again_says_what_a_plain_prompt_says(
    plain: LLM, drafted: LLM, lora: str | None, draw: str
) -> None:
    ids = [token for part in PARTS for token in plain.tokenizer.encode(part, add_special=False)]
    ids = [*plain.tokenizer.head, *ids]
    expected = plain.generate(ids, lora=lora, max_tokens=20, **DRAWS[draw])
    for strategy in ("query", "deviation"):
        recipe = Recipe(1.0, strategy, min_gain=0.0)
        done = drafted.blend(PARTS, recipe=recipe, lora=lora, max_tokens=20, **DRAWS[draw])
        assert done.token_ids == expected.token_ids
        assert done.usage.blended_recomputed > 0


@pytest.mark.parametrize("draw", DRAWS)
def test_drafts_change_no_token_cold_or_warm_and_sums_agree(
    plain: LLM, drafted: LLM, lora: str | None, draw: str
) -> None:
    recipe = Recipe(0.2, min_gain=0.0)

    def ask(llm: LLM) -> Completion:
        return llm.blend(PARTS, recipe=recipe, lora=lora, max_tokens=24, **DRAWS[draw])

    expected, cold, warm = ask(plain), ask(drafted), ask(drafted)
    assert expected.token_ids == cold.token_ids == warm.token_ids
    for done in (cold, warm):
        used = done.usage
        assert used.prompt_tokens == used.computed + used.prefix_hit + used.blended_reused + used.blended_recomputed
        assert used.blended_recomputed == int(0.2 * (used.blended_reused + used.blended_recomputed))
        assert used.cached_tokens == used.prefix_hit + used.blended_reused
        assert used.accepted_tokens == sum(used.accepted_places)
        assert used.drafted_tokens >= used.accepted_tokens
        assert used.recipe == recipe.name
    assert plain.generate("x", max_tokens=1).usage.drafted_tokens == 0


def test_some_of_these_drafts_were_accepted(drafted: LLM) -> None:
    done = drafted.blend(PARTS, recipe=Recipe(0.2, min_gain=0.0), max_tokens=30, temperature=0.0)
    assert done.usage.accepted_tokens > 5


def test_all_of_them_at_once(plain: LLM, drafted: LLM) -> None:
    """Rows on adapters, base rows, documents and plain prompts in the same steps, all with drafts."""
    fields: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0}
    recipe, prompts = Recipe(0.2, min_gain=0.0), ["The tower is", "Everest is", ONE + ONE]
    for name in (None, "pirate"):
        expected = [plain.generate(one, documents=[ONE, TWO], recipe=recipe, lora=name, **fields) for one in prompts]
        done = drafted.generate(prompts, documents=[ONE, TWO], recipe=recipe, lora=name, **fields)
        assert [one.token_ids for one in done] == [one.token_ids for one in expected]
