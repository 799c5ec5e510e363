"""The backends that run on a machine without a GPU."""

from __future__ import annotations

from kvilt.ops.select import BACKENDS

CPU_BACKENDS = [name for name in BACKENDS if name != "triton"]
