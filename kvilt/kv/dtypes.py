"""The dtypes that KV may have, by the names of `config.KV_DTYPES`, which is the one list of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from ..config import KV_DTYPES

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: getattr(torch, name) for name in KV_DTYPES})
