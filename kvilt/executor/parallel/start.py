"""From a checkpoint to the processes that share its model."""

from __future__ import annotations

import torch

from ...config import RunConfig
from ...errors import Unsupported
from ...models.assemble import split_checkpoint
from ...models.spec import ModelSpec
from ...weights.source import Checkpoint
from .group import RankGroup


def start_group(
    checkpoint: Checkpoint, spec: ModelSpec, config: RunConfig, device: torch.device, max_context: int, kv_dtype: str
) -> RankGroup:
    """Start the other ranks of a model; they load their parts while this process loads its own."""
    if device.type != "cpu":
        raise Unsupported(f"tensor_parallel runs on CPUs, and this model would run on {device}; pass device='cpu'")
    splits = split_checkpoint(checkpoint, spec, config.tensor_parallel)
    group = RankGroup(splits, config.parallel_timeout_s)
    try:
        group.start(checkpoint.path, config, max_context, kv_dtype)
    except BaseException:
        group.close()
        raise
    return group
