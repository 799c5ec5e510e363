"""The dtypes that KV may have: the one list of them, with what each keeps in pages.

A dtype is added here. Which of them a backend has kernels for, the backend says when pages are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ..errors import ParamError


@dataclass(frozen=True, slots=True)
class KVDtype:
    """The numbers that stand in pages, and whether scales stand beside them."""

    name: str  # in options, files and identities; it never changes
    storage: torch.dtype  # of keys in pages, and of values unless they are packed
    # The keys of each token and head have a float32 scale, which makes the largest of them this number, and so have
    # its values. None: there are no scales. Scales of more tokens or heads together would break law 5.
    scaled_to: float | None = None
    # Values have 4 bits and stand two to a byte (`packed_values.py`); a head has an even number of them then.
    packed_values: bool = False

    @property
    def scales(self) -> int:
        """Scales that a token has in each head, for its keys and again for its values."""
        return int(self.scaled_to is not None)

    @property
    def value_storage(self) -> torch.dtype:
        """What values stand in."""
        return torch.uint8 if self.packed_values else self.storage

    def value_width(self, dim: int) -> int:
        """Numbers of `value_storage` that the `dim` values of a head take."""
        return dim // 2 if self.packed_values else dim


FLOAT32 = KVDtype("float32", torch.float32)
FLOAT16 = KVDtype("float16", torch.float16)
BFLOAT16 = KVDtype("bfloat16", torch.bfloat16)
INT8 = KVDtype("int8", torch.int8, scaled_to=127.0)
FLOAT8 = KVDtype("float8_e4m3fn", torch.float8_e4m3fn, scaled_to=448.0)
K8V4 = KVDtype("k8v4", torch.int8, scaled_to=127.0, packed_values=True)  # keys as in int8

KV_DTYPES: Mapping[str, KVDtype] = MappingProxyType(
    {one.name: one for one in (FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8, K8V4)}
)


def kv_dtype_of(keys: torch.dtype, values: torch.dtype, scaled: bool) -> KVDtype | None:
    """The dtype of keys and values like these with or without scales; None where there is none."""
    kind = (keys, values, scaled)
    return next((one for one in KV_DTYPES.values() if (one.storage, one.value_storage, one.scales > 0) == kind), None)


def check_kv_dtype(name: str) -> None:
    """Refuse a name that is not registered, before anything is loaded."""
    if name not in ("auto", *KV_DTYPES):
        raise ParamError("kv_dtype", f"must be auto or one of {', '.join(KV_DTYPES)}, not {name!r}")
