"""The text of a request as its tokens come: detokenizing, stop strings, repetition and the end.

Listens to the engine; refuses to know prompts and readers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..blend.report import BlendReport
from ..engine.event import DraftCounts, Ended, Event, PooledPrompt, Scored, TokenEvent
from ..engine.misses.miss import PrefixMiss
from ..sampling.params import SamplingParams
from ..sampling.repetition import RepetitionDetection, RepetitionDetector
from ..sampling.sampler import TokenLogprobs
from ..text.detokenizer import Detokenizer
from ..text.stops import StopChecker, StopStrings
from ..text.tokenizer import Tokenizer
from .chat_parsing import ChatParsing, text_pieces
from .completion import Completion, FinishReason, Miss, TextAround, TextPiece, Timing, Usage

if TYPE_CHECKING:
    from .session_use import SessionUse


@dataclass(frozen=True, slots=True)
class AnswerConfig:
    """What an answer must know of its request."""

    tokenizer: Tokenizer
    params: SamplingParams
    ends: frozenset[int]  # ids that end a sample
    prompt_tokens: int
    stops: StopStrings | None = None  # shared by all samples
    parsing: ChatParsing | None = None  # of a chat whose answer is parsed
    warnings: tuple[str, ...] = ()  # what of the request had no effect
    session: SessionUse | None = None  # that gets a turn for each sample


class SampleText:
    """One sample: its tokens, and the text that no later token can change."""

    __slots__ = (
        "_checker",
        "_detector",
        "_detokenizer",
        "_drafted",
        "_ends",
        "_markers",
        "_min_tokens",
        "_reader",
        "_shown",
        "ended",
        "logprobs",
        "looped",
        "stop_string",
        "text",
        "token_ids",
    )

    def __init__(self, config: AnswerConfig) -> None:
        params = config.params
        self._markers = config.parsing.markers if config.parsing else {}
        self._reader = config.parsing.reader() if config.parsing else None  # of pieces
        self._detokenizer = Detokenizer(config.tokenizer, at_start=False, shown=self._markers)
        self._checker = StopChecker(config.stops, params.include_stop_str_in_output) if config.stops else None
        detection = params.repetition_detection
        self._detector = RepetitionDetector(detection) if isinstance(detection, RepetitionDetection) else None
        self._ends = config.ends
        self._min_tokens = params.min_tokens
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.ended: Ended | None = None
        self.looped = False  # it ended because it repeats itself
        self.stop_string: str | None = None  # that ended it
        self._shown = 0
        self._drafted: list[tuple[int, int]] = []  # spans of the text from accepted drafts, not taken yet

    def add(self, event: TokenEvent) -> bool:
        """Add a token; True if the text ends with it: at a stop string, or because it repeats itself."""
        before = len(self.text)
        over = self._add(event) or self._is_looping(event.token)
        if event.drafted and before < len(self.text):
            self._drafted.append((before, len(self.text)))
        return over

    def _add(self, event: TokenEvent) -> bool:
        may_end = len(self.token_ids) >= self._min_tokens  # no stop is looked for before min_tokens
        self.token_ids.append(event.token)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.token in self._ends:
            self.text += self._markers.get(event.token, "")
            return False
        text = self._detokenizer.add(event.token)
        if self._checker is None or not may_end:
            self.text += text
            return False
        emitted = self._checker.add(text)
        self.text += emitted.text
        self.stop_string = emitted.stop
        return emitted.stopped

    def _is_looping(self, token: int) -> bool:
        found = self._detector is not None and self._detector.add(token)
        self.looped = found and len(self.token_ids) > self._min_tokens
        return self.looped

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sample ended; None while it runs, and where it failed."""
        if self.ended is None or self.ended.reason == "error":
            return None
        return "repetition" if self.looped and self.ended.reason == "stop" else self.ended.reason

    @property
    def fresh(self) -> bool:
        """Whether there is text that was not taken yet."""
        return self._shown < len(self.text)

    def take(self) -> str:
        """Text that was not taken yet."""
        new, self._shown = self.text[self._shown :], len(self.text)
        return new

    def pieces(self) -> list[TextPiece]:
        """Text that was not taken yet, in pieces; all of a piece comes from accepted drafts, or none of it."""
        cuts = [*self._drafted, (len(self.text), len(self.text))]
        found, at = [], self._shown
        for start, stop in cuts:
            found += [TextPiece(self.text[at:start]), TextPiece(self.text[start:stop], True)]
            at = stop
        self._drafted, self._shown = [], len(self.text)
        return self._parsed([piece for piece in found if piece])

    def _parsed(self, raw: list[TextPiece]) -> list[TextPiece]:
        """Pieces of text as reasoning and content."""
        if self._reader is None:
            return raw
        shown = [one for piece in raw for one in text_pieces(self._reader.feed(piece), piece.drafted)]
        if self.ended is not None:
            shown += text_pieces(self._reader.finish())
            self._reader = None  # there is no more text
        return shown

    def end(self, event: Ended) -> None:
        """End the text: what was held back is added, unless a stop string was found."""
        text = self._detokenizer.finish()
        self.text += text if self._checker is None else self._checker.add(text).text + self._checker.finish()
        self.ended = event


