"""`kvilt inspect`: what a checkpoint or a saved KV cache is. Loads no weights; a cache needs no model."""

from __future__ import annotations

import json
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..errors import TokenizerError, Unsupported
from ..executor.load import PAGE_TOKENS
from ..kv.codec import MAGIC, VERSION, describe
from ..kv.layout import Full, KVLayout, Latent, LayerGroup, Reach, Window
from ..kv.sizing import split_memory
from ..models.assemble import read_spec
from ..models.spec import (
    ExpertsSpec,
    FactorScaling,
    FeedForwardSpec,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ModelSpec,
    NoRope,
    NoScaling,
    ProportionalScaling,
    Rope,
    Scaling,
    YarnScaling,
    kv_layout,
)
from ..ops.kv_dtypes import KV_DTYPES, KVDtype
from ..ops.select import select
from ..quant.formats import FORMATS
from ..quant.unpack import UNPACKED_FORMATS
from ..text import tokenizer as tokenizers
from ..text.vocabulary import read_vocabulary
from ..weights.hub import resolve
from ..weights.source import Checkpoint, TensorSource, open_checkpoint
from .progress import bars

_GIB = 1 << 30
_RUNNABLE = frozenset(UNPACKED_FORMATS) | {"F64"}
_TOKENIZERS = {"gpt2": "byte-level BPE", "llama": "SentencePiece BPE"}


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor, from the header of its file."""

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """All tensors of one format together."""

    format: str
    tensors: int
    parameters: int
    nbytes: int
    backend: str | None  # that would run it; None: no backend can
    expanded: bool = False  # the backend has no kernels for it and computes on a float32 copy
    kernel: str | None = None  # what multiplies it there


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The architecture; where layers differ, all values."""

    family: str
    layers: int
    hidden: int
    heads: str
    kv_heads: str
    head_dim: str
    feed_forward: str
    context: int
    vocabulary: int
    attention: str
    rope: str
    tied_head: bool


@dataclass(frozen=True, slots=True)
class KVFacts:
    """The memory of KV in one dtype."""

    dtype: str
    token_bytes: int
    tokens_per_gib: int
    context_bytes: int  # of one sequence as long as the model's context


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """How text becomes tokens, or why it cannot."""

    kind: str | None
    tokens: int | None
    chat_template: bool
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What the headers of a checkpoint say."""

    kind: str
    path: str
    container: str
    name: str | None
    architecture: str
    model: ModelFacts | None  # None: not an architecture kvilt runs
    problem: str | None
    parameters: int
    nbytes: int
    formats: tuple[FormatFacts, ...]
    kv: tuple[KVFacts, ...]
    tokenizer: TokenizerFacts
    tensors: tuple[TensorFacts, ...]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Layers of a saved cache with one shape."""

    layers: int
    reach: str
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class SavedRowFacts:
    """One row of a saved cache."""

    length: int
    embedded: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What the header of a saved cache says. Reading it checks the checksum."""

    kind: str
    path: str
    version: int
    checksum: str
    nbytes: int
    token_bytes: int
    identity: dict[str, str]
    layout: tuple[GroupFacts, ...]
    rows: tuple[SavedRowFacts, ...]


def inspect(name: str, tensors: bool, as_json: bool) -> None:
    """Print the facts about a checkpoint or a saved cache, given by path or by a model's name."""
    with bars() as shown:
        path = resolve(name, shown.fetching)
    facts = cache_facts(path) if is_saved_cache(path) else checkpoint_facts(path)
    if as_json:
        fields = asdict(facts)
        if not tensors:
            fields.pop("tensors", None)
        print(json.dumps(fields, ensure_ascii=False))
        return
    from .inspect_view import show_cache, show_checkpoint

    if isinstance(facts, CacheFacts):
        show_cache(facts)
    else:
        show_checkpoint(facts, tensors)


