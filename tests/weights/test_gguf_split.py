"""Models in several GGUF files: what the gguf package splits is read as one, and a bad set of parts is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvilt.errors import WeightError
from kvilt.quant.unpack import to_float
from kvilt.weights.files import part_name
from kvilt.weights.gguf import GGUFFile
from kvilt.weights.source import open_checkpoint

Craft = Any  # conftest.Craft
UINT16, UINT32, INT32 = 2, 4, 5
TENSORS = {f"t{i}": np.full((2, 8), float(i), dtype=np.float32) for i in range(7)}


def _write(folder: Path, **options: Any) -> list[Path]:
    """Seven tensors, split by the gguf package; all files it made."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", **options)
    writer.add_string("general.name", "a model in parts")
    for name, values in TENSORS.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    files = _write(tmp_path, split_max_tensors=3)
    assert [file.name for file in files] == [f"model-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    return files


@pytest.mark.parametrize("which", [0, 1, 2])
def test_opening_any_part_opens_the_whole_model(parts: list[Path], which: int) -> None:
    with GGUFFile.open(parts[which]) as file:
        assert file.names() == tuple(TENSORS)
        assert file.metadata["general.name"] == "a model in parts"
        for name, values in TENSORS.items():
            assert np.array_equal(to_float(file.tensor(name)).numpy(), values)
            assert (file.storage(name).format, file.storage(name).nbytes) == ("F32", 64)


def test_a_folder_that_holds_one_split_model_opens(parts: list[Path]) -> None:
    checkpoint = open_checkpoint(parts[0].parent)
    with checkpoint.tensors as tensors:
        assert (checkpoint.kind, tensors.names()) == ("gguf", tuple(TENSORS))


def test_a_folder_with_another_model_beside_the_parts_asks_for_one(parts: list[Path], craft: Craft) -> None:
    (parts[0].parent / "other.gguf").write_bytes(craft.file())
    with pytest.raises(WeightError, match="4 GGUF files"):
        open_checkpoint(parts[0].parent)


def test_a_first_part_without_tensors_is_sound(tmp_path: Path) -> None:
    files = _write(tmp_path, split_max_tensors=4, small_first_shard=True)
    with GGUFFile.open(files[-1]) as file:
        assert (len(files), file.names()) == (3, tuple(TENSORS))


def test_the_digest_is_the_same_from_every_part_and_changes_with_each(parts: list[Path]) -> None:
    def digest(path: Path) -> str:
        with GGUFFile.open(path) as file:
            return file.digest()

    (before,) = {digest(path) for path in parts}
    for path in parts:
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        assert digest(parts[0]) != before
        path.write_bytes(raw)
    assert digest(parts[0]) == before


def test_tensors_of_every_part_outlive_the_closed_model(parts: list[Path]) -> None:
    file = GGUFFile.open(parts[0])
    first, last = to_float(file.tensor("t0")), to_float(file.tensor("t6"))
    file.close()
    assert (float(first[0, 0]), float(last[0, 0])) == (0.0, 6.0)
    with pytest.raises(WeightError, match="closed"):
        file.tensor("t6")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(parts: list[Path], missing: int) -> None:
    parts[missing].unlink()
    for left in parts:
        if left.exists():
            with pytest.raises(WeightError, match=f"part {missing + 1} of 3") as caught:
                GGUFFile.open(left)
            assert caught.value.field == parts[missing].name
    with pytest.raises(WeightError, match=f"part {missing + 1} of 3"):
        open_checkpoint(parts[0].parent)


def test_a_damaged_part_is_named_whichever_part_was_asked_for(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-70])
    with pytest.raises(WeightError, match="cut short") as caught:
        GGUFFile.open(parts[0])
    assert caught.value.field == parts[2].name


def test_parts_that_were_renamed_or_mixed_up_are_refused(parts: list[Path]) -> None:
    second, third = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(third)
    parts[2].write_bytes(second)
    for path in parts:
        with pytest.raises(WeightError, match="mixed up") as caught:
            GGUFFile.open(path)
        assert caught.value.field == "split.no"
    renamed = parts[0].rename(parts[0].with_name("best.gguf"))
    with pytest.raises(WeightError, match=r"one of 3 parts.*NAME-00001-of-00003\.gguf"):
        GGUFFile.open(renamed)


def _part(
    craft: Craft, number: int, tensors: list[bytes], *, count: int = 2, total: int = 2, extra: list[bytes] | None = None
) -> bytes:
    pairs = [
        craft.pair("split.no", UINT16, struct.pack("<H", number)),
        craft.pair("split.count", UINT16, struct.pack("<H", count)),
        craft.pair("split.tensors.count", INT32, struct.pack("<i", total)),
    ]
    return craft.file([*pairs, *(extra or [])], tensors)


