"""What is left of a page when a prefix index loses it, for a store that keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from ..ops.contract import HostCopy, KeysValues
from .prefix_keys import PrefixScope
from .row import Token


@dataclass(frozen=True, slots=True)
class EvictedPage:
    """A page that is about to be lost: the tokens up to its end, where it starts, and its KV by layer group.

    The KV may still be on its way to the host: its numbers may be read after `wait`.
    """

    scope: PrefixScope
    tokens: tuple[Token, ...]
    start: int
    kv: tuple[KeysValues | None, ...]
    copies: tuple[HostCopy, ...] = ()
    state: KeysValues | None = None  # the recurrent state at its end

    def wait(self) -> None:
        """The host waits until all of it is there."""
        for one in self.copies:
            one.wait()
