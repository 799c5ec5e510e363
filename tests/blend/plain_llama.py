"""A Llama forward of another engine, in plain torch over a checkpoint's tensors: it knows blending by its interfaces.

Nothing of kvilt's forward is in here; rows shrink where the blend executor selects tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvilt.blend import BlendExecutor, BlendRetrieverTask


class PlainLlama:
    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.dim = self.config["hidden_size"] // self.heads

    def logprobs(self, ids: Tensor, task: BlendRetrieverTask, blend: BlendExecutor) -> Tensor:
        """Log-probabilities [vocab] of the token after a prompt whose stored segments are blended."""
        x, at, starts = (
            self.weights["model.embed_tokens.weight"][ids],
            torch.arange(len(ids)),
            torch.tensor([0, len(ids)]),
        )
        places = at
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = self.norm(x, f"{name}.input_layernorm")
            q, k, v = (normed @ self.weights[f"{name}.self_attn.{p}_proj.weight"].T for p in "qkv")
            out = blend.blend_result(
                layer, task.result(layer), self.rotate(q, at), self.rotate(k, at), v, at, starts, 0
            )
            x, at = x[out.local_indices], out.positions
            x = x + self.attention(out.q, out.k, out.v, at, places) @ self.weights[f"{name}.self_attn.o_proj.weight"].T
            x = x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        head = self.norm(x[-1], "model.norm") @ self.weights["model.embed_tokens.weight"].T
        return head.log_softmax(-1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        inv_freq = self.config["rope_theta"] ** -(torch.arange(0, self.dim, 2) / self.dim)
        angles = (at[:, None] * inv_freq)[:, None]
        first, second = x.view(len(x), -1, self.dim).chunk(2, -1)
        turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return torch.cat(turned, -1).flatten(1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor, places: Tensor) -> Tensor:
        group = self.heads // self.kv_heads
        queries = q.view(len(q), self.heads, self.dim)
        keys, values = (one.view(len(one), self.kv_heads, self.dim).repeat_interleave(group, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / self.dim**0.5
        scores = scores.masked_fill(places > at[:, None], float("-inf"))  # by position, not the last rows
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
