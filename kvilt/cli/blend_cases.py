"""Reads questions about documents: text files and a list of questions, or a JSON file with both."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.blend_measure import BlendCase
from ..errors import InputError, ParamError
from .texts import read_text

_JSON = (".json", ".jsonl")


def read_cases(files: Sequence[str], questions: Sequence[str], each: int, seed: int) -> list[BlendCase]:
    """The cases of JSON files, and every question about `each` of the text files, in random order for each question."""
    if not files:
        raise ParamError("files", "give text files to ask about, or a JSON file with questions and documents")
    texts = [read_text(path).strip() for path in files if Path(path).suffix not in _JSON]
    cases = [case for path in files if Path(path).suffix in _JSON for case in _cases(path)]
    if texts and not questions:
        raise ParamError("question", "text files need questions; give --question, or --questions with one on each line")
    if questions and not texts:
        raise ParamError("question", "questions need text files to be asked about; JSON files have their own")
    mixed = random.Random(seed)
    cases += [BlendCase(one, tuple(mixed.sample(texts, min(each, len(texts))))) for one in questions]
    if not cases:
        raise InputError("there are no questions in these files")
    return cases


def read_questions(path: str) -> list[str]:
    """One question on each line."""
    return [line.strip() for line in read_text(path).splitlines() if line.strip()]


def _cases(path: str) -> Iterator[BlendCase]:
    raw = read_text(path)
    try:
        whole = (
            [json.loads(line) for line in raw.splitlines() if line.strip()] if path.endswith("l") else json.loads(raw)
        )
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {str(error)[:100]}") from None
    if not isinstance(whole, list):
        raise InputError(f"{path} holds no list of cases")
    for number, entry in enumerate(whole):
        try:
            yield _case(entry)
        except (KeyError, TypeError, AttributeError):
            shape = '{"question": ..., "documents": [...], "answers"?: [...]}'
            raise InputError(f"{path}: entry {number} is not {shape}") from None


def _case(entry: Mapping[str, Any]) -> BlendCase:
    """A case from JSON; data sets in the style of MuSiQue call the documents `ctxs`."""
    documents = tuple(map(_document, entry["documents"] if "documents" in entry else entry["ctxs"]))
    answers = entry.get("answers", [entry["answer"]] if "answer" in entry else [])
    if not isinstance(entry["question"], str) or not documents or isinstance(answers, str):
        raise TypeError
    return BlendCase(entry["question"], documents, tuple(str(one) for one in answers if str(one).strip()))


def _document(raw: str | Mapping[str, str]) -> str:
    if isinstance(raw, str):
        return raw
    return f"{raw.get('title', '')}\n{raw['text']}".lstrip()
