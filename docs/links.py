"""A hook of MkDocs: links to files outside docs/, and the list of notebooks.

In a clone `../examples/fork.py` works as it is. The site has pages only, so such a link becomes the path as text. A
link to a file that is not there is an error.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./(?:\.\./)?[^)#]+)(#[^)]*)?\)")
NOTEBOOKS = "<!-- notebooks: docs/links.py lists them here -->"
log = logging.getLogger("mkdocs.plugins.links")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with paths in place of links that leave the site, and with the notebooks that there are."""
    markdown = markdown.replace(NOTEBOOKS, notebooks())
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def inside(match: re.Match[str]) -> str:
        label, target = match[1], (folder / match[2]).resolve()
        if not target.exists():
            log.warning("%s links to %s, which is not there", page.file.src_uri, match[2])
        if (ROOT / "docs") in target.parents:
            return match[0]
        path = f"`{target.relative_to(ROOT)}`"
        return path if label.strip("`") == path.strip("`") else f"{label} ({path})"

    return OUTSIDE.sub(inside, markdown)


def notebooks() -> str:
    """A list of the notebooks, each with its first heading."""
    lines = []
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        heading = re.search(r"^# (.*)$", text, re.MULTILINE)
        lines.append(f"- [{heading[1] if heading else path.stem}](notebooks/{path.name})")
    return "\n".join(lines)
