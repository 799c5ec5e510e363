"""A conversation as a value: its turns, their exact token ids, and the KV computed so far.

Generated ids are kept; they are never made again from text. This module does not know terminals.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import BlobError, InputError, TruncateError
from ..kv.cache import KVCache
from ..sampling.params import SamplingParams
from .chat_record import ChatRecord, ChatTurn, ids_of, kv_name, read_record, write_record
from .completion import Completion, Stream, TextPiece
from .facade import LLM


class Conversation:
    """Turns with one model. The cache always holds a prefix of the ids. Close it, or use it as a context manager."""

    def __init__(
        self,
        llm: LLM,
        system: str = "",
        turns: Sequence[ChatTurn] = (),
        kv: KVCache | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes ownership of `kv`. `template_kwargs` are variables of the chat template."""
        self.llm = llm
        self.system = system
        self.turns = tuple(turns)
        self.template_kwargs = dict(template_kwargs or {})
        self.last: Completion | None = None  # of the latest answer, without its KV
        self._kv = llm.executor.create_kv_cache() if kv is None else kv
        self._live: Stream | None = None

    # Contents.

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages, as a chat template takes them."""
        said = [(("user", turn.user), ("assistant", turn.assistant)) for turn in self.turns]
        system = [("system", self.system)] if self.system else []
        return [{"role": role, "content": text} for role, text in [*system, *(each for both in said for each in both)]]

    @property
    def ids(self) -> list[int]:
        """The exact token ids; generated ones as they were generated."""
        return ids_of(self.turns)

    @property
    def held(self) -> int:
        """The number of ids, from the first on, that the cache holds."""
        return self._kv.num_entries

    @property
    def missing(self) -> int:
        """Ids that the next answer must compute. Usually one: the last token of an answer was never an input."""
        return len(self.ids) - self.held

    @property
    def kv_bytes(self) -> int:
        """Memory of its KV pages, including pages shared with forks."""
        groups = self._kv.layout.groups
        return sum(len(pages) * group.shape.page_bytes for pages, group in zip(self._kv.pages(), groups, strict=True))

    # Answers.

    def say(self, text: str, params: SamplingParams | None = None) -> Generator[TextPiece, None, None]:
        """Generate the answer, reasoning first, piece by piece. Then there is a new turn, and `last` has the numbers.

        If the answer is stopped or the generator is closed early, the text so far is kept. A question without a single
        token of answer is dropped. An error leaves the conversation unchanged.
        """
        ids = self._prompt(text)
        self._rewind(ids[:-1])
        self._live = stream = self.llm.stream_answer(ids[self.held :], params, kv=self._kv, keep_kv=True)
        try:
            for piece in stream:  # noqa: UP028 (`yield from` would close the stream before it can be stopped)
                yield piece
        except GeneratorExit:
            stream.stop()
            self._keep(text, ids, stream.completion)
            raise
        finally:
            self._live = None
        self._keep(text, ids, stream.completion)

    def stop(self) -> None:
        """Stop the answer in progress and keep its text so far. Signal callbacks may call this twice."""
        stream, self._live = self._live, None
        if stream is not None:
            stream.stop()
            self.llm.executor.cancel()

    # Operations on the conversation; none of them computes anything.

    def undo(self) -> ChatTurn:
        """Remove the last turn. If a sliding window has dropped the pages before it, `missing` is the whole rest."""
        if not self.turns:
            raise InputError("there is nothing to undo")
        *before, last = self.turns
        self.turns = tuple(before)
        self._rewind(self.ids)
        return last

    def fork(self) -> Conversation:
        """A second conversation with the same turns; the KV pages are shared."""
        return Conversation(self.llm, self.system, self.turns, self._kv.fork(), self.template_kwargs)

    def clear(self) -> None:
        """Remove all turns; the system message stays."""
        self.turns = ()
        self._kv.truncate(0)

    def restart(self, system: str) -> None:
        """Remove all turns and set another system message."""
        self.clear()
        self.system = system

    def save(self, path: str | os.PathLike[str], label: str = "") -> int:
        """Write the conversation to `path` and its KV to a file beside it; returns the bytes of both files.

        `label` is the name of the model for messages.
        """
        if not self.turns:
            raise InputError("nothing has been said yet, so there is nothing to save")
        path = Path(path)
        identity = self.llm.executor.pool.identity()
        kv_path = path.with_name(kv_name(path, self.ids[: self.held]))
        before = _kv_of(path)
        self._kv.save(kv_path)
        # Before this line the old pair of files is complete, after it the new one.
        write_record(path, ChatRecord(identity.model, identity.numerics, label, self.system, self.turns, kv_path.name))
        if before is not None and before != kv_path:
            before.unlink(missing_ok=True)
        return path.stat().st_size + kv_path.stat().st_size

    @staticmethod
    def load(llm: LLM, path: str | os.PathLike[str]) -> LoadedConversation:
        """A saved conversation with its KV; BlobError if a file is damaged, of another model, or they do not match."""
        path = Path(path)
        record = read_record(path)
        identity = llm.executor.pool.identity()
        if record.model != identity.model:
            made = f"with {record.label!r}, which is" if record.label else "with"
            raise BlobError("model", f"this chat was made {made} another model; load that model first")
        if max(token for turn in record.turns for token in turn.ids) >= llm.executor.spec.vocab_size:
            raise BlobError("turns.ids", "a token id is past this model's vocabulary")
        kv = _open_kv(llm, path.with_name(record.kv))
        if kv.batch_size != 1 or kv.tokens() != ids_of(record.turns)[: kv.num_entries]:
            kv.close()
            raise BlobError("kv", "the KV file holds other tokens than this chat")
        conversation = Conversation(llm, record.system, record.turns, kv)
        return LoadedConversation(conversation, 0 if record.numerics == identity.numerics else conversation.held)

    def close(self) -> None:
        """Release the KV."""
        self._kv.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _prompt(self, text: str) -> list[int]:
        """The ids of the conversation with a new question."""
        messages = [*self.messages, {"role": "user", "content": text}]
        template, tokenizer = self.llm.chat_template, self.llm.tokenizer
        variables = template.options_read(self.template_kwargs)
        behind = template.encode_after(tokenizer, messages, **variables) if self.turns else None
        if behind is None:
            return template.encode(tokenizer, messages, **variables)
        ids = self.ids
        if ids[-1] in self.llm.stop_ids:
            ids.pop()  # the template ends the turn itself, with the same token or the one it prefers
        return ids + behind

    def _rewind(self, ids: Sequence[int]) -> None:
        """Truncate the cache to the longest prefix that it shares with `ids`."""
        try:
            self._kv.truncate(self._kv.shared_prefix(ids))
        except TruncateError:  # a sliding window has dropped that part: it is computed again when needed
            self._kv.truncate(0)

    def _keep(self, text: str, ids: list[int], done: Completion) -> None:
        """Add a finished answer."""
        assert done.kv is not None
        self.last = dataclasses.replace(done, kv=None)
        if not done.token_ids:
            done.kv.close()
            return
        kept = sum(1 for _ in takewhile(bool, map(eq, self.ids, ids)))
        self.turns += (ChatTurn(text, done.text, kept, (*ids[kept:], *done.token_ids)),)
        self._kv.close()
        self._kv = done.kv


@dataclass(frozen=True, slots=True)
class LoadedConversation:
    """A conversation from a file, and the number of tokens that were computed again because of other numerics."""

    conversation: Conversation
    computed: int


def _open_kv(llm: LLM, path: Path) -> KVCache:
    """A saved cache. KV of another layout (from a run with another kv_dtype) is a miss: the next answer computes it."""
    if not path.is_file() or path.is_symlink():
        raise BlobError("kv", f"the KV file {path.name} of this chat is not there")
    try:
        return llm.executor.open_kv_cache(path)
    except BlobError as error:
        if error.field != "layout":
            raise
    return llm.executor.create_kv_cache()


def _kv_of(path: Path) -> Path | None:
    """The KV file of the chat at `path`, if there is one."""
    try:
        return path.with_name(read_record(path).kv)
    except (InputError, BlobError):
        return None
