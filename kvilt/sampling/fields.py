"""The keywords of sampling as type checkers and editors see them; `SamplingParams` says what each of them does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from .constraint import Constraint
from .repetition import RepetitionDetection


class SamplingFields(TypedDict, total=False):
    """The fields of `SamplingParams`, and grammars by their kind, as `SamplingParams.of` takes them."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    bad_words_ids: Sequence[Sequence[int]]
    bad_words: Sequence[str]
    logit_bias: Mapping[int, float]
    logprobs: int | None
    prompt_logprobs: int | None
    seed: int | None
    n: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    grammar: Constraint | None
    draft_tokens: int | None
    repetition_detection: RepetitionDetection | bool | None

    # A grammar by its kind, in place of `grammar`.
    json_schema: str | Mapping[str, Any] | bool | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    lark: str | None
    gbnf: str | None
