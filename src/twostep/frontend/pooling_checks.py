"""What an embedding request may ask for, checked before it enters the engine core."""

from __future__ import annotations

from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.pooling import Pooler, PoolingParams


def check_pooling_params(params: PoolingParams, pooler: Pooler | None) -> PoolingParams:
    """A copy of ``params`` with ``normalize`` filled in; InvalidRequestError names the bad field.

    ``pooler``: the engine's; None if it generates text.
    """
    if pooler is None:
        raise InvalidRequestError(
            "this model generates text and makes no embeddings; load it with --convert embed "
            "(convert='embed') to get some",
            "model",
            "unsupported_feature",
        )
    if not isinstance(params.normalize, bool | None):
        raise InvalidRequestError(
            f"normalize is {params.normalize!r:.40}; it must be true or false", "normalize"
        )
    _check_dimensions(params.dimensions, pooler)
    normalize = pooler.normalize if params.normalize is None else params.normalize
    return PoolingParams(
        dimensions=params.dimensions, normalize=normalize, priority=params.priority
    )


def _check_dimensions(dimensions: int | None, pooler: Pooler) -> None:
    if dimensions is None:
        return
    if type(dimensions) is not int or dimensions < 1:
        raise InvalidRequestError(
            f"dimensions is {dimensions!r:.40}; it must be an integer of at least 1", "dimensions"
        )
    if not pooler.is_matryoshka:
        raise InvalidRequestError(
            f"this model was not trained for shorter vectors (matryoshka): they have {pooler.size} "
            "numbers; leave dimensions out",
            "dimensions",
        )
    if pooler.dimensions and dimensions not in pooler.dimensions:
        allowed = ", ".join(map(str, pooler.dimensions))
        raise InvalidRequestError(
            f"dimensions is {dimensions}; vectors of this model can have {allowed}", "dimensions"
        )
    if dimensions > pooler.size:
        raise InvalidRequestError(
            f"dimensions is {dimensions}; vectors of this model have {pooler.size}", "dimensions"
        )
