"""A request and its session: the KV that its prompt begins with, and the turn that its answer becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..batch import Adapter
from ..engine.admission import BorrowedKV
from ..engine.sessions.session import MovedLoan, SessionLoan, SessionOptions
from ..engine.sessions.sessions import Sessions, check_options
from ..errors import ParamError
from ..kv.cache import KVCache
from ..sampling.params import SamplingParams
from .options import RequestOptions
from .prepared_prompt import PreparedPrompt
from .replace import moved_fields

REPAIR = 0.075  # of text that stands behind what a client has cut out


@dataclass(slots=True)
class SessionUse:
    """What one request does with its session."""

    sessions: Sessions
    options: SessionOptions
    tenant: str
    keeps_kv: bool  # the caller wants the KV too
    loan: SessionLoan | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # of the request, where text was cut out

    @classmethod
    def of(cls, sessions: Sessions, options: RequestOptions) -> SessionUse | None:
        """The session of a request; None where it names none."""
        session = options.session_options
        if session is None:
            return None
        check_options(session)
        if isinstance(options.kv, KVCache):
            raise ParamError("session", "cannot stand beside a KVCache; a session finds its KV by itself")
        return cls(sessions, session, options.tenant, options.keep_kv)

    def borrow(self, prompt: PreparedPrompt, params: SamplingParams, adapter: Adapter) -> BorrowedKV | None:
        """The KV of the session that the prompt begins with; documents, embedding rows and scored prompts use none."""
        if prompt.loan is not None:
            return prompt.borrowed
        if prompt.blend_fields or prompt.embeds is not None or params.prompt_logprobs is not None:
            return None
        self.loan = self.sessions.lend(self.tenant, self.options, prompt.ids, adapter)
        reached = 0 if self.loan is None else self.loan.kv.row(0).resumes_at
        moved = self.sessions.moved(self.tenant, self.options, prompt.ids, adapter, reached)
        if moved is not None:
            return self._move(moved)
        return None if self.loan is None else BorrowedKV(self.loan.kv, exact=self.loan.shared)

    def _move(self, moved: MovedLoan) -> BorrowedKV | None:
        """Begin with what both texts begin with; the fields of the request say what stands elsewhere."""
        if self.loan is not None:
            self.loan.kv.close()
        self.loan = None
        with moved.kv as kv:
            self.fields = moved_fields(kv, moved.spans, REPAIR)
            begins = kv.fork_to(moved.prefix) if moved.prefix else None
            return None if begins is None else BorrowedKV(begins)

    def keep(self, kv: KVCache | None) -> KVCache | None:
        """Make the KV of an answer a turn; returns what is left for the caller."""
        if kv is None:
            return None
        own = kv.fork() if self.keeps_kv else kv
        self.sessions.keep(self.tenant, self.options, own, self.loan)
        return kv if self.keeps_kv else None
