"""The table of families, and which of them a checkpoint belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import Unsupported
from ...weights.source import Checkpoint
from .ernie4_5_moe import ERNIE4_5_MOE
from .family import CheckpointDialect, Family
from .gemma import GEMMA
from .glm4_moe import GLM4_MOE
from .gpt_oss import GPT_OSS
from .lfm2 import LFM2
from .llama import LLAMA
from .mixtral import MIXTRAL
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen2_moe import QWEN2_MOE
from .qwen3 import QWEN3
from .qwen3_5 import QWEN3_5, QWEN3_5_MOE
from .qwen3_moe import QWEN3_MOE
from .qwen3_next import QWEN3_NEXT
from .smollm3 import SMOLLM3

FAMILIES: tuple[Family, ...] = (
    LLAMA, QWEN2, QWEN3, GEMMA, PHI3, SMOLLM3, QWEN2_MOE, QWEN3_MOE, MIXTRAL, GLM4_MOE, ERNIE4_5_MOE,
    QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, LFM2, GPT_OSS,
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
            if dialect.kind == checkpoint.kind and architecture in dialect.architectures:
                return Recognised(family, dialect)
    known = [name for f in FAMILIES for d in f.dialects if d.kind == checkpoint.kind for name in d.architectures]
    raise Unsupported(f"the architecture {architecture!r} is not supported; kvilt runs {', '.join(known)}")


def pairs_qk(family: str, kind: str) -> bool:
    """Whether this family's checkpoints of a kind have the rows of q and k in neighbouring pairs."""
    return any(d.pairs_qk for f in FAMILIES if f.name == family for d in f.dialects if d.kind == kind)
