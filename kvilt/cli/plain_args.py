"""Reads plain command lines of `kvilt run` and `kvilt chat` without typer, whose import delays the first token.

Plain: options that take one value or none, each given once and spelled as in the help, and no settings of files or the
environment. Every other command line is typer's, as are help and errors: there are none here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..config import DEFAULT_MODEL, config_files, env_sets_options
from .option_groups import DRAFTS, GRAMMAR, RUNTIME, SAMPLING, STORE, Option, OptionGroup
from .starts import start_chat, start_run

# What a flag sets: the name of a parameter, and how its value is read, or the value itself.
FlagUse = tuple[str, Callable[[str], Any] | bool]
_READERS: Mapping[Any, Callable[[str], Any]] = MappingProxyType(
    {str: str, str | None: str, int: int, int | None: int, float: float, float | None: float}
)
_MODEL: Mapping[str, FlagUse] = MappingProxyType(
    {
        "--model": ("model", str),
        "-m": ("model", str),
        "--system": ("system", str),
        "--attach": ("attach", True),
        "--no-attach": ("attach", False),
    }
)
_SHOWN: Mapping[str, FlagUse] = MappingProxyType(
    {"--raw": ("raw", True), "--json": ("json", True), "--verbose": ("verbose", True), "-v": ("verbose", True)}
)


@dataclass(frozen=True, slots=True)
class PlainCommand:
    """A command: the function that carries it out, its groups of options, and flags of its own."""

    start: Callable[..., None]
    groups: Mapping[str, OptionGroup]
    flags: Mapping[str, FlagUse]
    positional: str | None = None  # the parameter that a word without a flag sets; "-" if there is no such word

    def read(self, words: Sequence[str]) -> dict[str, Any] | None:
        """The keywords of `start`; None where the words are not plain."""
        known = dict(self.flags)
        for group in self.groups.values():
            for name, option in group.options.items():
                known |= _flags(name, option)
        try:
            given = _given(words, known, self.positional)
        except ValueError:
            return None
        groups = {
            key: {name: given.pop(name, _default(option)) for name, option in group.options.items()}
            for key, group in self.groups.items()
        }
        unsaid = {"model": DEFAULT_MODEL, **({self.positional: "-"} if self.positional else {})}
        return {**unsaid, **given, **groups}


COMMANDS: Mapping[str, PlainCommand] = MappingProxyType(
    {
        "run": PlainCommand(
            start_run,
            {"sampling": SAMPLING, "grammar": GRAMMAR, "store": STORE, "drafts": DRAFTS, "config": RUNTIME},
            {**_MODEL, **_SHOWN},
            positional="prompt",
        ),
        "chat": PlainCommand(
            start_chat,
            {"sampling": SAMPLING.without("n", "logprobs"), "drafts": DRAFTS, "config": RUNTIME},
            _MODEL,
        ),
    }
)


def plain_start(args: Sequence[str]) -> Callable[[], None] | None:
    """What carries a command line out; None for one that is typer's."""
    command = COMMANDS.get(args[0]) if args else None
    if command is None or os.name == "nt":  # typer expands wildcards and variables there
        return None
    values = command.read(args[1:])
    if values is None or env_sets_options() or any(path.is_file() for path in config_files()):
        return None
    return lambda: command.start(**values)


def _given(words: Sequence[str], known: Mapping[str, FlagUse], positional: str | None) -> dict[str, Any]:
    """The parameters that the words set; ValueError for anything that is not plain."""
    given: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        name, value = _parameter(word, rest, known, positional)
        if name in given:
            raise ValueError(f"{name} is given twice")
        given[name] = value
    return given


def _parameter(word: str, rest: Iterator[str], known: Mapping[str, FlagUse], positional: str | None) -> tuple[str, Any]:
    """The parameter that a word sets, with the next one of the rest where that is its value."""
    if positional is not None and not word.startswith("-"):
        return positional, word
    flag, joined, text = word.partition("=")
    name, use = known.get(flag, ("", False))
    if not name or (joined and (isinstance(use, bool) or not flag.startswith("--"))):
        raise ValueError(f"{word} is not plain")
    if isinstance(use, bool):
        return name, use
    value = text if joined else next(rest, "-")
    if value.startswith("-"):
        raise ValueError(f"{value} may be a flag")
    return name, use(value)


def _flags(name: str, option: Option) -> dict[str, FlagUse]:
    """The flags of an option of a group, spelled as typer spells them; none for one that may be repeated."""
    spelled = name.replace("_", "-")
    if option.type is bool:
        pairs = [flag.partition("/") for flag in option.flags or (f"--{spelled}/--no-{spelled}",)]
        return {flag: (name, flag == on) for on, _, off in pairs for flag in (on, off) if flag}
    if option.type not in _READERS:
        return {}
    return dict.fromkeys(option.flags or (f"--{spelled}",), (name, _READERS[option.type]))


def _default(option: Option) -> Any:
    """What typer passes for an option that is not given."""
    return list(option.default) if isinstance(option.default, tuple) else option.default
