"""Chunks of one model: documents computed standalone, kept with unrotated keys, found again by their exact tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ..errors import InputError
from ..executor.protocol import Executor
from ..kv.identity import Identity
from ..kv.row import BASE, Token
from ..store.address import Kind, chunk_address, form_of, token_bytes
from ..store.layer import LayerKV
from ..store.loading import Loading
from ..store.store import Store
from .document_finder import DocumentFinder
from .known_documents import DocumentScope
from .recipe import Span
from .retriever import StoredTask, StoreRetriever, int_tensor


class ChunkCache:
    """The documents of one executor in a store."""

    def __init__(self, executor: Executor, store: Store, context_prefix: Sequence[int] = ()) -> None:
        """`context_prefix` are tokens before every document while it is computed, such as a model's first one."""
        if executor.layout.recurrent is not None:
            raise InputError(
                "documents of models with recurrent state cannot be blended: a state depends on all tokens before it; "
                "leave out the documents, and give their text in the prompt"
            )
        if executor.layout.bare:
            raise InputError(
                "documents of models with layers that read the KV of others cannot be blended; leave out the "
                "documents, and give their text in the prompt"
            )
        if any(group.shape.value_dim == 0 for group in executor.layout.groups):
            raise InputError("documents of models whose KV has no values cannot be blended")
        self.context_prefix = tuple(context_prefix)
        self._executor = executor
        self._store = store
        dtype = executor.layout.groups[0].shape.dtype
        # Pages with scales round keys after rotation, so their chunks are kept as two-byte floats, which lose little.
        self.dtype = torch.float16 if dtype.scales else dtype.storage
        self.form = form_of(executor.layout, self.dtype)
        self._finder = DocumentFinder(self._stored, self._there)

    def open(self, ids: Sequence[int], tenant: str = "", maker: str = BASE) -> Loading:
        """Begin to look for a document; its layers arrive in order."""
        self._finder.known.add(DocumentScope(tenant, maker), ids)  # it will be stored: a missing document gets computed
        return self._store.open_chunk(self._identity(tenant, maker), ids, self.form)

    def retriever(self, tenant: str = "", maker: str = BASE, device: torch.device | None = None) -> StoreRetriever:
        """Finds these documents in prompts of any engine; tensors on `device`, by default the executor's."""
        return StoreRetriever(
            self._store, self._identity(tenant, maker), self.form, device or self._executor.pool.device
        )

    def keep(
        self,
        ids: Sequence[int],
        layers: Sequence[LayerKV],
        tenant: str = "",
        retain: bool = False,
        maker: str = BASE,
    ) -> Loading:
        """Store a document that was computed, and give it back as every later lookup finds it."""
        self._finder.known.add(DocumentScope(tenant, maker), ids)
        copies = self._executor.pool.host_copies
        parts = copies.download([part for one in layers for part in (one.keys, one.values)]).wait()
        on_host = [LayerKV(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return self._store.put_chunk(self._identity(tenant, maker), ids, on_host, retain)

    def open_task(self, ids: Sequence[int], tenant: str, maker: str) -> StoredTask:
        """`open` as a task of the retriever, which is how prompts are blended."""
        self._finder.known.add(DocumentScope(tenant, maker), ids)
        return self._cpu_retriever(tenant, maker).new_request([int_tensor(ids)], [[]])

    def keep_task(self, ids: Sequence[int], layers: Sequence[LayerKV], tenant: str, maker: str) -> StoredTask:
        """`keep` as a task of the retriever."""
        return self._cpu_retriever(tenant, maker).loaded(self.keep(ids, layers, tenant, maker=maker))

    def _cpu_retriever(self, tenant: str, maker: str) -> StoreRetriever:
        return self.retriever(tenant, maker, torch.device("cpu"))  # tensors as they are stored

    def find(self, ids: Sequence[int], tenant: str = "", maker: str = BASE, start: int = 0) -> tuple[Span, ...]:
        """Documents that stand in a prompt from `start` on and are stored; asks the store, and does not wait long.

        With the first question for a tenant and adapter a thread begins to read what the tiers below memory hold.
        """
        return self._finder.find(DocumentScope(tenant, maker), ids, start)

    def read(self, tenant: str = "", maker: str = BASE) -> None:
        """Begin to read what of a tenant's documents is stored, for `find`."""
        self._finder.read(DocumentScope(tenant, maker))

    def close(self) -> None:
        """Read no more."""
        self._finder.close()

    def _stored(self, scope: DocumentScope) -> Iterator[Sequence[Token]]:
        return self._store.stored_tokens(Kind.CHUNK, self._identity(*scope))

    def _there(self, scope: DocumentScope, ids: Sequence[int]) -> bool:
        return self._store.count_leading([chunk_address(self._identity(*scope), ids, self.form)]) == 1

    def _identity(self, tenant: str, maker: str) -> Identity:
        prefix = hashlib.sha256(token_bytes(self.context_prefix)).hexdigest() if self.context_prefix else "nothing"
        origin = f"chunk/1 behind={prefix}"
        return replace(self._executor.pool.identity(), origin=origin, salt=tenant, adapter=maker)

    def __repr__(self) -> str:
        return f"ChunkCache(dtype={self.dtype}, context_prefix={list(self.context_prefix)}, layers={len(self.form)})"
