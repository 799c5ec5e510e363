"""Sessions over a tiny engine: turns of token prompts, a clock, and what each prompt says in a cold run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from kvilt.store.disk import Disk
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget

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
    """One process after the other: an engine with its handles and sessions, and a store if there is a folder for it."""

    executor: Executor
    config: EngineConfig = field(
        default_factory=lambda: EngineConfig(step_tokens=64, max_rows=8, handle_ttl_s=100.0, stored_prefix_tokens=32)
    )
    now: float = 0.0
    folder: Path | None = None

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        began = self.now  # a clock that counts from the start of a process says nothing to the next

        def clock() -> float:
            return self.now - began

        def calendar() -> float:
            return self.now

        past, model = PastPrompts(clock), self.executor.pool.identity().model
        limits = StoreLimits(close_s=60, lookup_s=60, layer_s=60)
        self.store = None if self.folder is None else Store(None, [Disk(self.folder, Budget(1 << 24))], limits=limits)
        notes = None if self.store is None else self.store.session_notes(model)
        noted = None if self.store is None else self.store.notes(model)
        self.handles = Handles(
            self.executor, self.config, clock=clock, notes=noted, calendar=calendar, on_expired=past.expire
        )
        reclaim = self.handles.evict_one
        self.engine = Engine(self.executor, self.config, reclaim=reclaim, past_prompts=past, store=self.store)
        self.sessions = Sessions(self.executor, self.handles, self.config, clock, past.expire, notes, calendar)
        text = self.exchange_text
        self.exchange = SessionExchange(self.executor, self.handles, self.sessions, text, self.config, clock)

    @staticmethod
    def exchange_text(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def restart(self) -> None:
        """A new process: no KV is left, and without a store no session."""
        self.close()
        self.executor.prefixes.clear()
        self.start()

    def close(self) -> None:
        self.engine.close()
        self.sessions.close()
        self.handles.close()
        if self.store is not None:
            self.store.close()

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
