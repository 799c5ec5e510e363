"""The table of families, and which of them a checkpoint belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher

from ...errors import Unsupported
from ...weights.source import Checkpoint
from .cohere import COHERE
from .deepseek import DEEPSEEK
from .ernie import ERNIE
from .ernie4_5_moe import ERNIE4_5_MOE
from .falcon_h1 import FALCON_H1
from .family import CheckpointDialect, Family
from .gemma import GEMMA
from .gemma3n import GEMMA3N
from .gemma4 import GEMMA4
from .glm import GLM
from .glm4_moe import GLM4_MOE
from .gpt2 import GPT2
from .gpt_oss import GPT_OSS
from .granite import GRANITE
from .granite_hybrid import GRANITE_HYBRID
from .lfm2 import LFM2
from .lfm2_moe import LFM2_MOE
from .llama import LLAMA
from .llama4 import LLAMA4
from .mistral3 import MISTRAL3
from .mixtral import MIXTRAL
from .nemotron_h import NEMOTRON_H
from .olmo import OLMO
from .olmoe import OLMOE
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen2_moe import QWEN2_MOE
from .qwen3 import QWEN3
from .qwen3_5 import QWEN3_5, QWEN3_5_MOE
from .qwen3_moe import QWEN3_MOE
from .qwen3_next import QWEN3_NEXT
from .smollm3 import SMOLLM3
from .starcoder2 import STARCODER2

FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL3, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, GEMMA, GEMMA3N,
    GEMMA4, PHI3, SMOLLM3, OLMO, GRANITE, GLM, GLM4_MOE, COHERE, STARCODER2, GPT2, GPT_OSS, ERNIE, ERNIE4_5_MOE, LFM2,
    LFM2_MOE, GRANITE_HYBRID, FALCON_H1, NEMOTRON_H, DEEPSEEK, OLMOE, LLAMA4,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recognised:
    """The family of a checkpoint and the way it is written."""

    family: Family
    dialect: CheckpointDialect


def recognise(checkpoint: Checkpoint) -> Recognised:
    """The family a checkpoint says it is of."""
    architecture = checkpoint.architecture
    for family in FAMILIES:
        for dialect in family.dialects:
            known = _names(dialect)
            if dialect.kind == checkpoint.kind and architecture in known and _has(checkpoint, dialect):
                return Recognised(family, dialect)
    raise Unsupported(_unknown(architecture, checkpoint.kind))


def _names(dialect: CheckpointDialect) -> tuple[str, ...]:
    """What checkpoints of a dialect call themselves; those without a head also say XModel for XForCausalLM."""
    if not dialect.headless:
        return dialect.architectures
    return (*dialect.architectures, *(name.replace("ForCausalLM", "Model") for name in dialect.architectures))


def has_head(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint's logits mean something: a model that is kept for embeddings may have no head."""
    dialect = recognise(checkpoint).dialect
    tied = bool(checkpoint.config.get("tie_word_embeddings", False))
    return not dialect.headless or tied or dialect.names["head"] in checkpoint.tensors.names()


def _unknown(architecture: str, kind: str) -> str:
    """One sentence: what was asked for, the nearest that there is, and how to add it."""
    known = {name: f.name for f in FAMILIES for d in f.dialects if d.kind == kind for name in d.architectures}
    nearest = max(known, key=lambda name: SequenceMatcher(None, architecture.lower(), name.lower()).ratio())
    return (
        f"the architecture {architecture!r} is not supported; the nearest that is known is {nearest} "
        f"(family {known[nearest]}), and docs/adding_a_family.md says how to add one"
    )


def _has(checkpoint: Checkpoint, dialect: CheckpointDialect) -> bool:
    return not dialect.when or dialect.when in checkpoint.tensors.names()


def pairs_qk(family: str, kind: str) -> bool:
    """Whether this family's checkpoints of a kind have the rows of q and k in neighbouring pairs."""
    return any(d.pairs_qk for f in FAMILIES if f.name == family for d in f.dialects if d.kind == kind)
