"""Recurrent state on the native kernels; where the installed ones are older and lack these, plain torch does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import recurrent
from ..contract import Decay, FoldHeads, StatePlace, StateSlots
from .border import I64, F32Address, I64Address, check, check_dims, checked, f32, i64
from .memory import Buffers

if TYPE_CHECKING:
    from _kvilt_native import KernelRunner


def has_kernels(runner: KernelRunner) -> bool:
    """Whether the installed kernels know recurrent state."""
    return hasattr(runner, "fold")


def causal_conv(
    runner: KernelRunner,
    buffers: Buffers,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    place: StatePlace,
) -> Tensor:
    if not has_kernels(runner):
        return recurrent.causal_conv(x, weight, bias, silu, place)
    check_dims("x", x, 2)
    tokens, channels = x.shape
    x, tails = checked("x", x.contiguous(), x.shape), place.store.tails
    width = tails.shape[-1] + 1
    checked("weight", weight, (channels, width))
    if bias is not None:
        checked("bias", bias, (channels,))
    checked("tails", tails, (tails.shape[0], tails.shape[1], channels, width - 1))
    out = buffers.empty(tokens, channels)
    at = (f32(tails[place.layer]), *_rows(place.slots, tokens), tails.shape[1])
    runner.causal_conv(f32(x), f32(weight), f32(bias), channels, width, silu, *at, f32(out))
    return out


def gated_delta(
    runner: KernelRunner,
    buffers: Buffers,
    mixed: Tensor,
    step: Tensor,
    beta: Tensor,
    decay: Decay,
    heads: FoldHeads,
    place: StatePlace,
) -> Tensor:
    if not has_kernels(runner):
        return recurrent.gated_delta(mixed, step, beta, decay, heads, place)
    beta = checked("beta", beta.contiguous(), (len(mixed), heads.value_heads))
    return _fold(runner, buffers, mixed, step, f32(beta), decay, F32Address(0), heads, place)


def mamba2(
    runner: KernelRunner,
    buffers: Buffers,
    mixed: Tensor,
    step: Tensor,
    skip: Tensor,
    decay: Decay,
    heads: FoldHeads,
    place: StatePlace,
) -> Tensor:
    if not has_kernels(runner):
        return recurrent.mamba2(mixed, step, skip, decay, heads, place)
    skip = checked("skip", skip, (heads.value_heads,))
    return _fold(runner, buffers, mixed, step, F32Address(0), decay, f32(skip), heads, place)


def sigmoid_mul(runner: KernelRunner, buffers: Buffers, x: Tensor, gate: Tensor) -> Tensor:
    if not has_kernels(runner):
        return x * recurrent.steady(torch.sigmoid, gate)
    x, gate = checked("x", x.contiguous(), x.shape), checked("gate", gate.contiguous(), x.shape)
    out = buffers.empty(*x.shape)
    runner.sigmoid_mul(f32(x), f32(gate), x.numel(), f32(out))
    return out


def _fold(
    runner: KernelRunner,
    buffers: Buffers,
    mixed: Tensor,
    step: Tensor,
    beta: F32Address,
    decay: Decay,
    skip: F32Address,
    heads: FoldHeads,
    place: StatePlace,
) -> Tensor:
    tokens, memories = len(mixed), place.store.memories
    mixed = checked("mixed", mixed.contiguous(), (tokens, heads.channels))
    step = checked("step", step.contiguous(), (tokens, heads.value_heads))
    for name, each in (("log_rate", decay.log_rate), ("bias", decay.bias)):
        checked(name, each, (heads.value_heads,))
    memory = (heads.value_heads, heads.key_dim, heads.value_dim)
    checked("memories", memories, (*memories.shape[:2], *memory))
    out = buffers.empty(tokens, heads.value_heads, heads.value_dim)
    sizes = [heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim, int(heads.tiled)]
    inputs = (f32(mixed), f32(step), beta, f32(decay.log_rate), f32(decay.bias), skip, sizes, decay.least, decay.most)
    at = (f32(memories[place.layer]), *_rows(place.slots, tokens), memories.shape[1])
    runner.fold(*inputs, *at, f32(out))
    return out


def _rows(slots: StateSlots, tokens: int) -> tuple[list[int], I64Address, I64Address]:
    """Where rows begin, and the addresses of what they read and write."""
    check(slots.starts[-1] == tokens, "starts", f"must end with the last of {tokens} tokens")
    rows = len(slots.starts) - 1
    checked("reads", slots.reads, (rows,), I64)
    checked("writes", slots.writes, (tokens,), I64)
    return list(slots.starts), i64(slots.reads), i64(slots.writes)
