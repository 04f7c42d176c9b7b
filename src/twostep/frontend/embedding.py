"""From the vector that the engine made to the one that a request asked for."""

from __future__ import annotations

import math
from array import array

from twostep.contracts.pooling import PoolingParams


def finish_embedding(data: bytes, params: PoolingParams) -> list[float]:
    """Cut to ``params.dimensions``, then scaled to length 1 if ``params.normalize``.

    ``data`` is float32. The values are float32 numbers as well. The length is rounded once, so
    that it is the same on every machine; a vector of zeros stays one.
    """
    values = array("f")
    values.frombytes(data)
    vector = values.tolist()[: params.dimensions]
    length = math.sqrt(math.fsum(x * x for x in vector)) if params.normalize else 0.0
    if length == 0.0:
        return vector
    return array("f", [x / length for x in vector]).tolist()
