"""Sampling parameters, checked field by field when the object is made.

Refuses to know models and text: ids are checked against a vocabulary only when `validate_vocab` is given its size.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ParamError
from .constraint import CONSTRAINTS, SHORT_NAMES, Constraint, by_name
from .repetition import RepetitionDetection

MAX_TOKENS = 2**31 - 1
MAX_LOGPROBS = 20
MAX_DRAFT_TOKENS = 32
MAX_SAMPLES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_BYTES = 1 << 14  # of all stop strings of a request
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASED_TOKENS = 1024
MAX_NGRAM = 64
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1024
MAX_BAD_WORD_BYTES = 1 << 14  # of all of them; each is tokenized twice
MAX_BAD_SEQUENCES = 1024
MAX_BAD_SEQUENCE_TOKENS = 1024
# Outside these a float32 logit divided by the temperature may overflow, and 0 already means greedy.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 100.0

# field -> smallest, largest, and what the field may be, in words
_RANGES: dict[str, tuple[float, float, str]] = {
    "top_p": (math.ulp(0.0), 1.0, "above 0 and at most 1 (1 is off)"),
    "min_p": (0.0, 1.0, "between 0 (off) and 1"),
    "typical_p": (math.ulp(0.0), 1.0, "above 0 and at most 1 (1 is off)"),
    "repetition_penalty": (0.01, 100.0, "between 0.01 and 100 (1 is off)"),
    "presence_penalty": (-2.0, 2.0, "between -2 and 2 (0 is off)"),
    "frequency_penalty": (-2.0, 2.0, "between -2 and 2 (0 is off)"),
}


class TokenBias(Mapping[int, float]):
    """An immutable, hashable map from token id to the number added to its logit, in ascending order of ids."""

    __slots__ = ("_pairs", "_values")

    def __init__(self, values: Mapping[int, float]) -> None:
        self._values = {token: values[token] for token in sorted(values)}
        self._pairs = tuple(self._values.items())

    def __getitem__(self, token: int) -> float:
        return self._values[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; the defaults are greedy, and every invalid value is refused by name."""

    max_tokens: int | None = None  # None: until a stop or the end of the context; 0: only beside prompt_logprobs
    min_tokens: int = 0  # nothing ends a sample before it has this many
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    presence_penalty: float = 0.0  # over generated tokens
    frequency_penalty: float = 0.0  # over generated tokens
    no_repeat_ngram_size: int = 0  # 0: off; over prompt and generated tokens
    bad_words_ids: Sequence[Sequence[int]] = ()  # sequences that are never completed
    bad_words: Sequence[str] = ()  # the same as text, for callers that have a tokenizer
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=lambda: TokenBias({}))
    logprobs: int | None = None  # None: off; 0: the chosen token's; n: and the n likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    seed: int | None = None  # None: drawn by with_seed()
    n: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    grammar: Constraint | None = None  # a constraint on the text
    draft_tokens: int | None = None  # most to draft ahead; None: as many as usual, 0: none. Changes no token
    repetition_detection: RepetitionDetection | bool | None = None  # ends a sample that loops; True: as usual

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            # With prompt_logprobs a request may generate nothing.
            _whole("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, MAX_TOKENS)
        _whole("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamError("min_tokens", f"must not be above max_tokens, which is {self.max_tokens}")
        self._set("temperature", _temperature(self.temperature))
        _whole("top_k", self.top_k, 0, None)
        for name, (low, high, meaning) in _RANGES.items():
            self._set(name, _real(name, getattr(self, name), low, high, meaning))
        _whole("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, MAX_NGRAM)
        self._set("bad_words_ids", _sequences(self.bad_words_ids))
        words = _texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        self._set("bad_words", _within("bad_words", words, MAX_BAD_WORD_BYTES))
        self._set("logit_bias", _bias(self.logit_bias))
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _whole("seed", self.seed, None, None)
        _whole("n", self.n, 1, MAX_SAMPLES)
        self._set("stop", _within("stop", _texts("stop", self.stop, MAX_STOPS, MAX_STOP_CHARS), MAX_STOP_BYTES))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS))
        _flag("ignore_eos", self.ignore_eos)
        _flag("include_stop_str_in_output", self.include_stop_str_in_output)
        _check_grammar(self.grammar, self.ignore_eos)
        if self.draft_tokens is not None:
            _whole("draft_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS)
        self._set("repetition_detection", _detection(self.repetition_detection))

    def _set(self, name: str, value: object) -> None:
        """Normalise a field while the object is being made."""
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, params: SamplingParams | None = None, **fields: object) -> SamplingParams:
        """`params` (or the defaults) with `fields` replaced; a field that does not exist is refused by name.

        A grammar may be given by its kind too: `json_schema`, `json_object`, `regex`, `choice`, `lark` or `gbnf`.
        """
        fields = _with_grammar(fields)
        if params is not None and not isinstance(params, SamplingParams):
            raise ParamError("params", f"must be a SamplingParams, not {_kind(params)}")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ParamError(name, f"is not a sampling field; the fields are {', '.join(known)}")
        return dataclasses.replace(params or cls(), **fields)  # type: ignore[arg-type]

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether the history of tokens changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def with_seed(self) -> SamplingParams:
        """These params with a seed: their own, or a fresh one drawn from the system."""
        if self.seed is not None:
            return self
        return dataclasses.replace(self, seed=secrets.randbits(63))

    def validate_vocab(self, vocab_size: int) -> None:
        """Refuse token ids that this vocabulary does not have."""
        bad = [token for sequence in self.bad_words_ids for token in sequence]
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words_ids", bad),
        ):
            if ids and (token := max(ids)) >= vocab_size:
                raise ParamError(name, f"token id {token} is past the vocabulary of {vocab_size} tokens")


