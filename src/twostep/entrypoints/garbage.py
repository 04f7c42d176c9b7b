"""The garbage collector, out of the way of what lives as long as an engine."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """For making an engine: the collector rests meanwhile and never looks at the result.

    Modules, weights and vocabularies are hundreds of thousands of objects and no garbage. Looking
    through them costs a start a tenth of its time, and later stalls steps for milliseconds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
