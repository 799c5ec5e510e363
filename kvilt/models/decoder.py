"""The decoder, written once for all families: spans of layers over a batch.

Prefill, decode, verification and blending are batches with different rows; nothing here tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from ..batch import (
    HiddenOut,
    Last,
    Logits,
    PlacedLoad,
    PlacedRepair,
    Pooled,
    Score,
    Scores,
    Segment,
    SegmentOutputs,
    StepInput,
)
from ..ops.contract import Ops, PageStore, Prepared, Rotation, RowLogprobs, StateStore
from ..ops.logprobs import row_logprobs
from .altup import AltUpLayer, StreamEntry
from .attention import Attention
from .experts import Experts, FeedForward
from .latent import LatentAttention
from .layers import AnyNorm, LayerContext, LayerRepair, Linear, linears_in
from .per_layer import PerLayerBlock, PerLayerInputs
from .recurrent import AttentionAndRecurrent, Recurrent
from .rope import rotation
from .spec import ModelSpec, RopeSpec
from .split import ModelShare
from .step_adapters import StepAdapters
from .stored_kv import StoredLayers, stored_layers, write_load
from .tap import DecoderBatch, LayerTap, TapResults, layer_taps

Stores = tuple[PageStore, ...]  # one per layer group
Rotations = Mapping[RopeSpec, Rotation]
SCORE_BLOCK_BYTES = 16 << 20  # logits held at a time while scoring
Mixer = Attention | LatentAttention | Recurrent | AttentionAndRecurrent
NO_TAPS: MappingProxyType[int, LayerTap] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention, then feed-forward, each added to the stream it reads; both of the same normed input; or one alone."""

    attention_norm: AnyNorm | None
    attention: Mixer | None
    feed_forward_norm: AnyNorm | None
    feed_forward: FeedForward | None
    post_attention_norm: AnyNorm | None = None
    post_feed_forward_norm: AnyNorm | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    output_scale: float = 1.0  # of the stream that leaves; the last norm of the layer has it already
    per_layer: PerLayerBlock | None = None

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        if self.attention is None or self.feed_forward is None:
            return self._alone(x, context)
        if self.parallel:
            normed = x if self.attention_norm is None else self.attention_norm(x, context.ops)
            return self.feed_forward(normed, context, self.attention(normed, context, x))
        x = self._added(self.attention, self.attention_norm, context, x, self.post_attention_norm)
        if self.per_layer is not None:
            x = self._added(self.feed_forward, self.feed_forward_norm, context, x, self.post_feed_forward_norm)
            return context.ops.add(self.per_layer(x, context), x, self.output_scale)
        if self.output_scale != 1.0 and self.post_feed_forward_norm is not None:
            made = self.feed_forward(x, context, None, self.feed_forward_norm)
            return context.ops.add(self.post_feed_forward_norm(made, context.ops), x, self.output_scale)
        return self._added(self.feed_forward, self.feed_forward_norm, context, x, self.post_feed_forward_norm)

    def narrow(self, x: Tensor, context: LayerContext, tokens: Tensor, wanted: LayerContext) -> Tensor:
        """Write the KV of all tokens, and compute the outputs of some: `wanted` is the context of these."""
        if not isinstance(self.attention, Attention | LatentAttention):  # recurrent: outputs and state come together
            return self(x, context)[tokens]
        self.attention.write(x, context, self.attention_norm)
        return self(x[tokens], wanted) if len(tokens) else x[tokens]

    def _alone(self, x: Tensor, context: LayerContext) -> Tensor:
        """A layer of one block."""
        if self.attention is not None:
            return self._added(self.attention, self.attention_norm, context, x, self.post_attention_norm)
        assert self.feed_forward is not None
        return self._added(self.feed_forward, self.feed_forward_norm, context, x, self.post_feed_forward_norm)

    def _added(
        self,
        block: Mixer | FeedForward,
        norm: AnyNorm | None,
        context: LayerContext,
        stream: Tensor,
        post_norm: AnyNorm | None,
    ) -> Tensor:
        """The stream with what a block makes of it, normalized before the block, after it, or both."""
        if post_norm is None and self.residual_scale == 1.0:
            return block(stream, context, stream, norm)
        made = block(stream, context, None, norm)
        made = made if post_norm is None else post_norm(made, context.ops)
        return context.ops.add(stream, made, self.residual_scale)


def _layer_repairs(
    index: int, repairs: Sequence[tuple[PlacedRepair, Rotations]], stored: StoredLayers
) -> tuple[LayerRepair, ...]:
    return tuple(LayerRepair(one, stored.on_device(one.stored[index]), rotations) for one, rotations in repairs)


