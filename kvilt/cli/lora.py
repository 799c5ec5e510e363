"""`kvilt lora merge`: a checkpoint with an adapter in its weights."""

from __future__ import annotations

import os
from pathlib import Path

from ..weights.hub import resolve
from ..weights.merge import merge as write
from ..weights.peft import open_peft
from ..weights.source import open_checkpoint


def merge(model: str, adapter: str, target: str, scale: float) -> str:
    """Write the merged checkpoint; returns a summary."""
    checkpoint = open_checkpoint(resolve(os.fspath(model)))
    with checkpoint.tensors, open_peft(adapter) as opened:
        changed = write(checkpoint, opened, Path(target), scale)
    return f"{changed} weights of {len(checkpoint.tensors.names())} tensors have the adapter in them: {target}"
