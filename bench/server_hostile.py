"""Attacks on a real `kvilt serve`, and what another key notices of each.

python bench/server_hostile.py [--model smollm2-q4_1] [--only NAME...] [--seconds 20] [--markdown] [--list]

For each attack a fresh server with two keys and an address space of 8 GiB. Printed are the longest that `/health` took,
asked every 10 ms by a third process, before and during the attack; the latency of the victim's small requests during
the attack against the median before it; requests of the victim that failed; the server's memory before, at its peak and
six seconds after; and how the attack was answered. Item numbers are those of `docs/security.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from hostile import owning, parsing
from hostile.measure import ATTACKER, VICTIM, Result, measured, table
from hostile.serving import serving
from peers.models import MODELS

ATTACKS = sorted((*parsing.ATTACKS, *owning.ATTACKS), key=lambda attack: int(attack.item))
_MEMORY_BYTES = 8 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-q4_1", help=f"a model's name or path, or one of {', '.join(MODELS)}"
    )
    parser.add_argument("--only", nargs="+", choices=[attack.name for attack in ATTACKS], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=20.0, help="that an attack may last")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv-memory", default="256M")
    parser.add_argument("--markdown", action="store_true", help="print the table for the documents")
    parser.add_argument("--list", action="store_true", help="print the attacks and end")
    asked = parser.parse_args()
    chosen = [attack for attack in ATTACKS if not asked.only or attack.name in asked.only]
    if asked.list:
        print("\n".join(f"{attack.name:<16} {attack.item:>2} {attack.what}" for attack in chosen))
        return
    results: list[Result] = []
    model = str(MODELS.get(asked.model, asked.model))
    for attack in chosen:
        options = ["--kv-memory", asked.kv_memory, *attack.options]
        with serving(
            model, [ATTACKER, VICTIM], threads=asked.threads, memory_bytes=_MEMORY_BYTES, options=options
        ) as one:
            results.append(asyncio.run(measured(one, attack, asked.seconds)))
        print(table(results[-1:], markdown=False).splitlines()[1], file=sys.stderr, flush=True)
    print(table(results, asked.markdown))


if __name__ == "__main__":
    main()
