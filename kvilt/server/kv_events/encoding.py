"""From changes of the prefix index to KV events, and the blocks that were told of. Refuses to know sockets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...kv.prefix_keys import PrefixNode, PrefixScope, tokens_of
from ...kv.prefix_watch import PrefixChange
from ...kv.row import BASE
from .messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

# vLLM's token ids are whole numbers. A row that was given as an embedding has none: its hash is in the extra keys.
_EMBEDDED_ID = 0


def block_hash(node: PrefixNode) -> int:
    """The first 64 bits of a node's key, as a number: what routers of vLLM replicas read."""
    return int.from_bytes(node.key[:8], "big")


class KVEventEncoder:
    """Makes events of changes, and knows all blocks that they leave known."""

    def __init__(self, page_tokens: int, medium: str) -> None:
        """`medium` is where the KV is: "GPU" or "CPU"."""
        self._size = page_tokens
        self._medium = medium
        self._nodes: dict[bytes, PrefixNode] = {}  # parents before children
        self._adapters: dict[str, int] = {}

    def events(self, changes: Iterable[PrefixChange]) -> list[KVEvent]:
        """Changes as events; blocks that follow each other share one."""
        made: list[KVEvent] = []
        run: list[PrefixNode] = []
        kind = ""
        for change in changes:
            self._apply(change)
            if run and (change.kind != kind or (kind == "stored" and not _continues(run[-1], change.node))):
                made.append(self._of_run(kind, run))
                run = []
            kind = change.kind
            if change.node is None:
                made = [AllBlocksCleared()]
            else:
                run.append(change.node)
        return [*made, self._of_run(kind, run)] if run else made

    def snapshot(self, most: int) -> Iterator[list[KVEvent]]:
        """Events that give all blocks to a reader that may have others, in lists of `most` blocks at the most."""
        first: list[KVEvent] = [AllBlocksCleared()]
        nodes = list(self._nodes.values())
        for start in range(0, len(nodes), most):
            yield first + [self._of_run("stored", run) for run in _runs(nodes[start : start + most])]
            first = []
        if first:
            yield first

    def _apply(self, change: PrefixChange) -> None:
        if change.node is None:
            self._nodes.clear()
        elif change.kind == "stored":
            self._nodes[change.node.key] = change.node
        else:
            self._nodes.pop(change.node.key, None)

    def _of_run(self, kind: str, run: list[PrefixNode]) -> KVEvent:
        hashes = tuple(block_hash(node) for node in run)
        if kind == "removed":
            return BlockRemoved(hashes, self._medium)
        scope, parent = run[0].scope, run[0].parent
        tokens = tuple(_EMBEDDED_ID if isinstance(one, bytes) else one for one in tokens_of(run, self._size))
        is_base = scope.adapter == BASE
        return BlockStored(
            hashes,
            None if parent is None else block_hash(parent),
            tokens,
            self._size,
            None if is_base else self._adapters.setdefault(scope.adapter, len(self._adapters) + 1),
            self._medium,
            None if is_base else scope.adapter,
            self._extra_keys(scope, run),
        )

    def _extra_keys(self, scope: PrefixScope, run: list[PrefixNode]) -> tuple[tuple[str, ...] | None, ...] | None:
        """The tenant, and the hashes of embeddings, of each block."""
        salt = (scope.salt,) if scope.salt else ()
        keys = tuple((*salt, *_embeds(node, self._size)) or None for node in run)
        return keys if any(keys) else None


def _continues(last: PrefixNode, node: PrefixNode | None) -> bool:
    return node is not None and node.parent is last and node.scope == last.scope


def _runs(nodes: Iterable[PrefixNode]) -> Iterator[list[PrefixNode]]:
    run: list[PrefixNode] = []
    for node in nodes:
        if run and not _continues(run[-1], node):
            yield run
            run = []
        run.append(node)
    if run:
        yield run


def _embeds(node: PrefixNode, page_tokens: int) -> tuple[str, ...]:
    if len(node.content) == page_tokens * 8:
        return ()
    return tuple(one.hex() for one in tokens_of([node], page_tokens) if isinstance(one, bytes))
