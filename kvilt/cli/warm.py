"""`kvilt warm`: text files computed once and stored, for questions of other processes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..errors import InputError, ParamError, Unsupported
from ..llm import LLM, Warmed, load
from ..store.store import Store
from .progress import bars, tracked
from .run import ADAPTER
from .store import check, opened, outlives
from .texts import TextFile, read_documents

_AT_ONCE = 16  # documents between two waits for the store, whose queue is bounded


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be warmed, and how it is told."""

    files: Sequence[str]
    separator: str | None = None  # a line that stands between documents
    key_file: str | None = None  # for whose requests
    lora: str = ""  # the folder of an adapter
    lora_scale: float = 1.0
    json: bool = False


@dataclass(slots=True)
class Tally:
    """What became of the files."""

    done: list[tuple[TextFile, Warmed]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # why, by name
    lost: dict[str, int] = field(default_factory=dict)  # records that a tier did not take, by tier and reason
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failed and not self.lost


def warm(ask: Ask, model: str, store: dict[str, Any], config: dict[str, Any]) -> bool:
    """Compute and store files; False if something could not be."""
    check(store)
    if not outlives(store):
        raise ParamError("store", "documents are kept for others to find; give --store PATH or --store-redis URL")
    tenant, tally = _tenant(ask.key_file), Tally()
    documents = list(_read(ask, tally))  # before the model: files that cannot be read should not cost a load
    if not documents:
        _tell(ask, tally)
        return False
    with opened(store, memory=False) as kept:
        assert kept is not None
        with bars() as shown:
            llm = load(model, on_fetch=shown.fetching, store=kept, **config)
        with llm:
            own = {"tenant": tenant, "lora_scale": ask.lora_scale}
            if ask.lora:
                llm.load_lora(ask.lora, ADAPTER)
                own["lora"] = ADAPTER
            try:
                _warm(llm, kept, [one for one in documents if _fits(llm, one, tally)], own, tally)
            finally:  # what an interrupt leaves is stored, and worth telling
                kept.flush()
                tally.lost = _lost(kept)
                _tell(ask, tally)
    return tally.ok


def _read(ask: Ask, tally: Tally) -> Iterator[TextFile]:
    for path in ask.files:
        try:
            yield from read_documents(path, ask.separator)
        except InputError as error:
            _fail(tally, path, str(error))


def _fits(llm: LLM, document: TextFile, tally: Tally) -> bool:
    try:
        llm.documents.check_alone(document.name, len(llm.documents.ids(document.text)))
    except InputError as error:
        _fail(tally, document.name, str(error))
        return False
    return True


def _fail(tally: Tally, name: str, why: str) -> None:
    tally.failed[name] = why
    print(f"kvilt: {why}", file=sys.stderr)


def _warm(llm: LLM, store: Store, documents: Sequence[TextFile], own: dict[str, Any], tally: Tally) -> None:
    """All of them, a few at a time, so that the store keeps up."""
    started_s = time.perf_counter()
    tokens = [len(llm.documents.ids(one.text)) for one in documents]
    left, before = iter(documents), 0
    with tracked("warming", sum(tokens)) as show:
        while some := list(islice(left, _AT_ONCE)):

            def note(done: int, _total: int, before: int = before) -> None:
                show(before + done, f"tokens, {(before + done) / (time.perf_counter() - started_s):.0f} a second")

            results = llm.warm([one.text for one in some], on_progress=note, **own)
            store.flush()
            tally.done += zip(some, results, strict=True)
            before += sum(one.tokens for one in results)
            tally.seconds = time.perf_counter() - started_s


def _lost(store: Store) -> dict[str, int]:
    """Records that did not reach a tier: then it was in vain, and whoever asked should know."""
    series = store.metrics.snapshot()["kvilt_store_dropped_total"]["series"]
    return {f"{one['labels']['tier']}: {one['labels']['reason']}": int(one["value"]) for one in series if one["value"]}


def _tell(ask: Ask, tally: Tally) -> None:
    found = [one.tokens for _, one in tally.done if one.found]
    computed = [one.tokens for _, one in tally.done if not one.found]
    if ask.json:
        print(json.dumps(_as_json(tally), ensure_ascii=False))
        return
    for document, one in tally.done:
        print(f"{'found' if one.found else 'computed':<8} {one.tokens:>7,} tokens  {document.name}")
    for why, count in tally.lost.items():
        print(f"kvilt: {count} documents were not taken by the store ({why})", file=sys.stderr)
    speed = f" ({sum(computed) / tally.seconds:.0f} tok/s)" if computed and tally.seconds else ""
    said = [f"{len(computed)} computed, {sum(computed):,} tokens{speed}", f"{len(found)} found already"]
    if tally.failed:
        said.append(f"{len(tally.failed)} failed")
    print(" · ".join(said), file=sys.stderr)


def _as_json(tally: Tally) -> dict[str, Any]:
    documents = [
        {"name": document.name, "id": one.id, "tokens": one.tokens, "found": one.found} for document, one in tally.done
    ]
    return {"documents": documents, "failed": tally.failed, "not_stored": tally.lost, "seconds": tally.seconds}


def _tenant(key_file: str | None) -> str:
    """For whose requests: a server finds documents by the key they were stored for."""
    if key_file is None:
        return ""
    try:
        from ..server.gate import tenant_of
    except ImportError as error:
        raise Unsupported(f"keys are a server's; it needs {error.name}: pip install 'kvilt[server]'") from None
    from .serve import read_keys

    keys = read_keys(key_file)
    if len(keys) != 1:
        raise ParamError("api_key_file", f"{key_file!r} holds {len(keys)} keys; warm for one at a time")
    return tenant_of(keys[0])
