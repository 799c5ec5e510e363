"""What others might write for the interfaces: a model without kvilt inside, a cache, an executor over `KVCache`."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from kvilt import KVCache
from kvilt.errors import Cancelled, InputError
from kvilt.kv.identity import Identity
from kvilt.kv.layout import Full, KVLayout, LayerGroup
from kvilt.kv.pool import PagePool
from kvilt.ops.contract import KeysValues, PageShape
from kvilt.ops.kv_dtypes import KV_DTYPES
from kvilt.ops.reference import ReferenceOps


class ToyModel:
    """A decoder-only model of twenty lines. A token's logits depend on all tokens before it, and on their order."""

    def __init__(self, vocab: int = 61, context: int = 256) -> None:
        self.sizes = SimpleNamespace(
            hidden_size=8, num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=vocab, max_seq_len=context
        )
        self.caches: dict[str, list[int]] = {}
        self.calls: list[str] = []

    def config(self) -> Any:
        return self.sizes

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> list[float]:
        self.calls.append(f"prefill {cache_id} {len(tokens)}")
        self.caches[cache_id] = list(tokens)
        return self.logits(self.caches[cache_id])

    def decode(self, cache_id: str, token: int, pos: int) -> list[float]:
        self.calls.append(f"decode {cache_id} {pos}")
        assert pos == len(self.caches[cache_id]), "a token stands after those before it"
        self.caches[cache_id].append(token)
        return self.logits(self.caches[cache_id])

    def logits(self, tokens: Sequence[int]) -> list[float]:
        state = sum((place + 1) * (token + 3) for place, token in enumerate(tokens))
        return [((state * (word + 7)) % 101) / 10 for word in range(self.sizes.vocab_size)]

    def release(self, cache_id: str) -> None:
        self.caches.pop(cache_id, None)


class ToyCache:
    """A KV cache that is only tokens: what the model above would need."""

    def __init__(self, rows: Sequence[Sequence[int]] = ((),)) -> None:
        self.rows = [list(row) for row in rows]

    @property
    def num_entries(self) -> int:
        return max(map(len, self.rows))

    @property
    def batch_size(self) -> int:
        return len(self.rows)

    def serialize(self) -> bytes:
        return json.dumps(self.rows).encode()

    def load(self, data: bytes) -> None:
        rows = json.loads(data)
        if len(rows) != len(self.rows):
            raise ValueError("another number of rows")
        self.rows = rows

    def select_and_copy_from(self, other: ToyCache, batch_index: int) -> None:
        (self.rows,) = ([list(other.rows[batch_index])],)

    def broadcast_and_copy_from(self, other: ToyCache) -> None:
        self.rows = [list(other.rows[0]) for _ in self.rows]

    def deep_copy(self) -> ToyCache:
        return ToyCache(self.rows)


