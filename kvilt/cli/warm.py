"""`kvilt warm`: text files computed once and stored, for questions of other processes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError, ParamError, Unsupported
from ..llm import LLM, StoredDocument, load
from ..llm.warmup import AT_ONCE
from ..store.counters import DROPPED, EVICTED
from ..store.layer import layer_bytes
from ..store.store import Store
from .progress import bars, tracked
from .run import ADAPTER
from .store import behind, check, opened, outlives
from .texts import TextFile, read_documents


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be warmed, and how it is told."""

    files: Sequence[str]
    separator: str | None = None  # a line that stands between documents
    key_file: str | None = None  # for whose requests
    lora: str = ""  # the folder of an adapter
    lora_scale: float = 1.0
    json: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """A file that fits the model, as tokens."""

    file: TextFile
    ids: list[int]


@dataclass(slots=True)
class Tally:
    """What became of the files."""

    done: list[tuple[TextFile, StoredDocument]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # why, by name
    lost: dict[str, int] = field(default_factory=dict)  # records that a tier did not take, by tier and reason
    evicted: dict[str, int] = field(default_factory=dict)  # records that left a tier for them
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failed and not self.lost


def warm(ask: Ask, model: str, store: dict[str, Any], config: dict[str, Any]) -> bool:
    """Compute and store files; False if something could not be."""
    check(store)
    if not outlives(store):
        raise ParamError("store", "documents are kept for others to find; give --store PATH or --store-redis URL")
    _check_folder(store["store"])
    tenant, tally = _tenant(ask.key_file), Tally()
    files = list(_read(ask, tally))  # before the model: files that cannot be read should not cost a load
    if not files:
        _tell(ask, tally)
        return False
    with opened(store, memory=False) as kept:
        assert kept is not None
        with bars() as shown:
            llm = load(model, on_fetch=shown.fetching, store=kept, behind=behind(store), **config)
        with llm:
            own = {"tenant": tenant, "lora_scale": ask.lora_scale}
            if ask.lora:
                llm.load_lora(ask.lora, ADAPTER)
                own["lora"] = ADAPTER
            try:
                _warm(llm, kept, list(_fitting(llm, files, tally)), own, tally)
            finally:  # what an interrupt leaves is stored, and worth telling
                kept.flush()
                tally.lost = _counted(kept, DROPPED.name)
                tally.evicted = _counted(kept, EVICTED.name)
                _tell(ask, tally)
    return tally.ok


def _read(ask: Ask, tally: Tally) -> Iterator[TextFile]:
    for path in ask.files:
        try:
            yield from read_documents(path, ask.separator)
        except InputError as error:
            _fail(tally, path, str(error))


def _check_folder(folder: str | None) -> None:
    """Raise where nothing could be kept: then nothing should be computed, and no model loaded."""
    if folder is None:
        return
    path = Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ParamError("store", f"{folder!r} cannot be made: {error.strerror}; name another folder") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ParamError("store", f"{folder!r} cannot be written to; name another folder")


def _fitting(llm: LLM, files: Sequence[TextFile], tally: Tally) -> Iterator[Document]:
    for one in files:
        try:
            ids = llm.documents.ids_alone(one.name, one.text)
        except InputError as error:
            _fail(tally, one.name, str(error))
        else:
            yield Document(one, ids)


def _fail(tally: Tally, name: str, why: str) -> None:
    tally.failed[name] = why
    print(f"kvilt: {why}", file=sys.stderr)


def _groups(documents: Sequence[Document], most_tokens: int) -> Iterator[list[Document]]:
    """A few at a time, with so many tokens at the most, but for one that has more by itself."""
    group: list[Document] = []
    for one in documents:
        if group and (len(group) == AT_ONCE or sum(len(each.ids) for each in (*group, one)) > most_tokens):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _warm(llm: LLM, store: Store, documents: Sequence[Document], own: dict[str, Any], tally: Tally) -> None:
    """All of them, no more between two waits than the store's queue holds."""
    started_s, before = time.perf_counter(), 0
    most_tokens = store.limits.queue_bytes // sum(layer_bytes(form, 1) for form in llm.documents.chunks.form)
    with tracked("warming", sum(len(one.ids) for one in documents)) as show:
        for some in _groups(documents, most_tokens):

            def note(done: int, _total: int, before: int = before) -> None:
                show(before + done, f"tokens, {(before + done) / (time.perf_counter() - started_s):.0f} a second")

            results = llm.warm([one.ids for one in some], on_progress=note, **own)
            store.flush()
            tally.done += zip([one.file for one in some], results, strict=True)
            before += sum(one.tokens for one in results)
            tally.seconds = time.perf_counter() - started_s


def _counted(store: Store, name: str) -> dict[str, int]:
    """What a store counted, by tier and reason."""
    series = store.metrics.snapshot()[name]["series"]
    return {": ".join(one["labels"].values()): int(one["value"]) for one in series if one["value"]}


def _tell(ask: Ask, tally: Tally) -> None:
    found = [one.tokens for _, one in tally.done if one.found]
    computed = [one.tokens for _, one in tally.done if not one.found]
    if ask.json:
        print(json.dumps(_as_json(tally), ensure_ascii=False))
        return
    for document, one in tally.done:
        print(f"{'found' if one.found else 'computed':<8} {one.tokens:>7,} tokens  {document.name}")
    for why, count in tally.lost.items():
        print(f"kvilt: {_some(count)} not taken by the store ({why})", file=sys.stderr)
    for tier, count in tally.evicted.items():  # older ones, or, where the budget is small, the first of these
        print(f"kvilt: {_some(count)} removed from the {tier} tier to make room; give it more", file=sys.stderr)
    speed = f" ({sum(computed) / tally.seconds:.0f} tok/s)" if computed and tally.seconds else ""
    said = [f"{len(computed)} computed, {sum(computed):,} tokens{speed}", f"{len(found)} found already"]
    if tally.failed:
        said.append(f"{len(tally.failed)} failed")
    print(" · ".join(said), file=sys.stderr)


def _some(count: int) -> str:
    return "1 document was" if count == 1 else f"{count} documents were"


def _as_json(tally: Tally) -> dict[str, Any]:
    documents = [
        {"name": document.name, "id": one.id, "tokens": one.tokens, "found": one.found} for document, one in tally.done
    ]
    stored = {"not_stored": tally.lost, "evicted": tally.evicted}
    return {"documents": documents, "failed": tally.failed, **stored, "seconds": tally.seconds}


def _tenant(key_file: str | None) -> str:
    """For whose requests: a server finds documents by the key they were stored for."""
    if key_file is None:
        return ""
    try:
        from ..server.auth import tenant_of_key
    except ImportError as error:
        raise Unsupported(f"keys are a server's; it needs {error.name}: pip install 'kvilt[server]'") from None
    from .serve import read_keys

    keys = read_keys(key_file)
    if len(keys) != 1:
        raise ParamError("api_key_file", f"{key_file!r} holds {len(keys)} keys; warm for one at a time")
    return tenant_of_key(keys[0])
