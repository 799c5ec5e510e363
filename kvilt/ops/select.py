"""The table of backends, and the choice among them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import MappingProxyType

from ..errors import Unsupported
from .contract import Ops
from .native.backend import NativeOps
from .reference import ReferenceOps

_log = logging.getLogger(__name__)


def _native(isa: str, threads: int | None) -> Ops:
    return NativeOps(threads, isa)


# In order of preference: `auto` takes the first one that this machine can run, in its best instruction set.
BACKENDS: MappingProxyType[str, Callable[[int | None], Ops]] = MappingProxyType(
    {"native": NativeOps, "reference": lambda _threads: ReferenceOps()}
)
# Native kernels of one instruction set, for bits (and KV) that several kinds of machine share.
NARROWED: MappingProxyType[str, Callable[[int | None], Ops]] = MappingProxyType(
    {f"native/{isa}": partial(_native, isa) for isa in ("avx512", "avx2", "generic")}
)


def select(backend: str = "auto", threads: int | None = None) -> Ops:
    """The backend of that name, or the best one for this machine; a better one that is missing is said aloud."""
    if backend != "auto":
        named = BACKENDS | NARROWED
        if backend not in named:
            raise Unsupported(f"there is no backend {backend!r}; this build has {', '.join(named)}")
        return named[backend](threads)
    declined = []
    for make in BACKENDS.values():
        try:
            ops = make(threads)
        except Unsupported as reason:
            declined.append(reason)
            continue
        for why in declined:
            _log.warning("%s; running on %s, several times slower", why, ops.name)
        return ops
    raise AssertionError("the reference runs everywhere")
