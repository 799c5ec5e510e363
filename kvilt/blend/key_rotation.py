"""Keys brought to another position: rotation with a model's own tables, for every kind of rope.

Keys that were never rotated are rotated once. Keys that were rotated elsewhere are rotated by the difference, and keep
the magnitude that YaRN and longrope gave them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..models.rope import frequencies, magnitude
from ..models.spec import ModelSpec, NoRope, Rope, RopeSpec
from ..ops.contract import Rotation
from ..ops.reference import ReferenceOps

_MATH = ReferenceOps()


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """How one layer rotates its keys."""

    rope: Rope
    last: bool = False  # the rotated dimensions are the last ones of a key, as in latent attention
    head_dim: int | None = None  # needed to rotate keys [tokens, heads * dim]

    @property
    def scales(self) -> bool:
        """Whether rotation changes the length of a key too, so that a key at position 0 is not an unrotated one."""
        return isinstance(self.rope, RopeSpec) and magnitude(self.rope) != 1.0

    def place(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [tokens, heads, dim] that were never rotated, as they are at `positions`."""
        if isinstance(self.rope, NoRope):
            return keys
        angles = _angles(self.rope, positions).float()
        return self._rotate(keys, angles, magnitude(self.rope))

    def move(self, keys: Tensor, original: Tensor, positions: Tensor) -> Tensor:
        """Keys that were rotated at `original`, as they are at `positions`."""
        if isinstance(self.rope, NoRope):
            return keys
        return self._rotate(keys, _angles(self.rope, positions) - _angles(self.rope, original), 1.0)

    def strip(self, keys: Tensor, original: Tensor) -> Tensor:
        """Keys that were rotated at `original`, as they were before."""
        if isinstance(self.rope, NoRope):
            return keys
        return self._rotate(keys, -_angles(self.rope, original), 1.0 / magnitude(self.rope))

    def check_said(self, rotated: bool | None, layer: int) -> None:
        """Raise where it makes a difference whether keys are rotated, and it is not said."""
        if rotated is None and self.scales:
            raise InputError(
                f"layer {layer} scales keys when it rotates them: say whether retrieved keys are rotated, "
                "with rotated= of the result and blend_result, or with unrotated="
            )

    def by_head(self, keys: Tensor) -> Tensor:
        """Keys [tokens, heads * dim] as [tokens, heads, dim]; others stay as they are."""
        if keys.dim() > 2 or isinstance(self.rope, NoRope):
            return keys
        if self.head_dim is None or keys.shape[1] % self.head_dim:
            raise InputError(
                f"keys {list(keys.shape)} cannot be cut into heads to rotate them; give [tokens, heads, dim], or "
                "KeyRotation(rope, head_dim=...) instead of a rope"
            )
        return keys.reshape(len(keys), -1, self.head_dim)

    def _rotate(self, keys: Tensor, angles: Tensor, mscale: float) -> Tensor:
        assert isinstance(self.rope, RopeSpec)
        cos, sin = ((angle * mscale).float() for angle in (angles.cos(), angles.sin()))
        rotation = Rotation(cos, sin, self.rope.pairing)
        if not self.last:
            return _MATH.rotate(keys.float(), rotation).to(keys.dtype)
        plain, rotated = keys[..., : -self.rope.dims], keys[..., -self.rope.dims :]
        return torch.cat((plain, _MATH.rotate(rotated.float(), rotation).to(keys.dtype)), dim=-1)


def key_rotations(spec: ModelSpec) -> tuple[KeyRotation, ...]:
    """How each layer of a model rotates."""
    return tuple(KeyRotation(layer.attention.rope, head_dim=layer.attention.kv_dims[0]) for layer in spec.layers)


def as_key_rotations(ropes: Sequence[KeyRotation | Rope]) -> tuple[KeyRotation, ...]:
    return tuple(one if isinstance(one, KeyRotation) else KeyRotation(one) for one in ropes)


def _angles(rope: RopeSpec, positions: Tensor) -> Tensor:
    """The angles a model rotates by, as it rounds them, in float64: so that differences of them are exact."""
    return (positions.float().unsqueeze(1) * frequencies(rope).to(positions.device)).double()
