"""What rank 0 asks of the other ranks."""

from __future__ import annotations

from enum import IntEnum, auto


class RankCommand(IntEnum):
    """The first number of a message. Those that are answered say so."""

    BUILD = auto()  # open the checkpoint and take this rank's part of it; answered with DONE or FAILED
    CONNECT = auto()  # meet the other ranks
    PAGES = auto()  # make pages
    STEP = auto()  # one forward, together with all other ranks
    EMBED = auto()  # embeddings of tokens, likewise
    COPY_PAGES = auto()
    READ_SLOTS = auto()  # answered with the KV of this rank's heads
    WRITE_SLOTS = auto()
    WRITE_KV = auto()  # keys that are rotated on the way, of one layer
    WRITE_STATES = auto()
    PUT_ADAPTER = auto()
    DROP_ADAPTER = auto()
    END = auto()
    DONE = auto()
    FAILED = auto()
