"""A rank that follows: a process that has its part of a model and of all pages, and does what rank 0 tells it.

It knows no request, no cache and no token's meaning. It ends when rank 0 does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...config import RunConfig
from ...errors import KviltError, RankFailed
from ...kv.layout import PAGE_TOKENS, KVLayout
from ...models.adapters import map_shapes
from ...models.assemble import assemble, read_spec, split_checkpoint
from ...models.decoder import Decoder
from ...models.spec import at_context, kv_layout
from ...models.split import ModelShare
from ...models.step_adapters import AdapterTables, EmbeddedRows, RowEmbedding, StepAdapters, part_of
from ...ops.contract import KeysValues, Ops, PageStore, Rotation, StateStore
from ...ops.kv_dtypes import KV_DTYPES
from ...ops.lowrank import AdapterSlots, LowRank
from ...ops.native.cores import find_cores, rank_cpus
from ...ops.select import select
from ...weights.source import open_checkpoint
from .channel import RankChannel
from .collectives import ProcessRanks
from .command import RankCommand
from .message import MessageReader, MessageWriter
from .pages import own_shape, read_kv, write_kv
from .step_message import SentAdapters, read_batch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankPages:
    """This rank's heads of all pages, and all recurrent states."""

    stores: tuple[PageStore, ...]
    state_store: StateStore | None


