"""Saved caches: their bytes from a file, and the rows in them if a pool could hold these.

Refuses to know what a caller does with KV that is refused.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ..errors import BlobError
from .codec import max_bytes, unpack
from .pool import PagePool
from .row import BASE, EXACT, RowImage


def read_file(pool: PagePool, path: str | os.PathLike[str], capacity: int) -> bytes:
    """The bytes of a saved cache, unless they are more than any cache of this pool could have."""
    data_bytes, most_bytes = Path(path).stat().st_size, max_bytes(pool.nbytes, pool.pages, capacity)
    if data_bytes > most_bytes:
        raise BlobError("size", f"{data_bytes} bytes are more than the KV memory holds; raise kv_memory")
    return Path(path).read_bytes()


def read_images(
    pool: PagePool,
    data: bytes,
    capacity: int,
    accept_numerics: bool = False,
    maker: str = BASE,
    origin: str = EXACT,
) -> list[RowImage]:
    """The rows of a blob, if they could be rows of this pool; a BlobError otherwise."""
    identity = replace(pool.identity(), adapter=maker, origin=origin)
    images = unpack(data, pool.layout, identity, capacity, accept_numerics)
    if any(token >= pool.token_limit for image in images for token in image.ids):
        raise BlobError("payload.tokens", f"a token id is past this model's vocabulary of {pool.token_limit}")
    return images
