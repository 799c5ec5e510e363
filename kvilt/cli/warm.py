"""`kvilt warm`: computes the KV of text files once and stores it for other processes."""

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
from .store import check_store_options, context_prefix, is_persistent, open_store
from .texts import TextFile, read_documents


@dataclass(frozen=True, slots=True)
class WarmRequest:
    """The files to compute and store, and how the result is shown."""

    files: Sequence[str]
    separator: str | None = None  # a line between two documents of a file
    key_file: str | None = None  # with the API key that the documents are stored for
    lora: str = ""  # the folder of an adapter
    lora_scale: float = 1.0
    json: bool = False


@dataclass(frozen=True, slots=True)
class WarmDocument:
    """A file that fits the model, as tokens."""

    file: TextFile
    ids: list[int]


@dataclass(slots=True)
class WarmCounts:
    """Computed, failed and lost files."""

    done: list[tuple[TextFile, StoredDocument]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # reason by name
    lost: dict[str, int] = field(default_factory=dict)  # records that a tier did not take, by tier and reason
    evicted: dict[str, int] = field(default_factory=dict)  # records that a tier evicted to make room
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failed and not self.lost


def warm(request: WarmRequest, model: str, store: dict[str, Any], config: dict[str, Any]) -> bool:
    """Compute and store files; False if one of them failed."""
    check_store_options(store)
    if not is_persistent(store):
        raise ParamError(
            "store", "is missing: documents are stored for other processes; give --store PATH or --store-redis URL"
        )
    _check_folder(store["store"])
    tenant, counts = _tenant(request.key_file), WarmCounts()
    files = list(_read(request, counts))  # before the model: files that cannot be read should not cost a load
    if not files:
        _print_summary(request, counts)
        return False
    with open_store(store, memory=False) as kept:
        assert kept is not None
        with bars() as shown:
            llm = load(model, on_fetch=shown.fetching, store=kept, context_prefix=context_prefix(store), **config)
        with llm:
            own = {"tenant": tenant, "lora_scale": request.lora_scale}
            if request.lora:
                llm.load_lora(request.lora, ADAPTER)
                own["lora"] = ADAPTER
            try:
                _warm(llm, kept, list(_fitting(llm, files, counts)), own, counts)
            finally:  # after an interrupt, what was computed is stored and shown too
                kept.flush()
                counts.lost = _counted(kept, DROPPED.name)
                counts.evicted = _counted(kept, EVICTED.name)
                _print_summary(request, counts)
    return counts.ok


def _read(request: WarmRequest, counts: WarmCounts) -> Iterator[TextFile]:
    for path in request.files:
        try:
            yield from read_documents(path, request.separator)
        except InputError as error:
            _fail(counts, path, str(error))


def _check_folder(folder: str | None) -> None:
    """Refuse a folder that cannot be written to, before a model is loaded."""
    if folder is None:
        return
    path = Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ParamError("store", f"{folder!r} cannot be made: {error.strerror}; name another folder") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ParamError("store", f"{folder!r} cannot be written to; name another folder")


def _fitting(llm: LLM, files: Sequence[TextFile], counts: WarmCounts) -> Iterator[WarmDocument]:
    for one in files:
        try:
            ids = llm.documents.ids_alone(one.name, one.text)
        except InputError as error:
            _fail(counts, one.name, str(error))
        else:
            yield WarmDocument(one, ids)


def _fail(counts: WarmCounts, name: str, why: str) -> None:
    counts.failed[name] = why
    print(f"kvilt: {why}", file=sys.stderr)


def _groups(documents: Sequence[WarmDocument], most_tokens: int) -> Iterator[list[WarmDocument]]:
    """Groups of a few documents with at most `most_tokens` tokens; a longer document is a group of its own."""
    group: list[WarmDocument] = []
    for one in documents:
        if group and (len(group) == AT_ONCE or sum(len(each.ids) for each in (*group, one)) > most_tokens):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _warm(llm: LLM, store: Store, documents: Sequence[WarmDocument], own: dict[str, Any], counts: WarmCounts) -> None:
    """Compute all documents; the store is flushed before its queue is full."""
    started_s, before = time.perf_counter(), 0
    most_tokens = store.limits.queue_bytes // sum(layer_bytes(form, 1) for form in llm.documents.chunks.form)
    with tracked("warming", sum(len(one.ids) for one in documents)) as show:
        for some in _groups(documents, most_tokens):

            def note(done: int, _total: int, before: int = before) -> None:
                show(before + done, f"tokens, {(before + done) / (time.perf_counter() - started_s):.0f} a second")

            results = llm.warm([one.ids for one in some], on_progress=note, **own)
            store.flush()
            counts.done += zip([one.file for one in some], results, strict=True)
            before += sum(one.tokens for one in results)
            counts.seconds = time.perf_counter() - started_s


def _counted(store: Store, name: str) -> dict[str, int]:
    """What a store counted, by tier and reason."""
    series = store.metrics.snapshot()[name]["series"]
    return {": ".join(one["labels"].values()): int(one["value"]) for one in series if one["value"]}


def _print_summary(request: WarmRequest, counts: WarmCounts) -> None:
    found = [one.tokens for _, one in counts.done if one.found]
    computed = [one.tokens for _, one in counts.done if not one.found]
    if request.json:
        print(json.dumps(_as_json(counts), ensure_ascii=False))
        return
    for document, one in counts.done:
        print(f"{'found' if one.found else 'computed':<8} {one.tokens:>7,} tokens  {document.name}")
    for why, count in counts.lost.items():
        print(f"kvilt: {_documents_were(count)} not taken by the store ({why})", file=sys.stderr)
    for tier, count in counts.evicted.items():  # older records, or with a small budget the first of these
        print(
            f"kvilt: {_documents_were(count)} removed from the {tier} tier to make room; give it more", file=sys.stderr
        )
    speed = f" ({sum(computed) / counts.seconds:.0f} tok/s)" if computed and counts.seconds else ""
    said = [f"{len(computed)} computed, {sum(computed):,} tokens{speed}", f"{len(found)} found already"]
    if counts.failed:
        said.append(f"{len(counts.failed)} failed")
    print(" · ".join(said), file=sys.stderr)


def _documents_were(count: int) -> str:
    return "1 document was" if count == 1 else f"{count} documents were"


def _as_json(counts: WarmCounts) -> dict[str, Any]:
    documents = [
        {"name": document.name, "id": one.id, "tokens": one.tokens, "found": one.found} for document, one in counts.done
    ]
    stored = {"not_stored": counts.lost, "evicted": counts.evicted}
    return {"documents": documents, "failed": counts.failed, **stored, "seconds": counts.seconds}


def _tenant(key_file: str | None) -> str:
    """The tenant of the key in a file: a server finds documents by the key that they were stored for."""
    if key_file is None:
        return ""
    try:
        from ..server.auth import tenant_of_key
    except ImportError as error:
        raise Unsupported(
            f"API keys belong to the server, which needs {error.name}: pip install 'kvilt[server]'"
        ) from None
    from .keys import read_keys

    keys = read_keys(key_file)
    if len(keys) != 1:
        raise ParamError("api_key_file", f"{key_file!r} holds {len(keys)} keys; warm for one at a time")
    return tenant_of_key(keys[0])
