"""The native CPU kernels (csrc/). Tensors are on the CPU and contiguous, in the dtype and rank of each comment.

Calls inside of steps take addresses, which kvilt/ops/native/border.py makes of checked tensors. The memory behind an
address must stay while a recorded program that was given it may run.
"""

from collections.abc import Sequence
from enum import Enum

from torch import Tensor

from kvilt.ops.native.border import F32Address, FloatsAddress, I32Address, I64Address, TableAddress

REVISION: int  # of the arithmetic: counts up with every change of a result's bits

class Activation(Enum):
    silu = 0
    gelu_tanh = 1
    gelu = 2
    swiglu_oai = 3
    tanh = 4
    relu2 = 5
    relu = 6

class KVDtype(Enum):
    float32 = 0
    float16 = 1
    bfloat16 = 2
    int8 = 3
    k8v4 = 4

class WeightKind(Enum):
    float32 = 0
    float16 = 1
    bfloat16 = 2
    q4 = 3
    q4_min = 4
    q5 = 5
    q5_min = 6
    q8 = 7
    q4_k = 8
    q5_k = 9
    q6_k = 10
    fp4 = 11
    q2_k = 12
    q3_k = 13
    iq4_k = 14

class RouterScores(Enum):
    softmax = 0
    sigmoid = 1
    chosen_softmax = 2
    chosen_sigmoid = 3

def available_isas() -> list[str]:
    """The instruction sets this machine can run, best first."""

def limits(threads: int, size_bytes: int, /) -> tuple[float, float]:
    """Bytes read and int8 operations done in a second, at most, for a working set of that size."""

def packed_size(format_name: str, outputs: int, inputs: int, /) -> tuple[WeightKind, int] | None:
    """How a weight in a format of GGML is packed, and into how many bytes; None for a format without kernels."""

def head_bytes(dtype: KVDtype, page_tokens: int, key_dim: int, value_dim: int, /) -> int:
    """Bytes of one KV head of one layer in a page."""

def use_huge_pages(data: Tensor, /) -> None:  # uint8 [pages, bytes]
    """Let the system back this memory with large frames, where it has them."""

class Weight:
    """A packed weight [outputs, inputs]."""

    def __init__(self, kind: WeightKind, outputs: int, inputs: int, data: Tensor, /) -> None: ...  # uint8 [bytes]

class PageLayer:
    """One layer of the pages in `data` uint8 [pages, bytes of all layers]."""

    def __init__(
        self,
        dtype: KVDtype,
        data: Tensor,
        page_tokens: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        layers: int,
        layer: int,
        /,
    ) -> None: ...

class ExpertStack:
    """The maps of all experts of a block, which have one shape. The caller keeps them, and the biases (0: none)."""

    def __init__(
        self,
        gates: Sequence[Weight],
        ups: Sequence[Weight],
        downs: Sequence[Weight],
        gate_biases: Sequence[F32Address],
        up_biases: Sequence[F32Address],
        down_biases: Sequence[F32Address],
        /,
    ) -> None: ...

class Program:
    """The calls of a recorded step."""

    def run(self) -> bool:
        """Run them again; False if they were stopped half way."""

    def loop(self, steps: int, ids: Tensor, ends: Sequence[Sequence[int]], out: Tensor, /) -> int:
        """Run up to `steps` times, until a row of `ids` int64 [rows] is one of its ends or -1; returns the runs.

        The tokens after each run go to `out` int64 [steps, rows].
        """

