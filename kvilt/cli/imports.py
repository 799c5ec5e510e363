"""How a command imports what it is made of, torch above all."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import modules without garbage collections.

    Modules make hundreds of thousands of objects that stay as long as the process. Collections find no garbage among
    them and take a sixth of the time of the imports; afterwards they leave these objects out.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # so that the native module is unloaded in order