def _tensor(craft: Craft, name: str) -> list[bytes]:
    return [craft.tensor(name, [8, 4])]


PAIRS: dict[str, tuple[str, Callable[[Craft], tuple[bytes, bytes]]]] = {
    "another number of parts": (
        "split.count",
        lambda c: (_part(c, 0, _tensor(c, "a")), _part(c, 1, _tensor(c, "b"), count=3)),
    ),
    "a part of one file": (
        "split.count",
        lambda c: (_part(c, 0, _tensor(c, "a")), c.file([], _tensor(c, "b"))),
    ),
    "another number of tensors in the second": (
        "split.tensors.count",
        lambda c: (_part(c, 0, _tensor(c, "a")), _part(c, 1, _tensor(c, "b"), total=3)),
    ),
    "fewer tensors than both promise": (
        "split.tensors.count",
        lambda c: (_part(c, 0, _tensor(c, "a"), total=3), _part(c, 1, _tensor(c, "b"), total=3)),
    ),
    "a negative number of tensors": (
        "split.tensors.count",
        lambda c: (_part(c, 0, _tensor(c, "a"), total=-2), _part(c, 1, _tensor(c, "b"), total=-2)),
    ),
    "the same tensor in both": ("a", lambda c: (_part(c, 0, _tensor(c, "a")), _part(c, 1, _tensor(c, "a")))),
    "the first part twice": ("split.no", lambda c: (_part(c, 0, _tensor(c, "a")), _part(c, 0, _tensor(c, "b")))),
    "another architecture in the second": (
        "general.architecture",
        lambda c: (
            _part(c, 0, _tensor(c, "a"), extra=[c.string("general.architecture", "llama")]),
            _part(c, 1, _tensor(c, "b"), extra=[c.string("general.architecture", "qwen2")]),
        ),
    ),
    "an embedding in the second that is not the vocabulary's": (
        "token_embd.weight",
        lambda c: (
            _part(c, 0, _tensor(c, "a"), extra=[c.strings("tokenizer.ggml.tokens", ["x", "y"])]),
            _part(c, 1, _tensor(c, "token_embd.weight")),
        ),
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_parts_that_do_not_agree_are_refused_by_field(kind: str, tmp_path: Path, craft: Craft) -> None:
    field, make = PAIRS[kind]
    path = tmp_path / "m-00001-of-00002.gguf"
    first, second = make(craft)
    path.write_bytes(first)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(second)
    with pytest.raises(WeightError) as caught:
        GGUFFile.open(path)
    assert caught.value.field == field


def test_parts_that_agree_and_repeat_the_same_metadata_are_sound(tmp_path: Path, craft: Craft) -> None:
    extra = [craft.string("general.architecture", "llama")]
    for number, name in enumerate("ab"):
        path = tmp_path / f"m-{number + 1:05}-of-00002.gguf"
        path.write_bytes(_part(craft, number, _tensor(craft, name), extra=extra))
    with GGUFFile.open(path) as file:
        assert file.names() == ("a", "b")


@pytest.mark.parametrize(
    "pair",
    [
        lambda c: c.string("split.count", "3"),
        lambda c: c.u32("split.count", 2**32 - 1),
        lambda c: c.pair("split.count", INT32, struct.pack("<i", -1)),
        lambda c: c.pair("split.count", 7, b"\x01"),
    ],
    ids=["text", "2^32 - 1", "negative", "bool"],
)
def test_a_number_of_parts_that_is_none_is_refused(
    pair: Callable[[Craft], bytes], craft: Craft, write: Callable[..., Path]
) -> None:
    with pytest.raises(WeightError) as caught:
        GGUFFile.open(write(craft.file([pair(craft)]), "m-00001-of-00003.gguf"))
    assert caught.value.field == "split.count"


def test_a_file_called_like_a_part_that_is_whole_opens_alone(craft: Craft, write: Callable[..., Path]) -> None:
    with GGUFFile.open(write(craft.file(), "m-00002-of-00003.gguf")) as file:
        assert file.names() == ("a.weight",)


@pytest.mark.parametrize(
    "name", ["m.gguf", "m-1-of-3.gguf", "-00001-of-00003.gguf", "m-00000-of-00003.gguf", "m-00004-of-00003.gguf", ""]
)
def test_a_name_that_is_no_parts_name(name: str) -> None:
    assert part_name(name) is None


def test_a_parts_name_knows_its_siblings() -> None:
    named = part_name("a-00001-of-00009-00002-of-00003.gguf")
    assert named is not None
    assert (named.stem, named.number) == ("a-00001-of-00009", 2)
    assert named.siblings()[2] == "a-00001-of-00009-00003-of-00003.gguf"
