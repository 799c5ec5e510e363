"""Blends one prompt with documents up to its first token: which rows to run next, and what their results mean.

Returns rows and never runs them, so that they share steps with other requests. Refuses to know requests and text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..batch import Adapted, Adapter, Base, HiddenOut, KeyMass, KVLoad, Last, LayerSpan, Logits, Row, UnrotatedKV
from ..errors import InputError, StoreMiss
from ..executor.protocol import Executor
from ..kv.cache import KVCache
from ..kv.owner import owner_of
from ..store.layer import LayerKV
from .chunk import ChunkCache
from .controller import LoadMeter
from .interfaces import BlendExecutor, BlendOutput, BlendRetrieverResult
from .key_rotation import key_rotations
from .plugins import BlendPlugins
from .prompt_documents import DocumentKey, PromptDocuments
from .recipe import BlendPrompt, Recipe, Strategy
from .recipe_blend import RecipeBlend, selected_rows
from .repair import KVRepair
from .report import BlendedDocument, BlendReport, blended_documents
from .retriever import int_tensor
from .row_stage import RowStage
from .selection import TokenSelection

PROBE_TOKENS = 32  # the last tokens of a question, whose attention is measured in one row
MASS_EVERY = 4  # attention is measured in one of so many layers: those between give the same picture
Stages = Generator[RowStage | None, None, None]  # None: the documents of the next stage are not loaded yet
_BASE = Base()
_NO_PLUGINS = BlendPlugins()
_NONE = torch.zeros(0, dtype=torch.int64)


class Blending:
    """One prompt. `next` gives the row to run, `took` its result, until `done`; then the cache's owner commits.

    The cache holds the `exact` tokens before the first document; `begin` reserves room after them.
    While documents load there may be nothing to run. A caller that must not wait begins when it is `settled`; where it
    is `paused`, the caller calls `resume` when it is settled again.
    """

    def __init__(
        self,
        executor: Executor,
        chunks: ChunkCache,
        blend_prompt: BlendPrompt,
        recipe: Recipe,
        tenant: str = "",
        adapter: Adapter = _BASE,
        plugins: BlendPlugins = _NO_PLUGINS,
    ) -> None:
        layers = len(executor.spec.layers)
        recipe.check_layers(layers)
        plugins.check(layers)
        self.blend_prompt = blend_prompt
        self.recipe = recipe
        self._executor = executor
        self._chunks = chunks
        self._plugins = plugins
        self._tenant = tenant
        self._adapter = adapter
        # Before the tokens that switch an adapter on, documents are computed by the base model.
        late = isinstance(adapter, Adapted) and adapter.begins > 0
        if isinstance(adapter, Adapted) and late and any(one.stop > adapter.begins for one in blend_prompt.documents):
            raise InputError("documents stand before the tokens that switch an adapter on; put them there")
        self._document_adapter = _BASE if late else adapter  # documents are computed with this one
        maker = executor.adapters.identity(self._document_adapter)
        self._documents = PromptDocuments(chunks, blend_prompt, executor.spec, tenant, maker, plugins.retriever)
        self._selection = TokenSelection(blend_prompt, recipe, chunks.context_prefix)
        self._rotations = key_rotations(executor.spec)
        self._layers = layers
        self._meter = LoadMeter()
        self._opened = False
        self._made = 0
        self._again = _NONE  # positions of documents' tokens that are computed again
        self._report: tuple[BlendedDocument, ...] | None = None
        self._placed = 0  # layers whose stored KV is in the cache, or comes with the stage in progress
        self._scratch: KVCache | None = None  # where documents that are not stored yet are computed
        self._stages: Stages | None = None
        self._stage: RowStage | None = None
        self._awaited = 0  # layers of every document that must be loaded before the next stage
        self.done = False

    def open(self) -> None:
        """Begin to look for the documents, ahead of the first row, unless that was done; then they take memory."""
        if not self._opened:
            self._opened, self._meter = True, LoadMeter()
            self._documents.open()

    # What a scheduler asks.

    @property
    def scratch_tokens(self) -> int:
        """Tokens of room needed beside the prompt's own, should a document have to be computed."""
        longest = self._documents.longest
        return longest + len(self._chunks.context_prefix) if longest else 0

    @property
    def left(self) -> int:
        """Tokens that the next rows have, as far as that is known."""
        return self._stage.left if self._stage is not None else 0

    @property
    def draws(self) -> bool:
        """Whether the last of these rows returns logits."""
        return self._stage is not None and self._stage.draws

    @property
    def paused(self) -> bool:
        """Whether nothing can be run until more of the documents is loaded."""
        return self._stages is not None and self._stage is None

    @property
    def settled(self) -> bool:
        """Whether the awaited layers are loaded or never will be; before `begin`, whether all lookups are answered."""
        return self._documents.settled(self._awaited)

    @property
    def patience_s(self) -> float:
        """Seconds after which that is so, if nothing more comes; what is still missing then is computed."""
        return self._documents.patience_s(self._awaited)

    def watch(self, callback: Callable[[], None]) -> None:
        """Call this, from any thread, when more of a document is loaded."""
        self.open()
        self._documents.watch(callback)

    # Going on.

    def resume(self) -> None:
        """Go on after a pause, if that is possible now."""
        if self.paused and self.settled:
            self._advance()

    def begin(self, kv: KVCache) -> None:
        """Start, or after a preemption start again, in a cache that holds the tokens before the first document."""
        assert kv.lengths == (self.blend_prompt.exact,), "blending begins where the first document does"
        self.close()
        self.open()
        self._documents.locate()
        kv.reserve(len(self.blend_prompt.ids) - self.blend_prompt.exact)
        if self._documents.missing():
            self._room()  # all room is found before any work
        kv.row(0).origin = self.origin
        self._placed, self._again, self._report, self.done = 0, _NONE, None, False
        self._stages = self._run(kv)
        self._advance()

    def next(self, tokens: int) -> Row:
        """The next row, of at most so many tokens; the same one again if it was not taken. Waits out a pause."""
        while self.paused:
            self._documents.settle(self._awaited)
            self.resume()
        assert self._stage is not None, "there is nothing left to run"
        self._meter.begin()
        row = self._stage.row(tokens)
        return replace(row, adapter=self._document_adapter if row.cache is self._scratch else self._adapter)

    def took(self, row: Row, logits: Logits, index: int) -> None:
        """A row was run, as number `index` of its batch."""
        stage = self._stage
        assert stage is not None
        stage.took(len(row.positions), logits, index)
        self._meter.end(len(row.positions), min(row.layers.stop, self._layers) - row.layers.start)
        if not stage.left:
            self._advance()

    def twin(self) -> Blending:
        """A second blending of the same prompt, from its beginning."""
        given = (self._executor, self._chunks, self.blend_prompt, self.recipe, self._tenant, self._adapter)
        return Blending(*given, self._plugins)

    @property
    def origin(self) -> str:
        """How the KV of this prompt is made."""
        return f"{self.recipe.name}{self._plugins.name}"

    def report(self) -> BlendReport:
        reused = self._documents.prompt.reused
        computed = len(self.blend_prompt.ids) - self.blend_prompt.exact - reused
        again = len(self._again)
        return BlendReport(computed, reused - again, again, self._made, self.origin, self._documents_report())

    def _documents_report(self) -> tuple[BlendedDocument, ...]:
        """Which tokens of each document were computed again; nothing before all of them are."""
        if not self.done:
            return ()
        if self._report is None:
            prompt = self._documents.prompt
            self._report = blended_documents(prompt.ids, prompt.documents, self._again.tolist())
        return self._report

    def close(self) -> None:
        """Release what blending needed; the prompt's cache belongs to the caller."""
        if self._stages is not None:
            self._stages.close()
        self._stages, self._stage, self._awaited = None, None, 0
        if self._scratch is not None:
            self._scratch.close()
        self._scratch = None

    def _advance(self) -> None:
        assert self._stages is not None
        self._stage = None
        try:
            with self._executor.call(), self._executor.pool.lease(), torch.no_grad():
                self._stage = next(self._stages)
        except StopIteration:
            self.done = True
            self._documents.drop()  # all of it is in the cache now
            self._opened = False
            self.close()

    # The stages, in order.

    def _run(self, kv: KVCache) -> Stages:
        for key in self._documents.missing():
            if not self._documents.stored_meanwhile(key):
                yield from self._make(key)
        prompt, start, known = self._documents.prompt, self.blend_prompt.exact, self._plugins.retriever is None
        self._selection = TokenSelection(prompt, self.recipe, self._chunks.context_prefix if known else None)
        if not prompt.documents:  # a caller's retriever has found nothing
            ids = self.blend_prompt.ids[start:]
            yield RowStage(kv, range(start, start + len(ids)), ids, LayerSpan(), Last())
            return
        own = RecipeBlend(self._selection, self.recipe, start, self._ratio)
        blend = own if self._plugins.executor is None else self._plugins.executor()
        if not blend.selection_layers:
            if self.recipe.needs("query"):
                yield from self._probe(kv, 0, None, own.scores)
            chosen = own.select()
            self._again = chosen[self._selection.reusable[chosen]] + start
            yield from self._finish(kv, chosen, 0, None)
            return
        yield from self._select(kv, blend, own)

    def _select(self, kv: KVCache, blend: BlendExecutor, own: RecipeBlend) -> Stages:
        """Spans of layers that end where an executor selects: the tokens that it selects there go on."""
        start, reusable = self.blend_prompt.exact, self._selection.reusable
        chosen, lower = torch.arange(len(reusable)), 0
        source: Sequence[int] | Tensor = self.blend_prompt.ids[start:]
        for layer in blend.selection_layers:
            load = (yield from self._load(layer + 1)) if lower else None
            want = HiddenOut([layer], [layer])
            stage = RowStage(kv, _at(chosen, start), source, LayerSpan(lower, layer + 1), want, load=load)
            yield stage
            hidden, stored = torch.cat(stage.hidden), (yield from self._layer(layer))
            if not lower:
                self._placed = layer + 1  # what is computed there is exact already
                if blend is own and self.recipe.needs("query"):
                    yield from self._probe(kv, layer + 1, hidden, own.scores)
            output = self._blended(blend, layer, stage, stored)
            kept = selected_rows(output, self._selection.always()[chosen])
            if not lower:
                self._again = kept[reusable[kept]] + start
            chosen, source, lower = chosen[kept], hidden[kept.to(hidden.device)], layer + 1
        assert isinstance(source, Tensor)
        yield from self._finish(kv, chosen, lower, source)

    def _blended(self, blend: BlendExecutor, layer: int, stage: RowStage, stored: Sequence[LayerKV]) -> BlendOutput:
        """What an executor makes of one layer, on the tensors of its interface."""
        rotation, seen = self._rotations[layer], stage.kv[layer]
        keys, values = (torch.cat([getattr(one, name) for one in seen]) for name in ("keys", "values"))
        positions = int_tensor(stage.positions).to(keys.device)
        retrieved = self._retrieved(layer, stored, keys.device)
        starts = torch.tensor([0, len(self._selection.reusable)], device=keys.device)
        queries, fresh = torch.cat(stage.queries[layer]), rotation.place(keys, positions)
        return blend.blend_result(layer, retrieved, queries, fresh, values, positions, starts, 0)

    def _retrieved(self, layer: int, stored: Sequence[LayerKV], device: torch.device) -> BlendRetrieverResult:
        """One layer of all tokens, with keys rotated to where they stand."""
        start, valid = self.blend_prompt.exact, self._selection.reusable
        places = (valid.nonzero().flatten() + start).to(device)
        keys, values = (torch.cat([getattr(one, name).to(device) for one in stored]) for name in ("keys", "values"))
        rotated = self._rotations[layer].place(keys, places)
        k, v = (one.new_zeros((len(valid), *one.shape[1:])) for one in (rotated, values))
        k[places - start], v[places - start] = rotated, values
        origins = torch.zeros(len(valid), dtype=torch.int64, device=device)
        origins[places - start] = places
        return BlendRetrieverResult(k, v, valid.to(torch.uint8), origins, rotated=True)

    def _finish(self, kv: KVCache, chosen: Tensor, lower: int, hidden: Tensor | None) -> Stages:
        """The chosen tokens through the rest of the layers, in spans where later ones are still loading."""
        positions = _at(chosen, self.blend_prompt.exact)
        source = self._source(positions, None) if hidden is None else hidden
        repair = self._repair(positions)
        joints, repairs = (repair.joints, repair.of) if repair is not None else (None, None)
        while True:
            if self._placed <= lower:
                yield from self._layer(lower)
            ready = max(lower + 1, self._documents.layers_ready)
            load = yield from self._load(ready)
            if ready >= self._layers:
                break
            stage = RowStage(kv, positions, source, LayerSpan(lower, ready), HiddenOut(), joints, repairs, load)
            yield stage
            source, lower = torch.cat(stage.hidden), ready
        yield RowStage(kv, positions, source, LayerSpan(lower), Last(), joints, repairs, load)

    def _repair(self, positions: Sequence[int]) -> KVRepair | None:
        if not self.recipe.repair:
            return None
        documents = self._documents.prompt.documents
        return KVRepair(documents, positions, self.recipe.repair, self._documents.stored, self._layers)

    def _probe(self, kv: KVCache, lower: int, hidden: Tensor | None, scores: dict[Strategy, Tensor]) -> Stages:
        """Measure the attention of the question on documents as they are stored."""
        start = self.blend_prompt.exact
        layers = self._mass_layers(lower)
        fresh = ~self._selection.reusable  # text between documents is computed too: it has no KV yet
        question = self._documents.prompt.question
        fresh[question.start - start :] = True
        positions = _at(fresh.nonzero().flatten(), start)
        tail = min(PROBE_TOKENS, len(question))
        span = LayerSpan(lower, layers[-1] + 1)  # layers above measure nothing, and no logits are needed
        joints = [*range(1, len(positions) - tail + 1), len(positions)]  # the measured tokens go in one row
        load = yield from self._load(span.stop)
        stage = RowStage(kv, positions, self._source(positions, hidden), span, KeyMass(layers, tail), joints, load=load)
        yield stage
        scores["query"] = self._selection.attended(stage.mass)

    def _mass_layers(self, lower: int) -> list[int]:
        """Layers from `lower` on in which attention is measured, ascending."""
        usual = range(MASS_EVERY - 1, self._layers, MASS_EVERY)
        return sorted({layer for layer in self.recipe.mass_layers or usual if layer >= lower}) or [self._layers - 1]

    def _source(self, positions: Sequence[int], hidden: Tensor | None) -> Sequence[int] | Tensor:
        """What enters at these positions: ids, or their rows of all hidden states."""
        if hidden is None:
            return [self.blend_prompt.ids[p] for p in positions]
        return hidden[int_tensor(positions) - self.blend_prompt.exact]

    # Documents.

    def _make(self, key: DocumentKey) -> Stages:
        """Compute a document standalone and store it; blend what the store gives back."""
        context_prefix, text = self._chunks.context_prefix, key[1]
        ids = (*context_prefix, *text)
        stage = RowStage(self._room(), range(len(ids)), ids, LayerSpan(), HiddenOut(range(self._layers)))
        yield stage
        self._made += len(text)
        layers = [
            LayerKV(
                torch.cat([one.keys for one in stage.kv[i]])[len(context_prefix) :].to(self._chunks.dtype),
                torch.cat([one.values for one in stage.kv[i]])[len(context_prefix) :].to(self._chunks.dtype),
            )
            for i in range(self._layers)
        ]
        self._documents.keep(key, layers)

    def _room(self) -> KVCache:
        if self._scratch is None:
            self._scratch = self._executor.create_kv_cache(owner=owner_of(self._tenant))
            self._scratch.reserve(self.scratch_tokens)
        return self._scratch

    def _layer(self, index: int) -> Generator[RowStage | None, None, list[LayerKV]]:
        """One layer of every document; one that turns out to be damaged or late is computed."""
        while True:
            self._awaited = index + 1
            while not self.settled:
                yield None
            try:
                return self._documents.layer(index)
            except StoreMiss:
                for key in self._documents.damaged():
                    yield from self._make(key)

    def _load(self, stop: int) -> Generator[RowStage | None, None, KVLoad | None]:
        """The layers below `stop` that the next stage brings; None if their KV is in the cache already."""
        stored: dict[int, list[UnrotatedKV]] = {}
        for index in range(self._placed, stop):
            every = yield from self._layer(index)
            stored[index] = [UnrotatedKV(one.keys, one.values) for one in every]
        self._placed = max(self._placed, stop)
        spans = [range(one.start, one.stop) for one in self._documents.prompt.documents]
        return KVLoad(spans, stored) if stored else None

    def _ratio(self) -> float:
        floor = self.recipe.load_floor
        if floor is None:
            return self.recipe.ratio
        return self._meter.ratio(
            self._documents.layers_ready, self._layers, len(self.blend_prompt.ids) - self.blend_prompt.exact, floor
        )


def _at(chosen: Tensor, start: int) -> list[int]:
    return [start + i for i in chosen.tolist()]
