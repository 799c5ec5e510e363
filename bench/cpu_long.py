"""Long contexts on the CPU beside llama.cpp with flash attention: prefill, and decode behind it, in turn.

    python bench/cpu_long.py [--model qwen-q4_k_m] [--contexts 8192,16384,32768] [--rounds 2] [--threads 2]
                             [--python llama.cpp=PATH]

Every sample is a process of its own that loads the model, warms up, computes one prompt and then NEW tokens behind it.
The median over the rounds counts, and only the ratios within one run mean something. KV is float16 in both. How to
install llama.cpp is in bench/cpu_peers.py.
"""

from __future__ import annotations

import argparse
import statistics

from peers.children import long
from peers.models import MODELS, candidates

NEW = 17


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen-q4_k_m", help=f"{', '.join(MODELS)} or a .gguf file")
    parser.add_argument("--contexts", default="8192,16384,32768", help="tokens of the prompts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="interpreter of an engine")
    options = parser.parse_args()
    pythons = dict(one.split("=", 1) for one in options.python)
    engines = candidates(options.model, ["kvilt", "llama.cpp"], pythons)
    print(f"{'tok/s':>8} {'prefill: kvilt':>16} {'llama.cpp':>10}  ratio {'decode: kvilt':>16} {'llama.cpp':>10} ratio")
    for context in map(int, options.contexts.split(",")):
        rates: dict[str, list[tuple[float, float]]] = {one.name: [] for one in engines}
        disturbed = 0
        for _ in range(options.rounds):
            for engine in engines:
                prompt = context - NEW  # the answer is in the context too
                found = long(engine, options.threads, prompt, NEW)
                decode_s = found["total_s"] - found["first_s"]
                rates[engine.name].append((prompt / found["first_s"], (NEW - 1) / decode_s))
                disturbed += found["disturbed"]
        cells = []
        for part in (0, 1):
            own, peer = (statistics.median(one[part] for one in rates[engine.name]) for engine in engines)
            cells.append(f"{own:16.1f} {peer:10.1f} {own / peer:6.2f}")
        note = f"  ({disturbed} samples beside other processes)" if disturbed else ""
        print(f"{context:8} {' '.join(cells)}{note}", flush=True)


if __name__ == "__main__":
    main()
