"""Whether a lookup slows down as records become many: the curve from a thousand to a million, for every tier.

python bench/store_lookup.py [--records 1000 10000 100000 1000000] [--tiers memory disk redis] [--redis URL]

Records are real but hold one token of one small layer, so that what is measured is finding and verifying them, not
their bytes. The disk tier's files are written without fsync, to save an hour. The server at URL is filled
under a namespace of this script's own that is deleted at the end.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvilt.kv.identity import Identity
from kvilt.store.address import Address, LayerForm, chunk_address
from kvilt.store.codecs import Raw
from kvilt.store.disk import Disk
from kvilt.store.files import FileSystem
from kvilt.store.layer import LayerKV
from kvilt.store.record import RecordInfo, pack
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget

IDENTITY = Identity("model", "numerics")
FORM = (LayerForm(1, 4, 4, "float16"),)
LAYER = LayerKV(torch.zeros(1, 1, 4).half(), torch.zeros(1, 1, 4).half())
FRAME = Raw().encode(LAYER)
ROOMY = Budget(1 << 50)
LOOKUPS = 2000
PATIENT = StoreLimits(lookup_s=60, layer_s=60, close_s=600, queue_records=1 << 30)


class Hasty(FileSystem):
    """Files that nobody promised to keep."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


def address(number: int) -> Address:
    return chunk_address(IDENTITY, [number], FORM)


def record(number: int) -> tuple[bytes, list[bytes], RecordInfo]:
    one = address(number)
    return one.key, pack(one, Raw(), [FRAME], None), RecordInfo(one.tenant, "chunk")


def timed(work: Callable[[int], object], numbers: list[int]) -> list[float]:
    taken = []
    for number in numbers:
        began_s = time.perf_counter()
        work(number)
        taken.append(time.perf_counter() - began_s)
    return sorted(taken)


def found(store: Store, number: int) -> None:
    assert store.open(address(number)).wait(), "a record that was put was not found"


def absent(store: Store, number: int) -> None:
    assert not store.open(address(number + (1 << 55))).hit(), "a record that was never put was found"


def row(name: str, count: int, store: Store, put: Callable[[int], object], next_number: int) -> None:
    dice = random.Random(count)
    hits = timed(lambda number: found(store, number), [dice.randrange(count) for _ in range(LOOKUPS)])
    misses = timed(lambda number: absent(store, number), [dice.randrange(1 << 40) for _ in range(LOOKUPS)])
    puts = timed(put, list(range(next_number, next_number + 200)))
    cells = [f"{one[len(one) // 2] * 1e6:.0f} | {one[len(one) * 99 // 100] * 1e6:.0f}" for one in (hits, misses, puts)]
    print(f"| {name} | {count:,} | {' | '.join(cells)} |", flush=True)


def memory(counts: list[int]) -> None:
    with Store(ROOMY, limits=PATIENT) as store:
        done = 0
        for count in counts:
            for number in range(done, count):
                store.put(address(number), [LAYER])
            done = count
            row("memory", count, store, lambda number: store.put(address(number), [LAYER]), 1 << 50)


def disk(counts: list[int], folder: Path) -> None:
    tier = Disk(folder, ROOMY, files=Hasty())
    with Store(None, [tier], limits=PATIENT) as store:
        done = 0
        for count in counts:
            for number in range(done, count):
                tier.put(*record(number))
            done = count
            row("disk", count, store, lambda number: tier.put(*record(number)), 1 << 50)
    for path in folder.glob("index*"):
        path.unlink()
    began_s = time.perf_counter()
    tier = Disk(folder, ROOMY)
    opened_s = time.perf_counter() - began_s
    tier.settle()
    print(f"the lost index of {tier.usage().records:,} records was rebuilt in {time.perf_counter() - began_s:.1f} s,")
    print(f"and the first lookup was possible after {opened_s * 1e3:.0f} ms")
    tier.close()


def shared(counts: list[int], url: str) -> None:
    import redis

    from kvilt.store.redis import Redis

    tier = Redis(url, ROOMY, namespace="kvilt-bench", read_timeout_s=60, write_timeout_s=60)
    try:
        with Store(None, [tier], limits=PATIENT) as store:
            done = 0
            for count in counts:
                for number in range(done, count):
                    tier.put(*record(number))
                done = count
                row("redis", count, store, lambda number: tier.put(*record(number)), 1 << 50)
    finally:
        with redis.Redis.from_url(url) as client:
            names = []
            for name in client.scan_iter("{kvilt-bench}:*", count=10000):
                names.append(name)
                if len(names) == 10000:
                    client.unlink(*names)
                    names = []
            if names:
                client.unlink(*names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--tiers", nargs="+", choices=["memory", "disk", "redis"], default=["memory", "disk"])
    parser.add_argument("--redis", default="redis://127.0.0.1:6379/0")
    parser.add_argument("--folder", type=Path, help="where the disk tier is; a temporary folder otherwise")
    arguments = parser.parse_args()
    counts = sorted(arguments.records)
    print("| tier | records | hit µs | p99 | miss µs | p99 | put µs | p99 |")
    print("|---|---|---|---|---|---|---|---|")
    if "memory" in arguments.tiers:
        memory(counts)
    if "disk" in arguments.tiers:
        folder = Path(tempfile.mkdtemp(dir=arguments.folder))
        try:
            disk(counts, folder)
        finally:
            shutil.rmtree(folder)
    if "redis" in arguments.tiers:
        shared(counts, arguments.redis)


if __name__ == "__main__":
    main()
