"""The store's codecs by name: the one list of them. Importing it loads no codec and no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..errors import ParamError

if TYPE_CHECKING:
    from .codecs import Codec


@dataclass(frozen=True, slots=True)
class CodecEntry:
    """How a codec is loaded, and whether what it gives back is rounded."""

    load: Callable[[], Codec]
    lossy: bool = False


def _raw() -> Codec:
    from .codecs import Raw

    return Raw()


def _zstd() -> Codec:
    from .zstd import Zstd  # the only codec with a dependency

    return Zstd()


def _int8() -> Codec:
    from .codecs import Int8

    return Int8()


def _k8v4() -> Codec:
    from .codecs import K8V4

    return K8V4()


CODECS: Mapping[str, CodecEntry] = MappingProxyType(
    {
        "raw": CodecEntry(_raw),
        "zstd": CodecEntry(_zstd),
        "int8": CodecEntry(_int8, lossy=True),
        "k8v4": CodecEntry(_k8v4, lossy=True),
    }
)


def codec_named(name: str) -> Codec:
    """The codec of that name; Unsupported where what it needs is not installed."""
    if name not in CODECS:
        raise ParamError("codec", f"must be one of {', '.join(CODECS)}, not {name!r}")
    return CODECS[name].load()
