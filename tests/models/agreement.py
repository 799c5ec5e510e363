"""A random checkpoint against transformers: kvilt loads it and agrees, or refuses it by name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from families import write_checkpoint
from hypothesis import event
from hypothesis import strategies as st
from transformers import PreTrainedModel

from kvilt.config import RunConfig
from kvilt.errors import Unsupported, WeightError
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor

IDS = [int(i) for i in torch.randint(0, 53, (21,), generator=torch.Generator().manual_seed(3))]
BACKENDS = st.sampled_from(["native", "reference"])


def flags(*names: str) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.booleans() for name in names}


def rope(kind: str = "default", **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"rope_type": st.just(kind), "rope_theta": st.sampled_from([100.0, 1e4]), **fields})


PARTIAL = rope(partial_rotary_factor=st.sampled_from([0.25, 0.5, 0.75, 1.0]))


@st.composite
def sizes(
    draw: st.DrawFn, own_head_dim: bool, spread: float = 0.3, head_dims: Sequence[int] = (8, 16, 24, 6, 10, 2, 7)
) -> dict[str, Any]:
    """Sizes that do not always fit together."""
    heads, head_dim = draw(st.integers(1, 6)), draw(st.sampled_from(head_dims))
    sharing = [count for count in range(1, heads + 1) if heads % count == 0]
    hidden = draw(st.sampled_from([10, 24, 32])) if own_head_dim else heads * head_dim
    return {
        "vocab_size": 53,
        "hidden_size": hidden,
        "intermediate_size": draw(st.integers(3, 40)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from(sharing) | st.integers(1, heads)),
        "max_position_embeddings": 64,
        "initializer_range": spread,
    } | ({"head_dim": head_dim} if own_head_dim else {})


@torch.no_grad()
def fill_constants(model: PreTrainedModel) -> None:
    """Biases, norms and some routers start with 0 or 1, which would hide one that is not read, and choose by ties."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        own = isinstance(tensor, torch.nn.Parameter) or name.endswith("e_score_correction_bias")
        if own and tensor.is_floating_point() and bool((tensor == tensor.flatten()[0]).all()):
            tensor.add_(torch.randn_like(tensor) * 0.2)


def agrees_or_is_refused(make: Callable[[], PreTrainedModel], backend: str = "auto", atol: float = 2e-3) -> None:
    """All tokens but the last in one step and the last in another; what transformers cannot run proves nothing."""
    torch.manual_seed(5)
    try:
        model = make().eval()
        fill_constants(model)
        with torch.no_grad():
            theirs = model(torch.tensor([IDS])).logits[0].float()
    except Exception:
        return event("transformers cannot run it")
    with tempfile.TemporaryDirectory() as folder:
        executor = _loaded(write_checkpoint(model, Path(folder)), backend)
        if executor is None:
            return event("refused")
        with executor.create_kv_cache() as kv:
            first = executor.step(IDS[:-1], kv)[0]
            last = executor.step(IDS[-1:], kv)[0]
        executor.close()
    torch.testing.assert_close(torch.stack([first, last]), theirs[-2:], rtol=1e-3, atol=atol)
    return event("agrees")


def _loaded(folder: Path, backend: str) -> Executor | None:
    try:
        return load_executor(folder, RunConfig(kv_memory=1 << 22, kv_dtype="float32", threads=1, backend=backend))
    except WeightError as refusal:
        assert refusal.field, "a refusal names what it refuses"
    except Unsupported as refusal:
        assert str(refusal)
    return None
