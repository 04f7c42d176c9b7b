"""Whether an engine makes embeddings, and how: from the user's options and the checkpoint."""

from __future__ import annotations

import msgspec

from twostep.contracts.errors import UsageError
from twostep.contracts.pooling import Pooler
from twostep.entrypoints.engine_options import EngineOptions
from twostep.models.loader.checkpoint import Checkpoint
from twostep.models.loader.pooling_config import StoredPooling, stored_pooling


class PoolingChoice(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that makes embeddings."""

    pooler: Pooler
    max_length: int | None
    """Tokens of the longest text that the model's authors used it with."""
    is_encoder: bool

    def describe(self) -> str:
        """For the boot table."""
        rows = {
            "last": "the last token",
            "mean": "the mean of all tokens",
            "cls": "the first token",
        }
        length = ", scaled to length 1" if self.pooler.normalize else ""
        return f"{self.pooler.size} numbers out of {rows[self.pooler.kind]}{length}"


def choose_pooling(checkpoint: Checkpoint, options: EngineOptions) -> PoolingChoice | None:
    """What the engine pools; None if it generates text.

    Raises:
        UsageError: The options contradict the model, or one another.
        ModelError: The checkpoint's own settings cannot be read, or are not built.
    """
    is_encoder = checkpoint.config.is_encoder
    if options.runner == "generate" or (options.convert == "none" and options.runner == "auto"):
        if options.convert == "embed":
            raise UsageError("--runner generate and --convert embed contradict: leave one out")
        if is_encoder:
            raise UsageError(
                f"{checkpoint.config.architecture} makes embeddings and generates no text: leave "
                "--runner and --convert out"
            )
        return None
    stored = stored_pooling(checkpoint)
    asked = options.runner == "pooling" or options.convert == "embed"
    if not (asked or is_encoder or stored.kind is not None):
        _refuse_pooling_options(options)
        return None
    return PoolingChoice(
        pooler=_pooler(checkpoint, stored, options),
        max_length=stored.max_length,
        is_encoder=is_encoder,
    )


def _refuse_pooling_options(options: EngineOptions) -> None:
    if options.pooling_type is not None or options.normalize is not None:
        raise UsageError("a pooler needs a model that makes embeddings: add --convert embed")


def _pooler(checkpoint: Checkpoint, stored: StoredPooling, options: EngineOptions) -> Pooler:
    is_encoder = checkpoint.config.is_encoder
    kind = options.pooling_type or stored.kind or ("cls" if is_encoder else "last")
    if kind == "cls" and not is_encoder:
        raise UsageError(
            "pooling type cls needs an encoder: the first token of this model sees no other; "
            "use last or mean"
        )
    normalize = stored.normalize if options.normalize is None else options.normalize
    return Pooler(
        kind=kind,
        normalize=True if normalize is None else normalize,
        size=checkpoint.config.hidden_size,
        is_matryoshka=stored.is_matryoshka,
        dimensions=stored.dimensions,
    )
