"""Where a long text can be cut so that its pieces have exactly the tokens of the whole.

A cut stands before a space, or after a line break, where every known rule cuts words anyway. A pipeline that is not
known is never cut. Knows characters and the steps of a pipeline; refuses to know ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .pipeline_steps import BLOCK, composes, steps, writes_blocks
from .pretokenize import GPT2_SPLIT, KNOWN_SPLITS, WORD_SPLITS

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

PIECE_CHARS = 1 << 14  # some milliseconds of work, in which the interpreter's lock is free
# A character that is no white space, no control and no format character for any rule.
_HIDDEN = r"\s\x00-\x20\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\ufffb"
_SHOWN = f"[^{_HIDDEN}]"
_WORD = r"[^\W_]"
_BEFORE_SPACE = f"(?<={_SHOWN})(?= {_WORD})"
_BEHIND_LINE = f"(?<={_SHOWN}\n)(?={_WORD})"


@dataclass(frozen=True, slots=True)
class SplitPoints:
    """Places where a text may be split, as a pattern of zero width."""

    place: re.Pattern[str]
    drops_space: bool = False  # the pipeline puts a space before each text, so a piece leaves its own out

    def pieces(self, text: str, chars: int = PIECE_CHARS) -> Iterator[str]:
        """The text in pieces of about so many characters; longer where it has no place to cut."""
        start = 0
        while len(text) - start > 2 * chars:
            stop = self._next(text, start + chars)
            if stop is None:
                break
            yield self._piece(text, start, stop)
            start = stop
        yield self._piece(text, start, len(text))

    def _next(self, text: str, start: int) -> int | None:
        """The next place to cut; each search is short, so that other threads run in between."""
        for at in range(start, len(text), PIECE_CHARS):
            found = self.place.search(text, at, at + PIECE_CHARS + 2)  # it looks at two characters after the place
            if found is not None:
                return found.start()
        return None

    def _piece(self, text: str, start: int, stop: int) -> str:
        return text[start + 1 : stop] if start and self.drops_space else text[start:stop]


def find_split_points(core: Core) -> SplitPoints | None:
    """The split points of a pipeline; None if none are proved safe."""
    added = list(core.get_added_tokens_decoder().values())
    if any(not token.special and (token.lstrip or token.rstrip or token.single_word) for token in added):
        return None
    contents = [token.content for token in added]
    normalizers, splits = steps(core.normalizer), steps(core.pre_tokenizer)
    if composes(normalizers) and _cuts_words(splits):
        place = re.compile(f"{_BEFORE_SPACE}|{_BEHIND_LINE}")
        return None if any(map(place.search, contents)) else SplitPoints(place)
    # A split at spaces finds none where blocks are written for them.
    whole = all(step["type"] == "Split" and step["pattern"] == {"String": " "} for step in splits)
    vocabulary = core.get_vocab()
    if not writes_blocks(normalizers) or not whole or BLOCK not in vocabulary:
        return None
    prefix = any(step["type"] == "Prepend" for step in normalizers)
    if prefix and any(text.startswith((" ", BLOCK)) for text in contents):
        return None
    # Text after an added token gets a prefix of its own beside the space that it begins with.
    ends = {text[-1] for text in contents if text} if prefix else set()
    return SplitPoints(_between_tokens(vocabulary, contents, ends), prefix)


def _cuts_words(splits: list[Mapping[str, Any]]) -> bool:
    """Whether words are cut by rules that are known, and then written in bytes."""
    patterns: list[str] = []
    for step in splits:
        match step:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "Digits"}:
                pass
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": own}:
                patterns += [GPT2_SPLIT] if own else []
            case _:
                return False
    return set(patterns) <= KNOWN_SPLITS and not WORD_SPLITS.isdisjoint(patterns)


def _between_tokens(vocabulary: Iterable[str], added: Iterable[str], ends: set[str]) -> re.Pattern[str]:
    """Places before a space that no token reaches over, so that no merge does, and not after `ends`."""
    joined = {BLOCK, *ends, *re.findall(f"([^ {BLOCK}])[ {BLOCK}]", "\n".join([*vocabulary, *added]))}
    starts = {text[0] for text in added if text}
    return re.compile(f"{_BEFORE_SPACE}{_unless('<!', joined)}{_unless('! ', starts)}")


def _unless(look: str, chars: set[str]) -> str:
    return f"(?{look}[{re.escape(''.join(sorted(chars)))}])" if chars else ""
