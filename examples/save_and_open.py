"""KV survives the process: save it, open it again, and go on without computing it again."""

import tempfile
from pathlib import Path

import kvilt

with kvilt.load() as llm, tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "story.kv"
    with llm.prefill("Once upon a time, in a small house by the sea, there lived") as kv:
        kv.save(path)
        print(f"{kv.num_entries} tokens saved in {path.stat().st_size / 1e6:.1f} MB")
        expected = llm.generate(" an old", kv=kv, max_tokens=12).text

    with llm.open(path) as again:
        assert llm.generate(" an old", kv=again, max_tokens=12).text == expected
        print(f"...there lived an old{expected}")
