"""Where checkpoints of recurrent state stand in a sequence. Knows positions and slots; refuses to know states."""

from __future__ import annotations

from dataclasses import dataclass

SEQUENCE_TOKENS = 8192
EVERY = 512  # tokens between checkpoints that are worth the room of others
_MOST_REGULAR = 4  # that one step writes beside the state at its end
_MOST_DENSE = 16


@dataclass(frozen=True, slots=True)
class CheckpointSchedule:
    """Regular checkpoints every `every` tokens, 0: none; and dense ones between them, as long as slots are empty.

    Dense ones stand `dense` tokens apart, 0: there are none; further into a long sequence, further apart.
    """

    every: int
    dense: int = 0

    def is_regular(self, position: int) -> bool:
        """Whether one stands here whose slot may be taken from an older one."""
        return self.every > 0 and position % self.every == 0

    def has(self, position: int) -> bool:
        """Whether one stands here, if there is a slot for it."""
        return self.is_regular(position) or (self.dense > 0 and position % self._distance(position) == 0)

    def _distance(self, position: int) -> int:
        """Between dense ones: it doubles each time that a long sequence doubles its length."""
        return self.dense << (max(0, position - 1) // SEQUENCE_TOKENS).bit_length()

    def regular_inside(self, span: range) -> list[int]:
        """Those between the ends of a step, the last ones first."""
        if not self.every:
            return []
        found = range((span.start // self.every + 1) * self.every, span.stop, self.every)
        return list(found[::-1])[:_MOST_REGULAR]

    def dense_inside(self, span: range) -> list[int]:
        """The others, the last ones first; of many, some that divide the step evenly."""
        if not self.dense:
            return []
        first = (span.start // self.dense + 1) * self.dense
        found = [p for p in range(first, span.stop, self.dense) if self.has(p) and not self.is_regular(p)]
        return found[:: -max(1, -(-len(found) // _MOST_DENSE))]


def schedule_for(slots: int, page_tokens: int) -> CheckpointSchedule:
    """A regular checkpoint every EVERY tokens, and dense ones at ends of pages, as many as the slots of a pool allow:
    those of a sequence of SEQUENCE_TOKENS fill them at most once, and give way to everything else."""
    every = -(-EVERY // page_tokens) * page_tokens
    dense = page_tokens
    while SEQUENCE_TOKENS // dense > slots:
        dense *= 2
    return CheckpointSchedule(every, dense if dense < every else 0)
