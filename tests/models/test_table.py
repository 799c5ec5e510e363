"""The table of families in docs/models.md is that of the kept results, and these are of the families there are."""

from __future__ import annotations

import json

import table
from families import FAMILIES as FAMILY_ENTRIES
from families import SLOW
from test_gguf_dialects import ARCHITECTURES as DENSE
from test_gguf_experts import ARCHITECTURES as WITH_EXPERTS
from test_gguf_gemma import GGUF_MODELS as GEMMA
from test_gguf_hybrids import ARCHITECTURES as WITH_STATE
from test_latent import GGUF_MODELS as LATENT

from kvilt.models.families.registry import FAMILIES

KEPT = json.loads(table.KEPT.read_text(encoding="utf-8"))
ENTRIES = FAMILY_ENTRIES.keys() - SLOW
AGAIN = "run python -m tests.models.table"


def test_the_page_shows_the_kept_results() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.with_table(page, KEPT), AGAIN


def test_the_results_are_of_all_entries() -> None:
    parity = {detail for row in KEPT["parity"].values() for detail in row}
    assert {f"{entry} native" for entry in ENTRIES} <= parity, AGAIN
    assert {detail.split(" ")[0] for detail in parity} == set(ENTRIES), AGAIN
    files = {*DENSE, *WITH_EXPERTS, *WITH_STATE, *LATENT, *GEMMA}
    assert {detail.split(" ")[0] for row in KEPT["gguf"].values() for detail in row} == files, AGAIN


def test_every_architecture_of_a_config_was_compared() -> None:
    known = {name for family in FAMILIES for d in family.dialects if d.kind == "hf" for name in d.architectures}
    assert known == set(KEPT["parity"]), AGAIN


def test_what_failed_is_not_shown() -> None:
    """One failure empties the cells of its architecture; the test that failed is red by itself."""
    name = "LlamaForCausalLM"
    before = next(row for row in table.rows(KEPT) if row[1] == f"`{name}`")
    failed = {**KEPT, "parity": {**KEPT["parity"], name: {**KEPT["parity"][name], "llama native": False}}}
    after = next(row for row in table.rows(failed) if row[1] == f"`{name}`")
    assert (before[3], before[5]) == ("yes", "yes")
    assert (after[2], after[3], after[5]) == ("", "", "")
