"""llama.cpp's server on the prompts of agent traces, run by the interpreter that has xllamacpp.

JSON on stdin: "model", "tokens" of an answer, "threads", "slots", and "prompts" as lists of token ids, in order. One
line of JSON on stdout: for each prompt the tokens that were computed, and the answer as token ids.
"""

from __future__ import annotations

import json
import sys

from llama_turns import complete, server


def main() -> None:
    """Answer all prompts, one after the other, with `cache_prompt`."""
    asked = json.loads(sys.stdin.read())
    one, done = server(asked), []
    for prompt in asked["prompts"]:
        said = complete(one, prompt, asked["tokens"])
        done.append({"computed": said["timings"]["prompt_n"], "answer": said["tokens"]})
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
