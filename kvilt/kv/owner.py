"""Two names of a caller: the tenant, by which KV is found, and its owner, by which quotas and fair shares are counted.

A tenant `owner/part` is a part of its owner: it has KV of its own, but shares the owner's quotas.
Refuses to know keys and requests.
"""

from __future__ import annotations

_SEPARATOR = "/"


def owner_of(tenant: str) -> str:
    """The owner of a tenant: what stands before the first slash; a tenant without one owns itself."""
    return tenant.partition(_SEPARATOR)[0]


def part_of(tenant: str, part: str) -> str:
    """A tenant of the same owner, with KV of its own."""
    return f"{tenant}{_SEPARATOR}{part}"
