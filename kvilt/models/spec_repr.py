"""How specs show themselves."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def spec_repr(spec: Any) -> str:
    """Like that of a dataclass, but fields with `repr=False` are there only where they have not their default.

    The identity of saved KV is made of it, so an option that a model does not use must not show.
    """
    shown = [one for one in fields(spec) if one.repr or getattr(spec, one.name) != one.default]
    return f"{type(spec).__name__}({', '.join(f'{one.name}={getattr(spec, one.name)!r}' for one in shown)})"
