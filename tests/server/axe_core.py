"""axe-core, the accessibility checker, from npm: fetched once into the cache folder, and run inside a page."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

from absent import skip_without

VERSION = "4.10.3"


@cache
def axe_source() -> str:
    """The script; the test is skipped where npm or its registry cannot be reached."""
    folder = Path("~/.cache/kvilt-tests").expanduser() / f"axe-core-{VERSION}"
    script = folder / "axe.min.js"
    if not script.exists():
        _fetch(folder, script)
    return script.read_text(encoding="utf-8")


def _fetch(folder: Path, script: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        skip_without("npm")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([npm, "pack", f"axe-core@{VERSION}"], cwd=folder, capture_output=True, timeout=180)
    if done.returncode != 0:
        skip_without("npm packages")
    with tarfile.open(folder / f"axe-core-{VERSION}.tgz") as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        partial = folder / "axe.part"
        partial.write_bytes(member.read())
    partial.replace(script)


def violations(page: Any) -> dict[str, list[str]]:
    """What axe finds in the page as it is: the elements of each rule that is broken, with its impact."""
    page.evaluate(axe_source())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return {
        f"{one['impact']}: {one['id']}": [node["html"][:120] for node in one["nodes"]] for one in found["violations"]
    }
