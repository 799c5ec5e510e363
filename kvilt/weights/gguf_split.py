"""A GGUF model in several files: `NAME-00001-of-00003.gguf` and its siblings, all of them checked against each other.

Opening any part opens all. Refuses to know what tensors are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import WeightError
from .files import PartName, part_name
from .gguf_header import GGUFHeader, TensorInfo, check_vocabulary, read_header
from .mapped import MappedFile

MAX_PARTS = (1 << 16) - 1  # the format counts parts in 16 bits
_OF_ONE_FILE = ("general.alignment",)


@dataclass(frozen=True, slots=True)
class GGUFPart:
    """One open file and its checked header."""

    file: MappedFile
    header: GGUFHeader

    @classmethod
    def open(cls, path: Path) -> GGUFPart:
        """Map a file and check its whole header."""
        return cls.of(MappedFile(path))

    @classmethod
    def of(cls, file: MappedFile) -> GGUFPart:
        """Check the whole header of a file that is mapped; it is closed if anything is wrong."""
        try:
            return cls(file, read_header(file.map, file.size))
        except BaseException:
            file.close()
            raise


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A tensor and the file it lies in."""

    file: MappedFile
    info: TensorInfo


def open_parts(path: Path) -> tuple[GGUFPart, ...]:
    """The file at `path` and, where it is one of several, all the others, in order."""
    opened = [GGUFPart.open(path)]
    try:
        count = _number(opened[0], "split.count", MAX_PARTS, default=1)
        if count > 1:
            named = _own_name(path, opened[0], count)
            for number in range(1, count + 1):
                if number != named.number:
                    opened.append(_open_sibling(path, named, number))  # noqa: PERF401 (on failure these are closed)
            opened.insert(named.number - 1, opened.pop(0))
            _check_agreement(opened, count)
    except BaseException:
        for part in opened:
            part.file.close()
        raise
    return tuple(opened)


def join(parts: Sequence[GGUFPart]) -> tuple[Mapping[str, Any], Mapping[str, TensorLocation]]:
    """The first part's metadata, and the tensors of all parts; no tensor may stand in two of them."""
    metadata = parts[0].header.metadata
    places: dict[str, TensorLocation] = {}
    for part in parts:
        for name, info in part.header.tensors.items():
            if name in places:
                other = places[name].file.path.name
                raise WeightError(name, f"the tensor stands in {other} and again in {part.file.path.name}")
            places[name] = TensorLocation(part.file, info)
    check_vocabulary(metadata, {name: place.info for name, place in places.items()})
    return metadata, MappingProxyType(places)


def _number(part: GGUFPart, key: str, most: int, default: int | None = None) -> int:
    value = part.header.metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= most:
        raise WeightError(
            key, f"{part.file.path.name} must say a whole number from 0 to {most} here, not {value!r:.40}"
        )
    return value


def _own_name(path: Path, part: GGUFPart, count: int) -> PartName:
    named = part_name(path.name)
    if named is None or named.count != count:
        raise WeightError(
            "split.count",
            f"{path.name} is one of {count} parts, which must be called NAME-00001-of-{count:05}.gguf and so on, "
            "or the others cannot be found; give it its name back",
        )
    _check_number(part, named.number)
    return named


def _check_number(part: GGUFPart, number: int) -> None:
    found = _number(part, "split.no", MAX_PARTS)
    if found != number - 1:
        raise WeightError("split.no", f"{part.file.path.name} says it is part {found + 1}; the files were mixed up")


def _open_sibling(path: Path, named: PartName, number: int) -> GGUFPart:
    sibling = path.with_name(named.sibling(number))
    if not sibling.is_file():
        raise WeightError(sibling.name, f"is missing: part {number} of {named.count} must lie beside the others")
    try:
        return GGUFPart.open(sibling)
    except WeightError as error:  # its own message does not say which of the files is meant
        raise WeightError(sibling.name, str(error)) from error


def _check_agreement(parts: Sequence[GGUFPart], count: int) -> None:
    held = sum(len(part.header.tensors) for part in parts)
    for number, part in enumerate(parts, 1):
        name = part.file.path.name
        if (said := _number(part, "split.count", MAX_PARTS)) != count:
            raise WeightError("split.count", f"{name} says {said} parts and the others say {count}")
        _check_number(part, number)
        if (said := _number(part, "split.tensors.count", (1 << 31) - 1)) != held:
            raise WeightError("split.tensors.count", f"{name} says {said} tensors and the parts hold {held}")
        _check_metadata(part, parts[0])


def _check_metadata(part: GGUFPart, first: GGUFPart) -> None:
    """Later parts need no metadata; what they repeat must be what the first one says."""
    said = first.header.metadata
    for key, value in part.header.metadata.items():
        if key in said and value != said[key] and not key.startswith("split.") and key not in _OF_ONE_FILE:
            raise WeightError(key, f"{part.file.path.name} says something else than {first.file.path.name}")