class RankAdapters:
    """This rank's parts of adapters, by the slots that rank 0 gave them."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._tables: AdapterTables | None = None
        self._embedded: dict[int, EmbeddedRows] = {}

    def put(self, message: MessageReader) -> None:
        """Keep an adapter."""
        if self._tables is None:
            self._tables = AdapterTables(map_shapes(self._decoder), self._decoder.ops)
        slot, count = message.numbers()
        products = {}
        for _ in range(count):
            name, scale = message.text(), message.real()
            down, up = message.tensor().clone(), message.tensor().clone()
            products[name] = self._decoder.ops.prepare_low_rank(LowRank(down, up, scale))
        if (numbers := message.maybe_tensor()) is not None:
            self._embedded[slot] = EmbeddedRows(numbers.clone(), message.tensor().clone(), message.real())
        if self._tables.put(products) != slot:
            raise RankFailed("the slots of adapters are not the same on all ranks")

    def drop(self, slot: int) -> None:
        """Forget an adapter."""
        assert self._tables is not None
        self._tables.drop(slot)
        self._embedded.pop(slot, None)

    def of(self, sent: SentAdapters | None) -> StepAdapters | None:
        """The adapters of a step."""
        if sent is None:
            return None
        assert self._tables is not None
        tables = {name: table for name, table in self._tables.tables.items() if part_of(name) in sent.parts}
        embedded = tuple(RowEmbedding(self._embedded[slot], scale, at) for slot, scale, at in sent.embedded)
        return StepAdapters(sent.parts, tables, AdapterSlots(sent.slots, sent.scales), embedded)


class RankWorker:
    """Carries out commands, one after the other."""

    def __init__(self, channel: RankChannel, message: MessageReader) -> None:
        """Load this rank's part; `message` says of what."""
        rank, size, max_context = message.numbers()
        timeout_s = message.real()
        path, options, kv_dtype = message.text(), message.text(), message.text()
        config = RunConfig(**json.loads(options))
        if config.threads:
            torch.set_num_threads(config.threads)
        if config.numa and (cpus := rank_cpus(rank, size, find_cores())):
            os.sched_setaffinity(0, cpus)
        self._channel = channel
        self.ops: Ops = select(config.backend, config.threads, torch.device("cpu"), config.deterministic, config.numa)
        checkpoint = open_checkpoint(Path(path))
        with checkpoint.tensors:
            spec = at_context(read_spec(checkpoint), max_context)
            self._layout: KVLayout = kv_layout(spec, PAGE_TOKENS, KV_DTYPES[kv_dtype])
            splits = split_checkpoint(checkpoint, spec, size)
            self._ranks = ProcessRanks(rank, size, timeout_s)
            self._split = splits[rank]
            share = ModelShare(self._split, self._ranks, splits)
            self._decoder = assemble(checkpoint, spec, self._layout, self.ops, share=share)
        self._adapters = RankAdapters(self._decoder)
        self._pages = RankPages((), None)

    def follow(self) -> None:
        """Do what rank 0 says until it is gone."""
        while (message := self._channel.receive()) is not None and message.kind != RankCommand.END:
            with torch.no_grad(), self.ops.alone():
                self._obey(message)

    def _obey(self, message: MessageReader) -> None:
        match message.kind:
            case RankCommand.STEP:
                batch, adapters = read_batch(message, self._pages)
                self._decoder(batch, lambda _layer: None, self._adapters.of(adapters))
            case RankCommand.EMBED:
                self._decoder.embed(message.tensor())
            case RankCommand.COPY_PAGES:
                source, target = (self._pages.stores[index] for index in message.numbers())
                self.ops.copy_pages(source, list(message.numbers()), target, list(message.numbers()))
            case RankCommand.READ_SLOTS:
                self._read(message.number(), message.tensor())
            case RankCommand.WRITE_SLOTS:
                store, slots = self._pages.stores[message.number()], message.tensor()
                self.ops.write_slots(store, slots, read_kv(message))
            case RankCommand.WRITE_KV:
                self._write(message)
            case RankCommand.WRITE_STATES:
                assert self._pages.state_store is not None
                slots, keys, values = (message.tensor() for _ in range(3))
                self._pages.state_store.write(slots, KeysValues(keys, values), self.ops.host_copies)
            case RankCommand.PUT_ADAPTER:
                self._adapters.put(message)
            case RankCommand.DROP_ADAPTER:
                self._adapters.drop(message.number())
            case RankCommand.CONNECT:
                self._ranks.connect(message.text())
            case RankCommand.PAGES:
                states, *pages = message.numbers()
                self._make_pages(pages, states)
            case _:
                raise RankFailed(f"a command {message.kind} is not known")

    def _make_pages(self, pages: Sequence[int], states: int) -> None:
        groups, device = self._layout.groups, self.ops.device
        stores = tuple(
            self.ops.new_pages(own_shape(group.shape, self._split), n + 1, device)
            for n, group in zip(pages, groups, strict=True)
        )
        recurrent = self._layout.recurrent
        self._pages = RankPages(
            stores, None if recurrent is None else StateStore.empty(recurrent.shape, states + 1, device)
        )

    def _read(self, index: int, slots: torch.Tensor) -> None:
        answer = MessageWriter(RankCommand.DONE)
        write_kv(answer, self.ops.read_slots(self._pages.stores[index], slots))
        self._channel.send(answer)

    def _write(self, message: MessageReader) -> None:
        index, layer = message.numbers()
        slots, keys, values = (message.tensor() for _ in range(3))
        rotation = None
        if (cos := message.maybe_tensor()) is not None:
            sin, pairing = message.tensor(), message.text()
            rotation = Rotation(cos, sin, "half" if pairing == "half" else "interleaved")
        self.ops.write(self._pages.stores[index], layer, slots, keys, values, rotation)


def main(descriptor: int) -> int:
    """Follow the process at the other end of a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for rank 0, which ends this process in its own time
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = RankChannel(socket.socket(fileno=descriptor), "rank 0")
    if (first := channel.receive()) is None:
        return 0
    try:
        worker = RankWorker(channel, first)
    except (KviltError, OSError, RuntimeError, MemoryError) as error:
        failed = MessageWriter(RankCommand.FAILED)
        failed.text(f"{type(error).__name__}: {error}")
        channel.send(failed)
        return 1
    channel.send(MessageWriter(RankCommand.DONE))
    try:
        worker.follow()
    except RankFailed as error:
        _log.warning("this rank ends: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
