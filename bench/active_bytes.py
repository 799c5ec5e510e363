"""What a decode step reads: the weights of all maps that some row uses, keys and values, and recurrent states."""

from __future__ import annotations

import math

from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.kv.layout import Window
from kvilt.models.decoder import Decoder
from kvilt.models.experts import Experts
from kvilt.models.layers import linears_in


def weight_bytes(executor: Executor, rows: int) -> float:
    """Of a step of so many rows, whose tokens choose their experts independently of each other."""
    decoder, size = _decoder(executor), float(executor.weight_bytes)
    for layer in decoder.layers:
        if isinstance(block := layer.feed_forward, Experts):
            share = block.spec.top_k / block.spec.experts
            whole = sum(one.weight.nbytes for one in linears_in(block.experts))
            size += whole * (1 - (1 - share) ** rows - share)
    return size


def kv_bytes(executor: Executor, kv: KVCache) -> float:
    """Of the keys and values that the next token of each row sees, and of the states that it reads and writes."""
    size, page_tokens = 0.0, executor.layout.page_tokens
    for group in executor.layout.groups:
        seen = [min(n, group.reach.tokens) if isinstance(group.reach, Window) else n for n in kv.lengths]
        size += sum(seen) * group.shape.page_bytes / page_tokens
    states = executor.layout.recurrent
    return size if states is None else size + 2 * len(kv.lengths) * states.shape.slot_bytes


def multiplied(executor: Executor) -> float:
    """Weights that a token of a prompt is multiplied with; the head is not one of them."""
    count = 0.0
    for layer in _decoder(executor).layers:
        count += sum(math.prod(one.weight.shape) for one in linears_in(layer))
        if isinstance(block := layer.feed_forward, Experts):
            idle = 1 - block.spec.top_k / block.spec.experts
            count -= idle * sum(math.prod(one.weight.shape) for one in linears_in(block.experts))
    return count


def _decoder(executor: Executor) -> Decoder:
    found = executor._decoder  # type: ignore[attr-defined]
    assert isinstance(found, Decoder)
    return found
