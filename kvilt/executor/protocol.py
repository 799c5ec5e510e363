"""What an executor is: `run` computes, and every other call is made of it. The engine imports only this.

`ModelExecutor`, beside it, runs a model in this process; an executor over several devices or machines is another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..batch import Batch, Logits, Scores
from ..errors import KviltError
from ..kv.cache import KVCache
from ..kv.layout import KVLayout
from ..kv.pool import PagePool
from ..kv.prefix import PrefixIndex
from ..kv.row import EXACT
from ..metrics import Metrics
from ..models.spec import ModelSpec
from ..sampling.params import SamplingParams
from ..sampling.pending import PendingSample
from ..sampling.sampler import SamplerOutput, SamplingState
from ..weights.assets import AssetsLike
from .call import ExecutorCall
from .inputs import InputsLike
from .lora import Adapters
from .placement import KVPlacement

OnWarmup = Callable[[int, int], None]  # steps that are done, of all


class Executor(Protocol):
    """A model ready to run. It remembers no sequence. Concurrent calls wait for each other."""

    metrics: Metrics
    adapters: Adapters

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def pool(self) -> PagePool: ...

    @property
    def prefixes(self) -> PrefixIndex:
        """KV that no cache holds any more, for the next sequence with the same tokens."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens a sequence may have."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads, as the backend holds them."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether a row's bits depend neither on its batch nor on how its prompt was cut into chunks."""
        ...

    @property
    def expanded_formats(self) -> tuple[str, ...]:
        """Packed formats of the checkpoint that the backend has no kernels for, and so holds as float32."""
        ...

    @property
    def weight_kernels(self) -> Mapping[str, str]:
        """What multiplies the weights of each format of the checkpoint."""
        ...

    @property
    def replay_note(self) -> str:
        """Why decode steps are not recorded and replayed; empty where they are, or the backend records none."""
        ...

    @property
    def closed(self) -> bool:
        """Whether nothing runs any more."""
        ...

    @property
    def failure(self) -> KviltError | None:
        """Why nothing runs any more, where a process that holds a part of the model is gone."""
        ...

    @property
    def ranks(self) -> int:
        """The processes that share the model."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        ...

    # The primitive.

    def run(self, batch: Batch) -> Logits:
        """One forward over the rows of a batch. Commits nothing: the owner of the caches decides that."""
        ...

    def place(self, kv: KVCache, spans: Sequence[range]) -> KVPlacement:
        """Places for stored KV at these positions: all that is written to pages beside what `run` writes."""
        ...

    def sample(self, logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> SamplerOutput:
        """One token per row of `logits`; the states do not advance."""
        ...

    def start_sample(self, logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> PendingSample:
        """`sample` that does not wait for the device: tokens are there at once, and the host reads them later."""
        ...

    def warm_up(self, step_tokens: int, max_rows: int, on_progress: OnWarmup | None = None) -> None:
        """Make ready what steps of up to so many tokens and rows would otherwise wait for, such as compiled kernels."""
        ...

    def call(self) -> ExecutorCall:
        """Hold the executor for several runs that are one call to `cancel`; the handle stops it alone."""
        ...

    def cancel(self) -> None:
        """Stop the call in progress before its next layer, from any thread; does nothing when there is none.

        Calls of other threads that wait for their turn go on.
        """
        ...

    def close(self) -> None:
        """Let go of the checkpoint's files, once the call in progress is done. Nothing runs afterwards."""
        ...

    # Caches.

    def create_kv_cache(self, batch_size: int = 1, capacity: int | None = None, owner: str = "") -> KVCache:
        """An empty cache with this model's layout; `capacity` tokens per row, the context if not given."""
        ...

    def open_kv_cache(
        self,
        path: str | os.PathLike[str],
        accept_numerics: bool = False,
        lora_id: int | None = None,
        lora_scale: float = 1.0,
        origin: str = EXACT,
    ) -> KVCache:
        """A saved cache. KV made with other numerics is computed again from its tokens, unless accepted as it is.

        KV of a blend is opened by naming its `origin`.
        """
        ...

    # Calls made of `run`.

    def prefill(self, inputs: InputsLike, kv: KVCache, lora_id: int | None = None, lora_scale: float = 1.0) -> None:
        """Extend the cache by the input: by all of it, or, if anything fails, not at all."""
        ...

    def step(
        self,
        inputs: InputsLike,
        kv: KVCache,
        lora_id: int | None = None,
        lora_scale: float = 1.0,
        active: Sequence[bool] | None = None,
    ) -> Tensor:
        """One decode step for the caller's own sampler: float32 logits [batch, vocab] after the input.

        Rows that are not `active`, or whose input is empty, are skipped, here and in `sample_tokens`.
        """
        ...

    def sample_tokens(
        self,
        num_steps: int,
        inputs: InputsLike,
        kv: KVCache,
        lora_id: int | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_scale: float = 1.0,
        active: Sequence[bool] | None = None,
    ) -> list[list[int]]:
        """Up to `num_steps` sampled ids per row, without leaving the executor."""
        ...

    def embed(self, ids: Sequence[int]) -> Tensor:
        """The embedding rows of token ids, float32 [ids, hidden], as `Inputs` takes them."""
        ...

    def score(
        self,
        ids: Sequence[int],
        kv: KVCache | None = None,
        top: int = 0,
        lora_id: int | None = None,
        lora_scale: float = 1.0,
    ) -> Scores:
        """Log-probability of every token after the first, with the `top` likeliest beside it."""
        ...

    # Adapters.

    def load_lora(self, assets: AssetsLike, name: str | None = None) -> int:
        """Load an adapter from its path, an open file or bytes in memory, and return its id."""
        ...

    def unload_lora(self, lora_id: int) -> None:
        """Unload an adapter: new requests do not find it, and it leaves memory when its last user is gone."""
        ...

    def lora_metrics_snapshot(self) -> dict[str, Any]:
        """Adapters, what they take, and the rows each has served."""
        ...