class Answer:
    """All samples of one request. The stepping thread writes it, the caller reads it."""

    def __init__(self, config: AnswerConfig) -> None:
        self.samples = [SampleText(config) for _ in range(config.params.n)]
        self.stopped = False  # the reader wants no more; may be set from anywhere
        self.error: BaseException | None = None  # why it failed, if it did
        self.embedding: tuple[float, ...] | None = None  # of the prompt, if the request asked for it
        self._config = config
        self._session = config.session
        self._miss: Miss | None = None
        self._started_s = time.perf_counter()
        self._first_token_s = self._total_s = 0.0
        self._left = config.params.n
        wants = config.params.prompt_logprobs is not None
        self._scored: list[TokenLogprobs | None] = [None] * config.prompt_tokens if wants else []
        self._abandoned = False

    def on_event(self, event: Event) -> bool:
        """Take an event of the engine; called in the thread that steps."""
        sample = self.samples[event.index]
        match event:
            case TokenEvent():
                self._first_token_s = self._first_token_s or time.perf_counter() - self._started_s
                return sample.add(event)
            case Ended():
                self._end(sample, event)
            case Scored(start=start, logprobs=logprobs):
                self._scored[start : start + len(logprobs)] = logprobs
            case PooledPrompt(values=values):
                self.embedding = values
        return False

    def _end(self, sample: SampleText, event: Ended) -> None:
        sample.end(event)
        self.error = self.error or event.error
        if self._left == 1:
            self._total_s = time.perf_counter() - self._started_s
        self._left -= 1  # last: a waiting caller reads the rest when it is 0
        if self._abandoned:
            self.abandon()

    @property
    def prompt_tokens(self) -> int:
        return self._config.prompt_tokens

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Log-probabilities of the prompt, with prompt_logprobs; complete once a token was drawn."""
        return self._scored or None

    @property
    def over(self) -> bool:
        """Whether every sample has ended."""
        return self._left == 0

    def abandon(self) -> None:
        """The caller has left: KV that was kept for the completion is freed, now or when the sample ends."""
        self._abandoned = True
        for sample in self.samples:
            if sample.ended is not None and sample.ended.kv is not None:
                sample.ended.kv.close()

    def completion(self) -> Completion:
        """The completion of the first sample, with those of the others as alternatives."""
        self._keep_turns()
        first, *others = [self._completion(sample) for sample in self.samples]
        return Completion(
            first.text,
            first.token_ids,
            first.finish_reason,
            first.usage,
            first.logprobs,
            first.timing,
            first.kv,
            tuple(others),
            first.prompt_logprobs,
            first.stop_string,
            self._config.warnings,
            first.reasoning,
            first.tool_calls,
        )

    def _keep_turns(self) -> None:
        """Make each sample a turn of its session, once."""
        session, self._session = self._session, None
        for sample in self.samples if session is not None else ():
            if session is not None and sample.ended is not None:
                sample.ended = replace(sample.ended, kv=session.keep(sample.ended.kv))

    def _completion(self, sample: SampleText) -> Completion:
        assert sample.ended is not None and sample.finish_reason is not None, "what failed has no completion"
        parsed = parsing.parsed(sample.text) if (parsing := self._config.parsing) else None
        return Completion(
            text=parsed.content if parsed else sample.text,
            token_ids=sample.token_ids,
            finish_reason=sample.finish_reason,
            usage=self._usage(sample, sample.ended),
            logprobs=sample.logprobs if self._config.params.logprobs is not None else None,
            timing=Timing(self._first_token_s, self._total_s),
            kv=sample.ended.kv,
            prompt_logprobs=self.prompt_logprobs,
            stop_string=sample.stop_string,
            reasoning=parsed.reasoning if parsed else "",
            tool_calls=tuple(parsed.tool_calls) if parsed else (),
        )

    def _usage(self, sample: SampleText, ended: Ended) -> Usage:
        prompt, drawn = self._config.prompt_tokens, len(sample.token_ids)
        counts = prompt_usage(prompt, drawn, ended.cached, ended.computed, ended.blended)
        return replace(_drafted(counts, ended.drafts), miss=self.shown_miss(ended.miss))

    def shown_miss(self, miss: PrefixMiss | None) -> Miss | None:
        """A miss with the text around the first different token; made once."""
        if miss is not None and self._miss is None:
            self._miss = shown_miss(miss, self._config.tokenizer)
        return None if miss is None else self._miss


def shown_miss(miss: PrefixMiss, tokenizer: Tokenizer) -> Miss:
    """A miss with the text around the first different token."""
    around = None
    if miss.around is not None:
        parts = (miss.around.before, miss.around.now, miss.around.earlier)
        around = TextAround(*(tokenizer.decode(part, skip_special=False) for part in parts))
    return Miss(miss.reason, miss.first_different_token, around, miss.expected, miss.candidates)


def prompt_usage(prompt: int, completion: int, cached: int, computed: int, found: BlendReport | None) -> Usage:
    """Token counts by where the prompt's KV came from; they always add up to the tokens that were read."""
    if found is None or cached + computed < prompt:  # not blended, or ended before the blend was complete
        return Usage(prompt, completion, computed, prefix_hit=cached)
    computed -= found.reused + found.recomputed
    made = Usage(prompt, completion, computed, cached, found.reused, found.recomputed, found.recipe)
    return replace(made, documents_computed=found.made, documents=found.documents)


def _drafted(usage: Usage, drafts: DraftCounts) -> Usage:
    return replace(usage, drafted_tokens=drafts.drafted, accepted_tokens=drafts.accepted, accepted_places=drafts.places)
