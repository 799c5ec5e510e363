"""File names with a meaning: parts of a split GGUF model, and shards of a safetensors index.

Reads no weights, so that choosing what to fetch costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..errors import WeightError
from .json_file import read_object

CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PartName:
    """The parsed name of one part of a split GGUF model; numbers start at 1."""

    stem: str
    number: int
    count: int

    def sibling(self, number: int) -> str:
        """The file name of another part."""
        return f"{self.stem}-{number:05}-of-{self.count:05}.gguf"

    def siblings(self) -> list[str]:
        """The file names of all parts, in order."""
        return [self.sibling(number) for number in range(1, self.count + 1)]


def part_name(name: str) -> PartName | None:
    """The parsed name of a part, or None if the name is not one."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    number, count = int(match["number"]), int(match["count"])
    return PartName(match["stem"], number, count) if 1 <= number <= count else None


def read_index(path: Path) -> Mapping[str, str]:
    """Tensor name to shard, from an index whose shards all lie in its own folder."""
    places = read_object(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise WeightError("weight_map", f"{path.name} must map tensor names to shards")
    for name, shard in places.items():
        if not isinstance(shard, str) or not plain_file_name(shard):
            raise WeightError("weight_map", f"{name!r} points to {shard!r}, which is no safetensors file in the folder")
    return places


def plain_file_name(shard: str) -> bool:
    """Whether a safetensors file of that name stays in its folder on every system."""
    plain = PurePosixPath(shard).name == shard == PureWindowsPath(shard).name
    return plain and shard.endswith(".safetensors") and "\0" not in shard
