"""What torch and Hugging Face transformers reach on the same shape and card, with random weights.

A decoder with a static KV cache under torch.compile, as gpt-fast decodes at batch 1; `generate` (eager), and
`generate_batch` (continuous batching). Few tokens each. bench/gpu.py prints them as `--only baselines`.
"""

from __future__ import annotations

import gc
import random
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

_CONTEXT = 512  # positions of the static cache
_EPS = 1e-5


class StaticLayer(nn.Module):
    """One Llama layer for one token, whose keys and values stand in buffers of a fixed size."""

    def __init__(self, shape: Mapping[str, Any], context: int) -> None:
        super().__init__()
        width, inner = shape["hidden_size"], shape["intermediate_size"]
        self.heads, self.kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        self.head = shape.get("head_dim", width // self.heads)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.head, bias=False)
        self.out = nn.Linear(self.heads * self.head, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.norm, self.mlp_norm = nn.RMSNorm(width, eps=_EPS), nn.RMSNorm(width, eps=_EPS)
        self.register_buffer("keys", torch.zeros(1, self.kv_heads, context, self.head))
        self.register_buffer("values", torch.zeros(1, self.kv_heads, context, self.head))

    def forward(self, x: Tensor, at: Tensor, rotation: Tensor, mask: Tensor) -> Tensor:
        sizes = [self.heads * self.head, self.kv_heads * self.head, self.kv_heads * self.head]
        q, k, v = (
            part.view(1, 1, -1, self.head).transpose(1, 2) for part in self.qkv(self.norm(x)).split(sizes, dim=-1)
        )
        self.keys[:, :, at] = _rotated(k, rotation)
        self.values[:, :, at] = v
        mixed = functional.scaled_dot_product_attention(
            _rotated(q, rotation), self.keys, self.values, attn_mask=mask, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(1, 1, -1))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Queries or keys at one position; `rotation` is the cosines and the sines [2, 1, head / 2]."""
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = rotation[0], rotation[1]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class StaticDecoder(nn.Module):
    """A Llama that computes one token of one sequence."""

    def __init__(self, shape: Mapping[str, Any], context: int = _CONTEXT) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape["vocab_size"], shape["hidden_size"])
        self.layers = nn.ModuleList(StaticLayer(shape, context) for _ in range(shape["num_hidden_layers"]))
        self.norm = nn.RMSNorm(shape["hidden_size"], eps=_EPS)
        self.head = nn.Linear(shape["hidden_size"], shape["vocab_size"], bias=False)
        size = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
        inv_freq = shape["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(context).float(), inv_freq)
        self.register_buffer("rotations", torch.stack([angles.cos(), angles.sin()], dim=1)[:, :, None].float())
        self.register_buffer("masks", torch.ones(context, context, dtype=torch.bool).tril())

    def forward(self, token: Tensor, at: Tensor) -> Tensor:
        """The best next token [1, 1] after a token [1, 1] at a position [1]."""
        x, rotation, mask = self.embed(token), self.rotations[at][0], self.masks[at][None, None]
        for layer in self.layers:
            x = layer(x, at, rotation, mask)
        best: Tensor = self.head(self.norm(x)).argmax(-1)
        return best


def static_decoder(shape: Mapping[str, Any], device: str, dtype: torch.dtype) -> StaticDecoder:
    """The model with random weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return StaticDecoder(shape).eval()
    finally:
        torch.set_default_dtype(before)


def decode_tokens(step: Callable[[Tensor, Tensor], Tensor], tokens: int, device: str) -> list[int]:
    """Greedy tokens one after the other; each stays on the device until all are there."""
    token, at, drawn = torch.ones(1, 1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64), []
    at = at.to(device)
    for _ in range(tokens):
        with sdpa_kernel(SDPBackend.MATH):  # so that the compiler writes the attention itself
            token = step(token, at).clone()
        drawn.append(token)
        at += 1
    return torch.cat(drawn).flatten().tolist()


def compiled_decode(shape: Mapping[str, Any], tokens: int = 128) -> None:
    """Decode at batch 1 under torch.compile with CUDA graphs."""
    model = static_decoder(shape, "cuda", torch.bfloat16)
    began_s = time.perf_counter()
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    with torch.inference_mode():
        decode_tokens(step, 5, "cuda")
        compiled_s = time.perf_counter() - began_s
        seconds = min(_timed(lambda: decode_tokens(step, tokens, "cuda")) for _ in range(3))
    print(f"baseline, torch.compile decode, batch 1: {tokens / seconds:.0f} tok/s (compiled in {compiled_s:.0f} s)")


def _timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began_s


def hf_model(shape: Mapping[str, Any], device: str, dtype: torch.dtype) -> Any:
    """The transformers model of a shape with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**shape, max_position_embeddings=4096, rms_norm_eps=_EPS, tie_word_embeddings=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model.eval()


def hf_generate(shape: Mapping[str, Any], tokens: int = 48) -> None:
    """`generate` for one prompt of 16 tokens, eager and greedy."""
    model = hf_model(shape, "cuda", torch.bfloat16)
    prompt = torch.arange(1, 17, device="cuda")[None]

    def generate() -> None:
        with torch.inference_mode():
            model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    seconds = min(_timed(generate) for _ in range(3))
    print(f"baseline, transformers generate, batch 1: {tokens / seconds:.1f} tok/s")


def hf_generate_batch(shape: Mapping[str, Any], requests: int = 256, tokens: int = 32) -> None:
    """`generate_batch` for prompts of 100 to 1,000 tokens. The second of two runs counts: the first warms up."""
    from transformers import GenerationConfig

    model, dice = hf_model(shape, "cuda", torch.bfloat16), random.Random(1)
    prompts = [[dice.randrange(shape["vocab_size"]) for _ in range(dice.randint(100, 1000))] for _ in range(requests)]
    config = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1)
    with torch.no_grad():  # its thread has no inference mode of its own
        model.generate_batch(inputs=prompts[:8], generation_config=config)
        made: list[Any] = []
        seconds = _timed(lambda: made.append(model.generate_batch(inputs=prompts, generation_config=config)))
    drawn = sum(len(one.generated_tokens) for one in made[0].values())
    print(
        f"baseline, transformers generate_batch, {requests} x 100-1,000 in, {tokens} out: "
        f"{drawn / seconds:.0f} output tok/s ({seconds:.1f} s)"
    )


def baselines(shape: Mapping[str, Any]) -> None:
    """All of them, each with the card to itself; one that fails does not stop the others."""
    for work in (compiled_decode, hf_generate, hf_generate_batch):
        try:
            work(shape)
        except Exception:
            traceback.print_exc()
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
