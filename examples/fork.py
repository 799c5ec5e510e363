"""Pay for a long prompt once, then ask as often as you like: each question runs on a fork of the same KV."""

import kvilt

NOTES = (
    "Meeting notes. Ada will write the parser by Friday. Grace reviews it on Monday. "
    "Alan cannot come next week because he is in Manchester. The release is planned for the 21st. "
)
QUESTIONS = ["Who writes the parser?", "When is the release?", "Where will Alan be?"]

with kvilt.load() as llm, llm.prefill(NOTES) as kv:
    print(f"{kv.num_entries} tokens computed once")
    for question in QUESTIONS:
        done = llm.generate(f"\nQ: {question}\nA:", kv=kv, max_tokens=24, stop="\n")
        fresh = done.usage.prompt_tokens - done.usage.cached_tokens
        print(f"{question}{done.text}  [{done.usage.cached_tokens} tokens reused, {fresh} computed]")
