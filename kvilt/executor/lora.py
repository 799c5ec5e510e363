"""The adapters of one executor: loaded, named, held by requests and steps, and in memory as far as a budget goes.

An adapter that is not in memory lies in its folder and comes back when a row needs it. Refuses to know requests.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from ..batch import Adapted, Adapter, Base, Embeds, Hidden, Row, Source, token_count
from ..errors import AdapterUnknown, InputError, ParamError, WeightError
from ..kv.row import BASE
from ..models.adapters import FittedAdapter, fit, map_shapes
from ..models.decoder import Decoder
from ..models.step_adapters import EMBEDDING, AdapterTables, MagnitudeGain, RowEmbedding, StepAdapters, part_of
from ..ops.lowrank import AdapterSlots
from ..weights.assets import AssetsLike, ModelAssets
from .adapter_info import AdapterCounts, AdapterInfo

DEFAULT_BUDGET_BYTES = 1 << 30
MAX_NAME = 256
MAX_ADAPTERS = 4096


@dataclass(slots=True, eq=False)
class _Loaded:
    id: int
    name: str
    assets: ModelAssets
    inside: Path | None
    facts: FittedAdapter | None  # None while it is not in memory
    content: str
    rank: int
    parts: frozenset[str]
    nbytes: int
    invocation: tuple[int, ...]
    loaded_s: float
    slot: int | None = None
    users: int = 0
    running: int = 0  # steps
    leaving: bool = False  # unloaded; here until its last user is gone


class AdapterGroup(Protocol):
    """Other ranks that share the model."""

    def put_adapter(self, slot: int, fitted: FittedAdapter) -> None:
        """An adapter got a slot."""
        ...

    def drop_adapter(self, slot: int) -> None:
        """A slot was emptied."""
        ...


class AdapterLease:
    """Keeps an adapter loaded until it is released or forgotten; releasing twice is fine."""

    __slots__ = ("_release",)

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        self.release()


class Adapters:
    """Adapters by id. May be asked from any thread; a step sees each of them whole or not at all."""

    def __init__(
        self,
        decoder: Decoder,
        budget_bytes: int | None = None,
        alone: AbstractContextManager[object] | None = None,
        group: AdapterGroup | None = None,
    ) -> None:
        """`alone` is held while the model's weights are looked at: no step runs meanwhile.

        `group` gets what other ranks of the model need of each adapter.
        """
        self._decoder = decoder
        self._alone, self._group = alone or nullcontext(), group
        self.budget_bytes = DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes
        self._bank: AdapterTables | None = None  # made with the first adapter: most executors have none
        self._loaded: OrderedDict[int, _Loaded] = OrderedDict()  # the least recently used first
        self._next_id = 1
        self._lock = threading.RLock()
        self.loads = self.evictions = 0

    # Coming and going.

    def load(self, assets: AssetsLike, name: str | None = None, inside: Path | None = None) -> int:
        """Load an adapter under a name, its own if not given. With `inside`, all of it must lie there."""
        found = ModelAssets.of(assets, self.budget_bytes)
        with self._lock:
            name = _checked_name(name if name is not None else found.name or f"adapter-{self._next_id}")
            self._check_free(name)
        fitted = self._read(found, inside)
        with self._lock:
            self._check_free(name)  # another thread may have been quicker
            one = _Loaded(
                id=self._next_id, name=name, assets=found, inside=inside, facts=None, content=fitted.content,
                rank=fitted.rank, parts=_parts(fitted), nbytes=fitted.nbytes, invocation=fitted.invocation,
                loaded_s=time.time(),
            )  # fmt: skip
            self._place(one, fitted)
            self._next_id += 1
            self._loaded[one.id] = one
            return one.id

    def unload(self, adapter_id: int) -> None:
        """New requests may not use it; it leaves when its last user is gone."""
        with self._lock:
            one = self._find(adapter_id)
            one.leaving = True
            self._leave_if_done(one)

    def _check_free(self, name: str) -> None:
        if any(one.name == name and not one.leaving for one in self._loaded.values()):
            raise InputError(f"an adapter {name!r} is loaded already; unload it first, or choose another name")
        if len(self._loaded) >= MAX_ADAPTERS:
            raise InputError(f"{len(self._loaded)} adapters are loaded, and no more may be; unload some first")

    def _leave_if_done(self, one: _Loaded) -> None:
        if one.leaving and not one.users and self._loaded.get(one.id) is one:
            self._evict(one)
            del self._loaded[one.id]

    # Asking.

    def find(self, which: int | str) -> AdapterInfo:
        """An adapter by id or by name."""
        with self._lock:
            if isinstance(which, str):
                named = [one for one in self._loaded.values() if one.name == which and not one.leaving]
                if not named:
                    raise AdapterUnknown(which)
                return self._info(named[0])
            return self._info(self._find(which))

    def all(self) -> list[AdapterInfo]:
        """Every adapter that may be used, in the order they were loaded."""
        with self._lock:
            return [self._info(one) for _, one in sorted(self._loaded.items()) if not one.leaving]

    def choose(self, which: int | str, scale: float = 1.0, ids: Sequence[int] | None = None) -> Adapted:
        """What a row must say to run on an adapter; `ids` are its tokens, which may have to switch it on."""
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
            raise ParamError("lora_scale", f"must be a finite number, not {scale!r}")
        found = self.find(which)
        begins = 0
        if found.invocation and ids is not None:
            begins = _last(list(ids), list(found.invocation))
            if begins < 0:
                raise InputError(
                    f"the adapter {found.name!r} is switched on by the tokens {list(found.invocation)[:16]}, and the "
                    "prompt does not hold them; put them in, or ask the base model"
                )
        return Adapted(found.id, float(scale), begins)

    def by_identity(self, identity: str, begins: int) -> Adapter:
        """What makes KV of that identity, if it is loaded."""
        if identity == BASE:
            return Base()
        content, _, scale = identity.rpartition("@")
        with self._lock:
            for one in self._loaded.values():
                if one.content == content and not one.leaving and _is_number(scale):
                    return Adapted(one.id, float(scale), begins)
        raise InputError("the adapter that this KV was made with is not loaded; load it again")

    def identity(self, adapter: Adapter) -> str:
        """The maker of an adapter's KV: its content and scale."""
        if not isinstance(adapter, Adapted):
            return BASE
        with self._lock:
            return f"{self._known(adapter.adapter_id).content}@{adapter.scale!r}"

    def snapshot(self) -> AdapterCounts:
        """How many there are, counted at one moment."""
        with self._lock:
            every = list(self._loaded.values())
            return AdapterCounts(
                loaded=sum(not one.leaving for one in every),
                unloading=sum(one.leaving for one in every),
                active=sum(one.users > 0 for one in every),
                resident=sum(one.slot is not None for one in every),
                resident_bytes=self.resident_bytes,
                loads=self.loads,
                evictions=self.evictions,
            )

    def __len__(self) -> int:
        return sum(not one.leaving for one in list(self._loaded.values()))

    @property
    def resident_bytes(self) -> int:
        """Of those in memory."""
        return sum(one.nbytes for one in list(self._loaded.values()) if one.slot is not None)

    # Using.

    def hold(self, adapter: Adapter) -> AdapterLease | None:
        """Keep the adapter of a request loaded until it ends, and bring it into memory now, in the caller's thread."""
        if not isinstance(adapter, Adapted):
            return None
        with self._lock:
            one = self._find(adapter.adapter_id)
            one.users += 1
        hold = AdapterLease(lambda: self._released(one))
        try:
            self._bring([one])
        except BaseException:
            hold.release()
            raise
        return hold

    @contextmanager
    def step(self, rows: Sequence[Row], starts: Sequence[int]) -> Iterator[StepAdapters | None]:
        """For the length of a step: the adapters of its rows are in memory and stay there; None if no row has one."""
        if all(type(row.adapter) is Base for row in rows):
            yield None
            return
        with self._lock:
            ids = dict.fromkeys(row.adapter.adapter_id for row in rows if isinstance(row.adapter, Adapted))
            used = {one: self._known(one) for one in ids}
            for one in used.values():
                one.users, one.running = one.users + 1, one.running + 1
        try:
            self._bring(list(used.values()))
            yield self._adapting(rows, starts, used)
        finally:
            with self._lock:
                for one in used.values():
                    one.running -= 1
                    self._released(one)

    def _released(self, one: _Loaded) -> None:
        with self._lock:
            one.users -= 1
            self._leave_if_done(one)

    def _adapting(self, rows: Sequence[Row], starts: Sequence[int], used: dict[int, _Loaded]) -> StepAdapters:
        device = self._decoder.ops.device
        slots = torch.full((starts[-1],), -1, dtype=torch.int64)
        scales = torch.zeros(starts[-1], dtype=torch.float32)
        embedded: list[RowEmbedding] = []
        for index, (row, start) in enumerate(zip(rows, starts, strict=False)):
            if not isinstance(row.adapter, Adapted):
                continue
            one = used[row.adapter.adapter_id]
            assert one.slot is not None and one.facts is not None
            first = bisect_left(row.positions, row.adapter.begins)
            slots[start + first : starts[index + 1]] = one.slot
            scales[start + first : starts[index + 1]] = row.adapter.scale
            if one.facts.embedded is not None and (looked_up := _looked_up(row.source, first)):
                tokens = torch.tensor([start + i for i in looked_up], device=device)
                embedded.append(RowEmbedding(one.facts.embedded, row.adapter.scale, tokens))
        parts = frozenset().union(*(one.parts for one in used.values()))
        assert self._bank is not None
        tables = {name: table for name, table in self._bank.tables.items() if part_of(name) in parts}
        adapter_slots = AdapterSlots(slots, scales).to(device)
        return StepAdapters(parts, tables, adapter_slots, tuple(embedded), self._gain(used.values(), adapter_slots))

    def _gain(self, used: Iterable[_Loaded], adapter_slots: AdapterSlots) -> MagnitudeGain | None:
        """The gains of those of the adapters that have magnitudes (DoRA)."""
        some = [one for one in used if one.facts is not None and one.facts.gains and one.slot is not None]
        if not some or self._bank is None:
            return None
        names = {name for one in some if one.facts is not None for name in one.facts.gains}
        slots = frozenset(one.slot for one in some if one.slot is not None)
        return MagnitudeGain.for_slots({name: self._bank.gains[name] for name in names}, slots, adapter_slots)

    # In memory and out of it.

    def _bring(self, wanted: Sequence[_Loaded]) -> None:
        """Bring adapters into memory, the least recently used of the others out of it."""
        for one in wanted:
            with self._lock:
                if one.id in self._loaded:
                    self._loaded.move_to_end(one.id)
                if one.slot is not None:
                    continue
            fitted = self._read(one.assets, one.inside)
            if fitted.content != one.content:
                raise WeightError(
                    one.name, "the files of this adapter changed since it was loaded; unload it and load it again"
                )
            with self._lock:
                if one.slot is None:
                    self._place(one, fitted)

    def _place(self, one: _Loaded, fitted: FittedAdapter) -> None:
        if self._bank is None:
            self._bank = AdapterTables(map_shapes(self._decoder), self._decoder.ops)
        over = self.resident_bytes + one.nbytes - self.budget_bytes
        for other in list(self._loaded.values()):
            if over <= 0:
                break
            if other.slot is not None and not other.running:
                over -= other.nbytes
                self._evict(other)
                self.evictions += 1
        one.slot = self._bank.put(fitted.products, fitted.gains)
        if self._group is not None:
            self._group.put_adapter(one.slot, fitted)
        one.facts = replace(fitted, whole={})
        self.loads += 1

    def _evict(self, one: _Loaded) -> None:
        if one.slot is not None and self._bank is not None:
            self._bank.drop(one.slot)
            if self._group is not None:
                self._group.drop_adapter(one.slot)
        one.slot = one.facts = None

    def _read(self, assets: ModelAssets, inside: Path | None) -> FittedAdapter:
        with assets.open(inside) as adapter:
            if adapter.nbytes > self.budget_bytes:
                raise ParamError(
                    "lora_memory", f"the adapter takes {adapter.nbytes} bytes and {self.budget_bytes} are allowed"
                )
            return fit(adapter, self._decoder, self._alone)

    def _find(self, adapter_id: object) -> _Loaded:
        one = self._known(adapter_id)
        if one.leaving:
            raise AdapterUnknown(adapter_id)
        return one

    def _known(self, adapter_id: object) -> _Loaded:
        one = self._loaded.get(adapter_id) if type(adapter_id) is int else None
        if one is None:
            raise AdapterUnknown(adapter_id)
        return one

    def _info(self, one: _Loaded) -> AdapterInfo:
        return AdapterInfo(
            id=one.id, name=one.name, content=one.content, rank=one.rank, parts=tuple(sorted(one.parts)),
            nbytes=one.nbytes, resident=one.slot is not None, users=one.users, invocation=one.invocation,
            loaded_s=one.loaded_s,
        )  # fmt: skip

    def name_of(self, adapter: Adapter) -> str:
        """What rows of an adapter are counted under."""
        if not isinstance(adapter, Adapted):
            return BASE
        one = self._loaded.get(adapter.adapter_id)
        return one.name if one is not None else str(adapter.adapter_id)


def _looked_up(source: Source, first: int) -> list[int]:
    """Which of a row's tokens, from `first` on, enter as ids."""
    if isinstance(source, Hidden):
        return []
    vectors = set(source.at) if isinstance(source, Embeds) else set()
    return [i for i in range(first, token_count(source)) if i not in vectors]


def _parts(fitted: FittedAdapter) -> frozenset[str]:
    return fitted.parts | ({EMBEDDING} if fitted.embedded is not None else set())


def _is_number(text: str) -> bool:
    """Whether this is how a finite float is written; what says so may come from a file."""
    try:
        return math.isfinite(float(text)) and repr(float(text)) == text
    except ValueError:
        return False


def _last(ids: list[int], wanted: list[int]) -> int:
    """Where `wanted` stands for the last time; -1: nowhere."""
    for start in range(len(ids) - len(wanted), -1, -1):
        if ids[start : start + len(wanted)] == wanted:
            return start
    return -1


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or any(not c.isprintable() for c in name):
        raise ParamError("name", f"an adapter's name has 1 to {MAX_NAME} printable characters, not {name!r:.80}")
    return name
