"""Passages in any order: their KV is computed once, kept on disk, and reused wherever they stand in a prompt."""

from pathlib import Path

import kvilt
from kvilt.store.disk import Disk
from kvilt.store.store import Store
from kvilt.store.tier import Budget

PASSAGES = [
    "The Elbe rises in the Giant Mountains, flows through Dresden and Hamburg, and ends in the North Sea.\n" * 3,
    "The Rhine rises in the Alps, flows through Basel and Cologne, and ends in the North Sea.\n" * 3,
    "The Danube rises in the Black Forest, flows through Vienna and Budapest, and ends in the Black Sea.\n" * 3,
]
FOLDER = Path("~/.cache/kvilt-documents").expanduser()

with Store(Budget(1 << 30), [Disk(FOLDER, Budget(4 << 30))]) as store, kvilt.load(store=store) as llm:
    for passage in llm.warm(PASSAGES):  # a second run of this example finds them on disk
        print(f"{passage.tokens} tokens {'found' if passage.found else 'computed'}: {passage.id[:12]}")
    for order in ([0, 1, 2], [2, 0, 1]):
        question = [{"role": "user", "content": "Which river flows through Vienna?"}]
        done = llm.chat(question, documents=[PASSAGES[i] for i in order], max_tokens=32)
        used = done.usage
        print(f"{done.text} ({used.blended_reused} of {used.prompt_tokens} tokens reused)")
