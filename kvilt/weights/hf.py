"""`hf:org/name[:file]`: models of the Hugging Face hub, through its own package, its own cache and its own settings.

HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, resume and locking are huggingface_hub's business. What is decided here
is which files are wanted: weights that can be read without running code, and nothing else.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import offline
from ..errors import KviltError, ModelNotFound
from .files import CONFIG, GENERATION, INDEX, part_name, plain_file_name, read_index
from .progress import FetchProgress

if TYPE_CHECKING:
    from types import ModuleType

PREFIX = "hf:"
_log = logging.getLogger(__name__)
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"{_WORD}/{_WORD}")
_BESIDE_WEIGHTS = (
    CONFIG,
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",  # how an embedding model pools
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
)
_SHOWN = 12


class _Ambiguous(ModelNotFound):
    """Several models match; the user must say which one."""


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model on the hub: its repository and, where it was named, one of its files."""

    repository: str
    file: str | None

    @classmethod
    def parse(cls, text: str) -> HubReference:
        """Read `hf:org/name[:file]`; nothing that could leave the repository's folder is accepted."""
        repository, colon, file = text.removeprefix(PREFIX).partition(":")
        sound = _REPOSITORY.fullmatch(repository) and not re.search(r"\.\.|--|\.git$", repository)
        if not text.startswith(PREFIX) or not sound:
            raise ModelNotFound(f"{text[:200]!r} names no model of the hub; write hf:org/name or hf:org/name:file.gguf")
        if colon and not _plain_path(file):
            raise ModelNotFound(
                f"{file[:200]!r} is no GGUF file of a repository; name one as hf:{repository}:file.gguf, "
                f"or write hf:{repository} for its safetensors"
            )
        return cls(repository, file if colon else None)


def fetch(text: str, progress: FetchProgress | None = None) -> Path:
    """Make sure that a model of the hub is in the hub's cache, and return the path to open."""
    reference = HubReference.parse(text)
    hub = _hub()
    if offline() or hub.constants.HF_HUB_OFFLINE:
        return _from_cache(hub, reference, _forbidden(reference))
    try:
        return _from_hub(hub, reference, progress)
    except KviltError:
        raise
    except Exception as error:  # the library under the hub's package, and so its errors, change between releases
        reason = _reason(hub, reference, error)
        path = _from_cache(hub, reference, reason)
        _log.warning("%s; the copy in the cache is used", reason)
        return path


def _hub() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise ModelNotFound('models of the hub need huggingface_hub; run: pip install "kvilt[hub]"') from error
    return huggingface_hub


def _plain_path(file: str) -> bool:
    """Whether a file's name stays below the repository on every system."""
    steps = file.split("/")
    plain = all(step not in ("", ".", "..") and not step.endswith((" ", ".")) for step in steps)
    return plain and file.endswith(".gguf") and len(file) <= 1000 and re.search(r'[\\:*?"<>|\x00-\x1f]', file) is None


# Choosing files.


@dataclass(frozen=True, slots=True)
class _Choice:
    """The files to have, and which of them (or their folder, None) is to be opened."""

    files: tuple[str, ...]
    opened: str | None


def _choose(reference: HubReference, present: Sequence[str], index: Callable[[], Path]) -> _Choice:
    """What to fetch from a repository of these files; `index` yields the safetensors index when it is needed."""
    ggufs = [name for name in present if name.endswith(".gguf") and _plain_path(name)]
    if reference.file is not None:
        return _gguf(reference, reference.file, ggufs)
    shards = [name for name in present if plain_file_name(name)]
    if shards and CONFIG in present:
        return _safetensors(reference, present, shards, index)
    models = [name for name in ggufs if (part := part_name(name)) is None or part.number == 1]
    if len(models) == 1:
        return _gguf(reference, models[0], ggufs)
    if models:
        raise _Ambiguous(
            f"{reference.repository} holds several GGUF files; name one of them as "
            f"hf:{reference.repository}:file: {_some(models)}"
        )
    raise ModelNotFound(
        f"{reference.repository} holds neither {CONFIG} with safetensors nor a GGUF file; "
        "choose a repository that does (pickles are never read)"
    )


