"""Reads text files as documents, exactly as they are. A file that is no text is refused by name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError


@dataclass(frozen=True, slots=True)
class TextFile:
    """A document and its name."""

    name: str
    text: str


def read_text(path: str) -> str:
    """The text of a file, or of a pipe for `-`. Nothing is stripped: the identity of a document is its exact tokens."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start}); convert it first") from None
    if "\x00" in text:
        raise InputError(f"{path}: holds a NUL byte, so it is no text")
    if not text.strip():
        raise InputError(f"{path}: is empty")
    return text


def read_documents(path: str, separator: str | None) -> list[TextFile]:
    """The one document of a file, or the documents between separator lines; blank ones are skipped."""
    text = read_text(path)
    if separator is None:
        return [TextFile(path, text)]
    parts, part = [], ""
    for line in text.splitlines(keepends=True):
        if line.rstrip("\r\n") == separator:
            parts.append(part)
            part = ""
        else:
            part += line
    found = [one for one in (*parts, part) if one.strip()]
    if not found:
        raise InputError(f"{path}: holds nothing but separators")
    return [TextFile(f"{path}#{number}", one) for number, one in enumerate(found, start=1)]
