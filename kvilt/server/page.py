"""The static files of the page at `/`: those of one folder, and nothing outside it."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

WEB = Path(__file__).parent / "web"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
}


class Page:
    """All files of a folder, by the paths they have in a browser. Read when the server starts, so no path is resolved
    later, whatever a request asks for."""

    def __init__(self, folder: Path = WEB) -> None:
        files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix in _KINDS]
        self._files = {f"/{file.relative_to(folder).as_posix()}": file for file in files}
        if "/index.html" in self._files:
            self._files["/"] = self._files["/index.html"]

    @property
    def paths(self) -> list[str]:
        """What can be asked for."""
        return list(self._files)

    def __contains__(self, path: str) -> bool:
        return path in self._files

    def response(self, path: str) -> Response:
        """One file."""
        file = self._files[path]
        return Response(file.read_bytes(), 200, {"cache-control": "no-cache"}, _KINDS[file.suffix])
