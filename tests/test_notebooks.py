"""The notebooks of the docs: as committed they are complete and small, and run again they say the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EQUAL = "equal"  # the tag of cells whose output is the same on every machine
_MOST_BYTES = 64 << 10


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def test_there_are_four() -> None:
    names = {path.stem for path in NOTEBOOKS}
    assert names == {"kv_as_a_value", "rag_with_documents", "agent_with_forks", "research"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run from the top, once"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [one for one in outputs if one.output_type == "error" or one.get("name") == "stderr"]
    assert any("text/html" in one.get("data", {}) for one in outputs), "it draws something"
    assert all(printed(cell) for cell in cells if EQUAL in cell.metadata.get("tags", ()))
    assert path.stat().st_size < _MOST_BYTES
    text = path.read_text("utf-8")
    assert "/home/" not in text and "/root" not in text and "/tmp" not in text
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_says_the_same(path: Path, smollm2_path: Path, tmp_path: Path) -> None:
    """Cells tagged `equal` print what they printed when the notebook was committed: counts and comparisons."""
    assert smollm2_path.is_file()
    committed, again = read(path), read(path)
    for cell in code_cells(again):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(again, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ, "KVILT_THREADS": "1"})
    compared = 0
    for before, after in zip(code_cells(committed), code_cells(again), strict=True):
        assert not [one for one in after.outputs if one.output_type == "error"]
        if EQUAL in before.metadata.get("tags", ()):
            assert printed(after) == printed(before), before.source
            compared += 1
    assert compared >= 2
