"""The models that were fetched to this machine: kvilt's own folder, and the cache of the Hugging Face hub.

Reads names, sizes and times of files. Knows no format, and asks no network.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import cache_home
from ..errors import ModelNotFound
from .hf import PREFIX
from .hub import MODELS


@dataclass(frozen=True, slots=True)
class DiskModel:
    """A model that a name stands for without fetching anything."""

    name: str  # as --model takes it
    path: Path
    nbytes: int
    modified_s: float
    files: tuple[Path, ...]  # all of its files; of the hub's cache both the links and what they lead to
    repository: Path | None = None  # the hub's folder, which is removed with its last model


def models_on_disk() -> list[DiskModel]:
    """All of them, by name."""
    return sorted([*_own_models(), *_hub_models()], key=lambda model: model.name)


def model_on_disk(name: str, models: Sequence[DiskModel] | None = None) -> DiskModel:
    """One of them; a path in kvilt's own folder names it too."""
    models = models_on_disk() if models is None else models
    for model in models:
        if name in (model.name, str(model.path)):
            return model
    known = ", ".join(model.name for model in models) or "none"
    raise ModelNotFound(f"no fetched model is called {name[:200]!r}; fetched are: {known}")


def remove_model(model: DiskModel) -> int:
    """Delete a model's files; returns how many bytes that freed."""
    for file in model.files:
        file.unlink(missing_ok=True)
    if model.repository is not None and not any(one.suffix in _WEIGHTS for one in model.repository.rglob("*")):
        shutil.rmtree(model.repository, ignore_errors=True)
    return model.nbytes


def _own_models() -> Iterable[DiskModel]:
    names = {known.file: known.name for known in MODELS.values()}
    with suppress(OSError):
        for path in sorted((cache_home() / "models").glob("*.gguf")):
            if path.name.startswith(".") or not path.is_file():
                continue  # of a fetch that goes on
            stat = path.stat()
            yield DiskModel(names.get(path.name, str(path)), path, stat.st_size, stat.st_mtime, (path,))


_WEIGHTS = (".gguf", ".safetensors")


def _hub_models() -> Iterable[DiskModel]:
    """Each GGUF file of the hub's cache is a model, and so are the safetensors of a repository together."""
    try:
        from huggingface_hub import constants, scan_cache_dir
    except ImportError:
        return
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except Exception:  # there is no cache yet; the library's errors differ between releases
        return
    for repository in repositories:
        if repository.repo_type == "model":
            yield from _repository_models(repository)


def _repository_models(repository: Any) -> Iterable[DiskModel]:
    by_model: dict[str, list[Any]] = defaultdict(list)
    for revision in repository.revisions:
        whole = any(file.file_name.endswith(".safetensors") for file in revision.files)
        for file in revision.files:
            inside = file.file_path.relative_to(revision.snapshot_path).as_posix()
            if inside.endswith(".gguf"):
                by_model[f"{PREFIX}{repository.repo_id}:{inside}"].append(file)
            elif whole:
                by_model[f"{PREFIX}{repository.repo_id}"].append(file)
    for name, files in by_model.items():
        blobs = {file.blob_path: file for file in files}
        yield DiskModel(
            name=name,
            path=files[0].file_path if name.count(":") > 1 else files[0].file_path.parent,
            nbytes=sum(file.size_on_disk for file in blobs.values()),
            modified_s=max(file.blob_last_modified for file in files),
            files=tuple(dict.fromkeys([*(file.file_path for file in files), *blobs])),
            repository=repository.repo_path,
        )