@dataclass(frozen=True, slots=True)
class TokenStates:
    """What tokens have between two layers."""

    x: Tensor  # [tokens, hidden], of several residual streams one beside the other
    layer_inputs: Tensor | None  # [tokens, layers, width], where layers have inputs of their own

    def joined(self, span: slice) -> Tensor:
        """All of it for some tokens [tokens, state], for a row that goes on with it later."""
        if self.layer_inputs is None:
            return self.x[span]
        return torch.cat([self.x[span], self.layer_inputs[span].flatten(1)], dim=1)


def _only_reads(block: Mixer) -> bool:
    """Whether a layer reads the KV of an earlier one and has none of its own."""
    return isinstance(block, Attention) and block.k is None


def _nbytes(linear: Linear) -> int:
    return linear.weight.nbytes


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model: its spec, its weights and the operations they run on."""

    spec: ModelSpec
    ops: Ops
    embedding: Prepared
    layers: tuple[Layer | AltUpLayer, ...]
    norm: AnyNorm
    head: Linear
    frequencies: Mapping[RopeSpec, Tensor]  # one entry for each rope the layers use
    position_embedding: Prepared | None = None  # [context, hidden], where positions are learned
    per_layer: PerLayerInputs | None = None
    streams: StreamEntry | None = None  # where tokens have several residual streams
    share: ModelShare | None = None  # set where this is one rank's part of a model

    def __call__(
        self, batch: DecoderBatch, before_layer: Callable[[int], None], step_adapters: StepAdapters | None = None
    ) -> Logits:
        """Run every row through its span. `before_layer` may raise to stop between two layers."""
        seen = TapResults()
        taps = layer_taps(batch, len(self.layers), seen, self.share)
        pool = batch.pool
        states = self.forward(batch.step, pool.stores, before_layer, taps, step_adapters, pool.state_store)
        return self._outputs(batch, states, seen, step_adapters)

    def forward(
        self,
        step: StepInput,
        stores: Stores,
        before_layer: Callable[[int], None],
        taps: Sequence[Mapping[int, LayerTap]] = (),
        step_adapters: StepAdapters | None = None,
        state_store: StateStore | None = None,
    ) -> TokenStates:
        """What all tokens have after their last layers; writes their KV."""
        states = self._embed(step, step_adapters)
        x, layer_inputs = states.x, states.layer_inputs
        for index, segment in enumerate(step.segments):
            part, inputs = x, layer_inputs
            if segment.tokens is not None:
                part, inputs = x[segment.tokens], None if inputs is None else inputs[segment.tokens]
            own = step_adapters.of(segment.tokens) if step_adapters is not None else None
            tapped = taps[index] if taps else NO_TAPS
            part = self._through(part, segment, stores, before_layer, tapped, own, state_store, inputs)
            if segment.tokens is None:
                x = part
            else:
                x[segment.tokens] = part
        return TokenStates(x, layer_inputs)

    def decode(
        self,
        step: StepInput,
        stores: Stores,
        step_adapters: StepAdapters | None = None,
        state_store: StateStore | None = None,
    ) -> Tensor:
        """Logits after every token of a step, by operations of the backend alone: a step to be recorded or captured."""
        states = self.forward(step, stores, lambda _: None, (), step_adapters, state_store)
        return self.logits(states.x, step_adapters)

    @property
    def last_writer(self) -> int:
        """The last layer with KV or recurrent state of its own, which later tokens read."""
        blocks = [layer.attention for layer in self.layers]
        return max(i for i, one in enumerate(blocks) if one is not None and not _only_reads(one))

    @property
    def asks_the_host(self) -> bool:
        """Whether the host decides inside a step what is computed: which experts. A graph could not follow it."""
        blocks = (layer.feed_forward for layer in self.layers)
        return any(isinstance(block, Experts) and block.stack.asks_the_host for block in blocks)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step of one token reads: layers and head, few rows of the embedding, few experts."""
        idle = 0.0
        for layer in self.layers:
            if isinstance(block := layer.feed_forward, Experts):
                idle += (1 - block.spec.top_k / block.spec.experts) * sum(map(_nbytes, linears_in(block.experts)))
        attentions = [layer.attention for layer in self.layers]
        per_head = sum(one.per_head_bytes for one in attentions if isinstance(one, LatentAttention))
        maps = linears_in((self.head, self.layers, self.per_layer, self.streams))
        return sum(map(_nbytes, maps)) + per_head - round(idle)

    def _through(
        self,
        x: Tensor,
        segment: Segment,
        stores: Stores,
        before_layer: Callable[[int], None],
        taps: Mapping[int, LayerTap] = NO_TAPS,
        step_adapters: StepAdapters | None = None,
        state_store: StateStore | None = None,
        layer_inputs: Tensor | None = None,
    ) -> Tensor:
        """The layers of a segment."""
        context = LayerContext(
            self.ops,
            stores,
            segment.paging,
            self._rotations(segment.rotated_by),
            step_adapters=step_adapters,
            state_store=state_store,
            states=segment.states,
            layer_inputs=layer_inputs,
        )
        repairs = [(one, self._rotations(one.positions)) for one in segment.repairs]
        loads = [(one, self._rotations(one.positions)) for one in segment.loads]
        with stored_layers(segment, self.ops) as stored:
            for index in range(segment.start, segment.stop):
                before_layer(index)
                own = context
                if stored is not None:
                    stored.advance()
                    self._write_loads(index, loads, stored, stores)
                    own = replace(context, repairs=_layer_repairs(index, repairs, stored))
                if index in taps:
                    own = replace(own, tap=taps[index])
                if segment.outputs is not None and index == self.last_writer:
                    return self._last_layers(x, own, segment, segment.outputs, before_layer)
                x = self.layers[index](x, own)
        return x

    def _last_layers(
        self,
        x: Tensor,
        context: LayerContext,
        segment: Segment,
        outputs: SegmentOutputs,
        before_layer: Callable[[int], None],
    ) -> Tensor:
        """From the last layer with KV or state on: outputs only of the tokens that need them."""
        tokens, first = outputs.tokens, self.last_writer
        wanted = context.wanted(segment.wanted(outputs), self._rotations)
        part = self.layers[first].narrow(x, context, tokens, wanted)
        for index in range(first + 1, segment.stop if len(tokens) else first):
            before_layer(index)
            part = self.layers[index](part, wanted)
        x[tokens] = part
        return x

    def _write_loads(
        self, index: int, loads: Sequence[tuple[PlacedLoad, Rotations]], stored: StoredLayers, stores: Stores
    ) -> None:
        """Stored KV of one layer into its pages."""
        attention = self.layers[index].attention
        # A batch places no stored KV in a model with recurrent state.
        assert isinstance(attention, Attention | LatentAttention)
        place, rope = attention.place, attention.spec.rope
        for load, rotations in loads:
            here = [stored.on_device(one) for one in load.stored.get(index, ())]
            rotated = rotations[rope] if isinstance(rope, RopeSpec) else None
            write_load(load, here, self.ops, stores[place.group], place, rotated)

    def _rotations(self, positions: Tensor) -> dict[RopeSpec, Rotation]:
        return {rope: rotation(rope, at, positions, self.ops) for rope, at in self.frequencies.items()}

    def embed(self, ids: Tensor) -> Tensor:
        """What tokens start with, as the first layer reads it but for learned positions [tokens, hidden]."""
        share, scale = self.share, self.spec.embed_scale
        if share is None or (own := share.split.vocabulary) is None:
            return self.ops.embed(self.embedding, ids, scale)
        elsewhere = (ids < own.start) | (ids >= own.stop)
        x = self.ops.embed(self.embedding, (ids - own.start).masked_fill_(elsewhere, 0), scale)
        return share.ranks.sum(x.masked_fill_(elsewhere[:, None], 0.0))

    def _embed(self, step: StepInput, step_adapters: StepAdapters | None) -> TokenStates:
        """What all tokens start with: their streams, or the hidden states they come as, and the inputs of layers."""
        hidden = step.hidden
        if hidden is not None and hidden.at is None:
            return self._entering(hidden.values)
        embedded = self._embedded(step, step_adapters)
        layer_inputs = None
        if self.per_layer is not None:
            layer_inputs = self.per_layer(step.ids, embedded, self.ops, self.spec.vocab_size)
        x = embedded if self.streams is None else self.streams.enter(embedded, self.ops)
        if hidden is not None:
            entering = self._entering(hidden.values)
            x[hidden.at] = entering.x
            if layer_inputs is not None and entering.layer_inputs is not None:
                layer_inputs[hidden.at] = entering.layer_inputs
        return TokenStates(x, layer_inputs)

    def _entering(self, states: Tensor) -> TokenStates:
        """Hidden states that a caller brings [tokens, state], taken apart."""
        states, size = states.to(self.ops.dtype), self.spec.stream_size
        if self.per_layer is None:
            return TokenStates(states, None)
        return TokenStates(states[:, :size].contiguous(), states[:, size:].view(len(states), len(self.layers), -1))

    def _embedded(self, step: StepInput, step_adapters: StepAdapters | None) -> Tensor:
        """Embeddings of tokens, or the vectors they come as, and learned positions."""
        x, first = self._entered(step, step_adapters), step.segments[0]
        if self.position_embedding is None or first.start > 0:  # hidden states have their positions already
            return x
        positions = self.ops.embed(self.position_embedding, first.positions)
        if first.tokens is None:
            return self.ops.add(x, positions)
        x[first.tokens] = self.ops.add(x[first.tokens], positions)
        return x

    def _entered(self, step: StepInput, step_adapters: StepAdapters | None) -> Tensor:
        vectors = step.vectors
        if vectors is not None and vectors.at is None:
            return vectors.values.to(self.ops.dtype)
        x = self.embed(step.ids)
        if vectors is not None:
            x[vectors.at] = vectors.values.to(x.dtype)
        for own in () if step_adapters is None else step_adapters.embedded:
            x[own.tokens] += own.rows.of(step.ids[own.tokens], own.scale * self.spec.embed_scale)
        return x

    def _outputs(
        self, batch: DecoderBatch, states: TokenStates, seen: TapResults, step_adapters: StepAdapters | None
    ) -> Logits:
        """What each row wants of its last hidden states."""
        x, starts, scores, hidden = states.x, [0], {}, {}
        for index, row in enumerate(batch.rows):
            span = slice(batch.starts[index], batch.starts[index + 1])
            match row.want:
                case Score():
                    own = step_adapters.of(torch.arange(span.start, span.stop)) if step_adapters is not None else None
                    scores[index] = self._score(x[span], row.want, own)
                case HiddenOut():
                    hidden[index] = states.joined(span)
                case Pooled():
                    hidden[index] = self._pooled(x[span], row.want)
            starts.append(starts[-1] + (row.want.k if isinstance(row.want, Last) else 0))
        values = self._wanted(batch.step, x, step_adapters)
        return Logits(values, tuple(starts), scores, hidden, seen.kv, seen.mass, seen.queries)

    def _pooled(self, states: Tensor, want: Pooled) -> Tensor:
        """[hidden] float64, so that it hardly matters how a prompt was cut into rows."""
        wanted = states[-1:] if want.last else states[want.first :]
        return self._last_norm(wanted).double().sum(0)

    def _wanted(self, step: StepInput, x: Tensor, step_adapters: StepAdapters | None) -> Tensor:
        """The logits that the rows want [n, vocab]."""
        if step.wanted is None:
            return self.logits(x, step_adapters)
        if not len(step.wanted):
            return x.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        return self.logits(x[step.wanted], step_adapters.of(step.wanted) if step_adapters is not None else None)

    def _last_norm(self, states: Tensor) -> Tensor:
        """What a token has after the last layer [tokens, streams], as the head reads it [tokens, hidden]."""
        return self.norm(states if self.streams is None else self.streams.leave(states, self.ops), self.ops)

    def logits(self, states: Tensor, step_adapters: StepAdapters | None = None) -> Tensor:
        """[tokens, streams] to float32 [tokens, vocab]; ranks that follow another one have their part of it."""
        states = self._last_norm(states)
        values = self.head(states, self.ops).float()
        if step_adapters is not None:
            step_adapters.add([self.head], states, [values], self.ops)
        if self.share is not None:
            values = self.share.gather_vocabulary(values)
        cap = self.spec.final_soft_cap
        return self.ops.soft_cap(values, cap) if cap else values

    def _score(self, states: Tensor, want: Score, step_adapters: StepAdapters | None = None) -> Scores:
        """Log-probabilities in blocks, so that [tokens, vocab] is never in memory as a whole."""
        wanted, top = torch.as_tensor(want.targets, dtype=torch.int64, device=states.device), want.top
        block = max(1, SCORE_BLOCK_BYTES // (4 * self.spec.vocab_size))
        # Results have their room before the first block: small leftovers between large blocks would keep the allocator
        # from using that memory again.
        logprobs = states.new_empty(len(wanted), dtype=torch.float32)
        top_ids = wanted.new_empty((len(wanted), top))
        top_logprobs = logprobs.new_empty((len(wanted), top))
        ranks = wanted.new_empty(len(wanted) if want.ranks else 0)
        for start in range(0, len(wanted), block):
            part = slice(start, start + block)
            own = step_adapters.of(torch.arange(len(wanted))[part]) if step_adapters is not None else None
            logits = self.logits(states[part], own)
            if self.share is not None and not self.share.leads:
                continue
            found = self._logprobs(logits, wanted[part], top)
            logprobs[part], top_ids[part], top_logprobs[part] = found.logprobs, found.top_ids, found.top_logprobs
            if want.ranks:
                ranks[part] = found.ranks
        return Scores(logprobs, top_ids, top_logprobs, ranks)

    def _logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> RowLogprobs:
        """Of one token a row, as drawn tokens get them too."""
        if self.ops.sampling is not None:
            return self.ops.sampling.logprobs(logits, None, tokens, top)
        own = self.ops.reductions
        if own is None:
            return row_logprobs(logits, tokens, top)
        return own.logprobs(logits.contiguous(), range(len(tokens)), tokens.tolist(), top)