def _with_grammar(fields: dict[str, object]) -> dict[str, object]:
    """These fields with a grammar that was given by its kind under its real name."""
    short = {name: fields[name] for name in SHORT_NAMES if name in fields}
    if not short:
        return fields
    found = {name: one for name, value in short.items() if (one := by_name(name, value)) is not None}
    if len(found) > 1 or (found and fields.get("grammar") is not None):
        second = [*found][-1]
        raise ParamError(second, "is a second grammar; give one of grammar, " + ", ".join(SHORT_NAMES))
    rest = {name: value for name, value in fields.items() if name not in short}
    return {**rest, "grammar": next(iter(found.values()))} if found else rest


def _kind(value: object) -> str:
    """The type of a wrong value: never the value, which may be a gigabyte."""
    return type(value).__name__


def _whole(name: str, value: object, low: int | None, high: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParamError(name, f"must be a whole number, not {_kind(value)}")
    if low is not None and value < low:
        raise ParamError(name, f"must be at least {low}, not {_shown(value)}")
    if high is not None and value > high:
        raise ParamError(name, f"must be at most {high}, not {_shown(value)}")
    return value


def _shown(value: int | float) -> str:
    """A refused number as text, cut where the text would be unreasonable (str of a huge int even raises)."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return str(value)


def _real(name: str, value: object, low: float, high: float, meaning: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParamError(name, f"must be a number {meaning}, not {_kind(value)}")
    if not low <= value <= high:  # NaN and the infinities fail here too
        raise ParamError(name, f"must be {meaning}, not {_shown(value)}")
    return float(value)


def _temperature(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value == 0:
        return 0.0
    meaning = f"0 (greedy) or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}"
    return _real("temperature", value, MIN_TEMPERATURE, MAX_TEMPERATURE, meaning)


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ParamError(name, f"must be True or False, not {_kind(value)}")


def _detection(value: object) -> RepetitionDetection | None:
    if value is None or value is False:
        return None
    if value is True:
        return RepetitionDetection()
    if not isinstance(value, RepetitionDetection):
        raise ParamError("repetition_detection", f"must be True, False or a RepetitionDetection, not {_kind(value)}")
    return value


def _check_grammar(value: object, ignore_eos: bool) -> None:
    if value is None:
        return
    if not isinstance(value, CONSTRAINTS):
        known = ", ".join(kind.__name__ for kind in CONSTRAINTS)
        raise ParamError("grammar", f"must be one of {known}, not {_kind(value)}")
    if ignore_eos:
        raise ParamError("ignore_eos", "cannot be set beside a grammar, which ends with an end token")


def _bias(value: object) -> TokenBias:
    if isinstance(value, TokenBias):
        return value
    if not isinstance(value, Mapping):
        raise ParamError("logit_bias", f"must map token ids to numbers, not {_kind(value)}")
    if len(value) > MAX_BIASED_TOKENS:
        raise ParamError("logit_bias", f"may name at most {MAX_BIASED_TOKENS} tokens, not {len(value)}")
    return TokenBias({_token_id("logit_bias", token): _bias_value(bias) for token, bias in value.items()})


def _bias_value(value: object) -> float:
    return _real("logit_bias", value, -100.0, 100.0, "between -100 and 100 for every token")


def _token_id(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParamError(name, f"token ids must be whole numbers, not {_kind(value)}")
    if not 0 <= value < 2**31:
        raise ParamError(name, f"token ids must be between 0 and the size of the vocabulary, not {_shown(value)}")
    return value


def _listed(name: str, value: object, kind: str, most: int) -> list[object] | tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise ParamError(name, f"must be a list of {kind}, not {_kind(value)}")
    if len(value) > most:
        raise ParamError(name, f"may hold at most {most} {kind}, not {len(value)}")
    return value


def _token_ids(name: str, value: object, most: int) -> tuple[int, ...]:
    return tuple(_token_id(name, token) for token in _listed(name, value, "token ids", most))


def _sequences(value: object) -> tuple[tuple[int, ...], ...]:
    name = "bad_words_ids"
    given = _listed(name, value, "sequences of token ids", MAX_BAD_SEQUENCES)
    sequences = tuple(_token_ids(name, sequence, MAX_BAD_SEQUENCE_TOKENS) for sequence in given)
    if not all(sequences):
        raise ParamError(name, "must not hold an empty sequence, which no token completes")
    return sequences


def _texts(name: str, value: object, most: int, most_chars: int) -> tuple[str, ...]:
    """A tuple of strings; one string alone is a list of one."""
    given = (value,) if isinstance(value, str) else value
    return tuple(_text(name, text, most_chars) for text in _listed(name, given, "strings", most))


def _within(name: str, texts: tuple[str, ...], most_bytes: int) -> tuple[str, ...]:
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if size > most_bytes:
        raise ParamError(name, f"the strings may have {most_bytes} bytes in all, not {size}; shorten them")
    return texts


def _text(name: str, text: object, most_chars: int) -> str:
    if not isinstance(text, str):
        raise ParamError(name, f"must hold strings only, not {_kind(text)}")
    if not text:
        raise ParamError(name, "must not hold an empty string, which every text contains")
    if len(text) > most_chars:
        raise ParamError(name, f"strings may have at most {most_chars} characters, not {len(text)}")
    return text
