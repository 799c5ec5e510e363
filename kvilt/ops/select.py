"""The table of backends, and the choice among them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MappingProxyType

from ..errors import Unsupported
from .contract import Ops
from .native.backend import NativeOps
from .reference import ReferenceOps

_log = logging.getLogger(__name__)

# In order of preference: `auto` takes the first one that this machine can run.
BACKENDS: MappingProxyType[str, Callable[[int | None], Ops]] = MappingProxyType(
    {"native": NativeOps, "reference": lambda _threads: ReferenceOps()}
)


def select(backend: str = "auto", threads: int | None = None) -> Ops:
    """The backend of that name, or the best one for this machine; a better one that is missing is said aloud."""
    if backend != "auto":
        if backend not in BACKENDS:
            raise Unsupported(f"there is no backend {backend!r}; this build has {', '.join(BACKENDS)}")
        return BACKENDS[backend](threads)
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
