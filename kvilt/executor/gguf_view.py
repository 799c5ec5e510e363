"""A Hugging Face checkpoint seen as a GGUF file: its metadata, and its tensors under the names of GGUF.

What GGUF would mean is read back and compared with the checkpoint: a model that cannot be said in GGUF is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from math import prod
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import Unsupported, WeightError
from ..models.assemble import read_spec
from ..models.families.family import CheckpointDialect
from ..models.families.registry import FAMILIES, recognise
from ..models.gguf_fields import gguf_metadata, rope_tensors
from ..models.parts import JoinedParts, PartReader, PartWriter, joined_parts
from ..models.rope import frequencies, magnitude
from ..models.spec import LongScaling, ModelSpec, RopeSpec
from ..quant.tensor import Weight
from ..text.gguf_vocabulary import gguf_vocabulary
from ..weights.gguf import GGUFFile
from ..weights.gguf_writer import stored_value
from ..weights.quantize import KEPT
from ..weights.source import GGUF, Checkpoint
from ..weights.tensor_storage import TensorStorage

# Families that GGUF knows as another one.
_KNOWN_AS: Mapping[str, str] = MappingProxyType({"mixtral": "llama"})
_FLOATS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
)
_DIGITS = 5  # that must agree of numbers which GGUF keeps in 32 bits
_SHOWN = 4
_OTHER = "files of another kind would be read"


class GGUFView:
    """The tensors of a Hugging Face checkpoint as llama.cpp's converter would write them."""

    def __init__(
        self,
        writer: PartWriter,
        made: Mapping[str, JoinedParts],
        added: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
    ) -> None:
        """`made` are the tensors that come from the checkpoint, `added` those that follow from its config."""
        self.metadata = metadata
        self._writer = writer
        self._joined = made
        self._added = added
        self._tensors = writer.reader.checkpoint.tensors

    def renamed(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is known of matrices by the checkpoint's names, by those of GGUF: [matrices, columns] each."""
        found = {}
        for name, joined in self._joined.items():
            known = [values[one] for one in self._sources(joined) if one in values]
            if known and (not joined.experts or len(known) == len(self._sources(joined))):
                found[name] = torch.cat(known) if joined.experts and len(known) > 1 else known[0]
        return found

    def raw_metadata(self) -> dict[str, bytes]:
        """The metadata as it is stored."""
        return {key: stored_value(value) for key, value in self.metadata.items()}

    def names(self) -> tuple[str, ...]:
        return (*self._joined, *self._added)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._joined[name].shape if name in self._joined else tuple(self._added[name].shape)

    def storage(self, name: str) -> TensorStorage:
        shape = self.shape(name)
        if len(shape) < 2 or any(fnmatchcase(name, one) for one in KEPT):
            return TensorStorage("F32", 4 * prod(shape))  # llama.cpp takes norms, biases and routers as nothing else
        stored = self._tensors.storage(self._sources(self._joined[name])[0])
        return TensorStorage(stored.format, prod(shape) * (4 if stored.format == "F32" else 2))

    def tensor(self, name: str) -> Weight:
        if name in self._added:
            return self._added[name]
        found = self._writer.tensor(self._joined[name])
        return found.float() if self.storage(name).format == "F32" else found

    def forget(self, name: str) -> None:
        for one in self._sources(self._joined[name]) if name in self._joined else ():
            self._tensors.forget(one)

    @property
    def expected(self) -> ModelSpec:
        """The spec that a reader of the file must find."""
        return self._writer.spec

    def digest(self) -> str:
        return self._tensors.digest()

    def close(self) -> None:
        self._tensors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _sources(self, joined: JoinedParts) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one for part in joined.parts for one in self._writer.reader.sources(part)))


def gguf_tensors(source: Checkpoint) -> GGUFFile | GGUFView:
    """The tensors and the metadata of a checkpoint as those of a GGUF file; of one that is, as they are."""
    if isinstance(source.tensors, GGUFFile):
        return source.tensors
    own, spec = recognise(source), read_spec(source)
    folder = source.path if source.path.is_dir() else source.path.parent
    reader, refusals = PartReader.of(source, spec, own.dialect), []
    for dialect in _dialects(own.family.name):
        for architecture in dialect.architectures:
            view, why = _viewed(reader, dialect, gguf_metadata(spec, architecture, folder.name))
            if view is not None:
                view.metadata = {**view.metadata, **gguf_vocabulary(folder, spec.vocab_size)}
                return view
            refusals.append(why)
    what = f"{own.family.name} cannot be written to GGUF: that has no architecture of this kind"
    # The shortest comes nearest: it has the fewest differences.
    raise Unsupported(min((why for why in refusals if not why.endswith(_OTHER)), key=len, default=what))


def _dialects(family: str) -> Iterator[CheckpointDialect]:
    """How GGUF keeps models of a family."""
    names = (family, _KNOWN_AS.get(family, family))
    return (one for known in FAMILIES if known.name in names for one in known.dialects if one.kind == "gguf")


def _viewed(reader: PartReader, dialect: CheckpointDialect, metadata: dict[str, Any]) -> tuple[GGUFView | None, str]:
    """The view in a dialect, or why there is none."""
    source, architecture = reader.checkpoint, metadata["general.architecture"]
    refused = f"GGUF files of {architecture} cannot hold this model"
    try:
        view = GGUFView(
            PartWriter(reader, dialect), joined_parts(reader.spec, dialect), rope_tensors(reader.spec), metadata
        )
        written = Checkpoint(source.path, GGUF, metadata, source.generation, view)
        if recognise(written).dialect is not dialect:
            return None, f"{refused}: {_OTHER}"
        writes = view.expected
        differ = list(_differences(_plain(writes), _plain(read_spec(written))))
    except (Unsupported, WeightError) as error:
        return None, f"{refused}: {error}"
    if differ:
        return None, f"{refused}: {', '.join(dict.fromkeys(differ[:_SHOWN]))} would be lost"
    return view, ""


def _plain(value: Any) -> Any:
    """A spec as plain data, without what GGUF keeps in another order or rounds."""
    match value:
        case RopeSpec(scaling=LongScaling() as scaling):
            return {"rope": (value.theta, value.dims, _plain(scaling), value.pairing, value.sections)}
        case RopeSpec():
            turns = [_rounded(one) for one in frequencies(value).tolist()]
            return {"rope": (turns, _rounded(magnitude(value)), value.pairing, value.sections)}
        case float():
            return _rounded(value)
        case tuple():
            return tuple(_plain(one) for one in value)
        case _ if is_dataclass(value):
            own = {one.name: _plain(getattr(value, one.name)) for one in fields(value) if one.name != "family"}
            return {"kind": type(value).__name__, **own}
        case _:
            return value


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """The names of what differs between two specs, without the numbers of layers."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            yield from _differences(one[name], other[name], name if not path else f"{path}.{name}")
    elif path == "layers" and len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            yield from _differences(mine, theirs, "layer")
    elif one != other:
        yield path or "the kind of model"
