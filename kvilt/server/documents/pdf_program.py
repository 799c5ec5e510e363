"""The program of a process that reads one PDF: its bytes on stdin, a JSON object on stdout. Imports nothing of kvilt.

A PDF can ask for any amount of time and memory: the process limits itself, and its parent may kill it.
"""

from __future__ import annotations

import json
import resource
import sys

MAX_PAGES = 2000
MAX_CHARACTERS = 4 << 20


def main() -> None:
    """Read, and say what was read."""
    memory_bytes, cpu_s, *folders = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s)))
    sys.path.extend(folders)
    data = sys.stdin.buffer.read()
    try:
        said = _text(data)
    except MemoryError:
        said = {"error": "needs too much memory"}
    except Exception as error:  # a library that reads foreign bytes raises anything
        said = {"error": f"cannot be read ({type(error).__name__})"}
    sys.stdout.write(json.dumps(said))


def _text(data: bytes) -> dict[str, object]:
    import io
    import logging

    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns of every oddity of a file
    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        return {"error": "is encrypted"}
    if len(reader.pages) > MAX_PAGES:
        return {"error": f"has more than {MAX_PAGES} pages"}
    pages, characters = [], 0
    for page in reader.pages:
        pages.append(page.extract_text().strip())
        characters += len(pages[-1])
        if characters > MAX_CHARACTERS:
            return {"error": f"has more than {MAX_CHARACTERS} characters"}
    # A lone surrogate is no text: JSON of strict readers refuses it.
    text = "\n\n".join(page for page in pages if page).encode("utf-8", "replace").decode()
    return {"text": text, "pages": len(pages)}


if __name__ == "__main__":
    main()
