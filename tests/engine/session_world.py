"""Sessions over a tiny engine: turns of token prompts, a clock, and what each prompt says in a cold run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from small import Ear

from kvilt.batch import Base
from kvilt.config import EngineConfig
from kvilt.engine.admission import BorrowedKV
from kvilt.engine.engine import Engine
from kvilt.engine.handles.handles import Handles
from kvilt.engine.misses.past_prompts import PastPrompts
from kvilt.engine.request import Request
from kvilt.engine.sessions.exchange import SessionExchange
from kvilt.engine.sessions.session import SessionOptions
from kvilt.engine.sessions.sessions import Sessions
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


@dataclass(frozen=True)
class Said:
    """The answer to a prompt, and how many of the prompt's tokens were computed."""

    tokens: list[int]
    computed: int
    reused: int
    reason: str | None


@dataclass
class World:
    """One process: an engine with its handles and sessions."""

    executor: Executor
    config: EngineConfig = field(default_factory=lambda: EngineConfig(step_tokens=64, max_rows=8, handle_ttl_s=100.0))
    now: float = 0.0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        past, clock = PastPrompts(lambda: self.now), lambda: self.now
        self.handles = Handles(self.executor, self.config, clock=clock, on_expired=past.expire)
        self.engine = Engine(self.executor, self.config, reclaim=self.handles.evict_one, past_prompts=past)
        self.sessions = Sessions(self.executor, self.handles, self.config, clock, past.expire)
        text = self.exchange_text
        self.exchange = SessionExchange(self.executor, self.handles, self.sessions, text, self.config, clock)

    @staticmethod
    def exchange_text(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def restart(self) -> None:
        """A new process: no KV and no session is left."""
        self.close()
        self.executor.prefixes.clear()
        self.start()

    def close(self) -> None:
        self.sessions.close()
        self.handles.close()

    def ask(self, prompt: Sequence[int], session: SessionOptions | str, tenant: str = "") -> Said:
        """One turn."""
        options = SessionOptions(session) if isinstance(session, str) else session
        loan = self.sessions.lend(tenant, options, prompt, Base())
        ear = Ear()
        request = Request(list(prompt), GREEDY, tenant=tenant, keep_kv=True, session=options.name)
        self._run(request, ear, None if loan is None else BorrowedKV(loan.kv, exact=loan.shared))
        end = ear.ends[0]
        assert end is not None and end.error is None and end.kv is not None
        self.sessions.keep(tenant, options, end.kv, loan)
        return Said(ear.tokens[0], end.computed, end.cached, None if end.miss is None else end.miss.reason)

    def cold(self, prompt: Sequence[int]) -> list[int]:
        """What the prompt says where nothing is reused."""
        ear = Ear()
        self._run(Request(list(prompt), GREEDY, reuse=False), ear, None)
        return ear.tokens[0]

    def _run(self, request: Request, ear: Ear, borrowed: BorrowedKV | None) -> None:
        self.engine.add(self.engine.prepare(request, ear, borrowed))
        while ear.ends[0] is None:
            self.engine.step()
