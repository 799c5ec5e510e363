"""The table of families in docs/models.md, from test results.

`python -m tests.models.table` runs the tests that show something about a family, keeps what they showed in
`results.json`, and writes the table. With arguments it runs only those tests, and replaces the columns that they show;
`--kept` runs none.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvilt.models.families.registry import FAMILIES
from kvilt.text.parse_formats import calls_in

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
KEPT = Path(__file__).with_name("results.json")
TESTS = (
    "tests/models/test_families.py",
    "tests/models/test_gguf_dialects.py",
    "tests/models/test_gguf_experts.py",
    "tests/models/test_gguf_gemma.py",
    "tests/models/test_gguf_hybrids.py",
    "tests/models/test_latent.py",
    "tests/text/test_parse.py",
    "tests/e2e/test_real_weights.py",
)
BEGIN, END = "<!-- families: python -m tests.models.table -->", "<!-- end of families -->"
HEADINGS = ("family", "architecture", "parity", "safetensors", "GGUF", "native kernels", "tools", "real weights")

Results = Mapping[str, Mapping[str, Mapping[str, bool]]]  # column, architecture, detail: passed


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """One for each architecture of a config.json."""

    def details(column: str, row: str) -> list[str]:
        found = results.get(column, {}).get(row, {})
        return [detail for detail, passed in found.items() if passed and all(found.values())]

    for family in FAMILIES:
        for name in dict.fromkeys(n for d in family.dialects if d.kind == "hf" for n in d.architectures):
            runs = [detail.split(" ") for detail in details("parity", name)]
            configurations = len({entry for entry, _ in runs})
            formats = sorted({detail.split(" ")[1] for detail in details("gguf", name)})
            chosen = [calls_in(None, each)[0] for each in (name, family.name)]
            tools = [one.name for one in chosen if one.families][:1]
            yield (
                family.name,
                f"`{name}`",
                f"{configurations} configurations" if configurations > 1 else "1 configuration" if runs else "",
                "yes" if runs else "",
                ", ".join(f"`{one}`" for one in formats),
                "yes" if any(backend == "native" for _, backend in runs) else "",
                ", ".join(one for one in tools if details("tools", one)),
                ", ".join(details("real weights", name)),
            )


def table(results: Results) -> str:
    """In Markdown."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows(results)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def with_table(page: str, results: Results) -> str:
    """The page with the table of today between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}"


def run(tests: Sequence[str]) -> Results:
    """What these tests show."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", "-q", *tests, f"--model-results={found}"]
        if subprocess.run(command, cwd=ROOT, check=False).returncode not in (0, 1):
            sys.exit("the tests did not run")  # some that failed are in the results, and only what passed is shown
        return json.loads(found.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def main() -> None:
    chosen = sys.argv[1:]
    if chosen != ["--kept"]:
        kept = json.loads(KEPT.read_text(encoding="utf-8")) if chosen else {}
        KEPT.write_text(json.dumps({**kept, **run(chosen or TESTS)}, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), json.loads(KEPT.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
