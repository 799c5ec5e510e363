"""Opens the KV store that command-line options describe. Refuses secrets on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..config import available_memory_bytes, env_store_redis, parse_bytes
from ..errors import ParamError
from ..store.codec_registry import CODECS

if TYPE_CHECKING:
    from ..store.store import Store
    from ..store.tier import Tier

_DISK, _REDIS = "20G", "8G"
_MEMORY_SHARE = 8  # the memory tier gets 1/8 of the free memory
_SCHEMES = ("redis", "rediss", "unix")


@contextmanager
def open_store(options: dict[str, Any], memory: bool = True) -> Iterator[Store | None]:
    """A store, closed at the end; None without options: the model then keeps documents in its own memory.

    `memory=False` leaves the memory tier out, so that only tiers remain that outlive the command.
    """
    check_store_options(options)
    redis = _redis_url(options)
    if options["store"] is None and redis is None and options["store_memory"] is None:
        yield None
        return
    from ..store.store import Store

    codec, secret = options["store_codec"], _secret(options["store_secret_file"])
    lossy = CODECS[codec].lossy
    budget = _memory(options["store_memory"]) if memory else None
    with Store(
        budget,
        _tiers(options, redis),
        codec="raw" if lossy else codec,
        chunk_codec=codec,
        secret=secret,
    ) as store:
        yield store


def context_prefix(options: dict[str, Any]) -> list[dict[str, str]] | None:
    """The system text that documents are computed after, as messages."""
    text = options["context_prefix"]
    return None if text is None else [{"role": "system", "content": text}]


def check_store_options(options: dict[str, Any]) -> None:
    """Refuse wrong options before anything is loaded."""
    _redis_url(options)
    _secret(options["store_secret_file"])
    for name in ("store_memory", "store_disk", "store_redis_memory"):
        if options[name] is not None:
            parse_bytes(options[name], name)
    if options["store_codec"] not in CODECS:
        raise ParamError("store_codec", f"must be one of {', '.join(CODECS)}, not {options['store_codec']!r}")
    if options["store_disk"] is not None and options["store"] is None:
        raise ParamError("store_disk", "limits the folder of --store; name that too")
    if options["store_redis_memory"] is not None and _redis_url(options) is None:
        raise ParamError("store_redis_memory", "limits what is kept at --store-redis; name that too")
    if options["store"] == "":  # likely an unset variable of the shell
        raise ParamError("store", "is empty; name a folder")
    folder = None if options["store"] is None else Path(options["store"]).expanduser()
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ParamError("store", f"{options['store']!r} is a file; name a folder")


def is_persistent(options: dict[str, Any]) -> bool:
    """Whether stored records outlive the command."""
    return options["store"] is not None or _redis_url(options) is not None


def _tiers(options: dict[str, Any], redis: str | None) -> list[Tier]:
    from ..store.tier import Budget

    tiers: list[Tier] = []
    if options["store"] is not None:
        from ..store.disk import Disk

        tiers.append(Disk(options["store"], Budget(parse_bytes(options["store_disk"] or _DISK, "store_disk"))))
    if redis is not None:
        from ..store.redis import Redis

        room = parse_bytes(options["store_redis_memory"] or _REDIS, "store_redis_memory")
        tiers.append(Redis(redis, Budget(room)))
    return tiers


def _memory(size: str | None) -> Any:
    from ..store.tier import Budget

    given = available_memory_bytes() // _MEMORY_SHARE if size is None else parse_bytes(size, "store_memory")
    return Budget(given)


def _redis_url(options: dict[str, Any]) -> str | None:
    """The URL of the shared tier. The list of processes shows options, so a password must come from the environment."""
    given: str | None = options["store_redis"]
    url = given or env_store_redis()
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        secret = parts.password
        _ = parts.port
    except ValueError:
        raise ParamError("store_redis", "cannot be read; write it like redis://host:6379/0") from None
    if parts.scheme not in _SCHEMES:
        raise ParamError("store_redis", f"begins with {' or '.join(f'{one}://' for one in _SCHEMES)}")
    if given is not None and (secret or "password=" in parts.query):
        raise ParamError("store_redis", "has a password, which others could see; put the URL into KVILT_STORE_REDIS")
    return url


def _secret(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ParamError("store_secret_file", f"{path!r} cannot be read: {error.strerror}") from None
    if len(secret) < 16:
        raise ParamError("store_secret_file", f"{path!r} has fewer than 16 bytes; write a longer secret into it")
    return secret