def is_saved_cache(path: Path) -> bool:
    """Whether a file starts like a saved cache."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def cache_facts(path: Path) -> CacheFacts:
    """The facts about a saved cache, after its checksum was checked. The file is mapped, not copied."""
    with path.open("rb") as file:
        # Not closed here: a raised error may still hold views of the map.
        said = describe(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    groups = said.layout.groups
    return CacheFacts(
        kind="saved cache",
        path=str(path),
        version=VERSION,
        checksum="ok",
        nbytes=said.nbytes,
        token_bytes=sum(group.shape.token_bytes for group in groups),
        identity=asdict(said.identity),
        layout=tuple(map(_group_facts, groups)),
        rows=tuple(SavedRowFacts(row.length, row.embedded, row.tokens) for row in said.rows),
    )


def _group_facts(group: LayerGroup) -> GroupFacts:
    shape = group.shape
    sizes = (shape.kv_heads, shape.key_dim, shape.value_dim)
    return GroupFacts(shape.layers, _reach(group.reach), *sizes, shape.dtype.name)


def checkpoint_facts(path: Path) -> CheckpointFacts:
    """The facts about a checkpoint, from its headers."""
    checkpoint = open_checkpoint(path)
    with checkpoint.tensors as source:
        tensors = tuple(_tensor_facts(source))
        spec, problem = _spec(checkpoint)
        return CheckpointFacts(
            kind="checkpoint",
            path=str(checkpoint.path),
            container=checkpoint.format.label(checkpoint.config),
            name=_text(checkpoint.config.get("general.name") or checkpoint.config.get("_name_or_path")),
            architecture=checkpoint.architecture,
            model=_model_facts(spec) if spec else None,
            problem=problem,
            parameters=sum(prod(tensor.shape) for tensor in tensors),
            nbytes=sum(tensor.nbytes for tensor in tensors),
            formats=_format_facts(tensors),
            kv=tuple(_kv_facts(spec)) if spec else (),
            tokenizer=_tokenizer_facts(checkpoint),
            tensors=tensors,
        )


def _tensor_facts(source: TensorSource) -> Iterable[TensorFacts]:
    for name in source.names():
        stored = source.storage(name)
        yield TensorFacts(name, source.shape(name), stored.format, stored.nbytes)


def _spec(checkpoint: Checkpoint) -> tuple[ModelSpec | None, str | None]:
    try:
        return read_spec(checkpoint), None
    except Unsupported as error:  # its tensors can still be listed
        return None, str(error)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _format_facts(tensors: Sequence[TensorFacts]) -> tuple[FormatFacts, ...]:
    """The facts by format, the largest first."""
    ops = select(threads=1)  # only asked, never run
    found = []
    for name in dict.fromkeys(tensor.format for tensor in tensors):
        of_it = [tensor for tensor in tensors if tensor.format == name]
        parameters = sum(prod(tensor.shape) for tensor in of_it)
        nbytes = sum(tensor.nbytes for tensor in of_it)
        backend = ops.name if name in _RUNNABLE else None
        expanded = backend is not None and name in FORMATS and ops.expands(FORMATS[name])
        kernel = ops.kernel(FORMATS[name]) if backend is not None and name in FORMATS else None
        found.append(FormatFacts(name, len(of_it), parameters, nbytes, backend, expanded, kernel))
    return tuple(sorted(found, key=lambda facts: -facts.nbytes))


def _model_facts(spec: ModelSpec) -> ModelFacts:
    attention = [layer.attention for layer in spec.layers]
    return ModelFacts(
        family=spec.family,
        layers=len(spec.layers),
        hidden=spec.hidden_size,
        heads=_each(a.heads for a in attention),
        kv_heads=_each(a.kv_heads for a in attention),
        head_dim=_each(a.head_dim for a in attention),
        feed_forward=_shares(_feed_forward(layer.feed_forward) for layer in spec.layers),
        context=spec.context,
        vocabulary=spec.vocab_size,
        attention=_shares(_reach(a.reach, a.chunked) for a in attention),
        rope=_shares(_rope(a.rope) for a in attention),
        tied_head=spec.tied_head,
    )


def _each(values: Iterable[int]) -> str:
    return "/".join(f"{value:,}" for value in dict.fromkeys(values))


def _shares(words: Iterable[str]) -> str:
    """The distinct values; where there are several, with the number of layers of each."""
    counted = Counter(words)
    if len(counted) == 1:
        return next(iter(counted))
    return "; ".join(f"{word} in {count} layers" for word, count in counted.items())


def _feed_forward(spec: FeedForwardSpec | ExpertsSpec) -> str:
    match spec:
        case FeedForwardSpec(hidden):
            return f"{hidden:,}"
        case ExpertsSpec(experts, top_k, expert, shared=shared):
            of_all = "" if shared is None else f", one of {shared.block.hidden:,} for all"
            return f"{experts} experts of {expert.hidden:,}, {top_k} for each token{of_all}"


def _reach(reach: Reach, chunked: bool = False) -> str:
    match reach:
        case Full():
            return "full"
        case Window(tokens):
            return f"chunks of {tokens:,}" if chunked else f"window of {tokens:,}"
        case Latent(rope_dims):
            return f"latent, absorbed, {rope_dims} numbers of a key rotated"


def _rope(rope: Rope) -> str:
    if isinstance(rope, NoRope):
        return "none"
    return f"theta {rope.theta:,.10g} over {rope.dims} dims ({rope.pairing}{_scaling(rope.scaling)})"


def _scaling(scaling: Scaling) -> str:
    match scaling:
        case NoScaling():
            return ""
        case ProportionalScaling(pairs):
            return f", the first {pairs} pairs"
        case LinearScaling(factor):
            return f", linear ×{factor:g}"
        case Llama3Scaling():
            return f", llama3 ×{scaling.factor:g} from {scaling.original_context:,}"
        case YarnScaling():
            return f", yarn ×{scaling.factor:g} from {scaling.original_context:,}"
        case LongScaling():
            return f", longrope from {scaling.original_context:,}"
        case FactorScaling(factors):
            return f", {len(factors)} divisors"


def _kv_facts(spec: ModelSpec) -> Iterator[KVFacts]:
    """What KV takes in each dtype that can hold the model's."""
    for dtype in KV_DTYPES.values():
        with suppress(Unsupported):
            yield _facts_in(spec, dtype)


def _facts_in(spec: ModelSpec, dtype: KVDtype) -> KVFacts:
    layout = kv_layout(spec, PAGE_TOKENS, dtype)
    token_bytes = layout.page_bytes // PAGE_TOKENS
    return KVFacts(
        dtype.name,
        token_bytes,
        max(split_memory(layout, _GIB, spec.context)) * PAGE_TOKENS,
        _context_bytes(layout, spec.context),
    )


def _context_bytes(layout: KVLayout, context: int) -> int:
    """Bytes of KV at full context; a sliding window holds no more than its size."""
    return sum((context - group.first_needed(context)) * group.shape.token_bytes for group in layout.groups)


def _tokenizer_facts(checkpoint: Checkpoint) -> TokenizerFacts:
    try:
        if checkpoint.format.tokenizer_inside:
            vocabulary = read_vocabulary(checkpoint.config)
            kind = f"{_TOKENIZERS[vocabulary.kind]} ({vocabulary.pre})"
            return TokenizerFacts(kind, len(vocabulary.tokens), vocabulary.template is not None)
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        found = tokenizers.from_file(folder)
        return TokenizerFacts("BPE (tokenizer.json)", found.vocab_size, found.chat_template is not None)
    except TokenizerError as error:
        return TokenizerFacts(None, None, False, str(error))
