"""The documents of one prompt while they load: from the store, each by its own tokens, or from a caller's retriever.

Refuses to know rows and pages, and which tokens are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InputError, StoreMiss
from ..models.spec import ModelSpec
from ..store.layer import LayerKV
from .chunk import ChunkCache
from .interfaces import BlendRetriever, BlendRetrieverResult
from .key_rotation import KeyRotation, key_rotations
from .polled import BackgroundTask, PolledTask
from .recipe import BlendPrompt, Span

# Where a document stands and its tokens. The store finds it by tokens alone, so equal ones are one: -1.
DocumentKey = tuple[int, tuple[int, ...]]


class RetrievedDocument:
    """One document among the tokens of a task."""

    def __init__(self, task: PolledTask, span: Span, rotations: Sequence[KeyRotation], dtype: torch.dtype) -> None:
        self.task = task
        self._span = slice(span.start, span.stop)
        self._rotations = rotations
        self._dtype = dtype
        self._reason = ""
        self._whole: Tensor | None = None  # a mask that has all of the document

    @property
    def reason(self) -> str:
        """Why it is a miss; empty as long as it is none."""
        return self._reason or self.task.reason

    def hit(self) -> bool:
        """Whether it was found; waits for that."""
        self.task.settle()
        return not self.reason

    def layer(self, index: int) -> LayerKV:
        """One layer, keys as they were before rotation; waits for it, and raises StoreMiss if it does not come."""
        found, span = self.task.result(index), self._span
        if found.valid_mask is not self._whole and bool(found.valid_mask[span].bool().all()):
            self._whole = found.valid_mask  # tasks give the same mask with every layer
        if found.k is None or found.v is None or found.valid_mask is not self._whole:
            self._reason = self.reason or "absent"
            raise StoreMiss(self._reason)
        keys = self._unrotated(index, found, found.k)
        values = found.v[span].reshape(*keys.shape[:2], -1)  # not always of the keys' size
        return LayerKV(keys, values.to(self._dtype))

    def _unrotated(self, index: int, found: BlendRetrieverResult, keys: Tensor) -> Tensor:
        rotation = self._rotations[index]
        assert rotation.head_dim is not None
        keys = keys[self._span].reshape(self._span.stop - self._span.start, -1, rotation.head_dim).to(self._dtype)
        if found.rotated is False:
            return keys
        rotation.check_said(found.rotated, index)
        return rotation.strip(keys, found.original_positions[self._span].to(keys.device))


class PromptDocuments:
    """The documents of one prompt. Those that a caller's retriever does not have are computed with the prompt."""

    def __init__(
        self,
        chunks: ChunkCache,
        blend_prompt: BlendPrompt,
        spec: ModelSpec,
        tenant: str,
        maker: str,
        retriever: BlendRetriever | None = None,
    ) -> None:
        self._chunks = chunks
        self._given = blend_prompt
        self._tenant = tenant
        self._maker = maker
        self._retriever = retriever
        self._rotations = key_rotations(spec)
        self._layers = len(spec.layers)
        self._task: PolledTask | None = None  # the retriever's, for the whole prompt
        self._found: dict[DocumentKey, RetrievedDocument] = {}  # from when it is opened until all is placed
        self._keys: list[DocumentKey] = []  # of the documents, in order
        self.prompt = blend_prompt  # with the documents whose KV is reused

    @property
    def longest(self) -> int:
        """Tokens of the longest of them."""
        return max(map(len, self._given.documents), default=0)

    def open(self) -> None:
        """Begin to look for them, unless that was done. Equal ones are looked up, and perhaps computed, once."""
        if self._found or self._task is not None:
            return
        if self._retriever is None:
            self._keys = [(-1, self._text(one)) for one in self._given.documents]
            self._found = {key: self._stored(key) for key in dict.fromkeys(self._keys)}
            return
        retriever, ids = self._retriever, torch.tensor(self._given.ids, dtype=torch.int64)
        cuts = sorted({cut for one in self._given.documents for cut in (one.start, one.stop)} - {0, len(ids)})
        self._task = BackgroundTask(lambda: retriever.new_request([ids], [cuts]), self._layers)

    def locate(self) -> None:
        """Learn of which tokens a caller's retriever has KV: the others of a document are computed. Waits for that."""
        if self._task is None or self._keys:
            return
        self._task.settle()
        valid = torch.zeros(len(self._given.ids), dtype=torch.bool)
        if self._task.layers_ready:
            valid = self._task.result(0).valid_mask.bool().cpu()
        if len(valid) != len(self._given.ids):
            raise InputError(f"the retriever's mask has {len(valid)} tokens and the prompt {len(self._given.ids)}")
        spans = tuple(run for one in self._given.documents for run in _runs(valid, one))
        self.prompt = replace(self._given, documents=spans, begins=self._given.exact)
        self._keys = [(one.start, self._text(one)) for one in spans]
        for key, span in zip(self._keys, spans, strict=True):
            self._found[key] = RetrievedDocument(self._task, span, self._rotations, self._chunks.dtype)

    def drop(self) -> None:
        """All of it is placed, or not needed: let go of the memory."""
        if self._task is not None:
            self._task.cancel()
        self._task, self._found, self._keys = None, {}, []

    # Polling.

    def settled(self, layers: int) -> bool:
        """Whether so many layers are loaded or never will be; with 0, whether all lookups are answered."""
        # A list, so that every task is asked: its timeout runs from the first question on.
        each = [task.settled(layers) for task in self._tasks()]
        return all(each)

    def patience_s(self, layers: int) -> float:
        """Seconds after which that is so, if nothing more comes."""
        return max((task.patience_s(layers) for task in self._tasks()), default=0.0)

    def settle(self, layers: int) -> None:
        for task in self._tasks():
            task.settle(layers)

    def watch(self, notify: Callable[[], None]) -> None:
        for task in self._tasks():
            task.watch(notify)

    @property
    def layers_ready(self) -> int:
        """Layers that all of them have."""
        return min((task.layers_ready for task in self._tasks()), default=self._layers)

    def _tasks(self) -> list[PolledTask]:
        if self._task is not None and not self._keys:
            return [self._task]
        return list(dict.fromkeys(one.task for one in self._found.values()))

    # Reading, and computing what is missing.

    def missing(self) -> list[DocumentKey]:
        """Those that must be computed; waits for all lookups."""
        return [key for key, one in self._found.items() if not one.hit()]

    def damaged(self) -> list[DocumentKey]:
        """Those that turned out not to be complete."""
        return [key for key, one in self._found.items() if one.reason]

    def stored_meanwhile(self, key: DocumentKey) -> bool:
        """Whether another request has stored a document since the lookup."""
        again = self._stored(key)
        if again.task.layers_ready < self._layers:
            again.task.cancel()
            return False
        self._found[key] = again
        return True

    def keep(self, key: DocumentKey, layers: Sequence[LayerKV]) -> None:
        """Store a document that was computed standalone; blended is what the store gives back."""
        made = self._chunks.keep_task(key[1], layers, self._tenant, self._maker)
        self._found[key] = self._whole(made, key)

    def layer(self, index: int) -> list[LayerKV]:
        """One layer of every document; StoreMiss if one does not come."""
        return [self._found[key].layer(index) for key in self._keys]

    def stored(self, document: int, index: int) -> LayerKV:
        """One layer of one document, by its number."""
        return self._found[self._keys[document]].layer(index)

    def _stored(self, key: DocumentKey) -> RetrievedDocument:
        return self._whole(self._chunks.open_task(key[1], self._tenant, self._maker), key)

    def _whole(self, task: PolledTask, key: DocumentKey) -> RetrievedDocument:
        return RetrievedDocument(task, Span(0, len(key[1])), self._rotations, self._chunks.dtype)

    def _text(self, span: Span) -> tuple[int, ...]:
        return self._given.ids[span.start : span.stop]


def _runs(valid: Tensor, document: Span) -> list[Span]:
    """The parts of a document that have KV."""
    edges = torch.diff(valid[document.start : document.stop].int(), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, stops = ((edges == sign).nonzero().flatten() + document.start for sign in (1, -1))
    return [Span(a, b) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
