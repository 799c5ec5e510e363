"""Documents computed and stored before the first question about them: which are stored, and requests for the rest.

A document is warmed by a prompt that consists of it and reuses all of it: the engine computes and stores what is not
stored, as it does for any prompt, in steps that it shares with other requests. Refuses to know how the engine is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ..blend.recipe import Recipe, Span
from ..engine.request import Request
from ..engine.sequence import Job
from ..errors import InputError
from ..sampling.params import SamplingParams
from .answer import AnswerConfig
from .documents import DocumentInput, document_prompts
from .model import AdapterChoice, Model, Prompt

AT_ONCE = 4  # documents of one call in the engine: more would only wait there, with their KV in memory
_REUSE = Recipe(ratio=0.0, strategy="head", min_gain=0.0, gate=False)

OnProgress = Callable[[int, int], None]  # tokens that are done, of all
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document that is stored now."""

    id: str  # a hash of its tokens, its tenant and the model or adapter
    tokens: int
    found: bool  # it was there already; else it was computed


class DocumentWarmup:
    """The documents of one call, all of which are read and checked before any is computed."""

    def __init__(
        self,
        model: Model,
        documents: Sequence[DocumentInput],
        chosen: AdapterChoice,
        tenant: str = "",
        on_progress: OnProgress | None = None,
    ) -> None:
        if isinstance(documents, str):
            raise InputError("documents is a list of texts, or of token ids, not one text")
        self._model = model
        self._chunks = model.documents.chunks
        self.tenant = tenant
        self._on_progress = on_progress
        self._adapter = model.document_adapter(chosen)
        self._maker = model.executor.adapters.identity(self._adapter)
        self._documents = [self._read(index, text) for index, text in enumerate(document_prompts(documents))]
        self._unique = dict.fromkeys(self._documents)
        self._ids: dict[Ids, str] = {}
        self._found: set[Ids] = set()
        self._done = dict.fromkeys(self._unique, 0)  # tokens
        self._reported = -1

    def unique(self) -> Iterator[Ids]:
        """Each document once."""
        return iter(self._unique)

    def groups(self) -> Iterator[list[Ids]]:
        """The same, in groups that are looked up and computed at once."""
        left = self.unique()
        while some := list(islice(left, AT_ONCE)):
            yield some

    def missing(self, some: Sequence[Ids]) -> list[Ids]:
        """The documents that are not stored completely. All are looked up at once; waits for the store."""
        looked = [(ids, self._chunks.open(ids, self.tenant, self._maker)) for ids in some]
        missing = []
        for ids, loading in looked:
            self._ids[ids] = loading.address.key.hex()
            if loading.wait():
                self._found.add(ids)
                self.finished(ids)
            else:
                missing.append(ids)
        return missing

    def request(self, ids: Ids, **own: int | str) -> tuple[Request, AnswerConfig]:
        """The request that computes and stores a document, and what its answer must know."""
        context_prefix = self._chunks.context_prefix
        prompt = (*context_prefix, *ids, ids[-1])  # a prompt computes its last token: the document's are all reused
        request = Request(
            prompt,
            tenant=self.tenant,
            reuse=False,
            documents=(Span(len(context_prefix), len(prompt) - 1),),
            recipe=_REUSE,
            adapter=self._adapter,
            **own,  # type: ignore[arg-type]
        )
        return request, AnswerConfig(self._model.tokenizer, SamplingParams(), frozenset(), len(prompt))

    def watch(self, ids: Ids, job: Job) -> None:
        """Report how far a document is computed."""
        blend_progress = job.first.sample.blend_progress
        if blend_progress is not None and blend_progress.begun:
            self._report(ids, max(self._done[ids], len(ids) - max(1, blend_progress.left)))

    def finished(self, ids: Ids) -> None:
        """A document is stored."""
        self._report(ids, len(ids))

    def results(self) -> list[StoredDocument]:
        """The state of each document; of equal ones only the first was computed."""
        seen: set[Ids] = set(self._found)
        made = []
        for ids in self._documents:
            made.append(StoredDocument(self._ids[ids], len(ids), ids in seen))
            seen.add(ids)
        return made

    def _report(self, ids: Ids, tokens: int) -> None:
        self._done[ids] = tokens
        done = sum(self._done.values())
        if self._on_progress is not None and done != self._reported:
            self._reported = done
            self._on_progress(done, sum(map(len, self._unique)))

    def _read(self, index: int, text: Prompt) -> Ids:
        return tuple(self._model.documents.ids_alone(f"documents.{index}", text))
