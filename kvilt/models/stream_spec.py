"""What a token carries beside one residual stream, as data: inputs of its own for each layer, and further streams."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import WeightError


@dataclass(frozen=True, slots=True)
class PerLayerSpec:
    """Per-layer embeddings (PLE): each layer reads a small vector that comes from the token's id and its embedding."""

    width: int
    vocab_size: int  # ids at or above it count as 0


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """Alternating updates (AltUp): several residual streams; a layer computes one and corrects the others by it.

    With it goes a learned augmented residual (Laurel): a product of low rank beside attention.
    """

    streams: int
    active: int  # the stream that layers compute
    laurel_rank: int
    scaled: bool = True  # the corrected stream is scaled before the per-layer input is added

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.streams or self.streams < 2:
            raise WeightError("altup_active_idx", f"must be one of 2 or more streams, not {self.active}")


def altup_shapes(spec: AltUpSpec, width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer with several streams, by our names."""
    shapes: dict[str, tuple[int, ...]] = {
        "stream_router": (spec.streams, width),
        "stream_router_norm": (width,),
        "stream_predict": (spec.streams**2, spec.streams),
        "stream_correct": (spec.streams, spec.streams),
        "stream_scale": (width,),
        "laurel_left": (spec.laurel_rank, width),
        "laurel_right": (width, spec.laurel_rank),
        "laurel_norm": (width,),
    }
    return shapes


def per_layer_shapes(spec: PerLayerSpec, width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer that reads an input of its own, by our names."""
    return {
        "layer_gate": (spec.width, width),
        "layer_projection": (width, spec.width),
        "layer_input_norm": (width,),
    }