class TorchExecutor:
    """An executor in plain torch for the tiny llama of the tests. Of kvilt it has `KVCache` and its pool, no forward.

    It writes keys and values into reserved slots, reads them back for attention, and commits what it has written.
    """

    HEADS, KV_HEADS, PAGE = 4, 2, 32

    def __init__(self, folder: Any, context: int = 256, pages: int = 64) -> None:
        self.weights = load_file(folder / "model.safetensors")
        self.vocab, self.hidden = self.weights["model.embed_tokens.weight"].shape
        self.dim, self.context = self.hidden // self.HEADS, context
        self.layers = sum(name.endswith("input_layernorm.weight") for name in self.weights)
        shape = PageShape(self.layers, self.PAGE, self.KV_HEADS, self.dim, self.dim, KV_DTYPES["float32"])
        layout = KVLayout((LayerGroup(Full(), tuple(range(self.layers)), shape),))
        self.pool = PagePool(layout, pages, ReferenceOps(), lambda: Identity("torch", "plain"), token_limit=self.vocab)
        self._stop = threading.Event()

    def create_kv_cache(self, batch_size: int = 1) -> KVCache:
        return KVCache(self.pool, batch_size, self.context)

    def prefill(self, inputs: Any, kv: KVCache, lora_id: int | None = None) -> None:
        self._extend(inputs, kv, lora_id)

    def step(self, inputs: Any, kv: KVCache, lora_id: int | None = None) -> Tensor:
        return self._extend(inputs, kv, lora_id)

    def sample_tokens(self, num_steps: int, inputs: Any, kv: KVCache, lora_id: int | None = None) -> list[list[int]]:
        sampled: list[list[int]] = [[] for _ in range(kv.batch_size)]
        for _ in range(num_steps):
            tokens = self._extend(inputs, kv, lora_id).argmax(-1).tolist()
            for row, token in zip(sampled, tokens, strict=True):
                row.append(token)
            inputs = [[token] for token in tokens]
        return sampled

    def load_lora(self, assets: Any) -> int:
        raise InputError(f"this executor has no adapters; it cannot load {assets!r}")

    def unload_lora(self, lora_id: int) -> None:
        raise InputError(f"there is no adapter {lora_id}")

    def cancel(self) -> None:
        self._stop.set()

    def _extend(self, inputs: Any, kv: KVCache, lora_id: int | None) -> Tensor:
        if lora_id is not None:
            raise InputError(f"there is no adapter {lora_id}")
        rows = [inputs] if _flat(inputs) else inputs
        if len(rows) != kv.batch_size or not all(len(row) for row in rows):
            raise InputError("one sequence of tokens is needed for each row")
        if any(not 0 <= token < self.vocab for row in rows for token in row):
            raise InputError("a token is outside the vocabulary")
        self._stop.clear()
        kv.reserve([len(row) for row in rows])
        try:
            logits = [self._forward(list(row), kv, index) for index, row in enumerate(rows)]
            kv.commit([list(row) for row in rows])
        finally:
            kv.truncate(kv.lengths)  # what was reserved and not committed goes back
        return torch.stack(logits)

    def _forward(self, ids: list[int], kv: KVCache, index: int) -> Tensor:
        row = kv.row(index)
        start, weight = row.length, self.weights.__getitem__
        at = torch.arange(start, start + len(ids))
        x = weight("model.embed_tokens.weight")[torch.tensor(ids)]
        written = [torch.zeros(self.layers, len(ids), self.KV_HEADS, self.dim) for _ in range(2)]
        past = self.pool.ops.read_slots(self.pool.stores[0], row.slots(0, 0, start))
        for layer in range(self.layers):
            if self._stop.is_set():
                raise Cancelled()
            name = f"model.layers.{layer}."
            y = rms_norm(x, (self.hidden,), weight(name + "input_layernorm.weight"), 1e-5)
            q, k, v = (
                (y @ weight(f"{name}self_attn.{one}_proj.weight").T).view(len(ids), -1, self.dim) for one in "qkv"
            )
            q, k = self._rotated(q, at), self._rotated(k, at)
            written[0][layer], written[1][layer] = k, v
            keys, values = torch.cat([past.keys[layer], k]), torch.cat([past.values[layer], v])
            x = x + self._attended(q, keys, values, at) @ weight(name + "self_attn.o_proj.weight").T
            y = rms_norm(x, (self.hidden,), weight(name + "post_attention_layernorm.weight"), 1e-5)
            gate, up = (y @ weight(f"{name}mlp.{one}_proj.weight").T for one in ("gate", "up"))
            x = x + (silu(gate) * up) @ weight(name + "mlp.down_proj.weight").T
        slots = row.slots(0, start, start + len(ids))
        self.pool.ops.write_slots(self.pool.stores[0], slots, KeysValues(*written))
        x = rms_norm(x[-1], (self.hidden,), weight("model.norm.weight"), 1e-5)
        return x @ weight("model.embed_tokens.weight").T

    def _rotated(self, x: Tensor, at: Tensor) -> Tensor:
        angles = at[:, None] * 10000.0 ** (-torch.arange(0, self.dim, 2) / self.dim)
        cos, sin = (torch.cat([one, one], -1)[:, None] for one in (angles.cos(), angles.sin()))
        half = self.dim // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def _attended(self, q: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        groups = self.HEADS // self.KV_HEADS
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / self.dim**0.5
        scores = scores.masked_fill(torch.arange(len(keys)) > at[:, None], float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(len(q), -1)


def _flat(inputs: Any) -> bool:
    return len(inputs) == 0 or isinstance(inputs[0], int)