class KernelRunner:
    """Runs kernels of one instruction set on threads of its own; one call at a time."""

    def __init__(self, threads: int, isa: str, cpus: Sequence[Sequence[int]], /) -> None:
        """`cpus`: the CPUs that each thread may use, a list for each; none: the system chooses."""

    @property
    def isa(self) -> str: ...
    @property
    def numerics(self) -> str:
        """The instruction set whose bits this one gives; what KV identity names."""

    @property
    def threads(self) -> int: ...
    def begin_recording(self) -> None:
        """Remember the calls from now on that take addresses, besides doing them."""

    def end_recording(self) -> Program: ...
    def stop(self, stopped: bool, /) -> None:
        """Keep recorded programs from going on, until told otherwise. From any thread."""

    # Outside of steps.

    def pack(self, format_name: str, source: Tensor, inputs: int, out: Tensor, /) -> None:
        """Pack rows of a file, uint8 [outputs, bytes of a row], into `out` uint8 [packed_size]."""

    def read_slots(
        self,
        layers: Sequence[PageLayer],
        slots: Tensor,  # int64 [tokens]
        keys: Tensor,  # the pages' dtype [layers, tokens, kv_heads, key_dim]
        values: Tensor,
        key_scales: Tensor,  # float32 [layers, tokens, kv_heads] for int8 and k8v4, else empty
        value_scales: Tensor,
        /,
    ) -> None: ...
    def write_slots(
        self,
        layers: Sequence[PageLayer],
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        key_scales: Tensor,
        value_scales: Tensor,
        /,
    ) -> None: ...

    # Sampling, from `logits` float32 [rows, vocabulary].

    def argmax_with_values(self, logits: Tensor, ids: Tensor, values: Tensor, /) -> None:
        """The first largest of each row: `ids` int64 [rows] and `values` float32 [rows]."""

    def draw(
        self,
        logits: Tensor,
        rows: Sequence[int],
        keys: Sequence[int],
        temperatures: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        typical_p: Sequence[float],
        out: Tensor,  # int64 [draws]
        kept: Tensor | None,  # bool [draws, vocabulary]
        /,
    ) -> None: ...
    def logprobs(
        self,
        logits: Tensor,
        rows: Sequence[int],
        tokens: Sequence[int],
        logprobs: Tensor,  # float32 [rows]
        ranks: Tensor,  # int64 [rows]
        top_ids: Tensor,  # int64 [rows, top]
        top_logprobs: Tensor,  # float32 [rows, top]
        /,
    ) -> None: ...

    # Inside of steps.

    def linears(
        self,
        weights: Sequence[Weight],
        biases: Sequence[F32Address],  # 0: none
        residuals: Sequence[F32Address],  # 0: none
        outs: Sequence[F32Address],
        x: F32Address,
        rows: int,
        /,
    ) -> None: ...
    def gate_up(
        self,
        gate: Weight,
        gate_bias: F32Address,
        up: Weight,
        up_bias: F32Address,
        x: F32Address,
        rows: int,
        activation: Activation,
        out: F32Address,
        /,
    ) -> None: ...
    def act_mul(
        self,
        gate: F32Address,
        up: F32Address,  # 0: the activation alone
        count: int,
        activation: Activation,
        out: F32Address,
        /,
    ) -> None: ...
    def causal_conv(
        self,
        x: F32Address,
        weight: F32Address,
        bias: F32Address,  # 0: none
        channels: int,
        width: int,
        silu: bool,
        tails: F32Address,
        starts: Sequence[int],
        reads: I64Address,
        writes: I64Address,
        slots: int,
        out: F32Address,
        /,
    ) -> None: ...
    def fold(
        self,
        mixed: F32Address,
        step: F32Address,
        beta: F32Address,  # 0: Mamba-2
        log_rate: F32Address,
        bias: F32Address,
        skip: F32Address,  # 0: none
        heads: Sequence[int],  # key heads, value heads, the dims of both, and 1 if value heads take key heads in turn
        least: float,
        most: float,
        memories: F32Address,
        starts: Sequence[int],
        reads: I64Address,
        writes: I64Address,
        slots: int,
        out: F32Address,
        /,
    ) -> None: ...
    def sigmoid_mul(self, x: F32Address, gate: F32Address, count: int, out: F32Address, /) -> None: ...
    def streams(
        self,
        x: F32Address,
        y: F32Address,  # 0: streams are mixed
        weights: F32Address,
        tokens: int,
        streams: int,
        columns: int,
        out: F32Address,
        /,
    ) -> None: ...
    def match_rms(self, x: F32Address, like: F32Address, rows: int, columns: int, out: F32Address, /) -> None: ...
    def gaussian_relu(self, x: F32Address, cut: float, rows: int, columns: int, out: F32Address, /) -> None: ...
    def embed(self, weight: Weight, ids: I64Address, count: int, scale: float, out: F32Address, /) -> None: ...
    def rms_norm(
        self, x: F32Address, weight: F32Address, eps: float, rows: int, columns: int, out: F32Address, /
    ) -> None: ...
    def layer_norm(
        self,
        x: F32Address,
        weight: F32Address,
        bias: F32Address,  # 0: none
        eps: float,
        rows: int,
        columns: int,
        out: F32Address,
        /,
    ) -> None: ...
    def add_scaled(self, a: F32Address, b: F32Address, scale: float, count: int, out: F32Address, /) -> None: ...
    def scale_queries(
        self,
        x: F32Address,
        positions: I64Address,
        tokens: int,
        columns: int,
        beta: float,
        length: int,
        offset: int,
        out: F32Address,
        /,
    ) -> None: ...
    def per_head_linear(
        self,
        x: F32Address,
        tokens: int,
        heads: int,
        inputs: int,
        moved: int,
        weight: FloatsAddress,  # [heads, inputs, outputs padded to whole lanes]
        kind: WeightKind,
        outputs: int,
        out: F32Address,
        /,
    ) -> None: ...
    def add(self, a: F32Address, b: F32Address, count: int, out: F32Address, /) -> None: ...
    def soft_cap(self, x: F32Address, count: int, cap: float, /) -> None: ...
    def argmax(self, logits: F32Address, rows: int, columns: int, out: I64Address, /) -> None: ...
    def rope_cos_sin(
        self,
        positions: I64Address,
        tokens: int,
        inv_freq: F32Address,
        pairs: int,
        mscale: float,
        cos: F32Address,
        sin: F32Address,
        /,
    ) -> None: ...
    def rotate(
        self,
        x: F32Address,
        cos: F32Address,
        sin: F32Address,
        tokens: int,
        heads: int,
        dim: int,
        pairs: int,
        interleaved: bool,
        out: F32Address,
        /,
    ) -> None: ...
    def write(
        self,
        layer: PageLayer,
        slots: I64Address,
        tokens: int,
        keys: F32Address,
        values: F32Address,
        cos: F32Address,  # 0: keys are stored as they are
        sin: F32Address,
        pairs: int,
        interleaved: bool,
        /,
    ) -> None: ...
    def interpolate(
        self,
        layer: PageLayer,
        slots: I64Address,
        tokens: int,
        dtype: KVDtype,  # of the document's keys and values
        document: int,  # tokens
        keys: FloatsAddress,
        values: FloatsAddress,
        interpolated: I64Address,
        anchors: I64Address,
        anchor_count: int,
        weights: F32Address,
        new_keys: F32Address,
        new_values: F32Address,
        cos: F32Address,
        sin: F32Address,
        pairs: int,
        interleaved: bool,
        /,
    ) -> None: ...
    def attention(
        self,
        query: F32Address,
        heads: int,
        layer: PageLayer,
        tables: I64Address,
        width: int,
        starts: Sequence[int],
        positions: I64Address,
        scale: float,
        window: int,
        soft_cap: float,
        chunked: bool,
        sinks: F32Address,  # 0: none
        out: F32Address,
        /,
    ) -> None: ...
    def latent_attention(
        self,
        query: F32Address,  # [tokens, heads, key_dim + value_dim]
        heads: int,
        layer: PageLayer,
        tables: I64Address,
        width: int,
        starts: Sequence[int],
        positions: I64Address,
        scale: float,
        out: F32Address,
        /,
    ) -> None: ...
    def route(
        self,
        logits: F32Address,
        bias: F32Address,  # 0: none
        factors: F32Address,  # 0: none
        tokens: int,
        experts: int,
        scores: RouterScores,
        top_k: int,
        normalized: bool,
        epsilon: float,
        floor: float,
        scale: float,
        groups: int,
        top_groups: int,
        top_two: bool,
        chosen: I32Address,
        weights: F32Address,
        /,
    ) -> None: ...
    def experts(
        self,
        stack: ExpertStack,
        x: F32Address,
        tokens: int,
        chosen: I32Address,
        weights: F32Address,
        top_k: int,
        activation: Activation,
        weigh_inputs: bool,
        residual: F32Address,  # 0: none
        shared: F32Address,  # 0: none
        shared_gate: F32Address,  # 0: none
        out: F32Address,
        /,
    ) -> None: ...
    def sum_experts(
        self,
        made: F32Address,
        weights: F32Address,
        tokens: int,
        top_k: int,
        hidden: int,
        residual: F32Address,  # 0: none
        shared: F32Address,  # 0: none
        shared_gate: F32Address,  # 0: none
        out: F32Address,
        /,
    ) -> None: ...
    def add_lora(
        self,
        tables: Sequence[TableAddress],
        outputs: Sequence[int],
        outs: Sequence[F32Address],
        x: F32Address,
        rows: int,
        inputs: int,
        slots: I64Address,
        scales: F32Address,
        slot_count: int,
        /,
    ) -> None: ...
    def advance(
        self,
        positions: I64Address,
        rows: int,
        slots: Sequence[I64Address],
        tables: Sequence[I64Address],
        width: int,
        page_tokens: int,
        /,
    ) -> None: ...
