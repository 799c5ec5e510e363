"""A hook of MkDocs for links to files outside docs/; a link to a file that is not there is an error.

In a clone `../examples/fork.py` works as it is. The site has pages only, so such a link becomes the path as text.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./(?:\.\./)?[^)#]+)(#[^)]*)?\)")
log = logging.getLogger("mkdocs.plugins.links")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with paths in place of links that leave the site."""
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
