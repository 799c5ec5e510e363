"""The table of backends, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from ..errors import Unsupported
from .contract import Ops
from .reference import ReferenceOps

# In order of preference: `auto` takes the first one that this machine can run.
BACKENDS: MappingProxyType[str, Callable[[], Ops]] = MappingProxyType({"reference": ReferenceOps})


def select(backend: str = "auto") -> Ops:
    """The backend of that name, or the best one for this machine."""
    name = next(iter(BACKENDS)) if backend == "auto" else backend
    if name not in BACKENDS:
        raise Unsupported(f"there is no backend {backend!r}; this build has {', '.join(BACKENDS)}")
    return BACKENDS[name]()
