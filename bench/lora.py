"""What adapters cost: decode steps of many rows with and without them, loading one, and its memory.

    python bench/lora.py [--rows 16] [--adapters 8] [--rank 16] [--context 64] [--json]

Adapters are random, on the shapes of the model; what they say does not matter, what they cost does. All cases run in
turn, several times over, and medians are compared, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import kvilt
from kvilt.batch import Adapter, Base, Batch, Ids, Row
from kvilt.executor.protocol import Executor
from kvilt.models.adapters import map_shapes

NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def write_adapter(
    folder: Path, executor: Executor, rank: int, parts: Sequence[str], seed: int, dora: bool = False
) -> Path:
    """A random adapter in PEFT's format, in float32 as peft writes it."""
    random, header, data, at = np.random.default_rng(seed), {}, [], 0
    for name, (out, into) in map_shapes(executor._decoder).items():
        layer, _, part = name.partition(".")
        if part not in parts:
            continue
        shapes: dict[str, tuple[int, ...]] = {"lora_A.weight": (rank, into), "lora_B.weight": (out, rank)}
        if dora:
            shapes["lora_magnitude_vector"] = (out,)
        for half, shape in shapes.items():
            numbers = (random.standard_normal(shape) * 0.01 + (len(shape) == 1)).astype(np.float32)
            key = f"base_model.model.model.layers.{layer}.{NAMES[part]}.{half}"
            header[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + numbers.nbytes]}
            at += numbers.nbytes
            data.append(numbers.tobytes())
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "use_dora": dora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
    return folder


class Rows:
    """Rows that decode together, one token a step, each from a context of its own."""

    def __init__(self, executor: Executor, adapters: Sequence[Adapter], context: int) -> None:
        self.executor, self.adapters = executor, adapters
        self.caches = [executor.create_kv_cache() for _ in adapters]
        self.tokens = [1] * len(adapters)
        rows = []
        for i, (kv, adapter) in enumerate(zip(self.caches, adapters, strict=True)):
            kv.reserve(context)
            rows.append(Row(Ids([(7 * i + j) % 1000 for j in range(context)]), range(context), kv, adapter=adapter))
        executor.run(Batch.of(rows))
        for kv, row in zip(self.caches, rows, strict=True):
            kv.commit([list(row.source.ids)])  # type: ignore[union-attr]

    def steps(self, count: int) -> float:
        """Seconds of a step."""
        started = time.perf_counter()
        for _ in range(count):
            rows = []
            for kv, token, adapter in zip(self.caches, self.tokens, self.adapters, strict=True):
                kv.reserve(1)
                rows.append(Row(Ids([token]), [kv.num_entries], kv, adapter=adapter))
            logits = self.executor.run(Batch.of(rows)).values
            for kv, token in zip(self.caches, self.tokens, strict=True):
                kv.commit([[token]])
            self.tokens = logits.argmax(-1).tolist()
        taken = (time.perf_counter() - started) / count
        for kv in self.caches:  # so that every turn is at the same context
            kv.truncate(kv.num_entries - count)
        return taken

    def close(self) -> None:
        for kv in self.caches:
            kv.close()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--model", default="smollm2")
    asked.add_argument("--threads", type=int)
    for name, value in (("rows", 16), ("adapters", 8), ("rank", 16), ("context", 64), ("steps", 8), ("turns", 9)):
        asked.add_argument(f"--{name}", type=int, default=value)
    asked.add_argument("--json", action="store_true")
    options = asked.parse_args()
    torch.manual_seed(0)
    with (
        kvilt.load(options.model, kv_memory="512M", threads=options.threads) as llm,
        tempfile.TemporaryDirectory() as root,
    ):
        found = measure(llm.executor, Path(root), options)
    print(json.dumps(found, indent=2) if options.json else table(found, options))


def measure(executor: Executor, root: Path, options: argparse.Namespace) -> dict[str, float]:
    """Medians of all cases."""
    found: dict[str, float] = {}
    kinds = {"q and v": ("q", "v"), "all linear": tuple(NAMES)}
    kinds |= {f"DoRA of {kind}": parts for kind, parts in kinds.items()}
    cases: dict[str, Rows] = {"base": Rows(executor, [Base()] * options.rows, options.context)}
    for kind, parts in kinds.items():
        folders = [
            write_adapter(root / f"{kind}-{i}", executor, options.rank, parts, i, kind.startswith("DoRA"))
            for i in range(options.adapters)
        ]
        ids, loads = [], []
        for folder in folders:
            started = time.perf_counter()
            ids.append(executor.load_lora(folder))
            loads.append(time.perf_counter() - started)
        found[f"{kind}: load ms"] = statistics.median(loads) * 1e3
        found[f"{kind}: MiB"] = executor.adapters.find(ids[0]).nbytes / 2**20
        chosen = [executor.adapters.choose(ids[row % len(ids)]) for row in range(options.rows)]
        cases[kind] = Rows(executor, chosen, options.context)
        half = [adapter if row % 2 else Base() for row, adapter in enumerate(chosen)]
        cases[f"{kind}, every other row"] = Rows(executor, half, options.context)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(options.turns + 1):
        for name, rows in cases.items():
            taken = rows.steps(options.steps)
            if turn:  # the first one records
                times[name].append(taken)
    for name, each in times.items():
        found[f"{name}: tok/s"] = options.rows / statistics.median(each)
        ratios = [own / base for own, base in zip(each, times["base"], strict=True)]
        found[f"{name}: time against base"] = statistics.median(ratios)
    for rows in cases.values():
        rows.close()
    return found


def table(found: dict[str, float], options: argparse.Namespace) -> str:
    """The numbers as they go into docs/lora.md."""
    head = f"{options.rows} rows, {options.adapters} adapters of rank {options.rank}, context {options.context}"
    return "\n".join([head, *(f"  {name:42} {value:10.3f}" for name, value in found.items())])


if __name__ == "__main__":
    main()
