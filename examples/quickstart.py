"""Load the default model and stream an answer."""

import kvilt

with kvilt.load() as llm:
    for piece in llm.stream_chat([{"role": "user", "content": "Why is the sky blue? One sentence."}], max_tokens=60):
        print(piece, end="", flush=True)
    print()