def _gguf(reference: HubReference, file: str, ggufs: Sequence[str]) -> _Choice:
    part = part_name(file)
    wanted = [file] if part is None else part.siblings()
    held = frozenset(ggufs)
    missing = [name for name in wanted if name not in held]
    if missing:
        raise ModelNotFound(
            f"{reference.repository} has no file {missing[0]!r}; its GGUF files are: {_some(ggufs) or 'none'}"
        )
    return _Choice(tuple(wanted), wanted[0])


def _safetensors(
    reference: HubReference, present: Sequence[str], shards: Sequence[str], index: Callable[[], Path]
) -> _Choice:
    beside = [name for name in _BESIDE_WEIGHTS if name in present]
    if INDEX in present:
        named = sorted(set(read_index(index()).values()))
        missing = [name for name in named if name not in shards]
        if missing:
            raise ModelNotFound(f"{reference.repository} names {missing[0]!r} in its index and does not hold it")
        return _Choice((*beside, INDEX, *named), None)
    whole = "model.safetensors" if "model.safetensors" in shards else shards[0]
    if whole != "model.safetensors" and len(shards) > 1:
        raise ModelNotFound(f"{reference.repository} holds {len(shards)} safetensors files without an index")
    return _Choice((*beside, whole), whole)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


# Fetching them.


def _from_hub(hub: ModuleType, reference: HubReference, progress: FetchProgress | None) -> Path:
    def snapshot(names: Sequence[str], told: FetchProgress | None) -> Path:
        patterns, bar = [glob.escape(name) for name in names], _bar_class(told)
        return Path(hub.snapshot_download(reference.repository, allow_patterns=patterns, tqdm_class=bar))

    siblings = hub.HfApi().model_info(reference.repository).siblings or []
    present = [sibling.rfilename for sibling in siblings]
    choice = _choose(reference, present, lambda: snapshot([INDEX], None) / INDEX)
    return _opened(reference, choice, snapshot(choice.files, progress))


def _from_cache(hub: ModuleType, reference: HubReference, reason: str) -> Path:
    """The model as an earlier fetch left it, if it left all of it; otherwise `reason` is why it is not to be had."""
    try:
        # No pattern matches: the folder is wanted, whatever it holds.
        folder = Path(hub.snapshot_download(reference.repository, local_files_only=True, allow_patterns=[]))
        present = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return _opened(reference, _choose(reference, present, lambda: folder / INDEX), folder)
    except _Ambiguous:
        raise
    except Exception as error:  # nothing there, or not all of it
        raise ModelNotFound(reason) from error


def _opened(reference: HubReference, choice: _Choice, folder: Path) -> Path:
    for name in choice.files:
        if not (folder / name).is_file():
            raise ModelNotFound(f"{name} of {reference.repository} did not arrive; fetch it again")
    return folder if choice.opened is None else folder / choice.opened


def _bar_class(progress: FetchProgress | None) -> type[Any]:
    """A bar for huggingface_hub that shows nothing itself and passes bytes on to `progress`."""
    from tqdm.auto import tqdm

    first: list[object] = []  # of several bars over the same bytes, one is told of

    class Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.n = kwargs.get("initial") or 0
            self.total = kwargs.get("total")
            if kwargs.get("unit") == "B" and not first:
                first.append(self)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if progress is not None and first and first[0] is self:
                progress("downloading", int(self.n), max(int(self.total or 0), int(self.n)))

    return Bar


# Saying what went wrong.


def _reason(hub: ModuleType, reference: HubReference, error: Exception) -> str:
    name = reference.repository
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, hub.errors.GatedRepoError):
        return f"{name} is gated; ask for access on its page at the hub, then set HF_TOKEN to a token that may read it"
    if status == 403:
        return f"the hub does not let you read {name}; set HF_TOKEN to a token that may"
    if isinstance(error, hub.errors.RepositoryNotFoundError) or status in (401, 404):
        return f"the hub has no model {name!r}, or it is private; check the name, or set HF_TOKEN if it is yours"
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return f"{name} cannot be fetched now ({said}); check the connection, HF_ENDPOINT and the room on the disk"


def _forbidden(reference: HubReference) -> str:
    what = f"{reference.file} of {reference.repository}" if reference.file else reference.repository
    return (
        f"{what} is not whole in the hub's cache, and KVILT_OFFLINE or HF_HUB_OFFLINE forbids fetching it; "
        "unset them once to fetch it, or pass the path of a model"
    )
