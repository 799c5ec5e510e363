"""What a router is asked, what it assumes, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ParamError
from .prefix_hash import Tokens


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What a router assumes until it has measured, and how long it remembers."""

    block_tokens: int = 32
    prefill_tokens_per_s: float = 2000.0  # of a replica that has not answered yet
    decode_tokens: float = 8.0  # work that a request in decoding puts before a prompt, in tokens of prefill
    transfer_bytes_per_s: float = 2e8  # of KV between replicas, until it was measured
    transfer_latency_s: float = 0.02  # of one transfer, however small
    transfer_again_s: float = 30.0  # after so long without a transfer, the measured speed is not believed any more
    interference: float = 0.05  # part by which computing a prompt counts more for each request that decodes beside it
    work: float = 3.0  # part of the seconds of computing that is added to a score: requests behind it wait for them
    tie: float = 0.05  # scores that differ by less than this part are equal, and the load decides
    expected_s: float = 10.0  # how long a request counts as having left its prompt's KV, before an event says so
    doors: int = 1  # with several, a name without a home gets the same one from all of them
    most_named: int = 1 << 20  # handles, sessions and documents

    def __post_init__(self) -> None:
        if self.prefill_tokens_per_s <= 0 or self.expected_s <= 0 or self.block_tokens < 1:
            raise ParamError("router", "speeds, times and block sizes are above 0")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What decides where a request goes."""

    tokens: Tokens = ()
    adapter: str | None = None
    salt: str = ""
    names: tuple[str, ...] = ()  # handles and sessions that it begins with: their home serves it while it lives
    documents: tuple[tuple[str, int], ...] = ()  # hash and number of tokens of each


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way through a replica; the caller reports its first token and its end."""

    replica: str
    slot: int
    tokens: int  # to compute
    cached: int  # of the prompt, expected to be there
    ahead: float  # tokens of work before it
    began_s: float
    expected_s: float  # to its first token
    source: str | None = None  # the replica whose KV it takes first
    moved: int = 0  # tokens of it
    prefill: Ticket | None = None  # the source computes them first
    reach: int = 0  # tokens of the prompt that are there when that is done
    started: bool = False
    ended: bool = False
