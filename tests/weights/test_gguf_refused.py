"""Crafted GGUF files (threats E19): each kind is refused with the field that gave it away, at no cost in memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvilt.errors import WeightError
from kvilt.weights.gguf import GGUFFile

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = range(11)
HUGE = 2**64 - 1
Craft = Any  # conftest.Craft
Kind = Callable[[Craft], bytes]


def _vocabulary(c: Craft, tokens: int, rows: int) -> bytes:
    pairs = [c.strings("tokenizer.ggml.tokens", [str(i) for i in range(tokens)])]
    return c.file(pairs, [c.tensor("token_embd.weight", [8, rows])])


KINDS: dict[str, tuple[str, Kind]] = {
    "other magic": ("magic", lambda c: c.file(magic=b"GGML")),
    "three bytes": ("magic", lambda c: b"GGU"),
    "magic alone": ("version", lambda c: b"GGUF"),
    "version 0": ("version", lambda c: c.file(version=0)),
    "version 1": ("version", lambda c: c.file(version=1)),
    "version from the future": ("version", lambda c: c.file(version=4)),
    "big endian": ("version", lambda c: c.file(version=3 << 24)),
    "cut in the counts": ("tensor_count", lambda c: c.file()[:12]),
    "2^64 - 1 tensors": ("tensor_count", lambda c: c.file(tensor_count=HUGE)),
    "more tensors than bytes": ("tensor_count", lambda c: c.file(tensor_count=1000)),
    "one tensor too many": ("tensor name 1", lambda c: c.file(tensor_count=2)),
    "2^64 - 1 pairs": ("metadata_count", lambda c: c.file(pair_count=HUGE)),
    "2^60 pairs": ("metadata_count", lambda c: c.file(pair_count=2**60)),
    "empty key": ("metadata key 0", lambda c: c.file([c.string("", "x")])),
    "key of 2^64 - 1 bytes": ("metadata key 0", lambda c: c.file([c.text("k", HUGE)], pair_count=1)),
    "key of 64 KiB": ("metadata key 0", lambda c: c.file([c.string("k" * 65536, "x")])),
    "key that is not UTF-8": ("metadata key 0", lambda c: c.file([c.string(b"\xff\xfe", "x")])),
    "the same key twice": ("general.name", lambda c: c.file([c.string("general.name", "a")] * 2)),
    "unknown value type": ("k", lambda c: c.file([c.pair("k", 13, bytes(8))])),
    "value type 2^32 - 1": ("k", lambda c: c.file([c.pair("k", 2**32 - 1, bytes(8))])),
    "bool of 2": ("k", lambda c: c.file([c.pair("k", BOOL, b"\x02")])),
    "string of 2^64 - 1 bytes": ("k", lambda c: c.file([c.pair("k", STRING, c.text("x", HUGE))])),
    "string longer than the file": ("k", lambda c: c.file([c.pair("k", STRING, c.text("x", 10**6))])),
    "text that is not UTF-8": ("general.name", lambda c: c.file([c.string("general.name", b"\xff")])),
    "array of arrays": ("k", lambda c: c.file([c.array("k", ARRAY, bytes(64), 1)])),
    "array of an unknown type": ("k", lambda c: c.file([c.array("k", 99, bytes(64), 1)])),
    "array of 2^64 - 1 numbers": ("k", lambda c: c.file([c.array("k", UINT64, b"", HUGE)])),
    "array whose bytes overflow": ("k", lambda c: c.file([c.array("k", UINT64, b"", 2**61)])),
    "array longer than the file": ("k", lambda c: c.file([c.array("k", UINT32, b"", 5000)])),
    "array of 2^64 - 1 strings": ("k", lambda c: c.file([c.array("k", STRING, b"", HUGE)])),
    "more strings than bytes": ("k", lambda c: c.file([c.array("k", STRING, b"", 10**6)])),
    "long string in an array": ("k", lambda c: c.file([c.array("k", STRING, c.text("x", HUGE), 1)])),
    "gigantic array of bools": ("k", lambda c: c.file([c.array("k", BOOL, b"", 2**40)])),
    "bool of 7 in an array": ("k", lambda c: c.file([c.array("k", BOOL, b"\x01\x07", 2)])),
    "alignment as a string": ("general.alignment", lambda c: c.file([c.string("general.alignment", "32")])),
    "alignment as uint64": ("general.alignment", lambda c: c.file([c.pair("general.alignment", UINT64, bytes(8))])),
    "alignment 0": ("general.alignment", lambda c: c.file([c.u32("general.alignment", 0)])),
    "alignment 1": ("general.alignment", lambda c: c.file([c.u32("general.alignment", 1)])),
    "alignment 48": ("general.alignment", lambda c: c.file([c.u32("general.alignment", 48)])),
    "alignment 2^31": ("general.alignment", lambda c: c.file([c.u32("general.alignment", 2**31)])),
    "one part of several": ("split.count", lambda c: c.file([c.pair("split.count", UINT16, struct.pack("<H", 3))])),
    "tensor without a name": ("tensor name 0", lambda c: c.file(tensors=[c.tensor("", [8])])),
    "tensor name too long": ("tensor name 0", lambda c: c.file(tensors=[c.tensor("t" * 128, [8])])),
    "tensor name not UTF-8": ("tensor name 0", lambda c: c.file(tensors=[c.tensor(b"\xc3", [8])])),
    "the same tensor twice": ("t", lambda c: c.file(tensors=[c.tensor("t", [8]), c.tensor("t", [8], offset=32)])),
    "no dimensions": ("t", lambda c: c.file(tensors=[c.tensor("t", [])], tensor_count=1)),
    "five dimensions": ("t", lambda c: c.file(tensors=[c.tensor("t", [1] * 5)])),
    "zero dimension": ("t", lambda c: c.file(tensors=[c.tensor("t", [8, 0])])),
    "negative dimension": ("t", lambda c: c.file(tensors=[c.tensor("t", [8, 2**64 - 4])])),
    "shape that overflows": ("t", lambda c: c.file(tensors=[c.tensor("t", [2**32, 2**32])])),
    "shape that wraps to 8": ("t", lambda c: c.file(tensors=[c.tensor("t", [2**62 + 2, 4])])),
    "bytes that overflow": ("t", lambda c: c.file(tensors=[c.tensor("t", [2**59, 1])])),
    "unknown tensor type": ("t", lambda c: c.file(tensors=[c.tensor("t", [32], kind=255)])),
    "retired tensor type": ("t", lambda c: c.file(tensors=[c.tensor("t", [32], kind=4)])),
    "row of half a block": ("t", lambda c: c.file(tensors=[c.tensor("t", [48, 2], kind=2)])),
    "row of half a superblock": ("t", lambda c: c.file(tensors=[c.tensor("t", [128, 2], kind=12)])),
    "unaligned offset": ("t", lambda c: c.file(tensors=[c.tensor("t", [8], offset=8)])),
    "offset past the end": ("t", lambda c: c.file(tensors=[c.tensor("t", [8], offset=1 << 20)])),
    "offset near 2^64": ("t", lambda c: c.file(tensors=[c.tensor("t", [8], offset=2**64 - 32)])),
    "overlapping tensors": ("u", lambda c: c.file(tensors=[c.tensor("t", [16]), c.tensor("u", [8], offset=32)])),
    "the same data twice": ("u", lambda c: c.file(tensors=[c.tensor("t", [8]), c.tensor("u", [8])])),
    "data cut by one byte": ("t", lambda c: c.file(tensors=[c.tensor("t", [1024])])[:-1]),
    "no data at all": ("t", lambda c: c.file(tensors=[c.tensor("t", [8])], data=b"")),
    "fewer tokens than rows": ("token_embd.weight", lambda c: _vocabulary(c, 3, 4)),
    "more tokens than rows": ("token_embd.weight", lambda c: _vocabulary(c, 5, 4)),
    "fewer scores than tokens": (
        "tokenizer.ggml.scores",
        lambda c: c.file(
            [c.strings("tokenizer.ggml.tokens", ["a", "b"]), c.array("tokenizer.ggml.scores", FLOAT32, bytes(4), 1)]
        ),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_crafted_file_is_refused_by_the_name_of_its_field(
    kind: str, craft: Craft, write: Callable[[bytes], Path]
) -> None:
    field, build = KINDS[kind]
    path = write(build(craft))
    tracemalloc.start()
    try:
        with pytest.raises(WeightError) as caught:
            GGUFFile.open(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.field == field
    assert peak_bytes < 1 << 20


def test_an_empty_file_is_refused(write: Callable[[bytes], Path]) -> None:
    with pytest.raises(WeightError, match="empty"):
        GGUFFile.open(write(b""))


def test_the_honest_file_that_the_crafted_ones_vary_is_accepted(craft: Craft, write: Callable[[bytes], Path]) -> None:
    with GGUFFile.open(write(craft.file())) as file:
        assert file.names() == ("a.weight",)
        assert file.shape("a.weight") == (4, 8)


def test_a_file_cut_short_while_mapped_is_refused_when_a_tensor_is_asked_for(
    craft: Craft, write: Callable[[bytes], Path]
) -> None:
    path = write(craft.file(tensors=[craft.tensor("t", [2048])], data=bytes(8192)))
    with GGUFFile.open(path) as file:
        os.truncate(path, 4096)
        with pytest.raises(WeightError, match="cut from") as caught:
            file.tensor("t")
        assert caught.value.field == "file"
        with pytest.raises(WeightError, match="cut from"):
            file.digest()
