"""The one law of the store: what is served is what was put, whatever else happens; and nobody falls over."""

from __future__ import annotations

import ast
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import kvilt
from kvilt.store.files import FileSystem
from kvilt.store.tier import Budget

SMALL = Budget(6000)


class Fast(FileSystem):
    """No waiting for a disk: nothing here is about crashes of the machine."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


def damage(folder: Path, dice: random.Random) -> None:
    """Something happens to one of the files."""
    paths = sorted((folder / "records").rglob("*.kv"))
    if not paths:
        return
    path, data = dice.choice(paths), bytearray()
    match dice.randrange(4):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])
        case 2:
            data = bytearray(path.read_bytes())
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            path.write_bytes(bytes(data))
        case _:
            path.write_bytes(dice.choice(paths).read_bytes())  # a good record under another's name


STEPS = st.lists(st.tuples(st.sampled_from(["put", "open", "damage", "restart"]), st.integers(0, 5)), max_size=25)


@settings(max_examples=examples(25))
@given(steps=STEPS, seed=st.integers(0, 999), codec=st.sampled_from(["raw", "zstd"]))
def test_whatever_is_served_is_what_was_put(
    kit: Any, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], seed: int, codec: str
) -> None:
    folder, dice, put = tmp_path_factory.mktemp("law"), random.Random(seed), set[int]()

    def new() -> Any:
        disk = kit.disk(folder, SMALL, files=Fast())
        return kit.store(disk, memory=Budget(1500) if seed % 2 else None, codec=codec)

    store = new()
    for step, number in steps:
        match step:
            case "put":
                kit.put(store, [number, 1, 2], number)
                put.add(number)
            case "open":
                found = kit.open(store, [number, 1, 2])
                if found.wait():
                    assert number in put
                    assert kit.same(found.layers(), kit.layers(3, seed=number))
                else:
                    assert kit.count(store, "misses_total", reason=found.reason) > 0
                store.flush()
            case "damage":
                damage(folder, dice)
            case _:
                store.close()
                store = new()
        usage = store.usage()
        assert usage["disk"].nbytes <= SMALL.total_bytes
        assert usage["memory"].nbytes <= 1500
    store.close()


def test_many_threads_at_once(kit: Any, tmp_path: Path) -> None:
    errors: list[BaseException] = []
    served = [0]
    with kit.store(kit.disk(tmp_path, Budget(30_000), files=Fast()), memory=Budget(8000)) as store:

        def work(seed: int) -> None:
            dice = random.Random(seed)
            try:
                for _ in range(60):
                    number = dice.randrange(40)
                    if dice.random() < 0.4:
                        store.put_chunk(kit.identity, [number, 1, 2], kit.layers(3, seed=number), dice.random() < 0.2)
                        continue
                    found = kit.open(store, [number, 1, 2])
                    if dice.random() < 0.2:
                        found.cancel()
                    if found.wait():
                        served[0] += 1
                        assert kit.same(found.layers(), kit.layers(3, seed=number))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.flush()
        usage = store.usage()
    assert errors == []
    assert served[0] > 0
    assert usage["disk"].nbytes <= 30_000
    assert usage["memory"].nbytes <= 8000


def test_nothing_that_is_read_can_run_code() -> None:
    """Records come from disks and servers that others may write to: no part of the store, or of kvilt, unpickles."""
    runs = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    package = Path(kvilt.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    assert not runs & {one.name.partition(".")[0] for one in names}, path
                case ast.ImportFrom(module=str(module), level=0):
                    assert module.partition(".")[0] not in runs, path
                case ast.Attribute(value=ast.Name(id="torch" | "np" | "numpy"), attr="load"):
                    raise AssertionError(f"{path}:{node.lineno}")
